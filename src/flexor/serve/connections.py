"""The connections of a process: who may connect, what browsers and monitoring get, and the robots."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import re
import socket
from collections.abc import Mapping
from typing import Any

from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.datastructures import Headers
from websockets.http11 import Request, Response

from flexor.serve import web
from flexor.serve.access import REALM, foreign_name, has_key, is_foreign_page, names_of_server, wants_socket
from flexor.serve.clients import ClientLoop
from flexor.serve.form import ObservationForm
from flexor.serve.limits import RequestLimits
from flexor.serve.metrics import Metrics
from flexor.serve.model import Model
from flexor.serve.settings import ServeSettings
from flexor.serve.unfinished import REASON, CountedConnection, UnfinishedMessages

CLOSING_S = 4.0  # for a client to say goodbye
BUFFERED_FRAMES = 1  # of a client that sends without waiting for its answers


class Connections:
    """Answers whoever connects. Use it as `async with connections.listening(socket)`."""

    def __init__(
        self,
        settings: ServeSettings,
        form: ObservationForm,
        model: Model,
        metadata: bytes,
        about: Mapping[str, str],
        started: float,
    ):
        """`metadata`: the first frame that a client gets. `about`: what the page says of the server."""
        self.settings, self.model, self.about, self.started = settings, model, about, started
        self.metrics, self.limits = Metrics(), RequestLimits.of(form, settings.frame_bytes)
        self.loop = ClientLoop(settings, form, self.limits, model, self.metrics, metadata)
        self.unfinished = UnfinishedMessages(self.limits.unfinished, self._note_unfinished)
        self.names = names_of_server(settings.host, settings.allow_hosts)

    def listening(self, bound: socket.socket) -> contextlib.AbstractAsyncContextManager[Server]:
        settings = self.settings
        connect: Any = functools.partial(CountedConnection, self.unfinished, settings.requests_per_s)
        return serve(
            self.loop,
            sock=bound,
            ssl=settings.tls(),
            process_request=self._answer_http,
            compression=None,
            create_connection=connect,
            max_size=self.limits.frame.frame_bytes,
            max_queue=BUFFERED_FRAMES,
            open_timeout=settings.opening_s,
            close_timeout=CLOSING_S,
            ping_interval=settings.ping_s,
            ping_timeout=settings.ping_s,
            server_header=None,
            logger=_quiet(),
        )

    async def figures(self, images: bool) -> dict[str, Any]:
        """What this process counted and, of its clients, what the page shows: plain values."""
        clients = [*self.loop.clients.values()]
        # to make images small takes long, and is not in the way of robots
        rows = await asyncio.to_thread(web.client_rows, clients) if images else []
        return {
            "metrics": self.metrics.plain(),
            "clients": rows,
            "connected": len(clients),
            "sessions": sum(len(client.sessions) for client in clients),
            "resident_bytes": web.resident_bytes(),
        }

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
            return await self._admit()
        if path == "/":
            return web.status_page(f"{self.about['policy']} policy")
        if path in ("/metrics", "/status"):
            images = path == "/status"
            figures = await self.model.figures(await self.figures(images), images)
            show = web.status if images else web.prometheus
            return await asyncio.to_thread(show, figures, self.about, self.started)
        return web.response(404, "There is nothing here. Try / or /metrics.\n")

    async def _admit(self) -> Response | None:
        if not await self.model.has_room():
            self.metrics.refused_connections += 1
            return web.response(503, f"{self.settings.too_many()}\n")
        return None

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
        advice = f"--allow-host {plain.partition(':')[0]}"
        problem = f"it asks for {plain}, which is not a name of this server"
        self.loop.note("a request", f"{problem}; {advice} allows it")
        fix = f"Connect to its IP address, or start it with {advice}."
        return web.response(421, f"{plain} is not a name of this server. {fix}\n")

    def _note_unfinished(self, address: str) -> None:
        self.metrics.refused_connections += 1
        self.loop.note(address, f"{REASON}: the one that was begun first is dropped")

    def close(self) -> None:
        self.loop.decoders.shutdown(wait=False, cancel_futures=True)


def _quiet() -> logging.Logger:
    """The libraries' log lines: broken handshakes and the like are everyday on an open port."""
    logging.getLogger("asyncio").addFilter(_is_not_about_a_lost_client)
    logger = logging.getLogger("flexor.websockets")
    logger.setLevel(logging.CRITICAL)
    return logger


def _is_not_about_a_lost_client(record: logging.LogRecord) -> bool:
    """asyncio writes a line for every answer to a ping of a client that is gone: thousands, if it wants."""
    return record.msg != "socket.send() raised exception."
