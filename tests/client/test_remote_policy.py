"""The connection to a policy server: what is sent, and what happens when it refuses, hangs, dies or returns."""

import contextlib
import socket
import ssl
import subprocess
import threading
from typing import Any

import numpy as np
import pytest
from websockets.utils import accept_key

import flexor_client.remote
from flexor_client import (
    ClientError,
    ExpiredError,
    LimitError,
    RefusedError,
    RemotePolicy,
    ServerLostError,
)
from flexor_client.jpeg import is_jpeg, open_jpeg
from flexor_client.replies import REPLY_BYTES
from support.limits import LIMIT_S
from support.policy_server import FakePolicyServer, echo

STATE = {"observation.state": np.array([1, 2], np.float32)}


@pytest.fixture
def server():
    with FakePolicyServer(metadata={"policy": "act", "actions": [4, 2]}) as server:
        yield server


def remote(server: FakePolicyServer, **settings) -> RemotePolicy:
    return RemotePolicy(server.url, **{"timeout_s": LIMIT_S, "reconnect_s": 0.0, **settings})


def test_chunks_come_back_and_nothing_is_added(server):
    with remote(server) as policy:
        assert policy.metadata["actions"] == [4, 2]
        np.testing.assert_array_equal(policy.chunk(STATE)[:, 0], [1, 2, 3, 4])
        policy.infer({**STATE, "prompt": "fold"})
    assert [sorted(each) for each in server.received] == [
        ["observation.state"],
        ["observation.state", "prompt"],
    ]
    assert server.connections == 1


def test_options_and_episodes_are_sent(server):
    previous = np.ones((3, 2), np.float32)
    with remote(server) as policy:
        policy.reset(episode=5)
        policy.chunk(STATE, "fold", step=0)
        policy.chunk(STATE, "fold", step=8, previous=previous, delay=2)
        policy.reset()
        policy.chunk(STATE)
    first, second, third = (each["flexor"] for each in server.received)
    assert first == {"reset": True, "episode": 5, "step": 0}
    np.testing.assert_array_equal(second.pop("previous"), previous)
    assert second == {"episode": 5, "step": 8, "delay": 2}
    assert third == {"reset": True}


def test_images_are_sent_as_jpeg_on_request(server):
    ramp = np.broadcast_to(np.arange(64, dtype=np.uint8)[:, None, None] * 3, (64, 48, 3))
    observation = {
        **STATE,
        "top": ramp,
        "images": {"wrist": ramp.transpose(2, 0, 1)},
        "past": np.stack([ramp, ramp]),
    }
    with remote(server, jpeg=90) as policy:
        policy.chunk(observation)
    with remote(server) as policy:
        policy.chunk(observation)
    small, raw = server.received
    for sent in (small["top"], small["images"]["wrist"], *small["past"]):
        assert is_jpeg(sent)
        assert np.abs(open_jpeg(sent).decode().astype(int) - ramp).mean() < 2
    np.testing.assert_array_equal(raw["top"], ramp)
    np.testing.assert_array_equal(small["observation.state"], STATE["observation.state"])


def test_errors_of_the_server_are_told(server):
    server.answer = lambda _: "observation.image is missing"
    with remote(server, reconnect_s=30) as policy, pytest.raises(RefusedError, match="image is missing"):
        policy.chunk(STATE)
    server.answer = echo
    assert len(server.received) == 1  # what the server can't use is not sent again
    with remote(server) as policy:
        policy.chunk(STATE)


@pytest.mark.parametrize(
    "reply, message",
    [
        (b"\xc1", "does not speak"),
        (b"\x93\x01\x02\x03", "instead of a map"),
        ({"x": 1}, r"without actions \[H, A\]"),
        ({"actions": np.full((4, 2), np.nan, np.float32)}, "not finite"),
        ({"actions": np.zeros((4, 3), np.float32)}, "announced"),
        ({"actions": np.zeros((4, 2), int)}, "float array"),
        ({"expired": "now"}, "expired must say"),
        (b"\xc4" * 10, "does not speak"),
    ],
)
def test_nonsense_is_refused(server, reply, message):
    server.answer = lambda _: reply
    with remote(server) as policy, pytest.raises(RefusedError, match=message):
        policy.chunk(STATE)


def test_what_a_server_says_controls_no_terminal(server, caplog):
    server.answer = lambda _: "\x1b[2J\x1b]0;owned\x07 no\nline two\r" + "x" * 10_000
    with remote(server) as policy, pytest.raises(RefusedError) as error:
        policy.chunk(STATE)
    assert str(error.value).isprintable() and len(str(error.value)) < 3000
    assert r"\x1b[2J" in str(error.value)
    for kind in (ClientError, ServerLostError, RefusedError, ExpiredError, LimitError):
        assert str(kind("\x1b[2J\n")) == r"\x1b[2J\n"


def test_a_reply_without_end_is_not_read():
    endless = bytes(REPLY_BYTES + 1)
    for server in (FakePolicyServer(lambda _: endless), FakePolicyServer(metadata=endless)):
        with server, remote(server) as policy, pytest.raises(ServerLostError, match=r"1009|too big"):
            policy.chunk(STATE)


@pytest.mark.parametrize(
    "metadata, message",
    [
        ({"server": "flexor", "protocol": 2}, "version 2 of it, and this flexor-client version 1"),
        ({"observation_steps": [-(10**9)]}, "observation_steps in the server's metadata"),
        ([1], "instead of a map"),
        (b"\xc1", "does not speak"),
        ("text", "can't use the observation: text"),
    ],
)
def test_a_server_that_introduces_itself_wrongly_is_refused(metadata, message):
    with FakePolicyServer(metadata=metadata) as server:
        with remote(server, reconnect_s=60) as policy, pytest.raises(RefusedError, match=message):
            policy.metadata  # noqa: B018
        assert server.connections == 1  # it is not asked again


def test_a_server_that_returns_with_another_policy_is_refused(server):
    with remote(server) as policy:
        policy.chunk(STATE)
        server.stop()
        server.metadata = {"policy": "act", "actions": [4, 3]}
        server.start()
        with pytest.raises(ServerLostError):
            policy.chunk(STATE)
        with pytest.raises(RefusedError, match=r"another policy than before.*\[4, 3\].*\[4, 2\]"):
            policy.chunk(STATE)


def test_an_observation_that_is_too_large_is_not_sent(server):
    server.metadata = {"limits": {"frame_bytes": 1000}}
    with remote(server) as policy:
        policy.chunk(STATE)
        with pytest.raises(ClientError, match=r"takes 1,000: send only .*\(jpeg=90\)"):
            policy.chunk({**STATE, "eye": np.zeros((20, 20, 3), np.uint8)})
        policy.chunk(STATE)
    assert server.connections == 1


@pytest.mark.parametrize(
    "reply",
    [
        b"",
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"SSH-2.0-OpenSSH\r\n",
        b"HTTP/1.1 302 Found\r\nLocation: file:///etc/passwd\r\n\r\n",
        b"HTTP/1.1 302 Found\r\nLocation: ws://[\r\n\r\n",
        b"HTTP/1.1 401 \x1b[2J\r\nContent-Length: 4\r\n\r\n\x1b[2J",
        b"HTTP/1.1 503 no\r\nContent-Length: 4\r\n\r\n\x1b[2J",
        b"\xff" * 100_000,
    ],
)
def test_what_is_no_policy_server_is_an_error_of_this_package(reply):
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            with contextlib.suppress(OSError):  # the test is over
                for _ in range(11):  # a redirect may be followed a few times
                    with listening.accept()[0] as connection, contextlib.suppress(OSError):
                        connection.recv(1000)
                        connection.sendall(reply)

        threading.Thread(target=answer, daemon=True).start()
        policy = RemotePolicy(
            f"ws://127.0.0.1:{listening.getsockname()[1]}", reconnect_s=0, timeout_s=LIMIT_S
        )
        with pytest.raises(ClientError) as error:
            policy.chunk(STATE)
        assert str(error.value).isprintable()


def test_an_observation_that_is_too_old_says_so(server):
    server.answer = lambda _: {"expired": {"age_ms": 300, "deadline_ms": 200}}
    with remote(server) as policy:
        with pytest.raises(ExpiredError, match="300 ms old; 200"):
            policy.chunk(STATE, deadline_ms=200)
        server.answer = echo
        policy.chunk(STATE)
    assert server.connections == 1


def test_a_wrong_key_is_refused_at_once():
    with FakePolicyServer(key="secret") as server:
        assert remote(server, api_key="secret").chunk(STATE).shape == (4, 2)
        for key in (None, "guess"):
            with pytest.raises(RefusedError, match="the key is missing or wrong"):
                remote(server, api_key=key, reconnect_s=60).chunk(STATE)


def test_a_server_that_comes_back_is_found(server, caplog):
    pauses = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            server.start()

    with remote(server, reconnect_s=60, sleep=sleep) as policy:
        policy.reset(episode=3)
        policy.chunk(STATE)
        server.stop()
        np.testing.assert_array_equal(policy.chunk(STATE)[:, 0], [1, 2, 3, 4])
    assert pauses[:3] == [0.1, 0.2, 0.4]
    assert server.received[-1]["flexor"]["episode"] == 3
    assert "Trying again" in caplog.text


def test_a_server_that_stays_away_is_lost():
    now = [0.0]
    server = FakePolicyServer()  # it is not started: nobody listens
    policy = RemotePolicy(
        server.url,
        reconnect_s=10,
        clock=lambda: now[0],
        sleep=lambda seconds: now.__setitem__(0, now[0] + seconds),
    )
    with pytest.raises(ServerLostError, match="can't be reached"):
        policy.chunk(STATE)
    server.port.release()
    assert 8 < now[0] <= 10


def test_a_server_that_hangs_is_lost_and_its_late_answer_is_not_mistaken(server, monkeypatch):
    over = threading.Event()
    server.answer = lambda message: (over.wait(LIMIT_S), echo(message))[1]
    with remote(server) as policy:
        send = policy._send

        def send_then_hurry(*frame: Any) -> None:
            send(*frame)
            policy.timeout_s = 0.1

        with (
            monkeypatch.context() as patch,
            pytest.raises(ServerLostError, match=r"did not answer within 0.1 s"),
        ):
            patch.setattr(policy, "_send", send_then_hurry)
            policy.chunk(STATE)
        over.set()
        server.answer = echo
        policy.timeout_s = LIMIT_S
        other = {"observation.state": np.array([7, 8], np.float32)}
        assert policy.chunk(other)[0].tolist() == [7, 8]


@contextlib.contextmanager
def server_that_does_not_read(then: bytes = b""):
    """It shakes hands, introduces itself, sends `then` again and again, and reads nothing any more."""

    def answer() -> None:
        with contextlib.suppress(OSError), listening.accept()[0] as connection:
            key = connection.recv(10_000).partition(b"Sec-WebSocket-Key: ")[2].partition(b"\r\n")[0].decode()
            connection.sendall(
                b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
                b"Sec-WebSocket-Accept: " + accept_key(key).encode() + b"\r\n\r\n\x82\x01\x80"
            )
            while not over.wait(0 if then else None):
                connection.sendall(then)

    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=answer, daemon=True).start()
        yield f"ws://127.0.0.1:{listening.getsockname()[1]}"
        over.set()


@pytest.mark.parametrize("then", [b"", (b"\x89\x7d" + bytes(125)) * 100])
def test_a_server_that_does_not_read_is_lost(then, caplog):
    """Sending waits for it, and so does saying goodbye, or an answer to its pings: without a limit, for ever."""
    with (
        server_that_does_not_read(then) as url,
        RemotePolicy(url, timeout_s=LIMIT_S, reconnect_s=0) as policy,
    ):
        assert policy.metadata == {}
        policy.timeout_s = 0.2
        with pytest.raises(ServerLostError, match=r"did not take the observation within 0.2 s"):
            policy.chunk({**STATE, "eye": np.zeros(2**25, np.uint8)})
    assert "Traceback" not in caplog.text


def test_pings_without_end_do_not_keep_a_robot_from_leaving(monkeypatch):
    monkeypatch.setattr(flexor_client.remote, "CLOSING_S", 0.1)
    pings = (b"\x89\x7d" + bytes(125)) * 1000
    with (
        server_that_does_not_read(pings) as url,
        RemotePolicy(url, timeout_s=LIMIT_S, reconnect_s=0) as policy,
    ):
        assert policy.metadata == {}
        policy.timeout_s = 1.0  # until nothing more can be sent
        with pytest.raises(ServerLostError):
            policy.chunk(STATE)


def test_a_server_that_hangs_up_is_lost(server):
    server.answer = lambda _: None
    with remote(server) as policy, pytest.raises(ServerLostError, match="closed the connection"):
        policy.chunk(STATE)


@pytest.mark.parametrize(
    "url, settings, message",
    [
        ("http://robot", {}, "ws://HOST:PORT"),
        ("ws://robot", {"jpeg": 0}, "1 to 100"),
        ("ws://robot", {"api_key": "a\r\nHost: evil"}, "without line breaks"),
        ("ws://robot", {"certificate": "own.pem"}, "use wss://"),
        ("wss://robot", {"certificate": "missing.pem"}, "can't be read"),
    ],
)
def test_settings_that_make_no_sense(url, settings, message):
    with pytest.raises(ClientError, match=message):
        RemotePolicy(url, **settings)


def test_what_can_not_be_sent_is_told_before(server):
    with remote(server) as policy, pytest.raises(ClientError, match="can't be sent: A set"):
        policy.chunk({"x": {1, 2}})
    with remote(server) as policy, pytest.raises(ClientError, match="can't be sent"):
        policy.chunk({"x": 2**70})
    with remote(server, jpeg=90) as policy, pytest.raises(ClientError, match="can't be sent: An image"):
        policy.chunk({"x": np.zeros((8, 8, 4), np.uint8)})
    assert server.connections == 0


def test_tls_with_the_servers_own_certificate(tmp_path):
    certificate, key = tmp_path / "own.pem", tmp_path / "key.pem"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    new = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *subject]
    try:
        subprocess.run([*new, "-out", certificate, "-keyout", key], check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("openssl is not installed")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)
    with FakePolicyServer().start(tls) as server:
        url = server.url.replace("ws://", "wss://")
        with RemotePolicy(url, certificate=certificate, timeout_s=LIMIT_S) as policy:
            assert policy.chunk(STATE).shape == (4, 2)
        with pytest.raises(RefusedError, match="certificate is not trusted"):
            RemotePolicy(url, reconnect_s=60, timeout_s=LIMIT_S).chunk(STATE)
