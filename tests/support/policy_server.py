"""A policy server in a thread, for what a real one does not do on request: die, hang, refuse, answer nonsense."""

from __future__ import annotations

import http
import ssl
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from websockets.exceptions import ConnectionClosed
from websockets.sync.server import Server, ServerConnection, serve

from flexor_client.wire import pack, unpack
from support.limits import LIMIT_S
from support.ports import ReservedPort

Answer = Callable[[dict[str, Any]], Any]


def echo(observation: dict[str, Any]) -> dict[str, Any]:
    """A chunk whose first action is the state."""
    state = np.asarray(observation["observation.state"], np.float32)
    return {"actions": state[None] + np.arange(4, dtype=np.float32)[:, None]}


class FakePolicyServer:
    """`answer` gets an observation and returns a map, a text (an error), raw bytes, or None (hang up)."""

    def __init__(self, answer: Answer = echo, metadata: Any = None, key: str | None = None):
        self.answer, self.metadata, self.key = answer, metadata or {}, key
        self.port = ReservedPort()  # for all its starts
        self.received: list[dict[str, Any]] = []
        self.connections = 0
        self._server: Server | None = None

    def start(self, tls: ssl.SSLContext | None = None) -> FakePolicyServer:
        self._open: list[ServerConnection] = []
        self._server = serve(
            self._serve,
            "127.0.0.1",
            self.port.number,
            ssl=tls,
            compression=None,
            max_size=None,
            process_request=self._admit,
            open_timeout=LIMIT_S,
            close_timeout=0.2,
            ping_interval=None,
        )
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def stop(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            for connection in self._open:
                connection.socket.close()
                connection.close()
            self._server = None

    @property
    def url(self) -> str:
        return f"ws://127.0.0.1:{self.port.number}"

    def __enter__(self) -> FakePolicyServer:
        return self.start() if self._server is None else self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self.port.release()

    def _admit(self, connection: ServerConnection, request: Any) -> Any:
        if self.key is not None and request.headers.get("Authorization") != f"Api-Key {self.key}":
            return connection.respond(http.HTTPStatus.UNAUTHORIZED, "no\n")
        return None

    def _serve(self, connection: ServerConnection) -> None:
        self.connections += 1
        self._open.append(connection)
        try:
            first = self.metadata
            connection.send(first if isinstance(first, (str, bytes)) else pack(first))
            for frame in connection:
                message = unpack(frame)
                self.received.append(message)
                reply = self.answer(message)
                if reply is None:
                    return
                connection.send(reply if isinstance(reply, (str, bytes)) else pack(reply))
                if isinstance(reply, str):
                    connection.close(1011)
                    return
        except (ConnectionClosed, OSError):
            time.sleep(0)
