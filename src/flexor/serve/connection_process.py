"""A process with a part of a server's connections: it reads requests for the model, which is in another process.

    python -m flexor.serve.connection_process LINK CONNECTIONS MEMORY      numbers of open files, from the server

To receive, check and decode an observation takes Python longer than a small model takes to answer it. With several
such processes, robots do not wait for each other's. They do not import torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flexor.core.log import setup_logging
from flexor.serve.connections import Connections
from flexor.serve.form import Input, ObservationForm
from flexor.serve.job import ServeJob
from flexor.serve.link import Handler, Link
from flexor.serve.settings import ServeSettings
from flexor.serve.shared_observations import SharedObservations


class ReceivedConnections(socket.socket):
    """In the place of a listening socket: its connections were accepted by another process, which passes them on."""

    def listen(self, backlog: int = 0) -> None:
        pass

    def accept(self) -> tuple[socket.socket, Any]:
        data, files, _, _ = socket.recv_fds(self, 1, 1)
        if not data:
            raise BlockingIOError  # the server has ended: no more will come
        if not files:  # this process may not open more
            raise ConnectionAbortedError
        connection = socket.socket(fileno=files[0])
        try:
            return connection, connection.getpeername()
        except OSError as error:  # it is gone already
            connection.close()
            raise ConnectionAbortedError from error


class RemoteModel:
    """The model, in another process."""

    def __init__(self, link: Link, form: ObservationForm, memory: int, places: int):
        self.link = link
        self.observations = SharedObservations(memory, form, places)
        self.free = [*range(places)]  # numbers of observations; a client asks for one at a time
        self.session_numbers = itertools.count()

    async def has_room(self) -> bool:
        return bool(await self.link.call("has_room"))

    async def enter(self) -> int | None:
        number: int | None = await self.link.call("enter")
        return number

    def leave(self, client: int) -> None:
        self.link.notify("leave", client)

    def session(self) -> int:
        return next(self.session_numbers)

    async def submit(self, job: ServeJob) -> None:
        request, number = job.request, self.free.pop()
        try:
            self.observations.write(number, request.observation, request.stacked)
            options = None if request.options is None else vars(request.options)
            about = job.session, job.arrived, request.stacked, request.task, options
            job.take(await self.link.call("submit", number, [*request.observation], *about))
        finally:
            if not job.in_use:
                self.free.append(number)

    async def expire(self, job: ServeJob) -> None:
        job.expired, job.episode = True, await self.link.call("episode", job.session)

    def release(self, number: int) -> None:
        """The model has ended with an observation whose request expired meanwhile."""
        self.free.append(number)

    def forget(self, session: int) -> None:
        self.link.notify("forget", session)

    async def figures(self, local: Mapping[str, Any], images: bool) -> list[Mapping[str, Any]]:
        return [local, *await self.link.call("figures", local["metrics"], images)]


class ConnectionProcess:
    """What the process does: it is set up by the server, and ends with it."""

    link: Link
    model: RemoteModel
    connections: Connections

    def __init__(self, listener: ReceivedConnections, memory: int):
        self.listener, self.memory = listener, memory
        self.ended = asyncio.Event()
        self.open = contextlib.AsyncExitStack()

    async def run(self, line: socket.socket) -> None:
        handlers: dict[str, Handler] = {
            "set_up": self.set_up,
            "figures": self.figures,
            "close": self.open.aclose,
            "release": lambda number: self.model.release(number),
            "is_alive": lambda: True,
        }
        async with self.open:
            self.link = await Link.connect(line, handlers, self.ended.set)
            await self.ended.wait()

    async def set_up(
        self,
        settings: dict[str, Any],
        form: dict[str, Any],
        metadata: bytes,
        about: dict[str, str],
        started: float,
    ) -> None:
        """Listen from now on."""
        serve_settings, spec = _settings(settings), _form(form)
        self.model = RemoteModel(self.link, spec, self.memory, serve_settings.observation_places)
        self.connections = Connections(serve_settings, spec, self.model, metadata, about, started)
        self.open.callback(self.connections.close)
        await self.open.enter_async_context(self.connections.listening(self.listener))

    async def figures(self, images: bool) -> dict[str, Any]:
        return await self.connections.figures(images)


def _settings(plain: dict[str, Any]) -> ServeSettings:
    files = {name: plain[name] and Path(plain[name]) for name in ("tls_cert", "tls_key")}
    return ServeSettings(**{**plain, **files, "allow_hosts": tuple(plain["allow_hosts"])})


def _form(plain: dict[str, Any]) -> ObservationForm:
    inputs = {n: Input(**{**spec, "shape": tuple(spec["shape"])}) for n, spec in plain["inputs"].items()}
    return ObservationForm(**{**plain, "inputs": inputs})


def main(arguments: list[str]) -> int:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # they are for the server, which then ends this process
    setup_logging()
    line, listener, memory = map(int, arguments)

    async def run() -> None:
        await ConnectionProcess(ReceivedConnections(fileno=listener), memory).run(socket.socket(fileno=line))

    asyncio.run(run())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
