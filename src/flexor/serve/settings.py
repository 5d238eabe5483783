"""How a server is run: its address, its limits, and how requests are batched."""

from __future__ import annotations

import re
import ssl
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from flexor.core.errors import ConfigError
from flexor.core.machine import usable_cores

Reply = Literal["chunk", "action"]
MANY_CORES = 8  # from here on, connections get processes of their own


@dataclass(frozen=True)
class ServeSettings:
    """Settings of `flexor serve`; see its flags."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    reply: Reply | None = None
    """None: a chunk, or an action for policies with temporal ensembling."""
    seed: int = 0
    """Of the policy's noise."""
    max_batch: int = 8
    batch_window_ms: float | None = None
    """How long a request waits for those of other robots. None: at most the time of a prediction, and only for robots
    that ask again by then, judged by their last pauses."""
    processes: int | None = None
    """That receive and decode observations, beside the model's. None: `connection_processes` decides."""
    max_clients: int = 64
    max_sessions: int = 64
    """Robots on one connection."""
    requests_per_s: float = 200.0
    """Of one client, on average. Faster ones are answered later."""
    frame_bytes: int | None = None
    """Of one request. None: derived from the policy's inputs, see limits.py."""
    allow_hosts: tuple[str, ...] = ()
    """Names of this server besides those that it knows: see access.py."""
    opening_s: float = 4.0
    """How long a handshake may take. Browsers open spare connections, and a server that stops waits for them."""
    ping_s: float = 20.0
    """Clients that are silent get a ping this often, and are disconnected if they do not answer in the same time."""

    def validate(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port={self.port} must be from 0 to 65535; 0 takes any free one.")
        for name in ("max_batch", "max_clients", "max_sessions", "requests_per_s", "ping_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"--{name.replace('_', '-')}={getattr(self, name)} must be greater than 0.")
        if self.processes is not None and self.processes < 0:
            raise ConfigError(f"--processes={self.processes} must be at least 0.")
        if self.processes and not sys.platform.startswith("linux"):
            raise ConfigError(f"--processes={self.processes} needs Linux. Leave it out.")
        if self.batch_window_ms is not None and self.batch_window_ms < 0:
            raise ConfigError(f"--batch-window-ms={self.batch_window_ms} must be at least 0.")
        if self.frame_bytes is not None and self.frame_bytes < 2**16:
            raise ConfigError("--max-frame-mb is less than an image needs.")
        for name in self.allow_hosts:
            if not re.fullmatch(r"[\w.-]+", name):
                raise ConfigError(f"--allow-host={name}: give a name alone, such as robots.example.org.")
        if self.api_key is not None and (not self.api_key.isascii() or not self.api_key.strip()):
            raise ConfigError("The API key must be ASCII text that is not empty.")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("--tls-cert and --tls-key must be given together.")

    def too_many(self) -> str:
        return f"There are {self.max_clients} clients already."

    @property
    def max_robots(self) -> int:
        """Sessions of all connections together. Each keeps the last observations of its robot."""
        return max(self.max_sessions, 4 * self.max_clients)

    @property
    def observation_places(self) -> int:
        """Observations of a process that can be on their way: one of each client, and those that expire in a batch."""
        return self.max_clients + self.max_batch

    def connection_processes(self) -> int:
        """Processes for connections: on large machines, as many as robots are predicted for together."""
        if self.processes is not None:
            return self.processes
        cores = usable_cores() if sys.platform.startswith("linux") else 1
        return min(self.max_batch, cores // 2) if cores >= MANY_CORES else 0

    def tls(self) -> ssl.SSLContext | None:
        if self.tls_cert is None or self.tls_key is None:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.tls_cert, self.tls_key)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"Can't read the certificate {self.tls_cert} with the key {self.tls_key}: {error}. "
                "Both must be PEM files that belong together."
            ) from error
        return context
