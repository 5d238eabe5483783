"""A server and its clients: answers, batches, deadlines, sessions; nobody pays for what another one does."""

import asyncio
import functools
import socket
import threading
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest
from websockets.exceptions import ConnectionClosed, ConnectionClosedError

from flexor.core.errors import ConfigError
from flexor.serve import clients, listener, rate_limit
from flexor.serve.predictor import Predictor
from flexor.serve.server import bind
from flexor_client.jpeg import encode_jpeg
from flexor_client.wire import pack
from support.hostile_requests import hostile_requests
from support.limits import LIMIT_S, wait_for
from support.ports import ReservedPort
from support.serving import (
    CAMERA,
    CHUNK,
    SIZE,
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


@pytest.fixture(scope="module")
def url():
    with serving(numbers()) as (url, _):
        yield url


def test_a_plain_client_gets_metadata_and_chunks(url):
    with RawClient(url) as robot:
        assert robot.metadata["actions"] == [CHUNK, 2] and robot.metadata["reply"] == "chunk"
        first, second = robot.ask(observation(3)), robot.ask(observation(5, prompt="go"))
    np.testing.assert_array_equal(first["actions"], expected(3))
    np.testing.assert_array_equal(second["actions"], expected(5))
    assert first.keys() == {"actions", "server_timing", "policy_timing"}
    assert first["server_timing"].keys() == {"infer_ms", "decode_ms", "queue_ms", "model_ms"}
    assert second["server_timing"].keys() - first["server_timing"].keys() == {"prev_total_ms", "encode_ms"}
    assert 0 < second["policy_timing"]["infer_ms"] <= second["server_timing"]["infer_ms"]


@pytest.mark.parametrize(
    "frame", [b"\xc1", b"", "text", pack({"x": 1}), pack(observation(666)), pack(observation(2e6))]
)
def test_an_error_is_text_then_close_1011_and_only_for_that_client(url, frame):
    with RawClient(url) as other, RawClient(url) as robot:
        assert other.ask(observation(1))["actions"].shape == (CHUNK, 2)
        assert isinstance(robot.ask_raw(frame), str)
        with pytest.raises(ConnectionClosedError) as closed:
            robot.socket.recv(timeout=LIMIT_S)
        assert closed.value.rcvd.code == 1011
        np.testing.assert_array_equal(other.ask(observation(2))["actions"], expected(2))


def test_images_may_be_jpeg_files(url):
    image = np.zeros((SIZE, SIZE, 3), np.uint8)
    with RawClient(url) as robot:
        np.testing.assert_array_equal(
            robot.ask(observation(3) | {CAMERA: encode_jpeg(image)})["actions"], expected(3)
        )
        assert "resize it" in robot.ask(
            observation(3) | {CAMERA: encode_jpeg(np.zeros((99, 99, 3), np.uint8))}
        )


def test_a_failing_policy_says_little_and_values_that_are_not_finite_are_not_sent(url):
    with RawClient(url) as robot:
        assert (
            robot.ask(observation(666)) == "The policy failed: ZeroDivisionError. The server's log says more."
        )
    with RawClient(url) as robot:
        assert "not finite" in robot.ask(observation(2e6))
    assert 'flexor_requests_total{result="not_finite"}' in get(url, "/metrics")[1]


def test_one_action_at_a_time():
    """The server keeps the chunk: the policy is asked at every fourth step only."""
    policy = numbers()
    with serving(policy, reply="action") as (url, _), RawClient(url) as robot:
        assert robot.metadata["reply"] == "action"
        policy.policy.batches.clear()
        got = [robot.ask(observation(10 * step))["actions"] for step in range(6)]
        assert [a.tolist() for a in got] == [
            [[s, t]] for s, t in [(0, 0), (1, 1), (2, 2), (3, 3), (40, -40), (41, -39)]
        ]
        assert policy.policy.batches == [1, 1]
        again = robot.ask(observation(7, flexor={"reset": True, "episode": 2}))
        assert again["actions"].tolist() == [[7, -7]]
        assert again["flexor"] == {"step": 0, "episode": 2, "batch": 1}
    with (
        serving(numbers(n_action_steps=1, temporal_ensemble_coeff=0.01)) as (url, _),
        RawClient(url) as robot,
    ):
        assert robot.metadata["reply"] == "action"
        assert robot.ask(observation(1))["actions"].shape == (1, 2)


def test_sessions_of_one_connection_are_separate_and_a_new_connection_begins_anew():
    with serving(numbers(), reply="action", max_sessions=2) as (url, _):
        with RawClient(url) as robot:
            for value, name in ((0, "a"), (100, "b"), (7, "a"), (7, "b")):
                got = robot.ask(observation(value, flexor={"session": name, "id": name}))
                assert got["flexor"]["id"] == name
                start = 0 if name == "a" else 100
                assert got["actions"][0, 0] == start + (value == 7)
            assert "at most 2 sessions" in robot.ask(observation(1, flexor={"session": "c"}))
        with RawClient(url) as robot:
            assert robot.ask(observation(50))["actions"][0, 0] == 50


@pytest.mark.parametrize("processes", [0, pytest.param(1, marks=needs_linux)])
def test_all_connections_together_have_a_limited_number_of_robots(processes):
    """Each keeps observations: 64 sessions on each of 64 connections would be thousands of them."""
    with serving(numbers(), max_sessions=8, max_clients=2, processes=processes) as (url, server):
        with RawClient(url) as robot:
            for name in "abcdefgh":
                assert "actions" in robot.ask(observation(1, flexor={"session": name}))
            with RawClient(url) as other:
                assert "There are 8 robots already" in other.ask(observation(1))
            assert "actions" in robot.ask(observation(1, flexor={"session": "a"}))
        wait_for(lambda: not server.model.sessions)
        with RawClient(url) as other:
            assert "actions" in other.ask(observation(1))


def test_steps_count_as_the_robot_takes_them(url):
    with RawClient(url) as robot:
        steps = [robot.ask(observation(1, flexor={}))["flexor"]["step"] for _ in range(3)]
        assert steps == [0, CHUNK, 2 * CHUNK]  # as many as the policy was trained to execute
        assert robot.ask(observation(1, flexor={"step": 3}))["flexor"]["step"] == 3
        assert robot.ask(observation(1, flexor={"episode": 9}))["flexor"] == {
            "step": 0,
            "episode": 9,
            "batch": 1,
        }


def test_a_chunk_that_is_being_executed_fades_into_the_new_one(url):
    previous = np.full((3, 2), 50, np.float32)
    with RawClient(url) as robot:
        got = robot.ask(observation(10, flexor={"previous": previous, "delay": 1}))
        chunk, new = got["actions"][:, 0], expected(10)[:, 0]
        assert got["flexor"]["delay"] == 1
        assert chunk[0] == 50 and new[1] < chunk[2] < chunk[1] < 50 and chunk[3] == new[3]
        reset = robot.ask(observation(10, flexor={"previous": previous, "reset": True}))
        np.testing.assert_array_equal(reset["actions"], expected(10))


def test_robots_that_ask_together_are_predicted_together():
    policy = numbers()
    with serving(policy) as (url, server):
        got = ask_at_once(url, server, [1, 2, 3, 4])
    assert policy.policy.batches[-1] == 4
    for value, reply in zip([1, 2, 3, 4], got):
        np.testing.assert_array_equal(reply["actions"], expected(value))
        assert reply["flexor"]["batch"] == 4


def test_batches_have_few_sizes_where_each_needs_a_graph():
    policy = numbers()
    predictor = Predictor(policy, fixed_sizes=True, max_batch=6)
    with serving(predictor, max_batch=6) as (url, server):
        assert {*policy.policy.batches} == {1, 2, 4, 6}  # warm
        got = ask_at_once(url, server, [1, 2, 3])
    assert {*policy.policy.batches} == {1, 2, 4, 6} and policy.policy.batches[-1] == 4
    for value, reply in zip([1, 2, 3], got):
        np.testing.assert_array_equal(reply["actions"], expected(value))


def test_in_a_batch_only_the_one_who_broke_it_gets_the_error():
    policy = numbers()
    with serving(policy) as (url, server):
        good, bad = ask_at_once(url, server, [5, 666])
        assert policy.policy.batches[-3:] == [2, 1, 1]  # together, then each alone
        np.testing.assert_array_equal(good["actions"], expected(5))
        assert "ZeroDivisionError" in bad
        with RawClient(url) as robot:
            np.testing.assert_array_equal(robot.ask(observation(6))["actions"], expected(6))


@contextmanager
def held_up(event: threading.Event) -> Iterator[None]:
    """Inside, what waits for the event waits."""
    event.clear()
    try:
        yield
    finally:
        event.set()


def test_an_observation_that_is_too_old_is_said_to_be():
    go = threading.Event()
    go.set()
    policy = numbers(lambda size: (go.wait(LIMIT_S), None)[1])
    with (
        serving(policy) as (url, _),
        RawClient(url) as robot,
        RawClient(url) as other,
        ThreadPoolExecutor(1) as threads,
    ):
        late = robot.ask(observation(1, flexor={"deadline_ms": 50, "age_ms": 60, "id": 4}))
        assert "actions" not in late and late["flexor"]["id"] == 4
        assert late["expired"]["age_ms"] >= 60 and late["expired"]["deadline_ms"] == 50
        assert "actions" in robot.ask(observation(1, flexor={"deadline_ms": 1e3 * LIMIT_S}))
        policy.policy.batches.clear()
        with held_up(go):
            busy = threads.submit(other.ask, observation(2))
            wait_for(lambda: policy.policy.batches)  # the model is at it
            waited = robot.ask(observation(1, flexor={"deadline_ms": 100}))
            assert "expired" in waited and "actions" not in waited
        assert "actions" in busy.result(LIMIT_S)
        np.testing.assert_array_equal(robot.ask(observation(3))["actions"], expected(3))


@pytest.mark.parametrize("processes", [0, pytest.param(1, marks=needs_linux)])
def test_a_deadline_is_answered_in_time_while_the_model_is_busy(processes):
    """With other robots, or with this one: it is told that it is too late, and can ask again."""
    go = threading.Event()
    go.set()
    policy = numbers(lambda size: (go.wait(LIMIT_S), None)[1])
    batches, hasty = policy.policy.batches, {"deadline_ms": 300, "episode": 3}
    with (
        serving(policy, processes=processes, max_clients=2, max_batch=1) as (url, _),
        RawClient(url) as other,
        RawClient(url) as robot,
        ThreadPoolExecutor(1) as threads,
    ):
        robot.ask(observation(1, flexor={"episode": 3}))
        other.ask(observation(1))
        for _ in range(4):  # more often than there are places for observations of another process
            with held_up(go):
                batches.clear()
                busy = threads.submit(robot.ask, observation(2, flexor=hasty))
                wait_for(lambda busy=busy: batches or busy.done())  # the model is at it
                assert "expired" in busy.result(LIMIT_S)
                waited = other.ask(observation(3, flexor=hasty))
                assert "expired" in waited and "actions" not in waited
            answer = robot.ask(observation(4, flexor={}))
            np.testing.assert_array_equal(answer["actions"], expected(4))
            assert answer["flexor"]["episode"] == 3


def test_a_deadline_is_answered_in_time_while_images_are_decoded():
    """Whatever others send: here all threads that decode are taken."""
    go = threading.Event()
    file = encode_jpeg(np.zeros((SIZE, SIZE, 3), np.uint8))
    with (
        serving(numbers()) as (url, server),
        RawClient(url) as robot,
        RawClient(url) as other,
        ThreadPoolExecutor(1) as threads,
    ):
        robot.ask(observation(1, flexor={"episode": 5}))
        decoders = server.connections.loop.decoders
        with held_up(go):
            for _ in range(decoders._max_workers):
                decoders.submit(go.wait, LIMIT_S)
            patient = threads.submit(other.ask, observation(2) | {CAMERA: file})
            late = robot.ask(observation(3, flexor={"deadline_ms": 200}) | {CAMERA: file})
            assert late["expired"]["age_ms"] >= 200 and late["flexor"]["episode"] == 5
            np.testing.assert_array_equal(
                robot.ask(observation(4))["actions"], expected(4)
            )  # needs no decoding
        np.testing.assert_array_equal(patient.result(LIMIT_S)["actions"], expected(2))
        assert server.connections.metrics.results["expired"] == 1


@pytest.mark.parametrize("processes", [0, pytest.param(1, marks=needs_linux)])
def test_hostile_requests_are_refused_and_robots_notice_nothing(processes):
    frames = hostile_requests(CAMERA, STATE, SIZE, SIZE, 3)
    with serving(numbers(), processes=processes) as (url, _), RawClient(url) as robot:
        for number, (name, frame) in enumerate(frames.items()):
            with RawClient(url) as stranger:
                answer = stranger.ask_raw(frame)
                assert isinstance(answer, str) or name == "a long chunk", name
            np.testing.assert_array_equal(robot.ask(observation(number))["actions"], expected(number))


def test_a_slow_model_is_tried_again():
    """What is known of its speed must not refuse requests for ever."""
    with serving(numbers()) as (url, server), RawClient(url) as robot:
        server.model.batcher.durations.clear()
        server.model.batcher.durations.append(2 * LIMIT_S)  # it has been slow
        replies = [robot.ask(observation(1, flexor={"deadline_ms": 1e3 * LIMIT_S})) for _ in range(20)]
    assert "expired" in replies[0] and "actions" in replies[-1]


def test_connections_are_kept_alive_while_the_model_is_busy(monkeypatch):
    """As long as it compiles, pings of both sides are answered."""
    monkeypatch.setattr(listener, "serve", functools.partial(_serve_patiently, listener.serve))
    go = threading.Event()
    go.set()
    policy = numbers(lambda size: (go.wait(LIMIT_S), None)[1])
    with (
        serving(policy, ping_s=0.1) as (url, server),
        RawClient(url) as robot,
        ThreadPoolExecutor(1) as threads,
    ):
        (client,) = server.connections.loop.clients.values()
        policy.policy.batches.clear()
        with held_up(go):
            waiting = threads.submit(robot.ask, observation(4))
            wait_for(lambda: policy.policy.batches)  # the model is at it
            for _ in range(2):
                assert robot.socket.ping().wait(LIMIT_S)
                last = client.connection.latency
                wait_for(lambda last=last: client.connection.latency != last)  # another ping was answered
            assert not waiting.done()
        np.testing.assert_array_equal(waiting.result(LIMIT_S)["actions"], expected(4))


def _serve_patiently(serve, *arguments, **settings):
    return serve(*arguments, **{**settings, "ping_timeout": LIMIT_S})


def test_the_port_opens_when_the_policy_is_warm():
    accepts: list[bool] = []

    def before(size: int) -> None:
        with socket.socket() as probe:
            accepts.append(probe.connect_ex(("127.0.0.1", port)) == 0)

    with ReservedPort() as port, serving(numbers(before), port=port) as (url, _):
        assert accepts == [False] and url.endswith(str(port))
        before(0)
    assert accepts == [False, True]


def test_faster_than_allowed_is_answered_later(monkeypatch):
    monkeypatch.setattr(
        rate_limit, "time", types.SimpleNamespace(perf_counter=lambda: 100.0)
    )  # it stands still
    waits: list[float] = []
    sleep = asyncio.sleep

    async def recorded(seconds: float) -> None:
        waits.append(seconds)
        await sleep(0)

    with (
        serving(numbers(), requests_per_s=4) as (url, server),
        RawClient(url) as robot,
        RawClient(url) as other,
    ):
        monkeypatch.setattr(clients, "asyncio", types.SimpleNamespace(**{**vars(asyncio), "sleep": recorded}))
        for _ in range(6):  # 4 at once, then 4 per second
            assert "actions" in robot.ask(observation(1))
        assert waits == [0.25, 0.5] and server.connections.metrics.delayed == 2
        other.ask(observation(1))
        assert len(waits) == 2


def test_limits_on_frames_and_clients():
    with serving(numbers(), frame_bytes=2**16, max_clients=2) as (url, server):
        with RawClient(url) as greedy, RawClient(url) as other:
            with pytest.raises(Exception, match="503"):
                RawClient(url)
            greedy.socket.send(b"\x00" * 2**17)
            with pytest.raises(ConnectionClosed) as closed:
                greedy.socket.recv(timeout=LIMIT_S)
            assert closed.value.rcvd.code == 1009
            assert "actions" in other.ask(observation(1))
        wait_for(lambda: not server.model.clients)
        with RawClient(url) as greedy:
            assert "actions" in greedy.ask(observation(1))


def test_clients_that_die_in_the_middle_of_a_frame_leave_nothing_behind():
    with serving(numbers()) as (url, server), RawClient(url) as robot:
        for cut in (1, 5, 100):
            with RawClient(url) as dying:
                frame = pack(observation(1))
                raw = b"\x82\xfe" + len(frame).to_bytes(2, "big") + bytes(4) + frame
                dying.socket.socket.sendall(raw[:cut])
                dying.socket.socket.shutdown(socket.SHUT_RDWR)
        assert "actions" in robot.ask(observation(1))
        wait_for(lambda: len(server.model.clients) == 1)
        assert len(server.model.batcher.pauses) == 1


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"port": 70000}, "--port=70000"),
        ({"max_batch": 0}, "--max-batch=0"),
        ({"batch_window_ms": -1}, "--batch-window-ms"),
        ({"api_key": " "}, "API key"),
        ({"tls_cert": "x"}, "together"),
        ({"host": "nowhere.invalid"}, "--host=nowhere.invalid"),
    ],
)
def test_wrong_settings_are_refused(settings, words):
    with pytest.raises(ConfigError, match=words), serving(numbers(), **settings):
        pass


def test_a_port_that_is_taken_is_said(url):
    with pytest.raises(ConfigError, match="Choose another with --host and --port"):
        bind("127.0.0.1", int(url.rpartition(":")[2]))
