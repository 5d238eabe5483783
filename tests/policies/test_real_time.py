"""Real-time chunking: a new chunk continues the one that is being executed. LeRobot's numbers are in test_parity.py."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flexor.core.batch import ACTION, STATE
from flexor.core.errors import ConfigError, FlexorError
from flexor.core.rng import Noise
from flexor.policies import policy_class
from flexor.policies.features import Kind, PolicyFeature
from flexor.policies.nn.real_time import RealTimeSettings
from flexor.policies.pretrained import Pretrained
from flexor.policies.session import Executing, Session, predict_together
from support import small_pi
from support.tokenizers import make_tokenizer

CAMERA = "observation.images.top"
MEAN, STD = np.array([5.0, -3.0, 0.0]), np.array([2.0, 0.5, 1.0])


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Pretrained:
    settings = {**small_pi.CONFIG, "num_inference_steps": 10, "chunk_size": 12, "n_action_steps": 12}
    config = policy_class("pi0").Config(
        input_features={
            CAMERA: PolicyFeature(Kind.VISUAL, (3, 40, 56)),
            STATE: PolicyFeature(Kind.STATE, (4,)),
        },
        output_features={ACTION: PolicyFeature(Kind.ACTION, (3,))},
        tokenizer_name=str(make_tokenizer(tmp_path_factory.mktemp("tokenizer"))),
        rtc_config={"execution_horizon": 8},
        **settings,
    )
    torch.manual_seed(0)
    stats = {
        ACTION: {"mean": MEAN, "std": STD},
        STATE: {"mean": np.zeros(4), "std": np.ones(4)},
    }
    return Pretrained(policy_class("pi0")(config).eval(), *config.pipelines(stats, "cpu"))


OBSERVATIONS = {CAMERA: np.zeros((2, 3, 40, 56), np.uint8), STATE: np.ones((2, 4), np.float32)}
TASKS = ["pick up the cube"] * 2


def test_actions_that_will_be_executed_are_kept_and_later_ones_are_free(policy):
    free = policy.chunk(OBSERVATIONS, TASKS)
    previous = free[:, :10] + STD * np.random.default_rng(0).uniform(1, 2, (2, 10, 3))
    new = policy.chunk(OBSERVATIONS, TASKS, previous=previous, delay=4)
    away, apart = np.abs(new[:, :4] - previous[:, :4]), np.abs(free[:, :4] - previous[:, :4])
    assert (away < 0.15 * apart).all()  # the last of ten steps goes 91 % of the way
    assert new.shape == free.shape == (2, 12, 3)
    late = np.abs(new[:, 8:] - free[:, 8:])
    assert (late < np.abs(new[:, :4] - free[:, :4]).min()).all()
    np.testing.assert_array_equal(policy.chunk(OBSERVATIONS, TASKS), free)  # nothing of it is kept


def test_robots_at_different_points_of_their_chunks_share_a_batch(policy):
    """Each gets what it would get alone; one has no last chunk at all."""
    rng = np.random.default_rng(0)
    running = [
        Executing(rng.uniform(-4, 8, (left, 3)).astype(np.float32), delay)
        for left, delay in ((10, 4), (3, 1))
    ]
    sessions = [Session(policy, episode=episode) for episode in range(3)]
    observed = [{name: value[0] for name, value in OBSERVATIONS.items()}] * 3
    for session, observation in zip(sessions, observed):
        session.observe(observation, TASKS[0])
    together = predict_together(sessions, observed, [*running, None])
    for row in range(3):
        previous = {} if row == 2 else {"previous": running[row].actions[None], "delay": running[row].delay}
        noise = Noise(0, 0, torch.tensor([row]))
        (alone,) = policy.chunk({n: v[:1] for n, v in OBSERVATIONS.items()}, TASKS[:1], noise, **previous)
        np.testing.assert_allclose(together[row], alone, rtol=1e-4, atol=1e-4)
    # filled up to a size that is allowed, they get the same
    filled = predict_together(sessions, observed, [*running, None], sizes=(1, 8))
    np.testing.assert_allclose(filled, together, rtol=1e-4, atol=1e-4)


@given(
    st.sampled_from(["ZEROS", "ONES", "LINEAR", "EXP"]),
    st.integers(1, 20),
    st.integers(1, 30),
    st.integers(0, 30),
    st.integers(1, 30),
)
def test_guidance_falls_from_one_to_zero(schedule, chunk, left, delay, horizon):
    settings = RealTimeSettings(prefix_attention_schedule=schedule, execution_horizon=horizon)
    weights = settings.guidance_weights(chunk, left, delay)
    end = min(chunk, left, horizon)
    assert len(weights) == chunk and (weights.diff() <= 0).all() and (weights >= 0).all()
    assert (weights[: min(delay, end)] == 1).all() and (weights[end:] == 0).all()


def test_what_cant_be_is_refused(policy):
    with pytest.raises(FlexorError, match=r"actions \[robots, at least 1, 3\], but is \[2, 5, 4\]"):
        policy.chunk(OBSERVATIONS, TASKS, previous=np.zeros((2, 5, 4)))
    with pytest.raises(ConfigError, match=r"policy\.rtc_config"):
        RealTimeSettings.of({"horizon": 3})
    with pytest.raises(ConfigError, match="execution_horizon at least 1"):
        RealTimeSettings.of({"execution_horizon": 0})
    config = policy_class("act").Config(
        input_features={
            STATE: PolicyFeature(Kind.STATE, (4,)),
            "observation.environment_state": PolicyFeature(Kind.ENV, (2,)),
        },
        output_features={ACTION: PolicyFeature(Kind.ACTION, (3,))},
        dim_model=8,
        n_heads=2,
        dim_feedforward=8,
    )
    act = Pretrained(policy_class("act")(config), *config.pipelines({}, "cpu"))
    with pytest.raises(FlexorError, match=r"policy\.type=act can't continue a chunk"):
        act.chunk(OBSERVATIONS, TASKS, previous=np.zeros((2, 5, 3)))
