"""Processes with connections, beside the one with the model: started, given connections, and answered."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Coroutine, Mapping
from dataclasses import asdict
from typing import Any

from flexor.core.errors import FlexorError
from flexor.core.log import log
from flexor.policies.session import Session
from flexor.serve import connection_process
from flexor.serve.connection_process import ReceivedConnections
from flexor.serve.connections import Connections
from flexor.serve.form import ObservationForm
from flexor.serve.job import ServeJob
from flexor.serve.limits import BadRequest
from flexor.serve.link import Handler, Link
from flexor.serve.local_model import LocalModel
from flexor.serve.metrics import Metrics
from flexor.serve.options import RequestOptions
from flexor.serve.request import PolicyRequest
from flexor.serve.shared_observations import SharedObservations

START_S = 60.0
END_S = 15.0
FIGURES_S = 5.0
RUSH_S = 0.05  # after one connection, others are not taken for the first
RESTART_S = 1.0  # after a process died, until another one is started in its place
CHECK_S = 1.0  # between two questions whether a process is alive
ANSWER_S = 0.5  # in which it answers before it is given a connection
FROZEN_S = 10.0  # without an answer, after which it is ended
BACKLOG = 100
# figures of a process that has ended
NO_CLIENTS = {"clients": [], "connected": 0, "sessions": 0, "resident_bytes": 0}


class ConnectionTransfer:
    """Passes accepted connections to a process, as open files over a socket."""

    def __init__(self) -> None:
        self.local_end, self.remote_end = socket.socketpair()
        self.local_end.setblocking(False)  # one that hangs must not hold up this one
        self.last = 0.0

    def send(self, connection: socket.socket) -> bool:
        try:
            socket.send_fds(self.local_end, [b"+"], [connection.fileno()])
        except OSError:  # it is just ending, or does not answer
            return False
        self.last = time.monotonic()
        return True

    def close(self) -> None:
        self.local_end.close()
        self.remote_end.close()


class RemoteConnections:
    """One process, its connections, and the sessions of their robots."""

    def __init__(self, processes: ConnectionProcesses):
        self.processes = processes
        self.model, self.form = processes.model, processes.form
        memory = os.memfd_create("flexor-observations")
        try:
            self.observations = SharedObservations(memory, self.form, processes.settings.observation_places)
            self.line, theirs = socket.socketpair()
            self.transfer = ConnectionTransfer()
            with theirs, self.transfer.remote_end:
                files = (theirs.fileno(), self.transfer.remote_end.fileno(), memory)
                self.process = subprocess.Popen(
                    [sys.executable, "-m", connection_process.__name__, *map(str, files)],
                    stdin=subprocess.DEVNULL,
                    pass_fds=files,
                )
        finally:
            os.close(memory)
        self.clients: set[int] = set()
        self.sessions: dict[int, Session] = {}
        self.link: Link | None = None
        self.responsive = True  # when it was last asked
        self.counted: Mapping[str, Any] = Metrics().plain()  # when it was last asked

    async def set_up(self) -> None:
        handlers: dict[str, Handler] = {
            "has_room": self.model.has_room,
            "enter": self._enter,
            "leave": self._leave,
            "submit": self._submit,
            "episode": self._episode,
            "forget": self._forget,
            "figures": functools.partial(self.processes.figures_of_all_but, self),
        }
        self.link = await Link.connect(self.line, handlers, self._lost)
        here = self.processes.here
        settings = {**asdict(here.settings), "processes": 0}
        for name in ("tls_cert", "tls_key"):
            settings[name] = settings[name] and str(settings[name])
        await self.link.call(
            "set_up", settings, asdict(self.form), here.loop.metadata, dict(here.about), here.started
        )

    async def is_alive(self, timeout_s: float) -> bool:
        """Whether it answers in this time. One that hangs or is stopped does not."""
        try:
            assert self.link is not None
            self.responsive = await asyncio.wait_for(self.link.call("is_alive"), timeout_s)
        except (ConnectionError, TimeoutError):
            self.responsive = False
        return self.responsive

    async def watch(self) -> None:
        """End the process when it does not answer any more: its robots can then connect to another one."""
        while await self.is_alive(FROZEN_S):
            await asyncio.sleep(CHECK_S)
        if self.process.poll() is None:
            log.warning("a process with connections has not answered for %.0f s: it is ended", FROZEN_S)
            self.process.kill()

    async def figures(self, images: bool) -> Mapping[str, Any]:
        """What it counted; if it hangs or has died, what it had counted when it last answered."""
        if self.link is not None:
            with contextlib.suppress(ConnectionError, TimeoutError):
                answer = self.link.call("figures", images)
                figures: Mapping[str, Any] = await asyncio.wait_for(answer, FIGURES_S)
                self.counted = figures["metrics"]
                return figures
        return {**NO_CLIENTS, "metrics": self.counted}

    async def close(self) -> None:
        """Let it say goodbye to its clients, then end it."""
        if self.link is not None:
            with contextlib.suppress(ConnectionError, TimeoutError):
                await asyncio.wait_for(self.link.call("close"), END_S)
            self.link.close()
        self.line.close()
        self.transfer.close()
        try:
            await asyncio.to_thread(self.process.wait, END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    async def _enter(self) -> int | None:
        client = await self.model.enter()
        if client is not None:
            self.clients.add(client)
        return client

    def _leave(self, client: int) -> None:
        self.clients.discard(client)
        self.model.leave(client)

    def _forget(self, number: int) -> None:
        session = self.sessions.pop(number, None)
        if session is not None:
            self.model.forget(session)

    def _episode(self, number: int) -> int:
        return self.sessions[number].episode if number in self.sessions else 0

    async def _submit(
        self,
        place: int,
        names: list[str],
        number: int,
        arrived: float,
        stacked: bool,
        task: str,
        options: dict[str, Any] | None,
    ) -> list[Any]:
        """Answer a request, whose observation is in shared memory."""
        try:
            self.sessions[number] = self.sessions.get(number) or self.model.session()
        except BadRequest as error:
            return ServeJob(PolicyRequest({}, stacked, task, None), None, arrived, error=str(error)).answer()
        places = self.observations.view(place, stacked)
        observation = {name: places[name] for name in names}
        if self.form.steps is not None and not stacked:  # the session keeps it
            observation = {name: array.copy(order="K") for name, array in observation.items()}
        read_options = None if options is None else RequestOptions(**options)
        request = PolicyRequest(observation, stacked, task, read_options)
        job = ServeJob(request, self.sessions[number], arrived, lambda: number in self.sessions)
        if self.link is not None:
            job.release = functools.partial(self.link.notify, "release", place)
        await self.model.submit(job)
        return job.answer()

    def _lost(self) -> None:
        """The process has ended, or is about to."""
        for number in [*self.sessions]:
            self._forget(number)
        for client in [*self.clients]:
            self._leave(client)
        self.processes.lost(self)


class ConnectionProcesses:
    """All of them. Connections are accepted here: the first client stays in this process, where it is answered soonest;
    others go to the process with the fewest, if it answers."""

    def __init__(self, connections: Connections, form: ObservationForm, model: LocalModel):
        """`connections`: those of this process, which do not listen yet."""
        self.here, self.form, self.model = connections, form, model
        self.settings = connections.settings
        self.transfer = ConnectionTransfer()  # to this process itself
        self.running: list[RemoteConnections] = []
        self.closing = False
        self.tasks: set[asyncio.Task[None]] = set()
        self.ended = Metrics().plain()  # what processes that died had counted: sums never fall
        model.remote_figures = self.figures

    @contextlib.asynccontextmanager
    async def listening(self, bound: socket.socket, count: int) -> AsyncIterator[None]:
        try:
            started = await asyncio.gather(*(self._start() for _ in range(count)), return_exceptions=True)
            for error in started:
                if error is not None:
                    raise error
            async with self.here.listening(ReceivedConnections(fileno=self.transfer.remote_end.detach())):
                bound.setblocking(False)
                bound.listen(BACKLOG)
                self._listen(bound)
                try:
                    yield
                finally:
                    self.closing = True
                    asyncio.get_running_loop().remove_reader(bound)
                    bound.close()
        finally:
            self.closing = True
            for task in self.tasks:
                task.cancel()
            await asyncio.gather(*(remote.close() for remote in self.running))
            self.transfer.close()

    def _listen(self, bound: socket.socket) -> None:
        if not self.closing:
            asyncio.get_running_loop().add_reader(bound, self._accept, bound)

    async def _start(self) -> None:
        remote = RemoteConnections(self)
        try:
            await asyncio.wait_for(remote.set_up(), START_S)
        except (ConnectionError, TimeoutError) as error:
            await remote.close()
            raise FlexorError(
                f"A process for connections did not start (exit code {remote.process.returncode}). Its reason is "
                "above; --processes=0 does without."
            ) from error
        except asyncio.CancelledError:  # the server ends
            remote.process.kill()
            raise
        self.running.append(remote)
        self._spawn(remote.watch())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self.tasks.add(task)  # the event loop itself would forget it
        task.add_done_callback(self.tasks.discard)

    def _accept(self, bound: socket.socket) -> None:
        try:
            while True:
                self._spawn(self._transfer_connection(bound.accept()[0]))
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:  # too many open files, say
            log.warning("can't accept a connection: %s", error)
            loop = asyncio.get_running_loop()
            loop.remove_reader(bound)
            loop.call_later(RESTART_S, self._listen, bound)

    async def _transfer_connection(self, connection: socket.socket) -> None:
        """The first client stays here, as do those that no other process takes."""
        with connection:
            if not self.here.loop.clients and time.monotonic() - self.transfer.last > RUSH_S:
                self.transfer.send(connection)
                return
            for remote in sorted(self.running, key=_least_busy):
                remote.transfer.last = time.monotonic()  # the next connection goes to another one
                if await remote.is_alive(ANSWER_S) and remote.transfer.send(connection):
                    return
            self.transfer.send(connection)

    async def figures_of_all_but(
        self, asking: RemoteConnections, counted: Mapping[str, Any], images: bool
    ) -> list[Mapping[str, Any]]:
        asking.counted = counted
        return [await self.here.figures(images), *await self.figures(images, asking)]

    async def figures(
        self, images: bool, excluded: RemoteConnections | None = None
    ) -> list[Mapping[str, Any]]:
        """Those of the other processes, and of those that died."""
        ended = {**NO_CLIENTS, "metrics": self.ended}  # before others may join them
        running = [remote.figures(images) for remote in self.running if remote is not excluded]
        return [ended, *await asyncio.gather(*running)]

    def lost(self, remote: RemoteConnections) -> None:
        """Start another one in its place. Its robots connect again."""
        if remote not in self.running or self.closing:
            return
        self.running.remove(remote)
        self.ended = {**Metrics.merge([self.ended, remote.counted]).plain(), "recent": []}
        self._spawn(self._replace(remote))

    async def _replace(self, remote: RemoteConnections) -> None:
        await remote.close()
        log.warning(
            "a process with connections ended (exit code %s); another one is started",
            remote.process.returncode,
        )
        while not self.closing:
            await asyncio.sleep(RESTART_S)
            try:
                await self._start()
                return
            except FlexorError as error:
                log.warning("%s", error)


def _least_busy(remote: RemoteConnections) -> tuple[bool, int, float]:
    """Sorts processes: the one with the fewest clients first, those that did not answer last."""
    return not remote.responsive, len(remote.clients), remote.transfer.last
