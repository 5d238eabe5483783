"""A policy on the network: one port for robots, browsers and monitoring."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.http11 import Request, Response

from flexor import __version__
from flexor.core.errors import ConfigError
from flexor.core.log import log
from flexor.policies.features import Kind
from flexor.serve import web
from flexor.serve.access import REALM, has_key, is_foreign_page, wants_socket
from flexor.serve.batching import RequestBatcher
from flexor.serve.clients import ClientLoop
from flexor.serve.metrics import Metrics
from flexor.serve.predictor import Predictor
from flexor.serve.request import ObservationReader
from flexor.serve.settings import ServeSettings
from flexor_client.wire import PROTOCOL, pack

SWITCH_S = 0.0001  # Python's threads take turns this often: the model's must not hold up the connections
OPENING_S = 4.0  # for a request: browsers open connections in reserve, and the server's end waits for them
BUFFERED_FRAMES = 1  # of a client that sends without waiting for its answers


class PolicyServer:
    """Serves a predictor. Use it as `async with server.running() as url`."""

    def __init__(self, settings: ServeSettings, predictor: Predictor, names: Mapping[str, str] | None = None):
        """`names`: {the policy's name of an input: the clients' name}."""
        settings.validate()
        self.settings, self.predictor = settings, predictor
        self.reader = ObservationReader(
            predictor.config, names or {}, settings.limits, predictor.robots_names
        )
        self.metrics, self.started = Metrics(), time.time()
        self.tls = settings.tls()
        device = next(predictor.pretrained.policy.parameters()).device
        self.about = {"version": __version__, "policy": predictor.config.type, "device": str(device)}

    def metadata(self) -> dict[str, Any]:
        """The first frame that a client gets."""
        observed = self.predictor.config.observed
        limits = self.settings.limits
        return {
            "server": "flexor",
            "version": __version__,
            "protocol": PROTOCOL,
            **self.predictor.describe(),
            "inputs": {
                self.reader.names[name]: {"shape": list(f.shape), "image": f.type is Kind.VISUAL}
                for name, f in observed.items()
            },
            "limits": {
                "frame_bytes": limits.frame_bytes,
                "sessions": self.settings.max_sessions,
                "requests_per_s": self.settings.requests_per_s,
            },
        }

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        """Warm up, then listen. Inside, the server answers; its address is given."""
        bound = bind(self.settings.host, self.settings.port)
        switch = sys.getswitchinterval()
        try:
            sys.setswitchinterval(SWITCH_S)
            window = self.settings.batch_window_ms
            batcher = RequestBatcher(
                self.predictor.answer, self.predictor.max_batch, None if window is None else window / 1e3
            )
            await asyncio.get_running_loop().run_in_executor(batcher.thread, self.predictor.warm)
            self.loop = ClientLoop(
                self.settings, self.predictor, self.reader, batcher, self.metrics, pack(self.metadata())
            )
            worker = asyncio.create_task(batcher.run())
            try:
                async with self._listen(bound):
                    yield self._url(bound)
            finally:
                worker.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await worker
                batcher.thread.shutdown(wait=False, cancel_futures=True)
                self.loop.decoders.shutdown(wait=False, cancel_futures=True)
        finally:
            sys.setswitchinterval(switch)
            bound.close()

    def _listen(self, bound: socket.socket) -> contextlib.AbstractAsyncContextManager[Server]:
        settings = self.settings
        return serve(
            self.loop,
            sock=bound,
            ssl=self.tls,
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

    def _url(self, bound: socket.socket) -> str:
        host, port = bound.getsockname()[:2]
        return f"{'wss' if self.tls else 'ws'}://{f'[{host}]' if ':' in host else host}:{port}"

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
            return self._admit(request)
        if path == "/":
            return web.status_page(f"{self.about['policy']} policy")
        if path == "/metrics":
            return web.response(200, self._prometheus(), "text/plain; version=0.0.4; charset=utf-8")
        if path == "/status":
            about = {**self.about, "up_s": time.time() - self.started}
            # one tick later than it was asked for, but not in the way of robots
            body = await asyncio.to_thread(web.status, self.metrics, [*self.loop.clients.values()], about)
            return web.response(200, body, "application/json")
        return web.response(404, "There is nothing here. Try / or /metrics.\n")

    def _admit(self, request: Request) -> Response | None:
        if is_foreign_page(request.headers):
            self.metrics.refused_connections += 1
            return web.response(403, "Web pages of other sites can't connect.\n")
        if len(self.loop.clients) >= self.settings.max_clients:
            self.metrics.refused_connections += 1
            return web.response(503, f"There are {self.settings.max_clients} clients already.\n")
        return None

    def _prometheus(self) -> str:
        clients = self.loop.clients.values()
        gauges = {
            "clients": ("connected clients", float(len(clients))),
            "sessions": ("robots of connected clients", float(sum(len(c.sessions) for c in clients))),
            "uptime_seconds": ("seconds since the server was started", time.time() - self.started),
            "resident_memory_bytes": ("memory of the server's process", float(web.resident_bytes())),
        }
        return self.metrics.prometheus(gauges, self.about)


def bind(host: str, port: int) -> socket.socket:
    """Take the address, but do not listen yet: a robot that connects early is refused at once instead of waiting."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, proto)
    except OSError as error:
        raise ConfigError(f"--host={host}: {error}.") from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise ConfigError(
            f"Can't listen on {host}, port {port}: {error}. Choose another with --host and --port."
        ) from error
    return bound


def _quiet() -> Any:
    """The library's log lines: broken handshakes and the like are everyday on an open port."""
    import logging

    logger = logging.getLogger("flexor.websockets")
    logger.setLevel(logging.CRITICAL)
    return logger


async def serve_until(server: PolicyServer, stop: asyncio.Event, ready: Callable[[str], None]) -> None:
    """Serve until `stop` is set."""
    async with server.running() as url:
        ready(url)
        await stop.wait()
        log.info("closing %d connection(s)", len(server.loop.clients))
