"""The learner's port: actors say what they observe, hand their records over, and get actions or weights."""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from websockets.asyncio.server import ServerConnection
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Response

from flexor import __version__
from flexor.core.errors import FlexorError
from flexor.core.log import log
from flexor.rl.intake import ActorSession, Intake
from flexor.rl.spec import EnvironmentSpec
from flexor.serve import web
from flexor.serve.limits import BadRequest
from flexor.serve.listener import Listener
from flexor.serve.metrics import Metrics
from flexor.serve.rate_limit import ClientNotes
from flexor.serve.server import bind
from flexor.serve.settings import ServeSettings
from flexor_client.errors import WireError, printable
from flexor_client.wire import LEARNER_PROTOCOL, PROTOCOL, Limits, pack, unpack

FAILED, TRY_LATER = 1011, 1013  # close codes
SPOOL = re.compile(r"[0-9a-f]{32}\Z")
LONGEST_NAME = 64
UNFINISHED_FRAMES = 8  # of all actors at one address
TELL_S = 5.0  # for actors to hear that the run is over
FRAME = Limits(items=20_000)


class LearnerPort(Listener):
    """Lets actors in who have the key."""

    allow_flag = "--rl.serve.allow_hosts='[{}]'"

    def __init__(self, settings: ServeSettings, server: LearnerServer):
        unfinished = UNFINISHED_FRAMES * FRAME.frame_bytes
        super().__init__(settings, server.serve, server.notes, Metrics(), FRAME.frame_bytes, unfinished)
        self.server = server

    async def admit(self) -> Response | None:
        if len(self.server.connected) < self.settings.max_clients:
            return None
        return web.response(503, f"{self.settings.too_many()}\n")


class LearnerServer:
    """Use it as `with in_background(server) as url`. Actors are taken as soon as `open` was called."""

    def __init__(self, settings: ServeSettings):
        settings.validate()
        self.settings, self.notes = settings, ClientNotes()
        self.intake: Intake | None = None
        self.described = threading.Event()  # whether an actor has said what it observes
        self.spec: EnvironmentSpec | None = None  # of the first actor
        self.connected: set[ServerConnection] = set()
        self.sessions: dict[int, tuple[ActorSession, ServerConnection]] = {}  # by the actor's number
        self.packer = ThreadPoolExecutor(1, "pack")

    def open(self, intake: Intake) -> None:
        """The learner has begun. From any thread."""
        self.intake = intake

    def wait_for_actor(self) -> EnvironmentSpec:
        """What the first actor observes and does."""
        log.info("waiting for an actor, to learn what it observes and does")
        while not self.described.wait(0.2):  # so that signals are handled
            pass
        assert self.spec is not None
        return self.spec

    def tell_end(self) -> None:
        """Wait a moment until all connected actors know that the run is over."""
        until = time.monotonic() + TELL_S
        while time.monotonic() < until and not all(s.was_told for s, _ in [*self.sessions.values()]):
            time.sleep(0.02)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        """Inside, it listens at the address given."""
        bound = bind(self.settings.host, self.settings.port)
        host, port = bound.getsockname()[:2]
        scheme = "wss" if self.settings.tls() else "ws"
        try:
            async with LearnerPort(self.settings, self).listening(bound):
                yield f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
        finally:
            self.packer.shutdown(wait=False, cancel_futures=True)
            bound.close()

    async def serve(self, connection: ServerConnection) -> None:
        """One actor, from its first message to its last."""
        self.connected.add(connection)
        address = str((connection.remote_address or ("unknown",))[0])
        session: ActorSession | None = None
        try:
            await connection.send(
                pack(
                    {
                        "server": "flexor",
                        "version": __version__,
                        "protocol": PROTOCOL,
                        "learner": LEARNER_PROTOCOL,
                    }
                )
            )
            async for frame in connection:
                if isinstance(frame, str):
                    raise BadRequest("A message must be a binary frame of MessagePack, not text.")
                message = unpack(frame, FRAME)
                if not isinstance(message, dict):
                    raise BadRequest("A message must be a map.")
                if session is None:
                    session, reply = self._enter(message, connection)
                else:
                    reply = await self._answer(session, message)
                run = asyncio.get_running_loop().run_in_executor
                await connection.send(
                    await run(self.packer, pack, reply) if "weights" in reply else pack(reply)
                )
        except ConnectionClosed:
            pass  # whichever way it went, only this actor is concerned
        except (WireError, FlexorError) as error:
            await self._refuse(connection, f"actor {session.name}" if session else address, str(error))
        except OSError:  # of the record file: the learner ends with it, and the actor keeps its records
            await connection.close(TRY_LATER, "the learner can't write")
        finally:
            self.connected.discard(connection)
            if session is not None and self.sessions.get(session.number, (None, None))[1] is connection:
                del self.sessions[session.number]
                log.info("actor %s is gone", session.name)

    async def _refuse(self, connection: ServerConnection, who: str, reason: str) -> None:
        self.notes.note(who, reason)
        with contextlib.suppress(ConnectionClosed):
            await connection.send(reason)
            await connection.close(FAILED, "the message could not be used")

    def _enter(
        self, message: dict[Any, Any], connection: ServerConnection
    ) -> tuple[ActorSession | None, dict[str, Any]]:
        """Who it is; None while the learner has not begun."""
        hello = message.get("hello")
        if not isinstance(hello, dict) or hello.get("protocol") != LEARNER_PROTOCOL:
            raise BadRequest(
                "An actor begins with `hello`; install the flexor-client of the learner's release."
            )
        name, spool, has_policy = (hello.get(key) for key in ("actor", "id", "weights"))
        if not isinstance(name, str) or not 0 < len(name) <= LONGEST_NAME:
            raise BadRequest(f"actor must be a name of at most {LONGEST_NAME} characters.")
        if not isinstance(spool, str) or not SPOOL.match(spool) or not isinstance(has_policy, bool):
            raise BadRequest("id must be 32 hexadecimal digits, and weights true or false.")
        spec = EnvironmentSpec.read(hello.get("environment"))
        if self.intake is None:
            if not self.described.is_set():
                self.spec = spec
                self.described.set()
            return None, {"starting": True}
        session = self.intake.enter(spool, printable(name), has_policy, spec)
        self._replace(session, connection)
        log.info("actor %s is here", session.name)
        return session, self.intake.welcome(session)

    def _replace(self, session: ActorSession, connection: ServerConnection) -> None:
        """An actor that connects again has lost its last connection, whether or not that is known here."""
        _, earlier = self.sessions.get(session.number, (None, None))
        self.sessions[session.number] = session, connection
        if earlier is not None:
            earlier.transport.abort()

    async def _answer(self, session: ActorSession, message: dict[Any, Any]) -> dict[str, Any]:
        intake = self.intake
        assert intake is not None
        if "records" in message:
            return await intake.add(session, message.get("first"), message["records"])
        if "weights" in message:
            return intake.new_weights(message["weights"])
        if "status" in message:
            return intake.status(session)
        raise BadRequest("A message must have records, weights or status.")
