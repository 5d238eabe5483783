"""A server in a thread of this process: a learner's, or for measurements and tests."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Protocol

STOP_S = 30.0


class AnyServer(Protocol):
    """One for policies, or for a learner's actors."""

    def running(self) -> AbstractAsyncContextManager[str]: ...


@contextmanager
def in_background(server: AnyServer) -> Iterator[str]:
    """Inside, the server answers at the address given."""
    loop, ready, stop = asyncio.new_event_loop(), threading.Event(), asyncio.Event()
    urls: list[str] = []
    errors: list[Exception] = []

    async def run() -> None:
        try:
            async with server.running() as url:
                urls.append(url)
                ready.set()
                await stop.wait()
        except Exception as error:
            errors.append(error)
        finally:
            ready.set()

    thread = threading.Thread(target=loop.run_until_complete, args=(run(),), name="server", daemon=True)
    thread.start()
    ready.wait()
    try:
        if errors:
            raise errors[0]
        yield urls[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(STOP_S)
        if not thread.is_alive():
            loop.close()
