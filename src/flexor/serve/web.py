"""The same port for browsers and monitoring: `/` shows a page, `/status` what it shows, `/metrics`, `/healthz`."""

from __future__ import annotations

import functools
import http
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import psutil
from websockets.datastructures import Headers
from websockets.http11 import Response

from flexor.pages.images import as_base64, jpeg, scaled
from flexor.pages.page import as_json, page
from flexor.serve.access import SAFE
from flexor.serve.clients import Client
from flexor.serve.metrics import Metrics

SHOWN_WIDTH = 240  # of an image on the page
SHOWN_CLIENTS = 16  # with images


def response(
    status: int, body: str | bytes, kind: str = "text/plain; charset=utf-8", **more: str
) -> Response:
    data = body.encode() if isinstance(body, str) else body
    headers = Headers({"Content-Type": kind, "Content-Length": str(len(data)), "Connection": "close", **SAFE})
    for name, value in more.items():
        headers[name.replace("_", "-")] = value
    return Response(status, http.HTTPStatus(status).phrase, headers, data)


@functools.cache
def status_page(title: str) -> Response:
    text = page(
        title,
        body='<div id="status"></div>',
        data={"title": title},
        styles=[("flexor.serve", "status.css")],
        scripts=[("flexor.serve", "status.js")],
        live=True,
    )
    return response(200, text, "text/html; charset=utf-8")


def client_rows(clients: Iterable[Client]) -> list[dict[str, Any]]:
    """The page's rows, one for each client. Images are made small here, and only when somebody looks."""
    now = time.time()
    return [
        {
            "number": client.number,
            "address": client.address,
            "seconds": now - client.since,
            "robots": len(client.sessions),
            "requests": client.requests,
            "expired": client.expired,
            "last_ms": client.last_total_ms,
            "task": client.task[:200],
            "images": {} if place >= SHOWN_CLIENTS else {n: _small(i) for n, i in [*client.images.items()]},
        }
        for place, client in enumerate(clients)
    ]


def status(figures: Sequence[Mapping[str, Any]], about: Mapping[str, str], started: float) -> Response:
    """What the page shows, as JSON. `figures`: those of all processes, as `Connections.figures` has them."""
    metrics = Metrics.merge([process["metrics"] for process in figures])
    clients = [client for process in figures for client in process["clients"]]
    text = as_json(
        {
            **about,
            "up_s": time.time() - started,
            "clients": sorted(clients, key=lambda client: client["number"]),
            "results": dict(metrics.results),
            "latency_ms": metrics.percentiles(),
        }
    )
    return response(200, text, "application/json")


def prometheus(figures: Sequence[Mapping[str, Any]], about: Mapping[str, str], started: float) -> Response:
    def total(name: str) -> float:
        return float(sum(process[name] for process in figures))

    gauges = {
        "clients": ("connected clients", total("connected")),
        "sessions": ("robots of connected clients", total("sessions")),
        "uptime_seconds": ("seconds since the server was started", time.time() - started),
        "resident_memory_bytes": ("memory of the server's processes", total("resident_bytes")),
    }
    text = Metrics.merge([process["metrics"] for process in figures]).prometheus(gauges, about)
    return response(200, text, "text/plain; version=0.0.4; charset=utf-8")


def _small(image: np.ndarray) -> str:
    """An image [C, H, W] as the address of a small JPEG."""
    pixels = image.transpose(1, 2, 0)
    if pixels.shape[2] == 1:
        pixels = pixels.repeat(3, 2)
    height, width = pixels.shape[:2]
    if width > SHOWN_WIDTH:
        pixels = scaled(pixels, max(2, round(height * SHOWN_WIDTH / width)), SHOWN_WIDTH)
    return f"data:image/jpeg;base64,{as_base64(jpeg(pixels))}"


def resident_bytes() -> int:
    """Memory of this process; 0 where the system does not say."""
    try:
        return int(psutil.Process().memory_info().rss)
    except psutil.Error:
        return 0
