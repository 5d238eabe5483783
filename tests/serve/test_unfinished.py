"""Messages that are begun and never end: they are limited for each address, and cost others nothing."""

import logging
import socket
import types
from contextlib import ExitStack
from urllib.parse import urlsplit

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.frames import Frame
from websockets.server import ServerProtocol

from flexor.serve import listener, rate_limit
from flexor.serve.unfinished import FRAMES_PER_S, UnfinishedMessages
from flexor_client.wire import pack, unpack
from support.limits import LIMIT_S, wait_for
from support.serving import RawClient, expected, numbers, observation, serving

FRAME = 2**16
PART = 60_000


def begun(size: int, *, fragments: int = 1) -> bytes:
    """The beginning of a message: all but the last byte of a frame, or fragments without an end."""
    if fragments == 1:
        return b"\x82\xfe" + size.to_bytes(2, "big") + bytes(4) + bytes(size - 1)
    part = size // fragments
    head = part.to_bytes(2, "big") + bytes(4)
    frames = [(b"\x00\xfe" if number else b"\x02\xfe") + head + bytes(part) for number in range(fragments)]
    return b"".join(frames)


def opened(url: str, stack: ExitStack, source: str = "127.0.0.1") -> RawClient:
    at = urlsplit(url)
    raw = stack.enter_context(socket.create_connection((at.hostname, at.port), LIMIT_S, (source, 0)))
    return RawClient(url, sock=raw)


@pytest.mark.parametrize("fragments", [1, 10])
def test_the_oldest_of_too_many_is_dropped_and_other_addresses_are_not_concerned(fragments):
    with serving(numbers(), frame_bytes=FRAME) as (url, server), ExitStack() as stack:
        unfinished = server.connections.unfinished
        assert unfinished.max_bytes == 8 * FRAME
        robot, elsewhere = opened(url, stack), opened(url, stack, "127.0.0.2")
        elsewhere.socket.socket.sendall(begun(PART))
        hostile = [opened(url, stack) for _ in range(12)]
        for number, client in enumerate(hostile):
            client.socket.socket.sendall(begun(PART, fragments=fragments))
            wait_for(lambda number=number: _begun(server, hostile[number]) or number >= 8)
        for client in hostile[:3]:
            with pytest.raises(ConnectionClosed) as closed:
                client.socket.recv(timeout=LIMIT_S)
            assert closed.value.rcvd.code == 1013 and "unfinished messages" in closed.value.rcvd.reason
        for value in range(5):
            assert (robot.ask(observation(value))["actions"] == expected(value)).all()
        wait_for(lambda: sum(unfinished.sizes["127.0.0.1"].values()) > unfinished.max_bytes - 2 * PART)
        assert sum(unfinished.sizes["127.0.0.1"].values()) <= unfinished.max_bytes
        assert [*unfinished.sizes["127.0.0.2"].values()] == [PART - 1]
        elsewhere.socket.socket.sendall(b"\0")  # it ends, and is refused like any nonsense, not dropped
        assert isinstance(elsewhere.socket.recv(timeout=LIMIT_S), str)
        assert server.connections.metrics.refused_connections >= 3
    assert not unfinished.sizes


def _begun(server, client: RawClient) -> bool:
    """Whether the server has read what this client sent."""
    port = client.socket.socket.getsockname()[1]
    sizes = server.connections.unfinished.sizes.get("127.0.0.1", {})
    return any(connection.remote_address[1] == port for connection in [*sizes])


def test_a_message_that_is_completed_counts_no_more():
    with serving(numbers(), frame_bytes=FRAME) as (url, server):
        with RawClient(url, close_timeout=0.2) as robot:
            frame = begun(PART)
            for _ in range(3):
                robot.ask(observation(1))
                wait_for(lambda: not server.connections.unfinished.sizes)
            robot.socket.socket.sendall(frame)
            wait_for(lambda: server.connections.unfinished.sizes)
        wait_for(lambda: not server.connections.unfinished.sizes)


def test_the_order_is_that_in_which_messages_began():
    class Connection:
        def __init__(self, address: str):
            self.address, self.dropped = address, False

        def drop(self) -> None:
            self.dropped = True

    noted: list[str] = []
    unfinished = UnfinishedMessages(100, noted.append)
    first, second, other = Connection("a"), Connection("a"), Connection("b")
    unfinished.update(other, 100)
    unfinished.update(first, 10)
    unfinished.update(second, 60)
    unfinished.update(first, 0)  # complete
    unfinished.update(first, 30)  # its next message
    assert not noted
    unfinished.update(first, 50)
    assert second.dropped and not first.dropped and not other.dropped and noted == ["a"]
    unfinished.update(second, 0)  # when its connection is lost
    assert unfinished.sizes == {"a": {first: 50}, "b": {other: 100}}


@pytest.fixture
def no_time_passes(monkeypatch):
    """For limits on rates: what may be sent at once is all that may be sent."""
    monkeypatch.setattr(rate_limit, "time", types.SimpleNamespace(perf_counter=lambda: 100.0))


def test_fragments_of_nothing_end(monkeypatch, no_time_passes):
    """A message of empty fragments would never reach a limit in bytes."""
    monkeypatch.setattr(listener, "CLOSING_S", 0.2)
    with (
        serving(numbers(), frame_bytes=FRAME) as (url, _),
        RawClient(url, close_timeout=0.2) as robot,
        pytest.raises((ConnectionClosed, OSError)),
    ):
        robot.socket.socket.sendall(b"\x02\x80" + bytes(4))
        for _ in range(1000):
            robot.socket.socket.sendall((b"\x00\x80" + bytes(4)) * 1000)
        robot.socket.recv(timeout=LIMIT_S)


@pytest.mark.parametrize(
    "flood",
    [
        (b"\x89\x80" + bytes(4)) * 20_000,  # pings
        (b"\x89\xfd" + bytes(129)) * 20_000,
        (b"\x8a\x80" + bytes(4)) * 20_000,  # pongs
        b"\x02\x80" + bytes(4) + (b"\x00\x80" + bytes(4)) * 200_000,  # empty fragments
    ],
    ids=["pings", "full pings", "pongs", "fragments"],
)
def test_a_flood_of_small_frames_is_not_read(flood, monkeypatch, no_time_passes, caplog):
    """Each takes the event loop longer than its bytes suggest, and all robots with it."""
    monkeypatch.setattr(listener, "CLOSING_S", 0.2)
    received: list[int] = []
    with serving(numbers(), frame_bytes=FRAME) as (url, server), RawClient(url) as robot:
        count_frames(monkeypatch, received)
        with RawClient(url, close_timeout=0.2) as hostile, pytest.raises((ConnectionClosed, OSError)):
            hostile.socket.socket.sendall(flood)
            hostile.socket.recv(timeout=LIMIT_S)
        wait_for(lambda: len(server.model.clients) == 1)
        assert (robot.ask(observation(1))["actions"] == expected(1)).all()
    assert len(received) <= FRAMES_PER_S + 10
    assert "socket.send()" not in caplog.text


def count_frames(monkeypatch: pytest.MonkeyPatch, received: list[int]) -> None:
    """How many frames the server handles from now on."""
    handle = ServerProtocol.recv_frame

    def counted(self: ServerProtocol, frame: Frame) -> None:
        received.append(len(frame.data))
        handle(self, frame)

    monkeypatch.setattr(ServerProtocol, "recv_frame", counted)


def test_a_robot_may_ping_and_send_small_observations_and_fragments():
    with serving(numbers()) as (url, _), RawClient(url) as robot:
        for value in range(20):
            assert robot.socket.ping().wait(LIMIT_S)
            frame = pack(observation(value))
            robot.socket.send(frame[at : at + 30] for at in range(0, len(frame), 30))
            assert (unpack(robot.socket.recv(timeout=LIMIT_S))["actions"] == expected(value)).all()


def test_a_client_that_is_gone_costs_no_lines_of_the_log(caplog):
    with serving(numbers()):
        logging.getLogger("asyncio").warning("socket.send() raised exception.")
        logging.getLogger("asyncio").warning("something else")
    assert [record.message for record in caplog.records if record.name == "asyncio"] == ["something else"]
