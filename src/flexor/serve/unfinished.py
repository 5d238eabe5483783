"""Messages that are not complete yet: what they hold is limited for each address, not only for each connection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from websockets.asyncio.server import ServerConnection
from websockets.protocol import State

TRY_LATER = 1013
REASON = "too much of unfinished messages from this address"
GOODBYE_S = 1.0  # for the reason to be sent


class UnfinishedMessages:
    """The bytes of unfinished messages in this process, by address and connection.

    If those of an address exceed the limit, the message that was begun first loses its connection: a robot's message is
    complete in a moment, and one that is not meant to end is soon the oldest.
    """

    def __init__(self, most: int, note: Callable[[str], None]):
        self.most, self.note = most, note
        self.sizes: dict[str, dict[CountedConnection, int]] = {}  # in the order in which messages began

    def update(self, connection: CountedConnection, size: int) -> None:
        """So many bytes of a connection's message have arrived; 0: it is complete, or gone."""
        address = connection.address
        sizes = self.sizes.setdefault(address, {})
        if size:
            sizes[connection] = size
        else:
            sizes.pop(connection, None)
        while sum(sizes.values()) > self.most:
            oldest = next(iter(sizes))
            del sizes[oldest]
            oldest.drop()
            self.note(address)
        if not sizes:
            del self.sizes[address]


class CountedConnection(ServerConnection):
    """A connection whose unfinished message is counted."""

    def __init__(self, unfinished: UnfinishedMessages, *args: Any, **settings: Any):
        super().__init__(*args, **settings)
        self.unfinished, self.address, self.dropped = unfinished, "unknown", False

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
