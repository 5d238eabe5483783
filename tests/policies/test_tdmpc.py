"""TD-MPC: what it learns from, what it refuses, how it plans, and that a run of it is any other run."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from flexor.cli.main import main
from flexor.core.batch import ACTION, MEMORY, REWARD, STATE
from flexor.core.errors import ConfigError
from flexor.core.rng import Noise, seed_everything
from flexor.policies.features import Kind, PolicyFeature
from flexor.policies.tdmpc.config import TDMPCConfig
from flexor.policies.tdmpc.mppi import plan
from flexor.policies.tdmpc.policy import TDMPC
from flexor.policies.tdmpc.world_model import upscale_factor
from support import runs
from support.samples import write_lowdim

IMAGE = "observation.image"
TINY = TDMPCConfig(
    horizon=3,
    image_encoder_hidden_dim=4,
    state_encoder_hidden_dim=8,
    latent_dim=6,
    mlp_dim=8,
    n_gaussian_samples=16,
    n_pi_samples=4,
    n_elites=5,
    input_features={
        IMAGE: PolicyFeature(Kind.VISUAL, (3, 32, 32)),
        STATE: PolicyFeature(Kind.STATE, (2,)),
    },
    output_features={ACTION: PolicyFeature(Kind.ACTION, (2,))},
)
FLAGS = [
    "--policy.type=tdmpc",
    "--policy.horizon=3",
    "--policy.latent_dim=8",
    "--policy.mlp_dim=16",
    "--policy.state_encoder_hidden_dim=8",
    "--policy.device=cpu",
]


def policy(config: TDMPCConfig = TINY) -> TDMPC:
    """With critics that have an opinion: they start without."""
    seed_everything("weights", 0)
    made = TDMPC(config)
    for world in (made.model, made.model_target):
        for parameter in world.parameters():
            parameter.data += 0.1 * torch.randn(parameter.shape)
    return made


def batch(size: int, horizon: int = TINY.horizon) -> dict[str, Tensor]:
    torch.manual_seed(7)
    made = {
        IMAGE: torch.rand(size, horizon + 1, 3, 32, 32),
        STATE: torch.randn(size, horizon + 1, 2),
        ACTION: torch.rand(size, horizon, 2) * 2 - 1,
        REWARD: torch.rand(size, horizon),
    }
    ends = torch.randint(1, horizon + 2, (size, 1))
    return made | {f"{k}_is_pad": torch.arange(v.shape[1]) >= ends for k, v in made.items()}


def noise(*samples: int) -> Noise:
    return Noise(0, 0, torch.tensor(samples))


def test_a_sample_s_loss_does_not_depend_on_its_batch():
    tdmpc, made = policy(), batch(5)
    together = tdmpc.loss(made, noise(*range(5))).per_sample
    part = {key: value[3:] for key, value in made.items()}
    torch.testing.assert_close(tdmpc.loss(part, noise(3, 4)).per_sample, together[3:])


def test_padding_does_not_count():
    made, changed = batch(6), batch(6)
    for key in (IMAGE, STATE, ACTION, REWARD):
        changed[key][changed[f"{key}_is_pad"]] = 0.9
    losses = [policy().loss(each, noise(*range(6))) for each in (made, changed)]
    torch.testing.assert_close(losses[0].per_sample, losses[1].per_sample)


def test_the_target_follows_the_model_once_per_step_and_gets_no_gradient():
    made = policy()
    made.loss(batch(2), noise(0, 1)).per_sample.mean().backward()
    assert all(p.grad is not None for p in made.model.parameters())
    assert all(p.grad is None for p in made.model_target.parameters())
    before = [p.clone() for p in made.model_target.parameters()]
    made.begin_step(0)  # nothing was learned yet
    assert all(torch.equal(a, b) for a, b in zip(before, made.model_target.parameters()))
    made.begin_step(1)
    for old, now, model in zip(before, made.model_target.parameters(), made.model.parameters()):
        torch.testing.assert_close(now.data, 0.995 * old + 0.005 * model.data)


class Line:
    """A world on a line: an action moves by it, and the reward is for being near 0.6."""

    def step(self, latent: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        latent = latent + 0.3 * action
        return latent, -(latent - 0.6).square().sum(-1)

    def act(self, latent: Tensor) -> Tensor:
        return torch.zeros_like(latent)

    def values(self, latent: Tensor, action: Tensor) -> Tensor:
        return torch.zeros(*latent.shape[:-1], 5)


def test_planning_finds_the_way():
    config = replace(
        TINY,
        horizon=4,
        n_gaussian_samples=256,
        elite_weighting_temperature=20.0,
        output_features={ACTION: PolicyFeature(Kind.ACTION, (1,))},
    )
    starts = torch.tensor([[0.0], [0.6], [2.0]])
    actions, mean = plan(Line(), config, starts, noise(0, 1, 2), None)
    assert actions.shape == mean.shape == (3, 4, 1)
    ends = starts + 0.3 * mean[:, :2].sum(1)  # two steps are enough for the first, and none for the second
    np.testing.assert_allclose(ends[:2], 0.6, atol=0.1)
    np.testing.assert_allclose(mean[2], -1, atol=0.3)
    alone, _ = plan(Line(), config, starts[1:2], noise(1), None)
    torch.testing.assert_close(alone, actions[1:2])  # whatever is planned beside it


def test_a_plan_is_started_from_the_last_one_of_the_episode():
    made = policy().eval()
    observed = {IMAGE: torch.rand(1, 3, 32, 32), STATE: torch.randn(1, 2), MEMORY: {}}
    with torch.no_grad():
        first = made.predict(observed, noise(0))
        assert not torch.equal(made.predict(observed, noise(0)), first)
        torch.testing.assert_close(made.predict({**observed, MEMORY: {}}, noise(0)), first)
    assert first.shape == (1, 2, 2) and torch.equal(first[:, 0], first[:, 1])


@pytest.mark.parametrize("size", [32, 38, 39, 64])
def test_small_pictures_are_enlarged(size):
    feature = PolicyFeature(Kind.VISUAL, (3, size, size))
    made = policy(replace(TINY, input_features={IMAGE: feature}))
    assert upscale_factor(size) == (2 if size < 39 else 1)
    assert made.predict({IMAGE: torch.rand(2, 3, size, size)}, noise(0, 1)).shape == (2, 2, 2)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"n_obs_steps": 2}, "one observation"),
        ({"normalization_mapping": {Kind.ACTION: "MEAN_STD"}}, "MIN_MAX"),
        ({"n_action_steps": 2}, "n_action_repeats=1"),
        ({"n_action_steps": 2, "n_action_repeats": 1, "use_mpc": False}, "use_mpc"),
        ({"n_action_steps": 9, "n_action_repeats": 1}, "horizon"),
        ({"n_elites": 50}, "n_elites=50"),
        ({"n_gaussian_samples": 0}, "at least 1"),
        ({"q_ensemble_size": 1}, "disagree"),
        ({"discount": 1.2}, "from 0 to 1"),
        ({"min_std": 3.0}, "max_std"),
        ({"max_random_shift_ratio": -0.1}, "at least 0"),
        ({"input_features": {"observation.force": PolicyFeature(Kind.STATE, (2,))}}, "observation.force"),
        (
            {"input_features": {f"{IMAGE}s.{n}": PolicyFeature(Kind.VISUAL, (3, 64, 64)) for n in "ab"}},
            "one camera",
        ),
        ({"input_features": {IMAGE: PolicyFeature(Kind.VISUAL, (3, 64, 80))}}, "square"),
    ],
)
def test_what_can_t_be_is_refused(settings, says):
    with pytest.raises(ConfigError, match=says):
        replace(TINY, **settings).validate()


def test_data_without_rewards_is_refused(tmp_path, capsys):
    data = write_lowdim(tmp_path / "data", reward=False)
    code = main(["train", *runs.flags(data, tmp_path / "run", FLAGS, "--steps=1")])
    assert code != 0 and REWARD in capsys.readouterr().err


def test_each_picture_is_moved_by_pixels_of_its_own_and_the_border_repeated():
    pictures = batch(5)[IMAGE]
    pad = round(TINY.max_random_shift_ratio * 32)
    moved = policy().config.view_images(pictures, IMAGE, Noise(0, 0, torch.arange(5)))
    padded = torch.nn.functional.pad(pictures.flatten(0, 1), (pad,) * 4, "replicate").unflatten(0, (5, -1))
    places = []
    for b in range(5):
        for t in range(pictures.shape[1]):
            windows = padded[b, t].unfold(1, 32, 1).unfold(2, 32, 1)  # [C, top, left, 32, 32]
            same = (windows == moved[b, t][:, None, None]).all(-1).all(-1).all(0)
            places += [tuple(place) for place in same.nonzero().tolist()]
    assert pad > 0 and len(places) == 20 and len(set(places)) > 5
