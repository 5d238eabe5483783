"""The built-in task: exact, bounded, learnable only by looking."""

import hashlib
import math
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from hypothesis import given, settings
from hypothesis import strategies as st

from flexor.core.errors import FlexorError
from flexor.sim.expert import Disturbance, expert_action
from flexor.sim.record import EVAL_SEED_START
from flexor.sim.task import (
    DISCS_APART,
    ENV_ID,
    FINGER_SPEED,
    GOAL_TOLERANCE,
    GRASP_RADIUS,
    SPEED,
    TIME_LIMIT,
    PlaceEnv,
    State,
    advance,
    sample_start,
)


def trace(seed: int) -> str:
    """A digest of states and pixels over an episode of fixed odd actions."""
    env = PlaceEnv()
    digest = hashlib.sha256()
    observation, _ = env.reset(seed=seed)
    for step in range(40):
        digest.update(observation["pixels"].tobytes() + repr(env.state).encode())
        action = 0.3 * expert_action(env.state) + np.float32(0.6) * np.sin([step, 2 * step, 3 * step])
        observation, *_ = env.step(action)
    return digest.hexdigest()


def test_same_seed_and_actions_give_same_states_and_pixels_in_another_process() -> None:
    here = Path(__file__)
    command = [sys.executable, "-c", f"from {here.stem} import trace; print(trace(7))"]
    other = subprocess.run(command, cwd=here.parent, capture_output=True, text=True, check=True)
    assert other.stdout.strip() == trace(7) == trace(7)
    assert trace(7) != trace(8)


def test_gymnasium_accepts_it() -> None:
    for settings_ in (
        {},
        {"obs_type": "environment_state_agent_pos"},
        {"image_size": 96},
        {"targets": 2},
        {"targets": 2, "obs_type": "environment_state_agent_pos"},
    ):
        env = gymnasium.make(ENV_ID, render_mode="rgb_array", **settings_)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            check_env(env.unwrapped)


def test_block_and_goal_are_in_the_picture_only() -> None:
    env = PlaceEnv()
    observation, _ = env.reset(seed=0)
    assert set(observation) == {"pixels", "agent_pos"}
    assert observation["agent_pos"].tolist() == pytest.approx([*env.state.gripper, 1.0])
    env.state = replace(env.state, block=(env.state.block[0] + 0.003, env.state.block[1]))
    moved = env._observe()["pixels"]
    assert (moved != observation["pixels"]).any(), "a tenth of a pixel must show"


def test_open_closed_and_holding_look_different() -> None:
    env = PlaceEnv()
    env.reset(seed=0)
    looks = [
        replace(env.state, opening=opening, grasped=grasped)
        for opening, grasped in [(1.0, False), (0.0, False), (-1.0, False), (0.0, True)]
    ]
    pictures = []
    for look in looks:
        env.state = look
        pictures.append(env._observe()["pixels"].astype(int))
    for i in range(4):
        for j in range(i):
            assert np.abs(pictures[i] - pictures[j]).max() > 40


def test_only_words_tell_the_goal_of_two() -> None:
    """The same table with the other disc as goal looks the same, also as positions; only the description differs."""
    for obs_type, key in (
        ("pixels_agent_pos", "pixels"),
        ("environment_state_agent_pos", "environment_state"),
    ):
        env = PlaceEnv(obs_type=obs_type, targets=2)
        before, _ = env.reset(seed=3)
        state, words = env.state, env.task_description
        assert state.other_disc is not None and math.dist(state.goal, state.other_disc) >= DISCS_APART
        swapped = replace(
            state, goal=state.other_disc, other_disc=state.goal, goal_colour=1 - state.goal_colour
        )
        env.state = swapped
        assert np.array_equal(env._observe()[key], before[key])
        assert {words, env.task_description} == {
            "Put the red block on the green disc.",
            "Put the red block on the blue disc.",
        }
        env.state = replace(swapped, goal_colour=state.goal_colour)  # the colours exchanged on the table
        assert not np.array_equal(env._observe()[key], before[key])


def test_both_colours_are_asked_for_and_found() -> None:
    goals = []
    for seed in range(EVAL_SEED_START, EVAL_SEED_START + 100):
        state = sample_start(np.random.default_rng(seed), 2)
        goals.append(state.goal_colour)
        for _ in range(TIME_LIMIT):
            state = advance(state, expert_action(state))
        assert state.success, seed
        assert state.other_disc is not None and math.dist(state.block, state.other_disc) > GOAL_TOLERANCE
    assert 35 <= sum(goals) <= 65


def test_not_listening_solves_half() -> None:
    """The best that a policy can do which sees everything and ignores the words."""

    def deaf(state: State) -> State:
        [(green, _), _] = state.discs
        return replace(state, goal=green, goal_colour=0, other_disc=None)

    successes = 0
    for seed in SEEDS:
        state = sample_start(np.random.default_rng(seed), 2)
        for _ in range(TIME_LIMIT):
            if deaf(state).success:
                break
            state = advance(state, expert_action(deaf(state)))
        successes += state.success
    assert 0.4 <= successes / len(SEEDS) <= 0.6


def test_wrong_words() -> None:
    instructions = []
    for wrong in (False, True):
        env = PlaceEnv(targets=2, wrong_words=wrong)
        env.reset(seed=1)
        instructions.append(env.task_description)
    assert instructions[0] != instructions[1]
    with pytest.raises(FlexorError, match="wrong words need 2"):
        PlaceEnv(wrong_words=True)
    with pytest.raises(FlexorError, match="use 1 or 2 targets"):
        PlaceEnv(targets=3)


def test_one_target_is_what_it_was() -> None:
    """A second disc changes nothing for those who have none."""
    env = PlaceEnv()
    env.reset(seed=0)
    assert env.task_description == "Put the red block on the green disc." and env.state.other_disc is None
    assert env.state.gripper == pytest.approx((0.5012323827204359, 0.6604089236443549))
    assert env.state.goal == pytest.approx((-0.6242760074467752, -0.6575224156812005))


unit = st.floats(-1, 1)
point = st.tuples(unit, unit)
states = st.builds(State, gripper=point, opening=unit, block=point, goal=point)
actions = st.lists(st.tuples(*[st.floats(-3, 3)] * 3), min_size=1, max_size=30)


@settings(max_examples=150)
@given(states, actions)
def test_physics_stays_on_the_table_and_moves_only_what_is_held(state: State, script: list) -> None:
    for action in script:
        after = advance(state, np.array(action))
        assert all(-1 <= value <= 1 for value in (*after.gripper, *after.block, after.opening))
        assert math.dist(state.gripper, after.gripper) <= SPEED + 1e-12
        assert abs(after.opening - state.opening) <= FINGER_SPEED + 1e-12
        assert after.goal == state.goal
        assert 0 <= after.reward <= 1
        assert (after.reward == 1) == after.success
        if not (state.grasped or after.grasped):
            assert after.block == state.block
        if after.grasped:
            assert after.opening >= 0
            if not state.grasped:
                assert math.dist(after.gripper, state.block) <= GRASP_RADIUS
        state = after


@settings(max_examples=30)
@given(st.integers(0, 2**32))
def test_every_start_is_unsolved_and_solvable(seed: int) -> None:
    state = sample_start(np.random.default_rng(seed))
    assert not state.success
    rewards = [state.reward]
    for _ in range(TIME_LIMIT):
        state = advance(state, expert_action(state))
        rewards.append(state.reward)
        if state.success:
            break
    assert state.success
    assert all(after >= before - 1e-9 for before, after in pairwise(rewards))


def test_wrong_actions_and_settings_are_explained() -> None:
    env = PlaceEnv()
    env.reset(seed=0)
    with pytest.raises(FlexorError, match="normalisation"):
        env.step(np.array([0, np.nan, 0]))
    with pytest.raises(FlexorError, match="3 finite numbers"):
        env.step(np.zeros(2))
    with pytest.raises(FlexorError, match="obs_type"):
        PlaceEnv(obs_type="pixels")


def success_rate(actor: Callable[[State, int, np.random.Generator], np.ndarray], seeds: range) -> float:
    successes = 0
    for seed in seeds:
        rng = np.random.default_rng(seed)
        state = sample_start(np.random.default_rng(seed))
        for step in range(TIME_LIMIT):
            state = advance(state, actor(state, step, rng))
            if state.success:
                successes += 1
                break
    return successes / len(seeds)


SEEDS = range(EVAL_SEED_START, EVAL_SEED_START + 300)


def aim(block: tuple[float, float], goal: tuple[float, float]) -> Callable:
    """The expert, told the same positions every time instead of looking; it knows when it holds the block."""

    def actor(state: State, step: int, rng: np.random.Generator) -> np.ndarray:
        believed = state.gripper if state.grasped else block
        return expert_action(replace(state, block=believed, goal=goal if state.grasped else (9.0, 9.0)))

    return actor


def snap(state: State, step: int, rng: np.random.Generator) -> np.ndarray:
    """Sweep the table, opening and closing, and carry what was caught to the middle."""
    if state.grasped:
        return expert_action(replace(state, block=state.gripper, goal=(0.0, 0.0)))
    y = -0.6 + 1.2 * (step // 20) / 3
    return np.array([0.75 * math.sin(0.3 * step), y, 1.0 if step // 4 % 2 else -1.0], np.float32)


BLIND = {
    "rest": lambda state, step, rng: np.zeros(3, np.float32),
    "close in the middle": lambda state, step, rng: np.array([0, 0, -1], np.float32),
    "random": lambda state, step, rng: rng.uniform(-1, 1, 3),
    "mean positions": aim((0.0, 0.0), (0.0, 0.0)),
    "likely positions": aim((0.4, 0.4), (-0.4, -0.4)),
    "sweep": snap,
}


@pytest.mark.parametrize("name", BLIND)
def test_not_looking_fails(name: str) -> None:
    assert success_rate(BLIND[name], SEEDS) <= 0.10


def test_expert_succeeds() -> None:
    assert success_rate(lambda state, step, rng: expert_action(state), SEEDS) >= 0.98


def test_expert_succeeds_when_disturbed() -> None:
    disturbances: dict[np.random.Generator, Disturbance] = {}

    def disturbed(state: State, step: int, rng: np.random.Generator) -> np.ndarray:
        disturbance = disturbances.setdefault(rng, Disturbance(len(disturbances), 1.0))
        return disturbance.apply(expert_action(state))

    assert success_rate(disturbed, SEEDS) >= 0.95


def off_by(error: float) -> Callable:
    """The expert, seeing the block and the goal off by `error`, each in a direction of its own."""

    def actor(state: State, step: int, rng: np.random.Generator) -> np.ndarray:
        def off(point: tuple[float, float], turn: float) -> tuple[float, float]:
            angle = turn * state.goal[0]  # rests during an episode and varies between episodes
            return point[0] + error * math.cos(angle), point[1] + error * math.sin(angle)

        if state.grasped:
            return expert_action(replace(state, goal=off(state.goal, 30)))
        return expert_action(replace(state, block=off(state.block, 50)))

    return actor


def test_seeing_must_be_right_to_a_tenth_of_the_table() -> None:
    assert success_rate(off_by(0.15), SEEDS) >= 0.9
    assert success_rate(off_by(0.30), SEEDS) <= 0.05
