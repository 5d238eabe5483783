"""Acting: when the policy is asked, how overlapping chunks are averaged, and what is refused."""

import numpy as np
import pytest
import torch

from flexor.core.errors import FlexorError
from flexor.policies.act.config import ACTConfig
from flexor.policies.act.policy import ACT
from flexor.policies.actor import History, PolicyActor, TemporalEnsembler
from flexor.policies.base import Kind, PolicyFeature
from flexor.policies.pretrained import Pretrained
from flexor.policies.processing import default_pipelines

BATCH, CHUNK, STEPS = 3, 5, 13
MEAN, STD = np.array([1.0, -2.0]), np.array([2.0, 0.5])


def actor(n_action_steps: int = 1, coefficient: float | None = None) -> PolicyActor:
    """One whose policy's answers are made up: chunk i is chunks()[i]."""
    config = ACTConfig(
        chunk_size=CHUNK,
        n_action_steps=n_action_steps,
        temporal_ensemble_coeff=coefficient,
        dim_model=8,
        n_heads=2,
        dim_feedforward=8,
        n_encoder_layers=1,
        use_vae=False,
        input_features={"observation.environment_state": PolicyFeature(Kind.ENV, (4,))},
        output_features={"action": PolicyFeature(Kind.ACTION, (2,))},
    )
    policy = ACT(config)
    answers = iter(chunks())
    policy.predict = lambda batch, noise: next(answers)
    pipelines = default_pipelines(config, {"action": {"mean": MEAN, "std": STD}}, "cpu")
    playing = PolicyActor(Pretrained(policy, *pipelines))
    playing.reset(BATCH)
    return playing


def chunks() -> torch.Tensor:
    return torch.randn(STEPS, BATCH, CHUNK, 2, generator=torch.Generator().manual_seed(0))


def observation(**changes: np.ndarray) -> dict[str, np.ndarray]:
    return {"observation.environment_state": np.zeros((BATCH, 4), np.float32), **changes}


def play(playing: PolicyActor, steps: int) -> np.ndarray:
    return np.stack([playing.act(observation(), ["task"] * BATCH) for _ in range(steps)])


@pytest.mark.parametrize("n_action_steps", [1, 3, 5])
def test_a_chunk_is_played_before_the_next_is_asked_for(n_action_steps):
    played = play(actor(n_action_steps), STEPS)
    for step in range(STEPS):
        chunk = chunks()[step // n_action_steps][:, step % n_action_steps].numpy()
        np.testing.assert_allclose(played[step], chunk * STD + MEAN, rtol=1e-6)


def test_reset_forgets_the_rest_of_a_chunk():
    playing = actor(n_action_steps=3)
    play(playing, 1)
    playing.reset(BATCH)
    np.testing.assert_allclose(play(playing, 1)[0], chunks()[1][:, 0].numpy() * STD + MEAN, rtol=1e-6)


def average(coefficient: float, step: int) -> np.ndarray:
    """Algorithm 2 of the ACT paper, directly: all chunks that speak of this step, the oldest first."""
    speaking = [
        chunks()[asked][:, step - asked].numpy() for asked in range(max(0, step - CHUNK + 1), step + 1)
    ]
    weights = np.exp(-coefficient * np.arange(len(speaking)))
    return np.average(speaking, axis=0, weights=weights)


@pytest.mark.parametrize("coefficient", [0.01, 0.0, 1.0, -0.5])
def test_overlapping_chunks_are_averaged(coefficient):
    played = play(actor(coefficient=coefficient), STEPS)
    for step in range(STEPS):
        np.testing.assert_allclose(
            played[step], average(coefficient, step) * STD + MEAN, rtol=1e-5, atol=1e-6
        )


def test_an_ensemble_starts_anew_after_a_reset():
    ensembler = TemporalEnsembler(0.1, CHUNK)
    first = [ensembler(chunk) for chunk in chunks()]
    ensembler.reset()
    again = [ensembler(chunk) for chunk in chunks()]
    torch.testing.assert_close(first, again, rtol=0, atol=0)


def test_noise_goes_by_episode_not_by_what_runs_beside_it():
    playing = actor()
    playing.attach([object()] * BATCH, [7, 8, 9])
    playing.reset(BATCH)
    assert playing.episodes.tolist() == [7, 8, 9]


def shown_at_each_step(deltas: list[int] | None, steps: int, n_action_steps: int = 1) -> list[np.ndarray]:
    """The environment's state that the policy is shown when it is asked; row b at step t is 100 b + t."""
    playing = actor(n_action_steps)
    playing.history = History(deltas)
    shown: list[np.ndarray] = []

    def predict(batch, noise):
        shown.append(batch["observation.environment_state"].numpy()[..., 0])
        return torch.zeros(BATCH, CHUNK, 2)

    playing.policy.predict = predict
    for episode in range(2):
        playing.reset(BATCH)
        for step in range(steps):
            now = np.arange(BATCH)[:, None] * 100 + step + 10_000 * episode + np.zeros(4)
            seen = observation(**{"observation.environment_state": now.astype(np.float32)})
            playing.act(seen, ["task"] * BATCH)
    return shown


@pytest.mark.parametrize("deltas", [[-1, 0], [-4, -2, 0], [0]])
def test_the_policy_is_shown_the_last_observations_the_first_repeated(deltas):
    steps = 6
    for asked, state in enumerate(shown_at_each_step(deltas, steps)):
        episode, step = divmod(asked, steps)  # nothing is left of the episode before
        times = np.maximum(0, step + np.array(deltas))
        np.testing.assert_array_equal(state, np.arange(BATCH)[:, None] * 100 + times + 10_000 * episode)


def test_observations_between_two_questions_count():
    asked = shown_at_each_step([-1, 0], 6, n_action_steps=3)
    assert [state[0].tolist() for state in asked[:2]] == [[0, 0], [2, 3]]


def test_the_future_is_not_shown_and_no_deltas_mean_no_time_dimension():
    assert shown_at_each_step([0, 1, 2], 2)[1].tolist() == [[1], [101], [201]]
    assert shown_at_each_step(None, 2)[1].tolist() == [1, 101, 201]


def test_a_policy_may_keep_something_until_the_episode_ends():
    playing, found = actor(), []

    def predict(batch, noise):
        found.append(batch["memory"].get("last"))
        batch["memory"]["last"] = len(found)
        return torch.zeros(BATCH, CHUNK, 2)

    playing.policy.predict = predict
    play(playing, 2)
    playing.reset(BATCH)
    play(playing, 2)
    assert found == [None, 1, None, 3]


def test_a_missing_observation_is_named():
    with pytest.raises(FlexorError, match=r"needs observation\.environment_state.*pixels"):
        actor().act({"pixels": np.zeros((BATCH, 3))}, ["task"] * BATCH)


def test_an_observation_of_another_shape_is_named():
    wide = observation(**{"observation.environment_state": np.zeros((BATCH, 6), np.float32)})
    with pytest.raises(FlexorError, match=r"\[6\] in the environment.*trained on \[4\]"):
        actor().act(wide, ["task"] * BATCH)
