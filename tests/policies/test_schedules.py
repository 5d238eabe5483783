"""Our diffusion schedules against numbers of `diffusers`: stored ones, and fresh ones where it is installed."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

from flexor.errors import ConfigError
from flexor.policies.blocks.schedules import DiffusionSchedule, DiffusionSettings

sys.path.insert(0, str(Path(__file__).parents[1] / "parity"))
import diffusion_schedules as theirs
from records import difference, values

GOLDEN = json.loads((Path(__file__).parents[1] / "golden/diffusion/schedules.json").read_text())


def measure(name: str) -> dict:
    """The same as theirs.measure, by our schedule."""
    settings = DiffusionSettings(**theirs.CASES[name])
    settings.check_diffusion()
    schedule = DiffusionSchedule(settings)
    levels = torch.tensor([0, 7, settings.num_train_timesteps - 1])
    noisy = schedule.add_noise(theirs.tensor("clean"), theirs.tensor("noise"), levels)
    path = []

    class Given:
        def normal(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
            return theirs.tensor(name)

    def network(x: torch.Tensor, level: torch.Tensor) -> torch.Tensor:
        path.append(values(x))
        return theirs.tensor(f"predicted{level[0]}")

    end = schedule.sample(network, theirs.SHAPE, Given(), torch.zeros(1))
    path = [*path[1:], values(end)]
    kept = path[:: max(1, len(path) // 5)] + path[-1:]
    signal = values(schedule.signal[:: theirs.SPACING])
    return {"signal": signal, "noisy": values(noisy), "levels": schedule.levels(), "path": kept}


@pytest.mark.parametrize("name", theirs.CASES)
def test_computes_what_diffusers_computed(name):
    ours = measure(name)
    assert ours["levels"] == GOLDEN[name]["levels"]
    for part in ("signal", "noisy", "path"):
        assert difference(ours[part], GOLDEN[name][part]) <= 1e-6, part


@pytest.mark.skipif(not importlib.util.find_spec("diffusers"), reason="diffusers is not installed")
@pytest.mark.parametrize("name", theirs.CASES)
def test_computes_what_diffusers_computes(name):
    ours, live = measure(name), theirs.measure(name)
    assert max(difference(ours[part], live[part]) for part in live) <= 1e-6


@pytest.mark.parametrize("kind", ["DDPM", "DDIM"])
@pytest.mark.parametrize("prediction", ["epsilon", "sample"])
def test_a_network_that_knows_the_answer_finds_it(kind, prediction):
    """Sampling undoes the noise when the network predicts perfectly, in all steps or in a few."""
    clean = torch.tensor([[[0.3, -0.8], [0.1, 0.9]]])
    for steps in (None, 10):
        settings = DiffusionSettings(
            noise_scheduler_type=kind, prediction_type=prediction, num_inference_steps=steps
        )
        schedule = DiffusionSchedule(settings)

        def network(x: torch.Tensor, level: torch.Tensor, schedule=schedule) -> torch.Tensor:
            signal = schedule.signal[level][:, None, None]
            epsilon = (x - signal.sqrt() * clean) / (1 - signal).sqrt()
            return epsilon if prediction == "epsilon" else clean.expand_as(x)

        class Drawn:
            def normal(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
                return torch.randn(shape, generator=torch.Generator().manual_seed(len(name)))

        found = schedule.sample(network, (1, 2, 2), Drawn(), clean)
        torch.testing.assert_close(found, clean, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"noise_scheduler_type": "EULER"}, "one of DDPM, DDIM"),
        ({"beta_schedule": "sigmoid"}, "one of linear"),
        ({"prediction_type": "v"}, "one of epsilon"),
        ({"num_inference_steps": 101}, "num_inference_steps=101 must be from 1 to"),
        ({"num_inference_steps": 0}, "num_inference_steps=0"),
        ({"num_train_timesteps": 0}, "num_train_timesteps=0"),
        ({"beta_start": 0.5}, "beta_start=0.5"),
        ({"clip_sample_range": 0.0}, "clip_sample_range=0.0"),
    ],
)
def test_impossible_settings_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        DiffusionSettings(**settings).check_diffusion()
