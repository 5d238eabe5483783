"""Connections in processes of their own: answers, limits and figures as in one, and a death that costs little."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import types
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch
from websockets.exceptions import ConnectionClosed, InvalidStatus

from flexor.core.errors import ConfigError, FlexorError
from flexor.policies.base import Policy
from flexor.policies.diffusion.config import DiffusionConfig
from flexor.policies.features import Kind, PolicyFeature
from flexor.policies.pretrained import Pretrained
from flexor.serve import processes
from flexor.serve.form import Input, ObservationForm
from flexor.serve.processes import RemoteConnections
from flexor.serve.settings import ServeSettings
from flexor.serve.shared_observations import SharedObservations
from flexor_client.jpeg import encode_jpeg
from support.limits import LIMIT_S, wait_for
from support.serving import (
    CAMERA,
    STATE,
    RawClient,
    ask_at_once,
    expected,
    get,
    needs_linux,
    numbers,
    observation,
    serving,
)
from support.soaking import IMAGE, Soak

pytestmark = needs_linux


def test_clients_of_several_processes():
    with serving(numbers(), processes=2, max_clients=3, api_key="key") as (url, server):
        key = {"Authorization": "Api-Key key"}
        robots = [RawClient(url, additional_headers=key) for _ in range(3)]
        assert [*server.connections.loop.clients] == [1]  # the first one stays with the model
        assert [len(process.clients) for process in server.processes.running] == [1, 1]
        with pytest.raises(InvalidStatus, match="503"):
            RawClient(url, additional_headers=key)
        with pytest.raises(InvalidStatus, match="401"):
            RawClient(url)
        for value, robot in enumerate(robots):
            for flexor in ({}, {"flexor": {"id": 5, "episode": 2, "step": 7}}):
                reply = robot.ask(observation(value, prompt=f"robot {value}", **flexor))
                np.testing.assert_array_equal(reply["actions"], expected(value))
        assert reply["flexor"] == {"id": 5, "episode": 2, "step": 7, "batch": 1}
        previous = np.full((4, 2), 7, np.float32)
        moving = robots[0].ask(observation(0, flexor={"previous": previous, "delay": 2}))
        np.testing.assert_array_equal(moving["actions"][:2], previous[:2])
        robots[0].ask(observation(1))
        for image in (observation()[CAMERA], encode_jpeg(observation()[CAMERA])):
            options = {"flexor": {"deadline_ms": 1, "age_ms": 2}, "prompt": "robot 1"}
            late = robots[1].ask(observation(1, **options) | {CAMERA: image})
            assert late["expired"]["age_ms"] >= 2 and late["flexor"]["episode"] == 2  # the robot's, as before
        # whichever process is asked, it speaks for all
        for _ in range(3):
            page = json.loads(get(url, "/status", **key)[1])
            assert [client["task"] for client in page["clients"]] == ["", "robot 1", "robot 2"]
            assert [client["requests"] for client in page["clients"]] == [4, 4, 2]
            assert all([*client["images"]] == [CAMERA] for client in page["clients"])
            lines = get(url, "/metrics", **key)[1].splitlines()
            for line in ('flexor_requests_total{result="ok"} 8', "flexor_clients 3", "flexor_sessions 3"):
                assert line in lines
            assert "flexor_refused_connections_total 2" in lines
        for robot in robots:
            robot.socket.close()
        wait_for(lambda: not server.model.clients)
        assert not server.model.batcher.pauses
        assert not any(process.sessions for process in server.processes.running)


def test_a_process_that_dies_costs_only_its_own_clients():
    with serving(numbers(), processes=2) as (url, server):
        with RawClient(url) as survivor, RawClient(url) as other:
            dying = next(process for process in server.processes.running if process.clients)
            other.ask(observation(1))
            counted = 'flexor_requests_total{result="ok"} %d'
            assert counted % 1 in get(url, "/metrics")[1].splitlines()
            dying.process.send_signal(signal.SIGKILL)
            with pytest.raises(ConnectionClosed):
                other.socket.recv(timeout=LIMIT_S)
            np.testing.assert_array_equal(survivor.ask(observation(2))["actions"], expected(2))
            with RawClient(url) as again:
                np.testing.assert_array_equal(again.ask(observation(3))["actions"], expected(3))
            wait_for(lambda: len(server.processes.running) == 2 and dying not in server.processes.running)
            for _ in range(3):  # whichever process is asked
                assert counted % 3 in get(url, "/metrics")[1].splitlines()
        children = [process.process for process in server.processes.running]
    assert all(child.returncode == 0 for child in children)


@pytest.fixture
def frozen(monkeypatch):
    """Only the process that is put here may be taken for one that does not answer, and is ended once `over` is set."""
    frozen, is_alive = types.SimpleNamespace(process=None, over=False), RemoteConnections.is_alive

    async def patient(remote: RemoteConnections, timeout_s: float) -> bool:
        while remote.process.poll() is None:
            if await is_alive(remote, 0.5):
                return True
            if remote is frozen.process and (timeout_s < processes.FROZEN_S or frozen.over):
                return False
            await asyncio.sleep(0.01)
        return False

    monkeypatch.setattr(RemoteConnections, "is_alive", patient)
    return frozen


def test_a_process_that_is_frozen_gets_no_robots_and_is_replaced(frozen):
    with serving(numbers(), processes=2) as (url, server), ExitStack() as stack:
        first, stuck = (stack.enter_context(RawClient(url)) for _ in range(2))
        stopped = frozen.process = next(process for process in server.processes.running if process.clients)
        stopped.process.send_signal(signal.SIGSTOP)
        for value in range(4):  # these may not wait until it is replaced
            robot = stack.enter_context(RawClient(url))
            np.testing.assert_array_equal(robot.ask(observation(value))["actions"], expected(value))
        assert len(stopped.clients) == 1
        frozen.over = True
        with pytest.raises(ConnectionClosed):  # and can connect again
            stuck.socket.recv(timeout=LIMIT_S)
        wait_for(lambda: len(server.processes.running) == 2 and stopped not in server.processes.running)
        assert stopped.process.wait(LIMIT_S) == -signal.SIGKILL
        for client in (first, robot, stack.enter_context(RawClient(url))):
            np.testing.assert_array_equal(client.ask(observation(7))["actions"], expected(7))


@pytest.mark.parametrize("processes", [0, 2])
def test_a_rush_of_clients_does_not_exceed_the_limit(processes):
    def arrive(_: int) -> RawClient | None:
        try:
            return RawClient(url)
        except (InvalidStatus, ConnectionClosed):
            return None

    with serving(numbers(), processes=processes, max_clients=3) as (url, server):
        with ThreadPoolExecutor(16) as threads:
            robots = [robot for robot in threads.map(arrive, range(16)) if robot]
        assert len(robots) == len(server.model.clients) == 3
        for robot in robots:
            np.testing.assert_array_equal(robot.ask(observation(1))["actions"], expected(1))
            robot.socket.close()


def test_they_end_with_the_server():
    """Also if it is killed."""
    code = "\n".join(
        (
            "from support.serving import numbers, serving",
            "with serving(numbers(), processes=2) as (url, server):",
            "    print(*(one.process.pid for one in server.processes.running), flush=True)",
            "    input()",
        )
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], text=True, env=environment, **pipes) as server:
        pids = [int(pid) for pid in server.stdout.readline().split()]
        assert len(pids) == 2 and all(Path(f"/proc/{pid}").exists() for pid in pids)
        server.kill()
    wait_for(lambda: not any(_runs(pid) for pid in pids))


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_one_that_does_not_start_is_said(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with (
        pytest.raises(FlexorError, match=r"did not start \(exit code 1\).*--processes=0"),
        serving(numbers(), processes=2),
    ):
        pass


def test_robots_of_different_processes_share_a_batch():
    policy = numbers()
    with serving(policy, processes=2) as (url, server):
        replies = ask_at_once(url, server, [1, 2])
    for value, reply in zip([1, 2], replies):
        np.testing.assert_array_equal(reply["actions"], expected(value))
    assert policy.policy.batches[-1] == 2


def test_a_soak():
    with serving(numbers(image=IMAGE), processes=2, requests_per_s=1e6) as (url, server):
        soak = Soak(url, requests=300, deadline_s=LIMIT_S)
        soak.run()
        wait_for(lambda: not server.model.clients)
        assert not server.model.batcher.pauses and not server.model.batcher.waiting
        assert not any(process.process.returncode for process in server.processes.running)
    assert soak.wrong == []


@pytest.mark.parametrize("steps", [None, [-1, 0]])
@pytest.mark.parametrize("last", [False, True])
def test_shared_observations(steps, last):
    form = ObservationForm(
        {"eye": Input((3, 4, 5), True, "eye", True), "joints": Input((7,), False, "joints", True)},
        steps,
        2,
        4,
    )
    rng, memory = np.random.default_rng(0), os.memfd_create("test")
    writes, reads = (SharedObservations(memory, form, 3) for _ in range(2))
    os.close(memory)
    written = {}
    for number in range(3):
        stacked = bool(steps) and number == 1
        more = (2,) if stacked else ()
        image = rng.integers(0, 256, (*more, 4, 5, 3) if last else (*more, 3, 4, 5), np.uint8)
        image = np.moveaxis(image, -1, -3) if last else image
        written[number] = {"eye": image, "joints": rng.normal(size=(*more, 7)).astype(np.float32)}, stacked
        writes.write(number, *written[number])
    for number, (observed, stacked) in written.items():
        for name, array in reads.view(number, stacked).items():
            np.testing.assert_array_equal(array, observed[name])


class Remembers(Policy):
    """Its actions are the brightness of the last image and of this one."""

    def __init__(self, config: DiffusionConfig):
        super().__init__(config)
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def predict(self, batch, noise):
        brightness = 255 * batch[CAMERA].float().mean((2, 3, 4))  # [B, T]
        return brightness[:, None].expand(-1, len(self.config.action_deltas), -1)


def test_a_history_is_kept_of_every_robot():
    """Also in another process, where the memory of an observation is used again for the next one."""
    config = DiffusionConfig(
        input_features={
            CAMERA: PolicyFeature(Kind.VISUAL, (3, 8, 8)),
            STATE: PolicyFeature(Kind.STATE, (3,)),
        },
        output_features={"action": PolicyFeature(Kind.ACTION, (2,))},
        normalization_mapping=dict.fromkeys(("VISUAL", "STATE", "ACTION"), "IDENTITY"),
    )
    policy = Pretrained(Remembers(config), *config.pipelines({}, "cpu"))
    with serving(policy, processes=1) as (url, _), RawClient(url) as first, RawClient(url) as second:
        for before, now in ((1, 1), (1, 5), (5, 2)):
            for robot, more in ((first, 0), (second, 100)):
                image = np.full((8, 8, 3), now + more, np.uint8)
                actions = robot.ask(observation() | {CAMERA: image})["actions"][0]
                np.testing.assert_allclose(actions, [before + more, now + more], rtol=1e-4)
        both = np.stack([np.full((3, 8, 8), value, np.uint8) for value in (40, 50)])
        actions = first.ask({CAMERA: both, STATE: np.zeros((2, 3))})["actions"][0]
        np.testing.assert_allclose(actions, [40, 50], rtol=1e-4)


def test_they_do_without_torch():
    code = "import sys, flexor.serve.connection_process; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_how_many():
    assert ServeSettings(processes=3).connection_processes() == 3
    assert ServeSettings(max_batch=2).connection_processes() in (0, 2)
    with pytest.raises(ConfigError, match="--processes=-1"):
        ServeSettings(processes=-1).validate()
