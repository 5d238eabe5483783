"""One client: its connection, its robots' sessions, its rate limit, and the loop that answers it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from websockets.asyncio.server import ServerConnection
from websockets.exceptions import ConnectionClosed
from websockets.protocol import State

from flexor.serve.form import ObservationForm
from flexor.serve.job import ServeJob
from flexor.serve.limits import BadRequest, RequestLimits
from flexor.serve.metrics import Metrics
from flexor.serve.model import Model
from flexor.serve.rate_limit import ClientNotes, RateLimit
from flexor.serve.request import CheckedRequest, ObservationReader, PolicyRequest
from flexor.serve.settings import ServeSettings
from flexor_client.errors import WireError
from flexor_client.wire import OPTIONS, pack, unpack

FAILED = 1011  # the close code of openpi's server after an error
TRY_LATER = 1013
DECODERS = 8  # threads for images


class Client:
    """A connected client, as the page shows it."""

    def __init__(self, number: int, connection: ServerConnection, settings: ServeSettings):
        self.number, self.connection = number, connection
        self.address = str((connection.remote_address or ("unknown",))[0])
        self.since = time.time()
        self.requests = self.expired = 0
        self.last_total_ms: float | None = None
        self.images: dict[str, np.ndarray] = {}  # the last of each camera, [C, H, W]
        self.task = ""
        self.sessions: dict[str, Any] = {}  # by the client's name for it
        self.rate = RateLimit(settings.requests_per_s)
        self.encode_ms: float | None = None  # of the last reply

    def alive(self) -> bool:
        return self.connection.state is State.OPEN


class ClientLoop:
    """Answers clients, each in a task of its own."""

    def __init__(
        self,
        settings: ServeSettings,
        form: ObservationForm,
        limits: RequestLimits,
        model: Model,
        metrics: Metrics,
        metadata: bytes,
    ):
        self.settings, self.limits, self.reader = settings, limits, ObservationReader(form, limits)
        self.model, self.metrics, self.metadata = model, metrics, metadata
        self.clients: dict[int, Client] = {}
        self.decoders = ThreadPoolExecutor(min(DECODERS, os.cpu_count() or 1), "decode")
        self.cameras = {name for name, spec in form.inputs.items() if spec.image}
        self.notes = ClientNotes()

    async def __call__(self, connection: ServerConnection) -> None:
        """From the first frame to the last."""
        number = await self.model.enter()
        if number is None:
            self.metrics.refused_connections += 1
            await connection.close(TRY_LATER, self.settings.too_many())
            return
        self.metrics.connections += 1
        client = self.clients[number] = Client(number, connection, self.settings)
        try:
            await connection.send(self.metadata)
            async for frame in connection:
                if not await self._answer_frame(client, frame):
                    break
        except ConnectionClosed:
            pass  # whichever way it went, only this client is concerned
        finally:
            del self.clients[client.number]
            for session in client.sessions.values():
                self.model.forget(session)
            self.model.leave(client.number)

    async def _answer_frame(self, client: Client, frame: bytes | str) -> bool:
        """Answer one frame; False if that ends the connection."""
        arrived = time.perf_counter()
        wait = client.rate.wait_s()
        if wait:
            self.metrics.delayed += 1
            await asyncio.sleep(wait)
        self.metrics.bytes_in += len(frame)
        read_started = time.perf_counter()
        try:
            request = await self._read(frame, arrived)
            session = self._session(client, request)
        except (WireError, BadRequest) as error:
            return await self._refuse(client, "refused", str(error))
        decoded = time.perf_counter()
        job = ServeJob(request, session, arrived, client.alive)
        await (self.model.submit(job) if request.observation else self.model.expire(job))
        if job.error is not None:
            return await self._refuse(client, job.failure, job.error)
        await self._reply(client, job, decoded - read_started)
        return True

    async def _read(self, frame: bytes | str, arrived: float) -> PolicyRequest:
        if isinstance(frame, str):
            raise BadRequest("An observation must be a binary frame of MessagePack, not text.")
        checked = self.reader.check(unpack(frame, self.limits.frame))
        due = None if checked.options is None else checked.options.due(arrived)
        remaining_s = None if due is None else max(0.0, due - time.perf_counter())
        return await self._decoded(checked, remaining_s)

    async def _decoded(self, checked: CheckedRequest, timeout_s: float | None) -> PolicyRequest:
        """With its images, or without an observation if that takes longer than allowed.

        What one image costs is limited, but all clients share the threads that decode.
        """
        files, run = checked.files(), asyncio.get_running_loop().run_in_executor
        if not files:
            return checked.request({})
        decoding = [run(self.decoders, file.decode) for file in files]
        done, late = await asyncio.wait(decoding, timeout=timeout_s)
        for image in late:
            image.cancel()  # those that have begun end soon
        for error in [image.exception() for image in done]:
            if error is not None:
                raise error
        if late:
            return checked.too_late()
        return checked.request({file: image.result() for file, image in zip(files, decoding)})

    def _session(self, client: Client, request: PolicyRequest) -> Any:
        name = request.options.session if request.options else ""
        if name not in client.sessions:
            if len(client.sessions) >= self.settings.max_sessions:
                raise BadRequest(f"A connection can have at most {self.settings.max_sessions} sessions.")
            client.sessions[name] = self.model.session()
        for camera in self.cameras & request.observation.keys():
            image = request.observation[camera]
            client.images[camera] = image[-1] if request.stacked else image
        client.task = request.task
        return client.sessions[name]

    async def _refuse(self, client: Client, result: str, reason: str) -> bool:
        self.metrics.results[result] += 1
        self.notes.note(f"client {client.number} ({client.address})", reason)
        with contextlib.suppress(ConnectionClosed):
            await client.connection.send(reason)
            await client.connection.close(FAILED, "the observation could not be answered")
        return False

    async def _reply(self, client: Client, job: ServeJob, decode_s: float) -> None:
        pack_started = time.perf_counter()
        reply = pack(_message(client, job, decode_s))
        packed = time.perf_counter()
        await client.connection.send(reply)
        now = time.perf_counter()
        client.encode_ms, client.last_total_ms = 1e3 * (packed - pack_started), 1e3 * (now - job.arrived)
        client.requests += 1
        self.metrics.bytes_out += len(reply)
        if job.expired:
            client.expired += 1
            self.metrics.results["expired"] += 1
            return
        self.metrics.results["ok"] += 1
        seconds = {
            "decode": decode_s,
            "queue": job.started - job.queued,
            "model": job.finished - job.started,
            "encode": packed - pack_started,
            "total": now - job.arrived,
        }
        self.metrics.answered(seconds, job.batch)


def _message(client: Client, job: ServeJob, decode_s: float) -> dict[str, Any]:
    options = job.options
    timing = {"decode_ms": 1e3 * decode_s}
    if client.encode_ms is not None and client.last_total_ms is not None:
        timing |= {"encode_ms": client.encode_ms, "prev_total_ms": client.last_total_ms}
    message: dict[str, Any] = {}
    if job.expired:
        age = options.age_ms + 1e3 * (time.perf_counter() - job.arrived)
        message["expired"] = {"age_ms": age, "deadline_ms": options.deadline_ms}
    else:
        model_ms = 1e3 * (job.finished - job.started)
        timing |= {
            "queue_ms": 1e3 * (job.started - job.queued),
            "model_ms": model_ms,
            "infer_ms": 1e3 * (job.finished - job.queued),
        }
        message["actions"] = job.actions
        message["policy_timing"] = {"infer_ms": model_ms}
    message["server_timing"] = timing
    if job.request.options is not None:
        fields: dict[str, Any] = {"step": job.step, "episode": job.episode, "batch": job.batch}
        if options.id is not None:
            fields["id"] = options.id
        if options.previous is not None:
            fields["delay"] = options.delay
        message[OPTIONS] = fields
    return message
