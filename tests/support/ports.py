"""Ports that nobody else on this machine gets before a test uses them."""

from __future__ import annotations

import socket


class ReservedPort:
    """A port of this machine: the system gives it to nobody who asks for any, and a server of a test can take it.

    It is bound, but not listened on: whoever calls is refused, until a server binds it with SO_REUSEADDR.
    """

    def __init__(self) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("127.0.0.1", 0))
        self.number: int = self._socket.getsockname()[1]

    def release(self) -> None:
        self._socket.close()

    def __enter__(self) -> int:
        return self.number

    def __exit__(self, *_: object) -> None:
        self.release()
