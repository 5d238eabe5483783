"""A policy on the network: one port for robots, browsers and monitoring."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from flexor import __version__
from flexor.core.errors import ConfigError
from flexor.core.log import log
from flexor.serve.batching import RequestBatcher
from flexor.serve.connections import Connections
from flexor.serve.form import ObservationForm
from flexor.serve.limits import RequestLimits
from flexor.serve.local_model import LocalModel
from flexor.serve.predictor import Predictor
from flexor.serve.processes import ConnectionProcesses
from flexor.serve.settings import ServeSettings
from flexor_client.wire import PROTOCOL, pack

SWITCH_S = 0.0001  # Python's threads take turns this often: the model's must not hold up the connections


class PolicyServer:
    """Serves a predictor. Use it as `async with server.running() as url`."""

    model: LocalModel
    connections: Connections
    processes: ConnectionProcesses | None

    def __init__(self, settings: ServeSettings, predictor: Predictor, names: Mapping[str, str] | None = None):
        """`names`: {the policy's name of an input: the clients' name}."""
        settings.validate()
        self.settings, self.predictor = settings, predictor
        self.form = ObservationForm.of_policy(predictor.config, names or {}, predictor.robots_names)
        self.started = time.time()
        self.tls = settings.tls()
        device = next(predictor.pretrained.policy.parameters()).device
        self.about = {"version": __version__, "policy": predictor.config.type, "device": str(device)}

    def metadata(self) -> dict[str, Any]:
        """The first frame that a client gets."""
        limits = RequestLimits.of(self.form, self.settings.frame_bytes).frame
        return {
            "server": "flexor",
            "version": __version__,
            "protocol": PROTOCOL,
            **self.predictor.describe(),
            "inputs": {
                spec.name: {"shape": list(spec.shape), "image": spec.image}
                for spec in self.form.inputs.values()
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
        url = self._url(bound)
        switch = sys.getswitchinterval()
        try:
            sys.setswitchinterval(SWITCH_S)
            window_ms = self.settings.batch_window_ms
            window_s = None if window_ms is None else window_ms / 1e3
            batcher = RequestBatcher(self.predictor.answer, self.predictor.max_batch, window_s)
            await asyncio.get_running_loop().run_in_executor(batcher.thread, self.predictor.warm)
            self.model = LocalModel(self.predictor, batcher, self.settings)
            worker = asyncio.create_task(batcher.run())
            try:
                async with self._listening(bound):
                    yield url
            finally:
                worker.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await worker
                batcher.thread.shutdown(wait=False, cancel_futures=True)
        finally:
            sys.setswitchinterval(switch)
            bound.close()

    @contextlib.asynccontextmanager
    async def _listening(self, bound: socket.socket) -> AsyncIterator[None]:
        """Connections in this process, and in others."""
        here = self.connections = Connections(
            self.settings, self.form, self.model, pack(self.metadata()), self.about, self.started
        )
        count = self.settings.connection_processes()
        self.processes = ConnectionProcesses(self.connections, self.form, self.model) if count else None
        try:
            async with self.processes.listening(bound, count) if self.processes else here.listening(bound):
                yield
        finally:
            here.close()

    def _url(self, bound: socket.socket) -> str:
        host, port = bound.getsockname()[:2]
        return f"{'wss' if self.tls else 'ws'}://{f'[{host}]' if ':' in host else host}:{port}"


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


async def serve_until(server: PolicyServer, stop: asyncio.Event, ready: Callable[[str], None]) -> None:
    """Serve until `stop` is set."""
    async with server.running() as url:
        ready(url)
        await stop.wait()
        log.info("closing all connections: %d", len(server.model.clients))
