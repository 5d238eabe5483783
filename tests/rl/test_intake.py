"""Actors and a learner's port: each record once and in its order, whoever is gone meanwhile."""

import threading
from dataclasses import replace

import numpy as np
import pytest

from flexor.policies.weight_names import unique_state
from flexor.rl.acting import ActorWeights
from flexor.rl.buffer import ReplayBuffer
from flexor.rl.record_reader import FLAGS
from flexor_client import ActionLimits, ClientError, RefusedError
from flexor_client.address import Address
from flexor_client.learner import LearnerLink
from flexor_client.spool import Spool
from support import actors
from support.actors import (
    IMAGE,
    SPEC,
    STATE,
    WITH_IMAGES,
    LineRobot,
    collector,
    observation,
    taking,
    transitions,
)
from support.limits import LIMIT_S, wait_for
from support.ports import ReservedPort
from support.serving import RawClient

HELLO = {"protocol": 1, "actor": "arm", "id": "0" * 32, "weights": True, "environment": SPEC.plain()}


def record(value: float, is_step: bool = True, **fields) -> dict:
    message = {"is_step": is_step, "update": 0, "observation": observation(value)}
    if not is_step:
        return {**message, **fields}
    flags = dict.fromkeys(FLAGS, False)
    step = {"reward": 0.0, "penalty": 0.0, "action": np.zeros(2, np.float32), **flags}
    return {**message, **step, **fields}


def test_two_robots_take_turns_and_each_next_state_is_of_the_same_robot(tmp_path):
    with taking(tmp_path / "records") as (url, intake):
        with collector(url, actor="left") as left, collector(url, actor="right") as right:
            robots = [LineRobot(left), LineRobot(right, length=4)]
            robots[1].idle_steps = 500  # it begins elsewhere
            for turn in range(40):
                robots[turn % 3 == 0].step()
        stored = actors.records(intake)
        assert {*stored["actor"].tolist()} == {1, 2}
        for actor in (1, 2):
            part = stored[stored["actor"] == actor]
            assert part["sequence"].tolist() == [*range(1, len(part) + 1)]
        done = [robot.done for robot in robots]
        assert [transitions(stored[stored["actor"] == actor]) for actor in (1, 2)] in (done, done[::-1])
        assert (np.abs(stored["action"]) <= SPEC.high).all() and np.abs(stored["action"]).max() > 0
        replay = ReplayBuffer(
            intake.file.layout, 100, stored[:0], next(intake.weights.policy.parameters()).device
        )
        replay.extend(stored)
        before, after, step = replay.gather(replay.collected.rows[: replay.collected.count])
        moved = after[STATE][:, 0] - before[STATE][:, 0] - 1 - step["action"][:, 0]
        assert replay.collected.count == 40 and float(moved.abs().max()) < 1e-4


def test_a_robot_whose_learner_is_gone_holds_and_hands_over_later(tmp_path):
    """What a person does meanwhile is kept on the robot's disk."""
    with ReservedPort() as port:
        with taking(tmp_path / "records", port) as (url, _):
            arm = collector(url, spool=tmp_path / "spool")
            robot = LineRobot(arm)
            for _ in range(8):
                robot.step()
        wait_for(lambda: arm.lost)
        steps = len(robot.done)
        for _ in range(3):
            robot.step()
        assert len(robot.done) <= steps + 1 and robot.idle_steps >= 2  # one action had come before
        for _ in range(5):
            robot.step(person=np.array([9.0, -9.0]))
        assert robot.done[-1][1:3] == (1.0, -2.0)  # within the limits
        assert arm.link.pending >= 5
        with taking(tmp_path / "records", port) as (_, intake):
            wait_for(lambda: not arm.lost)
            for _ in range(4):
                robot.step()
            arm.close(LIMIT_S)
            stored = actors.records(intake)
    assert stored["sequence"].tolist() == [*range(1, len(stored) + 1)]
    assert transitions(stored) == robot.done
    assert (stored["intervention"] == 1).sum() == 5


def test_a_robot_that_died_hands_over_what_it_had_when_it_is_started_again(tmp_path):
    with ReservedPort() as port:
        dead = collector(f"ws://127.0.0.1:{port}", spool=tmp_path / "spool", lost_after_s=0)
        robot = LineRobot(dead)
        for _ in range(9):
            robot.step(person=np.array([0.5, 0.5]))
        dead.close(0)  # nobody ever got anything
        with taking(tmp_path / "records", port) as (url, intake):
            with collector(url, spool=tmp_path / "spool") as again:
                robot.collector = again
                robot.steps = 0  # another episode
                for _ in range(3):
                    robot.step()
            stored = actors.records(intake)
    assert transitions(stored) == robot.done
    assert stored["sequence"].tolist() == [*range(1, len(stored) + 1)]


def test_a_record_is_never_twice_and_after_a_gap_the_episode_is_left_out(tmp_path):
    with taking(tmp_path) as (url, intake), RawClient(url) as raw:
        assert raw.ask({"hello": HELLO})["received"] == 0
        first = [record(0, False), record(1), record(2)]
        assert raw.ask({"first": 1, "records": first})["received"] == 3
        assert raw.ask({"first": 1, "records": [*first, record(3)]})["received"] == 4
        with RawClient(url) as again:  # the same actor, after its connection was lost
            assert again.ask({"hello": HELLO})["received"] == 4
            again.ask({"first": 4, "records": [record(3), record(4, truncated=True)]})
            again.ask({"first": 8, "records": [record(9), record(10), record(11, False), record(12)]})
            assert again.ask({"status": True})["received"] == 11
            again.ask(
                {"first": 12, "records": [record(13, terminated=True), record(14)]}
            )  # no step follows an end
        assert actors.records(intake)[STATE][:, 0].tolist() == [0, 1, 2, 3, 4, 11, 12, 13]


def test_another_process_knows_what_was_received(tmp_path):
    with taking(tmp_path) as (url, _), RawClient(url) as raw:
        raw.ask({"hello": HELLO})
        raw.ask({"first": 1, "records": [record(0, False), record(1)]})
    with taking(tmp_path) as (url, intake), RawClient(url) as raw:
        assert (
            raw.ask({"hello": {**HELLO, "id": "1" * 32}})["received"] == 0
        )  # another actor of the same name
        raw.ask({"first": 1, "records": [record(5, False), record(6)]})
        with RawClient(url) as first:
            assert first.ask({"hello": HELLO})["received"] == 2
            first.ask({"first": 3, "records": [record(2)]})
        assert actors.records(intake, 1)[STATE][:, 0].tolist() == [0, 1, 2]
        assert actors.records(intake, 2)[STATE][:, 0].tolist() == [5, 6]


def test_weights_arrive_in_the_middle_of_an_episode(tmp_path):
    with taking(tmp_path) as (url, intake):
        arrived: list[tuple[int, dict]] = []
        link = LearnerLink(Address(url), "arm", SPEC.plain(), Spool(), has_policy=True, timeout_s=LIMIT_S)
        link.on_weights = lambda update, weights: arrived.append((update, weights))
        link.wait(lambda: link.weights_update == 0)
        assert {*arrived[0][1]} == {*unique_state(intake.weights.policy)}
        link.add(record(0, False))
        for step in range(1, 4):
            newer = {name: array + step for name, array in intake.weights.newest.tensors.items()}
            intake.weights.newest = ActorWeights(10 * step, newer)
            link.add(record(step))
            link.wait(lambda: link.weights_update == 10 * step)  # noqa: B023
        assert [update for update, _ in arrived] == [0, 10, 20, 30] and link.lost is None
        acting, state = intake.acting, observation(1)
        earlier = acting.action(state, 1)
        acting.offer(*arrived[-1])
        assert acting.update == 0 and not np.array_equal(acting.action(state, 1), earlier)
        assert acting.update == 30
        link.close()


def test_images_come_as_they_are_or_as_files(tmp_path):
    with taking(tmp_path, spec=WITH_IMAGES) as (url, intake):
        for jpeg in (None, 95):
            with collector(url, WITH_IMAGES, actor=f"jpeg {jpeg}", jpeg=jpeg) as arm:
                assert arm.begin(observation(40, WITH_IMAGES)) is not None
                picture = {**observation(90, WITH_IMAGES), IMAGE: np.full((48, 48, 3), 90, np.uint8)}
                arm.step(np.zeros(2, np.float32), picture, 1.0, terminated=True, success=True)
        for actor in (1, 2):
            stored = actors.records(intake, actor)
            assert stored["success"].tolist() == [0, 1] and stored["reward"].tolist() == [0, 1]
            assert np.abs(stored[IMAGE].astype(int).mean((1, 2, 3)) - [40, 90]).max() < 2


@pytest.mark.parametrize(
    "spec",
    [
        replace(SPEC, shapes={STATE: [4]}, ranges={}),
        replace(SPEC, shapes={"observation.joints": [3]}, ranges={}),
        replace(SPEC, low=[-1.0, -1.0]),
        replace(SPEC, low=[-1.0] * 3, high=[1.0] * 3),
    ],
)
def test_another_robot_is_refused(spec, tmp_path):
    with taking(tmp_path) as (url, intake):
        with pytest.raises(RefusedError, match=r"observes|limits"), collector(url, spec) as arm:
            arm.begin({name: np.zeros(shape, np.float32) for name, shape in spec.shapes.items()})
            arm.link.wait(lambda: False, LIMIT_S)
        assert intake.file.count == 0


def test_the_key_is_needed(tmp_path):
    with taking(tmp_path, api_key="right") as (url, intake):
        with (
            pytest.raises(RefusedError, match="the key is missing or wrong"),
            collector(url, api_key="wrong") as arm,
        ):
            arm.link.wait(lambda: False, LIMIT_S)
        with collector(url, api_key="right") as arm:
            assert arm.begin(observation(1)) is not None
        assert intake.file.count == 1


@pytest.mark.parametrize(
    "message",
    [
        {"records": [record(0, False)]},
        {"first": 0, "records": [record(0, False)]},
        {"first": 1, "records": []},
        {"first": 1, "records": [record(0, False)] * 300},
        {"first": 1, "records": [{**record(0, False), "more": 1}]},
        {"first": 1, "records": [record(0, False, update=-1)]},
        {"first": 1, "records": [record(np.nan, False)]},
        {"first": 1, "records": [{**record(0, False), "observation": {STATE: np.zeros(4, np.float32)}}]},
        {"first": 1, "records": [{**record(0, False), "observation": {}}]},
        {"first": 1, "records": [record(0, False), record(1, reward=float("inf"))]},
        {"first": 1, "records": [record(0, False), record(1, action=np.array([0, 9], np.float32))]},
        {"first": 1, "records": [record(0, False), record(1, action=np.array([0, np.nan], np.float32))]},
        {"first": 1, "records": [record(0, False), record(1, action=np.zeros(3, np.float32))]},
        {"first": 1, "records": [record(0, False), record(1, terminated=1)]},
        {"weights": "all"},
        {"anything": 1},
    ],
)
def test_what_is_no_record_is_refused_and_nothing_of_it_is_stored(message, tmp_path):
    with taking(tmp_path) as (url, intake):
        with RawClient(url) as raw:
            raw.ask({"hello": HELLO})
            assert isinstance(raw.ask(message), str)
        with RawClient(url) as raw:  # others go on
            assert raw.ask({"hello": HELLO})["received"] == intake.file.count == 0


@pytest.mark.parametrize(
    "hello",
    [
        {**HELLO, "protocol": 2},
        {**HELLO, "actor": "x" * 100},
        {**HELLO, "id": "../../x"},
        {**HELLO, "weights": 1},
        {**HELLO, "environment": {**SPEC.plain(), "shapes": {"../observation": [3]}}},
        {**HELLO, "environment": {**SPEC.plain(), "shapes": {STATE: [2**40]}}},
        {**HELLO, "environment": {**SPEC.plain(), "low": [float("nan"), 0.0]}},
        {**HELLO, "environment": {**SPEC.plain(), "ranges": {STATE: [[0.0], [1.0]]}}},
        {**HELLO, "environment": {**SPEC.plain(), "fps": 0}},
        {**HELLO, "environment": []},
    ],
)
def test_who_does_not_introduce_itself_is_refused(hello, tmp_path):
    with taking(tmp_path) as (url, intake), RawClient(url) as raw:
        assert isinstance(raw.ask({"hello": hello}), str)
        assert not intake.actors.entries


def test_limits_hold_for_everything_that_moves_the_robot(tmp_path):
    with taking(tmp_path) as (url, _), collector(url, limits=ActionLimits(step=0.01)) as arm:
        first = arm.begin(observation(0), position=np.zeros(2, np.float32))
        assert first is not None and np.abs(first).max() <= 0.01 + 1e-6
        second = arm.step(first, observation(1))
        assert second is not None and np.abs(second - first).max() <= 0.01 + 1e-6
        with pytest.raises(ClientError, match="limits"):
            arm.step(np.array([0.0, 3.0], np.float32), observation(2))
        with pytest.raises(ClientError, match="not finite"):
            arm.step(first, observation(np.nan))


def test_a_policy_that_is_broken_moves_nothing(tmp_path):
    with taking(tmp_path) as (url, intake), collector(url, lost_after_s=0.5) as arm:
        wait_for(lambda: arm.link.connected)
        intake.acting.action(observation(0), 0)  # its weights are in use now
        for name, tensor in intake.weights.policy.state_dict(keep_vars=True).items():
            tensor.data = intake.acting.policy.state_dict(keep_vars=True)[name].data = tensor.data * np.nan
        good = intake.weights.newest
        intake.weights.publish(1)
        assert intake.weights.newest is good
        assert arm.begin(observation(0)) is None
        assert intake.file.count == 1


def test_a_record_that_can_not_be_written_is_not_acknowledged(tmp_path, monkeypatch):
    with taking(tmp_path / "records") as (url, intake), collector(url) as arm:
        arm.begin(observation(0))
        full = threading.Event()
        real = intake.file.append

        def append(record: np.ndarray) -> None:
            if full.is_set():
                raise OSError(28, "No space left on device")
            real(record)

        monkeypatch.setattr(intake.file, "append", append)
        full.set()
        number = arm.link.add(record(1))
        wait_for(lambda: intake.failure)
        assert arm.link.spool.acknowledged < number
        full.clear()
        wait_for(lambda: arm.link.spool.acknowledged == number)
        assert intake.file.count == 2
        arm.close()
