"""Players and Flexor's own server: chunks continue each other, and a server that dies and returns is survived."""

import time

import numpy as np
import pytest

from flexor.policies.pretrained import load_pretrained
from flexor_client import ActionLimits, ChunkPlayer, RealTimePlayer, RefusedError, RemotePolicy
from support import runs
from support.limits import LIMIT_S, wait_for
from support.ports import ReservedPort
from support.serving import CAMERA, CHUNK, SIZE, STATE, expected, numbers, observation, serving
from support.small_policies import small_flags


def test_chunks_and_limits_and_jpeg():
    with serving(numbers()) as (url, _):
        with RemotePolicy(url, jpeg=90, timeout_s=LIMIT_S) as policy:
            np.testing.assert_array_equal(policy.chunk(observation(3), "go"), expected(3))
            assert policy.metadata["actions"] == [CHUNK, 2]
            player = ChunkPlayer(policy, limits=ActionLimits(high=4))
            assert [player.act(observation(3)).tolist() for _ in range(2)] == [[3, -3], [4, -2]]
            assert player.act(observation(3)).tolist() == [4, -1]
        with (
            RemotePolicy(url, timeout_s=LIMIT_S) as policy,
            pytest.raises(RefusedError, match=r"observation\.state"),
        ):
            policy.chunk({CAMERA: np.zeros((3, SIZE, SIZE), np.uint8)})


def test_a_policy_that_can_not_continue_chunks_is_blended():
    with serving(numbers()) as (url, _), RemotePolicy(url, timeout_s=LIMIT_S) as policy:
        assert policy.metadata["continues_chunks"] is False
        previous = np.full((3, 2), 100, np.float32)
        chunk = policy.chunk(observation(0), previous=previous, delay=1)
        plain = policy.chunk(observation(0))
        np.testing.assert_allclose(chunk[0], 100)
        assert (plain[1:3] < chunk[1:3]).all() and (chunk[1:3] < 100).all()
        np.testing.assert_array_equal(chunk[3:], plain[3:])


@pytest.mark.slow
def test_a_policy_with_flow_matching_continues_the_chunk_that_is_executed(dataset, tmp_path):
    flags = [*small_flags("smolvla", tmp_path / "files"), "--policy.device=cpu"]
    run = runs.train(dataset, tmp_path / "run", flags, "--steps=1")
    with serving(load_pretrained(str(run))) as (url, _), RemotePolicy(url, timeout_s=LIMIT_S) as policy:
        assert policy.metadata["continues_chunks"] is True
        observed = {
            name: np.zeros(about["shape"], np.uint8 if about["image"] else np.float32)
            for name, about in policy.metadata["inputs"].items()
        }
        free = policy.chunk(observed, "go", step=0)
        previous = free + 0.3
        continued = policy.chunk(observed, "go", step=0, previous=previous, delay=4)
        far, near = np.abs(free - previous)[:4].mean(), np.abs(continued - previous)[:4].mean()
        assert near < 0.5 * far

        clock = [0.0]
        sent = []

        def start(work):
            class Answer:
                ready, value = clock[0] + 0.2, work()

                def done(self):
                    return clock[0] >= self.ready - 1e-9

                def result(self):
                    return self.value

            return Answer()

        ask = policy.chunk
        policy.chunk = lambda *a, **k: (sent.append(k), ask(*a, **k))[1]
        player = RealTimePlayer(policy, fps=10, clock=lambda: clock[0], start=start)
        actions = []
        for _ in range(20):
            actions.append(player.act(observed, "go"))
            clock[0] += 0.1
        assert [action is None for action in actions] == [True] * 2 + [False] * 18
        assert len(sent) > 3 and sent[0].keys() == {"step"}
        assert all(each["delay"] == 2 and len(each["previous"]) >= 2 for each in sent[1:])


def test_real_threads_a_real_server_and_a_robot_that_never_waits():
    slow = numbers(before=lambda _: time.sleep(0.01), n_action_steps=4)
    with serving(slow) as (url, _), RemotePolicy(url, reconnect_s=0, timeout_s=LIMIT_S) as policy:
        player = RealTimePlayer(policy, fps=20, lost_after_s=LIMIT_S)
        player.wait(observation(0), timeout_s=LIMIT_S)
        actions: list[np.ndarray | None] = []

        def step() -> bool:
            actions.append(player.act(observation(len(actions))))
            return player.answers > 4 and sum(action is not None for action in actions) >= 10

        wait_for(step, every_s=0.05)
    assert actions[0].tolist() == [0, 0]
    assert player.latencies_s[0] >= 0.01


def test_a_server_that_dies_and_returns():
    steps_without_action = 0
    reserved = ReservedPort()
    with serving(numbers(), port=reserved.number) as (url, _):
        policy = RemotePolicy(url, reconnect_s=0, timeout_s=LIMIT_S)
        player = RealTimePlayer(policy, fps=100, lost_after_s=LIMIT_S)
        player.wait(observation(0), timeout_s=LIMIT_S)
        for _ in range(20):
            player.act(observation(1))
            assert not player.lost
            time.sleep(0.01)

    def is_lost() -> bool:
        nonlocal steps_without_action
        steps_without_action += player.act(observation(2)) is None
        return player.lost and steps_without_action > 10

    def is_back() -> bool:
        action = player.act(observation(50))
        return action is not None and action[0] >= 50

    wait_for(is_lost, every_s=0.01)
    with reserved as port, serving(numbers(), port=port):
        wait_for(is_back, every_s=0.01)
        assert not player.lost
        policy.close()


def test_state_is_named_as_the_policy_names_it():
    with serving(numbers(), {STATE: "joints"}) as (url, _), RemotePolicy(url, timeout_s=LIMIT_S) as policy:
        assert "joints" in policy.metadata["inputs"]
        observed = {**observation(2), "joints": observation(2)[STATE]}
        np.testing.assert_array_equal(policy.chunk(observed), expected(2))
