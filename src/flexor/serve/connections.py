"""The robots of a process, and what browsers and monitoring get to see of them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from websockets.http11 import Response

from flexor.serve import web
from flexor.serve.clients import ClientLoop
from flexor.serve.form import ObservationForm
from flexor.serve.limits import RequestLimits
from flexor.serve.listener import Listener
from flexor.serve.metrics import Metrics
from flexor.serve.model import Model
from flexor.serve.settings import ServeSettings


class Connections(Listener):
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
        self.model, self.about, self.started = model, about, started
        self.limits, metrics = RequestLimits.of(form, settings.frame_bytes), Metrics()
        self.loop = ClientLoop(settings, form, self.limits, model, metrics, metadata)
        frame_bytes, unfinished = self.limits.frame.frame_bytes, self.limits.unfinished
        super().__init__(settings, self.loop, self.loop.notes, metrics, frame_bytes, unfinished)

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

    async def admit(self) -> Response | None:
        if not await self.model.has_room():
            self.metrics.refused_connections += 1
            return web.response(503, f"{self.settings.too_many()}\n")
        return None

    async def page(self, path: str) -> Response:
        if path == "/":
            return web.status_page(f"{self.about['policy']} policy")
        if path in ("/metrics", "/status"):
            images = path == "/status"
            figures = await self.model.figures(await self.figures(images), images)
            show = web.status if images else web.prometheus
            return await asyncio.to_thread(show, figures, self.about, self.started)
        return web.response(404, "There is nothing here. Try / or /metrics.\n")

    def close(self) -> None:
        self.loop.decoders.shutdown(wait=False, cancel_futures=True)
