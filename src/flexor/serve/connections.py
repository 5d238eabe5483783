"""The connections of a process: who may connect, what browsers and monitoring get, and the robots."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Mapping
from typing import Any

from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.http11 import Request, Response

from flexor.serve import web
from flexor.serve.access import REALM, has_key, is_foreign_page, wants_socket
from flexor.serve.clients import ClientLoop
from flexor.serve.metrics import Metrics
from flexor.serve.model import Model
from flexor.serve.request import ObservationForm
from flexor.serve.settings import ServeSettings

OPENING_S = 4.0  # for a request: browsers open connections in reserve, and the server's end waits for them
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
        self.metrics = Metrics()
        self.loop = ClientLoop(settings, form, model, self.metrics, metadata)

    def listening(self, bound: socket.socket) -> contextlib.AbstractAsyncContextManager[Server]:
        settings = self.settings
        return serve(
            self.loop,
            sock=bound,
            ssl=settings.tls(),
            process_request=self._answer_http,
            compression=None,
            max_size=settings.limits.frame_bytes,
            max_queue=BUFFERED_FRAMES,
            open_timeout=OPENING_S,
            ping_interval=settings.ping_s,
            ping_timeout=settings.ping_s,
            server_header=None,
            logger=_quiet(),
        )

    async def figures(self, images: bool) -> dict[str, Any]:
        """What this process counted and, of its clients, what the page shows: plain values."""
        clients = [*self.loop.clients.values()]
        # to make images small takes long, and is not in the way of robots
        shown = await asyncio.to_thread(web.clients_shown, clients) if images else []
        return {
            "metrics": self.metrics.plain(),
            "clients": shown,
            "connected": len(clients),
            "sessions": sum(len(client.sessions) for client in clients),
            "resident_bytes": web.resident_bytes(),
        }

    async def _answer_http(self, connection: ServerConnection, request: Request) -> Response | None:
        """The answer to a browser or a monitor; None for a robot, which gets a WebSocket."""
        path = request.path.partition("?")[0]
        if path == "/healthz":
            return web.response(200, "OK\n")
        if not has_key(request.headers, self.settings.api_key):
            self.metrics.refused_connections += 1
            return web.response(
                401,
                "The API key is missing or wrong. Send `Authorization: Api-Key KEY`.\n",
                WWW_Authenticate=REALM,
            )
        if wants_socket(request.headers):
            return await self._admit(request)
        if path == "/":
            return web.status_page(f"{self.about['policy']} policy")
        if path in ("/metrics", "/status"):
            images = path == "/status"
            found = await self.model.figures(await self.figures(images), images)
            show = web.status if images else web.prometheus
            return await asyncio.to_thread(show, found, self.about, self.started)
        return web.response(404, "There is nothing here. Try / or /metrics.\n")

    async def _admit(self, request: Request) -> Response | None:
        if is_foreign_page(request.headers):
            self.metrics.refused_connections += 1
            return web.response(403, "Web pages of other sites can't connect.\n")
        if not await self.model.has_room():
            self.metrics.refused_connections += 1
            return web.response(503, f"{self.settings.too_many()}\n")
        return None

    def close(self) -> None:
        self.loop.decoders.shutdown(wait=False, cancel_futures=True)


def _quiet() -> logging.Logger:
    """The library's log lines: broken handshakes and the like are everyday on an open port."""
    logger = logging.getLogger("flexor.websockets")
    logger.setLevel(logging.CRITICAL)
    return logger
