"""With 200 ms of latency a robot that waits for every answer fails; with real-time chunking it succeeds as without."""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flexor.sim.expert import expert_action
from flexor.sim.record import EVAL_SEED_START
from flexor.sim.robot import PlaceRobot
from flexor.sim.task import GRASP_RADIUS, RELEASE_OPENING, TIME_LIMIT, State, advance
from real_time import score_in_real_time

SEEDS = range(EVAL_SEED_START, EVAL_SEED_START + 12)
STATE = "environment_state_agent_pos"
ROOT = Path(__file__).parents[2]


class ExpertChunks:
    """Predicts what the expert would do next, from what a policy sees."""

    metadata: dict[str, Any] = {"action_steps": 8}  # noqa: RUF012

    def reset(self, episode: int | None = None) -> None: ...

    def chunk(self, observation: Mapping[str, Any], task: str = "", **options: Any) -> np.ndarray:
        x, y, opening = map(float, observation["observation.state"])
        block_x, block_y, goal_x, goal_y = map(float, observation["observation.environment_state"])
        near = math.dist((x, y), (block_x, block_y)) <= GRASP_RADIUS
        grasped = near and abs(x - block_x) < 1e-3 and opening <= RELEASE_OPENING
        state = State((x, y), opening, (block_x, block_y), (goal_x, goal_y), grasped)
        chunk = []
        for _ in range(12):
            chunk.append(expert_action(state))
            state = advance(state, chunk[-1])
        return np.stack(chunk)


def score(latency_s: float, real_time: bool, block_speed: float):
    return score_in_real_time(
        ExpertChunks(),
        SEEDS,
        latency_s,
        real_time=real_time,
        execute=1,  # it is asked anew as often as it can be
        obs_type=STATE,
        block_speed=block_speed,
    )


@pytest.mark.parametrize("block_speed", [0.0, 0.02])
def test_latency_costs_nothing_in_real_time_and_much_without(block_speed):
    at_once = score(0.0, real_time=False, block_speed=block_speed)
    waiting = score(0.2, real_time=False, block_speed=block_speed)
    real_time = score(0.2, real_time=True, block_speed=block_speed)
    assert at_once.successes >= 11 and at_once.moving > 0.95
    assert real_time.successes >= at_once.successes - 1
    assert waiting.successes <= 8
    # It moves in every period but the first two, before there is anything to execute; one that waits, in one of three.
    assert real_time.moving > 0.9 and waiting.moving < 0.4
    assert real_time.mean_seconds < at_once.mean_seconds + 0.6 < waiting.mean_seconds


def test_without_latency_both_do_the_same_as_the_environment():
    real_time, waiting = score(0.0, True, 0.0), score(0.0, False, 0.0)
    assert real_time.successes == waiting.successes == len(SEEDS)
    assert abs(real_time.mean_seconds - waiting.mean_seconds) < 0.2


def test_the_robot_moves_on_without_actions():
    robot = PlaceRobot(obs_type=STATE)
    robot.reset(3)
    target = {"x": 0.0, "y": 0.0, "opening": 1.0}
    start = robot.get_observation()
    robot.send_action(target)
    robot.sleep(0.1)
    moved = robot.get_observation()
    assert math.dist((start["x"], start["y"]), (moved["x"], moved["y"])) == pytest.approx(0.08, rel=1e-3)
    robot.sleep(0.25)  # two periods and a half, without an action
    assert robot.steps == 3 and robot.clock() == pytest.approx(0.35)
    assert robot.get_observation()["x"] == pytest.approx(moved["x"])
    robot.sleep(100)
    assert robot.done and robot.steps == TIME_LIMIT
    robot = PlaceRobot(obs_type=STATE, idle="last")
    robot.reset(3)
    robot.send_action(target)
    robot.sleep(6)
    assert math.hypot(robot.get_observation()["x"], robot.get_observation()["y"]) < 0.01


def test_the_block_slides_until_it_falls_off():
    robot = PlaceRobot(obs_type=STATE, block_speed=0.03)
    robot.reset(5)
    places = []
    while not robot.done:
        places.append(robot.get_observation()["places"][:2])
        robot.sleep(0.1)
    np.testing.assert_allclose(np.linalg.norm(np.diff(places, axis=0), axis=1), 0.03, rtol=1e-3)
    assert robot.fell_off and not robot.success
    assert np.abs(places).max() <= 1 < np.abs(robot.get_observation()["places"]).max()


def test_the_robot_can_run_in_real_time_too(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    robot = PlaceRobot(obs_type=STATE, wall_clock=True)
    robot.connect()
    start = robot.get_observation()
    robot.send_action({"x": 0.0, "y": 0.0, "opening": 1.0})
    now[0] += 0.15
    assert robot.get_observation() != start and robot.steps == 1
    now[0] += 8
    robot.get_observation()
    assert robot.seed == 1 and robot.steps == 0  # the next episode


def test_the_page_has_the_benchmarks_numbers():
    results = json.loads((ROOT / "benchmarks/results/latency_2026-11-17.json").read_text())
    results_by_case = {(r["block_speed"], r["execute"], r["latency_s"], r["player"]): r for r in results}
    columns = [(0.0, "waits"), (0.2, "waits"), (0.2, "real time"), (0.4, "waits"), (0.4, "real time")]
    rows = re.findall(
        r"^\| (lies|slides [\d.]+) \| (\d) \| (.*) \|$", (ROOT / "docs/robot.md").read_text(), re.M
    )
    assert len(rows) == 9
    for block, execute, cells in rows:
        speed = float(block.partition(" ")[2] or 0)
        cases = [results_by_case[speed, int(execute), *column] for column in columns]
        assert cells == " | ".join(f"{r['success_rate']:.0%}, {r['mean_seconds']:.1f} s" for r in cases)
