"""The model in this process, for connections here and in other processes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from itertools import count
from typing import Any

from flexor.policies.session import Session
from flexor.serve.batching import RequestBatcher
from flexor.serve.job import ServeJob
from flexor.serve.limits import BadRequest
from flexor.serve.predictor import Predictor
from flexor.serve.settings import ServeSettings


class LocalModel:
    """A predictor and its queue. See `model.py` for what its methods are."""

    def __init__(self, predictor: Predictor, batcher: RequestBatcher, settings: ServeSettings):
        self.predictor, self.batcher, self.settings = predictor, batcher, settings
        self.clients: set[int] = set()
        self.sessions: set[Session] = set()
        self.numbers = count(1)
        self.remote_figures: Callable[[bool], Awaitable[list[Mapping[str, Any]]]] | None = None
        """The figures of other processes with connections."""

    async def has_room(self) -> bool:
        return len(self.clients) < self.settings.max_clients

    async def enter(self) -> int | None:
        if not await self.has_room():
            return None
        client = next(self.numbers)
        self.clients.add(client)
        return client

    def leave(self, client: int) -> None:
        self.clients.discard(client)

    def session(self) -> Session:
        if len(self.sessions) >= self.settings.max_robots:
            raise BadRequest(f"There are {len(self.sessions)} robots already, on all connections.")
        session = self.predictor.session()
        self.sessions.add(session)
        return session

    async def submit(self, job: ServeJob) -> None:
        job.episode = job.session.episode  # also of one that expires
        await self.batcher.submit(job)

    async def expire(self, job: ServeJob) -> None:
        job.expired, job.episode = True, job.session.episode

    def forget(self, session: Session) -> None:
        self.batcher.forget(session)
        self.sessions.discard(session)

    async def figures(self, local: Mapping[str, Any], images: bool) -> list[Mapping[str, Any]]:
        return [local, *(await self.remote_figures(images) if self.remote_figures else ())]
