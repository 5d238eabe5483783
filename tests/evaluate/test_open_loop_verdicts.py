"""The verdicts of `flexor eval --open_loop`: each made fault gets its name, and healthy data none.

The policy here is a formula. It reads where to go from two cameras (x from one, y from the other) and from the words
(open or close), and goes there from the state, step by step. The faults are made in what was recorded.
"""

from dataclasses import replace

import numpy as np
import pytest

from flexor.evaluate.open_loop.baselines import HOLD, MEAN, REPEAT
from flexor.evaluate.open_loop.errors import Target, scale_of
from flexor.evaluate.open_loop.open_loop import DataEvidence, OpenLoop, judge
from flexor.evaluate.open_loop.samples import Samples
from flexor.evaluate.open_loop.search import doubtful_joints

FRONT, SIDE, STATE = "observation.images.front", "observation.images.side", "observation.state"
TASKS = ("Open the gripper.", "Close the gripper.")
EPISODES, EACH, HORIZON = 12, 8, 12
SPEED = 0.08
LIGHT = {FRONT: 120, SIDE: 20}


def place_in(images: np.ndarray, light: int) -> np.ndarray:
    """Where the bright column of each image [N, 3, H, W] is, from -1 to 1; 0 if the rest has another light."""
    columns = images.mean(axis=(1, 2))
    right_light = np.abs(columns.min(1) - light) < 20
    return np.where(right_light, 2 * columns.argmax(1) / (images.shape[-1] - 1) - 1, 0.0)


def images_of(places: np.ndarray, light: int) -> np.ndarray:
    images = np.full((len(places), 3, 16, 33), light, np.uint8)
    columns = ((places + 1) / 2 * 32).round().astype(int)
    images[np.arange(len(places)), :, :, columns] = 230
    return images


def chunk(goal: np.ndarray, state: np.ndarray) -> np.ndarray:
    """[N, H, 3]: from the state to the goal in steps of at most SPEED."""
    steps = np.arange(1, HORIZON + 1)[:, None] * SPEED
    way = (goal - state)[:, None]
    return state[:, None] + np.clip(way, -steps, steps)


class Formula:
    """A policy that reads all of its inputs, with a small error."""

    uses_front, uses_words, uses_state = True, True, True

    def __init__(self, samples: Samples):
        self.samples = samples

    def __call__(self, observation=None, task=None, places=None):
        observation = self.samples.observation if observation is None else observation
        task = self.samples.task if task is None else task
        places = np.arange(len(self.samples)) if places is None else places
        words = np.array([{TASKS[0]: 0.9, TASKS[1]: -0.9}.get(text, 0.0) for text in task])[places]
        front = (
            place_in(observation[FRONT][places], LIGHT[FRONT]) if self.uses_front else np.zeros(len(places))
        )
        goal = np.stack([front, place_in(observation[SIDE][places], LIGHT[SIDE]), words * self.uses_words], 1)
        state = observation[STATE][places].astype(float) * self.uses_state
        noise = np.random.default_rng(1).normal(0, 0.02, (len(self.samples), HORIZON, 3))[places]
        return chunk(goal, state) + noise


def healthy() -> Samples:
    rng = np.random.default_rng(0)
    episode = np.repeat(np.arange(EPISODES), EACH)
    task = [TASKS[number % 2] for number in episode]
    goal = rng.uniform(-0.9, 0.9, (EPISODES, 2))[episode]
    goal = np.column_stack([goal, np.where(episode % 2, -0.9, 0.9)])
    state = rng.uniform(-1, 1, (len(episode), 3)).astype(np.float32)
    actions = chunk(goal, state.astype(float))
    return Samples(
        rows=np.arange(len(episode)),
        episode=episode,
        frame=np.tile(np.arange(EACH), EPISODES),
        observation={
            FRONT: images_of(goal[:, 0], LIGHT[FRONT]),
            SIDE: images_of(goal[:, 1], LIGHT[SIDE]),
            STATE: state,
        },
        task=task,
        actions=actions,
        valid=np.ones(actions.shape[:2], bool),
        previous=actions[:, 0] - SPEED / 2,
        joints=["x", "y", "gripper"],
        states=["x", "y", "gripper"],
        cameras=[FRONT, SIDE],
        colour=[FRONT, SIDE],
    )


def judged(samples: Samples, evidence: DataEvidence | None = None, **switches: bool) -> OpenLoop:
    policy = Formula(samples)
    for name, value in switches.items():
        setattr(policy, name, value)
    target = Target(samples.actions, samples.valid, scale_of(samples.actions.reshape(-1, 3)))
    usual = np.broadcast_to(samples.actions.mean((0, 1)), samples.actions.shape)
    still = np.repeat(samples.state[:, None], HORIZON, 1)
    repeated = np.repeat(samples.previous[:, None], HORIZON, 1)
    baselines = {HOLD: still, REPEAT: repeated, MEAN: usual}
    return judge(samples, target, policy, policy(), baselines, evidence or DataEvidence())


def names(result: OpenLoop) -> list[str]:
    return [finding.name for finding in result.findings]


def with_state(samples: Samples, state: np.ndarray, actions: np.ndarray) -> Samples:
    observation = {**samples.observation, STATE: state.astype(np.float32)}
    return replace(samples, observation=observation, actions=actions)


def scaled(samples: Samples, factors: list[float]) -> Samples:
    return with_state(samples, samples.state * factors, samples.actions * factors)


def test_healthy_data_gets_no_verdict_and_the_policy_beats_all_baselines():
    result = judged(healthy())
    assert names(result) == []
    assert result.beats_all
    assert result.use.ignored == []


def test_swapped_cameras_are_named():
    samples = healthy()
    images = samples.observation
    result = judged(replace(samples, observation={**images, FRONT: images[SIDE], SIDE: images[FRONT]}))
    assert names(result) == ["cameras swapped"]
    assert FRONT in result.findings[0].evidence and SIDE in result.findings[0].evidence


def test_shuffled_words_are_named_with_their_episodes():
    samples = healthy()
    wrong = {0, 3, 4, 8, 11}
    task = [TASKS[(e % 2) ^ (e in wrong)] for e in samples.episode.tolist()]
    result = judged(replace(samples, task=task))
    assert names(result) == ["words shuffled"]
    assert {*result.words.misfits} == wrong


@pytest.mark.parametrize("joint", [0, 1])
def test_a_joint_with_the_opposite_sign_is_named(joint):
    factors = [1.0, 1.0, 1.0]
    factors[joint] = -1.0
    result = judged(scaled(healthy(), factors))
    assert names(result) == ["sign flipped"]
    assert f"joint {'xy'[joint]} " in result.findings[0].evidence


def test_an_action_alone_with_the_opposite_sign_is_named():
    samples = healthy()
    result = judged(replace(samples, actions=samples.actions * [1, -1, 1]))
    assert names(result) == ["sign flipped"]
    assert "joint y has the opposite sign in the action" in result.findings[0].evidence


def test_degrees_for_radians_are_named():
    factor = 180 / np.pi
    result = judged(scaled(healthy(), [factor] * 3), DataEvidence(sizes=[factor] * 3))
    assert names(result) == ["other units"]
    assert "degrees instead of radians" in result.findings[0].evidence


def test_permuted_joints_are_named():
    samples = healthy()
    order = [1, 0, 2]
    result = judged(with_state(samples, samples.state[:, order], samples.actions[..., order]))
    assert names(result) == ["joints permuted"]
    assert "x and y" in result.findings[0].evidence


def test_of_many_joints_only_the_doubtful_ones_are_tried():
    rng = np.random.default_rng(0)
    actions = rng.normal(size=(20, 4, 40))
    target = Target(actions, np.ones((20, 4), bool), scale_of(actions.reshape(-1, 40)))
    predicted = actions + 0.05
    assert doubtful_joints(target, predicted, [actions * 0]) == []
    predicted[..., [3, 17]] *= -1
    assert doubtful_joints(target, predicted, [actions * 0]) == [3, 17]
    assert len(doubtful_joints(target, -actions, [actions * 0])) == 10


@pytest.mark.parametrize(("rate", "word"), [(2.0, "half of that"), (0.5, "twice that")])
def test_another_frame_rate_is_named(rate, word):
    samples = healthy()
    steps = np.arange(1, HORIZON + 1)[:, None] * SPEED * rate
    goal = np.column_stack(
        [
            place_in(samples.observation[FRONT], LIGHT[FRONT]),
            place_in(samples.observation[SIDE], LIGHT[SIDE]),
            [0.9 if task == TASKS[0] else -0.9 for task in samples.task],
        ]
    )
    way = (goal - samples.state)[:, None]
    result = judged(replace(samples, actions=samples.state[:, None] + np.clip(way, -steps, steps)))
    assert names(result) == ["other frame rate"]
    assert word in result.findings[0].evidence


def test_relative_actions_for_absolute_ones_are_named():
    samples = healthy()
    relative = np.diff(samples.actions, axis=1, prepend=samples.state[:, None])
    assert names(judged(replace(samples, actions=relative))) == ["action kind"]


def test_a_blank_camera_is_named_and_not_called_ignored():
    samples = healthy()
    blank = np.full_like(samples.observation[FRONT], 7)
    result = judged(replace(samples, observation={**samples.observation, FRONT: blank}))
    assert names(result) == ["blank camera"]
    assert FRONT in result.findings[0].evidence


@pytest.mark.parametrize(
    ("switch", "name"),
    [("uses_front", "camera ignored"), ("uses_words", "words ignored"), ("uses_state", "state ignored")],
)
def test_an_input_that_the_policy_ignores_is_named(switch, name):
    assert name in names(judged(healthy(), **{switch: False}))


def test_a_policy_that_is_no_better_than_holding_still_is_named():
    samples = healthy()
    result = judged(replace(samples, actions=np.repeat(samples.state[:, None], HORIZON, 1)))
    assert "no better than a baseline" in names(result)
