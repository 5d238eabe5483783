"""A port: who may connect, what is written of those who may not, and what browsers and monitoring get."""

from __future__ import annotations

import contextlib
import functools
import logging
import re
import socket
from collections.abc import Awaitable, Callable
from typing import Any

from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.datastructures import Headers
from websockets.http11 import Request, Response

from flexor.serve import web
from flexor.serve.access import REALM, foreign_name, has_key, is_foreign_page, names_of_server, wants_socket
from flexor.serve.metrics import Metrics
from flexor.serve.rate_limit import ClientNotes
from flexor.serve.settings import ServeSettings
from flexor.serve.unfinished import REASON, CountedConnection, UnfinishedMessages

CLOSING_S = 4.0  # for a client to say goodbye
BUFFERED_FRAMES = 1  # of a client that sends without waiting for its answers


class Listener:
    """Lets those in who have the key. Use it as `async with listener.listening(socket)`."""

    allow_flag = "--allow-host {}"

    def __init__(
        self,
        settings: ServeSettings,
        handler: Callable[[ServerConnection], Awaitable[None]],
        notes: ClientNotes,
        metrics: Metrics,
        frame_bytes: int,
        unfinished_bytes: int,
    ):
        """`frame_bytes`: the most that a frame may have. `unfinished_bytes`: of all unfinished ones of an address."""
        self.settings, self.handler, self.notes, self.metrics = settings, handler, notes, metrics
        self.frame_bytes = frame_bytes
        self.unfinished = UnfinishedMessages(unfinished_bytes, self._note_unfinished)
        self.names = names_of_server(settings.host, settings.allow_hosts)

    def listening(self, bound: socket.socket) -> contextlib.AbstractAsyncContextManager[Server]:
        settings = self.settings
        connect: Any = functools.partial(CountedConnection, self.unfinished, settings.requests_per_s)
        return serve(
            self.handler,
            sock=bound,
            ssl=settings.tls(),
            process_request=self._answer_http,
            compression=None,
            create_connection=connect,
            max_size=self.frame_bytes,
            max_queue=BUFFERED_FRAMES,
            open_timeout=settings.opening_s,
            close_timeout=CLOSING_S,
            ping_interval=settings.ping_s,
            ping_timeout=settings.ping_s,
            server_header=None,
            logger=_quiet(),
        )

    async def admit(self) -> Response | None:
        """None for a client that may connect, else what it gets."""
        return None

    async def page(self, path: str) -> Response:
        """What a browser or a monitor gets."""
        return web.response(404, "There is nothing here.\n")

    async def _answer_http(self, connection: ServerConnection, request: Request) -> Response | None:
        """The answer to a browser or a monitor; None for a robot, which gets a WebSocket."""
        path = request.path.partition("?")[0]
        refusal = self._refusal(path, request.headers)
        if refusal is not None:
            self.metrics.refused_connections += 1
            return refusal
        if path == "/healthz":
            return web.response(200, "OK\n")
        if wants_socket(request.headers):
            return await self.admit()
        return await self.page(path)

    def _refusal(self, path: str, headers: Headers) -> Response | None:
        """What a request gets that may not go on."""
        name = foreign_name(headers, self.names)
        if name is not None:
            return self._foreign(name)
        if is_foreign_page(headers):
            return web.response(403, "Web pages of other sites can't connect.\n")
        if path == "/healthz" or has_key(headers, self.settings.api_key):
            return None
        return web.response(
            401,
            "The API key is missing or wrong. Send `Authorization: Api-Key KEY`.\n",
            WWW_Authenticate=REALM,
        )

    def _foreign(self, name: str) -> Response:
        # it is a part of a command that people may copy: only what can be in a host's name
        plain = re.sub(r"[^\w.:-]", "?", name)
        advice = self.allow_flag.format(plain.partition(":")[0])
        problem = f"it asks for {plain}, which is not a name of this server"
        self.notes.note("a request", f"{problem}; {advice} allows it")
        fix = f"Connect to its IP address, or start it with {advice}."
        return web.response(421, f"{plain} is not a name of this server. {fix}\n")

    def _note_unfinished(self, address: str) -> None:
        self.metrics.refused_connections += 1
        self.notes.note(address, f"{REASON}: the one that was begun first is dropped")


def _quiet() -> logging.Logger:
    """The libraries' log lines: broken handshakes and the like are everyday on an open port."""
    logging.getLogger("asyncio").addFilter(_is_not_about_a_lost_client)
    logger = logging.getLogger("flexor.websockets")
    logger.setLevel(logging.CRITICAL)
    return logger


def _is_not_about_a_lost_client(record: logging.LogRecord) -> bool:
    """asyncio writes a line for every answer to a ping of a client that is gone: thousands, if it wants."""
    return record.msg != "socket.send() raised exception."
