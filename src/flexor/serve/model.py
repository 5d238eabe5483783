"""What connections need of the model, which is in their process or in another one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from flexor.serve.job import ServeJob


class Model(Protocol):
    """The one model of a server, for all its connections."""

    async def has_room(self) -> bool:
        """Whether another client may connect."""

    async def enter(self) -> int | None:
        """A client is there. Returns its number, or None if there are too many by now."""

    def leave(self, client: int) -> None: ...

    def session(self) -> Any:
        """For a new robot; BadRequest if there are too many."""

    async def submit(self, job: ServeJob) -> None:
        """Return when the job is answered or has expired."""

    async def expire(self, job: ServeJob) -> None:
        """Answer a job whose time was over before its images were decoded."""

    def forget(self, session: Any) -> None:
        """That robot is gone."""

    async def figures(self, local: Mapping[str, Any], images: bool) -> list[Mapping[str, Any]]:
        """Those of all processes of the server (`Connections.figures`); `local` are this one's."""
