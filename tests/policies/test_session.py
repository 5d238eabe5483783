"""Acting: when the policy is asked, how overlapping chunks are averaged, that robots do not disturb each other."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from flexor.core.batch import Batch
from flexor.core.errors import FlexorError
from flexor.policies.act.config import ACTConfig
from flexor.policies.act.policy import ACT
from flexor.policies.features import Kind, PolicyFeature
from flexor.policies.pretrained import Pretrained
from flexor.policies.session import History, Session, TemporalEnsembler, _stacked, _wrong_shape, act_together

BATCH, CHUNK, STEPS = 3, 5, 13
MEAN, STD = np.array([1.0, -2.0]), np.array([2.0, 0.5])
STATE = "observation.environment_state"


@dataclass
class LooksBackConfig(ACTConfig):
    """ACT that is shown more than the last observation; what it answers is made up below."""

    deltas: list[int] | None = None

    @property
    def observation_deltas(self) -> list[int] | None:
        return self.deltas


def pretrained(
    predict=None, n_action_steps: int = 1, coefficient: float | None = None, deltas: list[int] | None = None
) -> Pretrained:
    """A policy whose answers `predict(batch, noise)` makes up; by default chunk i is chunks()[i]."""
    config = LooksBackConfig(
        chunk_size=CHUNK,
        n_action_steps=n_action_steps,
        temporal_ensemble_coeff=coefficient,
        dim_model=8,
        n_heads=2,
        dim_feedforward=8,
        n_encoder_layers=1,
        use_vae=False,
        input_features={STATE: PolicyFeature(Kind.ENV, (4,))},
        output_features={"action": PolicyFeature(Kind.ACTION, (2,))},
        deltas=deltas,
    )
    policy, answers = ACT(config), iter(chunks())
    policy.predict = predict or (lambda batch, noise: next(answers))
    return Pretrained(policy, *config.pipelines({"action": {"mean": MEAN, "std": STD}}, "cpu"))


def sessions(*args, **settings) -> list[Session]:
    shared = pretrained(*args, **settings)
    return [Session(shared, episode=row) for row in range(BATCH)]


def chunks() -> torch.Tensor:
    return torch.randn(STEPS, BATCH, CHUNK, 2, generator=torch.Generator().manual_seed(0))


def play(playing: list[Session], steps: int, first: float = 0) -> np.ndarray:
    """The environment's state in row b at step t is 100 b + t."""
    return np.stack(
        [
            act_together(
                playing,
                [{STATE: np.full(4, first + 100 * row + step, np.float32)} for row, _ in enumerate(playing)],
                ["task"] * len(playing),
            )
            for step in range(steps)
        ]
    )


@pytest.mark.parametrize("n_action_steps", [1, 3, 5])
def test_a_chunk_is_played_before_the_next_is_asked_for(n_action_steps):
    played = play(sessions(n_action_steps=n_action_steps), STEPS)
    for step in range(STEPS):
        chunk = chunks()[step // n_action_steps][:, step % n_action_steps].numpy()
        np.testing.assert_allclose(played[step], chunk * STD + MEAN, rtol=1e-6)


def test_reset_forgets_the_rest_of_a_chunk():
    playing = sessions(n_action_steps=3)
    play(playing, 1)
    for session in playing:
        session.reset()
    np.testing.assert_allclose(play(playing, 1)[0], chunks()[1][:, 0].numpy() * STD + MEAN, rtol=1e-6)


def average(coefficient: float, step: int) -> np.ndarray:
    """Algorithm 2 of the ACT paper, directly: all chunks that speak of this step, the oldest first."""
    speaking = [
        chunks()[start][:, step - start].numpy() for start in range(max(0, step - CHUNK + 1), step + 1)
    ]
    weights = np.exp(-coefficient * np.arange(len(speaking)))
    return np.average(speaking, axis=0, weights=weights)


@pytest.mark.parametrize("coefficient", [0.01, 0.0, 1.0, -0.5])
def test_overlapping_chunks_are_averaged(coefficient):
    played = play(sessions(coefficient=coefficient), STEPS)
    for step in range(STEPS):
        np.testing.assert_allclose(
            played[step], average(coefficient, step) * STD + MEAN, rtol=1e-5, atol=1e-6
        )


def test_a_short_history_of_an_ensemble_is_its_only_chunk():
    chunk = chunks()[0][0].numpy()
    np.testing.assert_array_equal(TemporalEnsembler(0.1, CHUNK)(chunk), chunk[0])


def shown_at_each_step(deltas: list[int] | None, steps: int, n_action_steps: int = 1) -> list[np.ndarray]:
    """The environment's state that the policy is shown when it is asked, in two episodes."""
    states: list[np.ndarray] = []

    def predict(batch, noise):
        states.append(batch[STATE].numpy()[..., 0])
        return torch.zeros(BATCH, CHUNK, 2)

    playing = sessions(predict, n_action_steps=n_action_steps, deltas=deltas)
    for episode in range(2):
        for session in playing:
            session.reset()
        play(playing, steps, first=10_000 * episode)
    return states


@pytest.mark.parametrize("deltas", [[-1, 0], [-4, -2, 0], [0]])
def test_the_policy_is_shown_the_last_observations_the_first_repeated(deltas):
    steps = 6
    for count, state in enumerate(shown_at_each_step(deltas, steps)):
        episode, step = divmod(count, steps)  # nothing is left of the episode before
        times = np.maximum(0, step + np.array(deltas))
        np.testing.assert_array_equal(state, np.arange(BATCH)[:, None] * 100 + times + 10_000 * episode)


def test_observations_between_two_questions_count():
    states_at_requests = shown_at_each_step([-1, 0], 6, n_action_steps=3)
    assert [state[0].tolist() for state in states_at_requests[:2]] == [[0, 0], [2, 3]]


def test_the_future_is_not_shown_and_no_deltas_mean_no_time_dimension():
    assert shown_at_each_step([0, 1, 2], 2)[1].tolist() == [[1], [101], [201]]
    assert shown_at_each_step(None, 2)[1].tolist() == [1, 101, 201]


# One policy, several robots


def remembering(batch: Batch, noise) -> torch.Tensor:
    """A policy that looks at all it is given: observation, its own noise, and how often it was asked before."""
    memory, rows = batch["memory"], len(batch[STATE])
    memory["asked"] = memory.get("asked", torch.zeros(rows)) + 1
    noises = noise.normal("noise", (rows, CHUNK, 2))
    return noises + batch[STATE].reshape(rows, -1)[:, None, -2:] + memory["asked"][:, None, None]


@pytest.mark.parametrize("coefficient", [None, 0.1])
def test_two_sessions_on_one_policy_do_not_disturb_each_other(coefficient):
    """Each acts as it would alone: with its own queue, history, ensemble, memory and noise."""
    settings = {"n_action_steps": 1 if coefficient else 2, "coefficient": coefficient, "deltas": [-1, 0]}

    def alone(episode: int, steps: int, first: float) -> np.ndarray:
        return play([Session(pretrained(remembering, **settings), episode=episode)], steps, first)[:, 0]

    shared = pretrained(remembering, **settings)
    first, second = Session(shared, episode=7), Session(shared, episode=8)
    played = [play([first], 3, first=50)[:, 0]]  # is three steps ahead when the other begins
    together = []
    for step in range(6):
        together.append(
            act_together(
                [first, second],
                [{STATE: np.full(4, 53 + step, np.float32)}, {STATE: np.full(4, step, np.float32)}],
                ["", ""],
            )
        )
        if step == 3:
            second.reset(9)  # a new episode of one is none of the other's business
    together = np.stack(together)
    np.testing.assert_array_equal(np.concatenate([played[0], together[:, 0]]), alone(7, 9, 50))
    np.testing.assert_array_equal(together[:4, 1], alone(8, 4, 0))
    np.testing.assert_array_equal(together[4:, 1], alone(9, 2, 4))


def test_robots_that_ask_together_are_one_batch():
    sizes = []

    def predict(batch, noise):
        sizes.append(len(batch[STATE]))
        return remembering(batch, noise)

    playing = sessions(predict, n_action_steps=2)
    play(playing, 4)
    assert sizes == [BATCH, BATCH]


def test_a_chunk_without_a_session_keeps_nothing():
    shared = pretrained(remembering)
    observed = {STATE: np.zeros((2, 4), np.float32)}
    first, again = shared.chunk(observed, ["", ""]), shared.chunk(observed, ["", ""])
    assert first.shape == (2, CHUNK, 2)
    np.testing.assert_array_equal(first, again)


def test_memory_ends_with_the_episode():
    memories = []

    def predict(batch, noise):
        last = batch["memory"].get("last")
        memories.append(last if last is None else last.tolist())
        batch["memory"]["last"] = torch.full((BATCH,), float(len(memories)))
        return torch.zeros(BATCH, CHUNK, 2)

    playing = sessions(predict)
    play(playing, 2)
    for session in playing:
        session.reset()
    play(playing, 2)
    assert memories == [None, [1.0] * BATCH, None, [3.0] * BATCH]


@pytest.mark.parametrize("wrong", [5, torch.zeros(BATCH + 1)])
def test_memory_that_is_no_batch_is_refused_by_name(wrong):
    def predict(batch, noise):
        batch["memory"]["last"] = wrong
        return torch.zeros(BATCH, CHUNK, 2)

    with pytest.raises(FlexorError, match=r"memory'\]\['last'\].*first dimension is the batch \(3\)"):
        play(sessions(predict), 1)


def test_a_missing_observation_is_named():
    with pytest.raises(FlexorError, match=r"needs observation\.environment_state.*pixels"):
        Session(pretrained()).act({"pixels": np.zeros(3)})


def test_an_observation_of_another_shape_is_named():
    with pytest.raises(FlexorError, match=r"the shape \[6\].*trained on \[4\].*--env.kwargs"):
        Session(pretrained()).act({STATE: np.zeros(6, np.float32)})


def test_an_image_with_its_channels_last_is_named_as_such():
    message = _wrong_shape("observation.image", [48, 64, 3], [3, 48, 64])
    assert (
        "[48, 64, 3]" in message and "image.transpose(2, 0, 1)" in message and "--env.kwargs" not in message
    )


def test_an_empty_history_starts_with_what_it_is_given():
    history = History([-2, 0])
    history.add({"x": np.array([1.0])})
    assert history.stacked()["x"].tolist() == [[1.0], [1.0]]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "arrays",
    [
        [np.arange(5, dtype=np.float32), np.ones(5)],  # of two types
        [np.moveaxis(np.arange(n, n + 60, dtype=np.uint8).reshape(4, 5, 3), -1, 0) for n in range(3)],
        [np.moveaxis(np.arange(120, dtype=np.uint8).reshape(2, 4, 5, 3), -1, -3)],
        [np.zeros((3, 4, 5), np.uint8)[:, ::-1], np.ones((3, 5, 4), np.uint8).transpose(0, 2, 1)],
        [np.array(1.5), np.array(2.5)],
    ],
)
def test_stacked_in_pinned_memory_as_numpy_does_it(arrays):
    pinned, plain = _stacked(arrays, True), _stacked(arrays, False)
    np.testing.assert_array_equal(pinned, plain)
    assert pinned.dtype == plain.dtype and torch.from_numpy(pinned).is_pinned()
    if len({array.strides for array in arrays}) == 1:
        assert pinned.strides == plain.strides
