"""Diffusion schedules: what they undo and what they refuse. Their numbers are compared in test_parity.py."""

import pytest
import torch

from flexor.core.errors import ConfigError
from flexor.policies.nn.diffusion import DiffusionSchedule, DiffusionSettings


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

        class StandardNoise:
            def normal(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
                return torch.randn(shape, generator=torch.Generator().manual_seed(len(name)))

        sampled = schedule.sample(network, (1, 2, 2), StandardNoise(), clean)
        torch.testing.assert_close(sampled, clean, rtol=0, atol=1e-4)


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
