"""Remote calls between two processes of a server, both ways, as MessagePack over a socket."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Mapping
from itertools import count
from typing import Any

import msgpack

from flexor.core.log import log
from flexor_client.wire import pack, unpack_numpy

Handler = Callable[..., Any]
GONE = "The other process of the server is gone."


class Link(asyncio.Protocol):
    """One end. `handlers`: the function for each kind of call; it may be a coroutine function."""

    def __init__(self, handlers: Mapping[str, Handler], lost: Callable[[], None]):
        self.handlers, self.lost = handlers, lost
        self.unpacker = msgpack.Unpacker(object_hook=unpack_numpy)
        self.pending: dict[int, asyncio.Future[Any]] = {}
        self.tasks: set[asyncio.Task[None]] = set()
        self.call_ids = count()
        self.transport: asyncio.Transport | None = None

    @classmethod
    async def connect(
        cls, sock: socket.socket, handlers: Mapping[str, Handler], lost: Callable[[], None]
    ) -> Link:
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        _, link = await loop.create_connection(lambda: cls(handlers, lost), sock=sock)
        return link

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        for answer in self.pending.values():
            if not answer.done():
                answer.set_exception(ConnectionResetError(GONE))
        self.pending.clear()
        self.lost()

    def notify(self, kind: str, *content: Any) -> None:
        """Call a handler of the other process without waiting for it."""
        self._send(None, kind, content)

    async def call(self, kind: str, *content: Any) -> Any:
        """Call a handler of the other process and return its result; ConnectionResetError if that process is gone."""
        if self.transport is None or self.transport.is_closing():
            raise ConnectionResetError(GONE)
        number = next(self.call_ids)
        answer = self.pending[number] = asyncio.get_running_loop().create_future()
        self._send(number, kind, content)
        return await answer

    def close(self) -> None:
        if self.transport is not None:
            self.transport.close()

    def _send(self, number: int | None, kind: str | None, content: Any) -> None:
        if self.transport is not None and not self.transport.is_closing():
            self.transport.write(pack([number, kind, content]))

    def data_received(self, data: bytes) -> None:
        self.unpacker.feed(data)
        for number, kind, content in self.unpacker:
            if kind is None:
                answer = self.pending.pop(number)
                if not answer.done():
                    answer.set_result(content)
            else:
                self._handle(number, kind, content)

    def _handle(self, number: int | None, kind: str, content: list[Any]) -> None:
        reply = self.handlers[kind](*content)
        if asyncio.iscoroutine(reply):
            task = asyncio.ensure_future(self._answer_later(number, kind, reply))
            self.tasks.add(task)  # the event loop itself would forget it
            task.add_done_callback(self.tasks.discard)
        elif number is not None:
            self._send(number, None, reply)

    async def _answer_later(self, number: int | None, kind: str, reply: Awaitable[Any]) -> None:
        try:
            answer = await reply
        except Exception:
            log.exception("A process of the server failed: %s", kind)
            self.close()  # the caller must not wait for an answer that never comes
            return
        if number is not None:
            self._send(number, None, answer)
