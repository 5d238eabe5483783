"""Messages that are not complete yet: what they hold is limited for each address, not only for each connection.

So is the number of small frames on a connection: they are read in the event loop, and thousands would hold it up.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from websockets.asyncio.server import ServerConnection
from websockets.exceptions import ProtocolError
from websockets.frames import CTRL_OPCODES, Frame
from websockets.protocol import State

from flexor.serve.rate_limit import RateLimit

TRY_LATER = 1013
SMALL_FRAME = 1024  # bytes; of a larger one, the network is the limit
FRAMES_PER_S = 1000.0  # small ones of a connection, on average
PINGS_PER_S = 50.0  # and other frames of control
TOO_MANY = "too many small frames"
REASON = "too much of unfinished messages from this address"
GOODBYE_S = 1.0  # for the reason to be sent


class UnfinishedMessages:
    """The bytes of unfinished messages in this process, by address and connection.

    If those of an address exceed the limit, the message that was begun first loses its connection: a robot's message is
    complete in a moment, and one that is not meant to end is soon the oldest.
    """

    def __init__(self, max_bytes: int, on_drop: Callable[[str], None]):
        self.max_bytes, self.on_drop = max_bytes, on_drop
        self.sizes: dict[str, dict[CountedConnection, int]] = {}  # in the order in which messages began

    def update(self, connection: CountedConnection, size: int) -> None:
        """So many bytes of a connection's message have arrived; 0: it is complete, or gone."""
        address = connection.address
        sizes = self.sizes.setdefault(address, {})
        if size:
            sizes[connection] = size
        else:
            sizes.pop(connection, None)
        while sum(sizes.values()) > self.max_bytes:
            oldest = next(iter(sizes))
            del sizes[oldest]
            oldest.drop()
            self.on_drop(address)
        if not sizes:
            del self.sizes[address]


class CountedConnection(ServerConnection):
    """A connection whose unfinished message and small frames are counted."""

    def __init__(self, unfinished: UnfinishedMessages, requests_per_s: float, *args: Any, **settings: Any):
        super().__init__(*args, **settings)
        self.unfinished, self.address, self.dropped = unfinished, "unknown", False
        self.small, self.pings = RateLimit(max(requests_per_s, FRAMES_PER_S)), RateLimit(PINGS_PER_S)
        protocol: Any = self.protocol
        protocol.recv_frame = functools.partial(self._receive_frame, protocol.recv_frame)

    def _receive_frame(self, receive: Callable[[Frame], None], frame: Frame) -> None:
        """A frame has arrived. What follows too many of them is not even read."""
        rate = self.pings if frame.opcode in CTRL_OPCODES else self.small
        if len(frame.data) < SMALL_FRAME and rate.wait_s():
            raise ProtocolError(TOO_MANY)
        receive(frame)

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.address = str((self.remote_address or (self.address,))[0])

    def data_received(self, data: bytes) -> None:
        if self.dropped:
            return
        super().data_received(data)
        if not self.dropped:
            self.unfinished.update(self, self._unfinished_bytes())

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.unfinished.update(self, 0)

    def drop(self) -> None:
        """End the connection, and take nothing more from it."""
        self.dropped = True
        if self.protocol.state is State.OPEN:
            self.protocol.fail(TRY_LATER, REASON)
            self.send_data()
        self.loop.call_later(GOODBYE_S, self.transport.abort)

    def _unfinished_bytes(self) -> int:
        """Of a frame that has not arrived fully, and of the fragments before it."""
        fragments: int = getattr(self.protocol, "current_size", None) or 0
        return len(self.protocol.reader.buffer) + fragments
