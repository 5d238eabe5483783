"""How long tests wait. A limit is there to end what hangs: ten times and more of what a busy machine needs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

LIMIT_S = 600.0
FOREVER_S = 10 * LIMIT_S  # for what is to hang


def wait_for(
    condition: Callable[[], object], otherwise: object = "waited too long", every_s: float = 0.005
) -> None:
    """`otherwise` is said, as it is by then, if it does not come about. Ask less often where asking takes long."""
    until = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < until, f"{otherwise}"
        time.sleep(every_s)


def retried(attempt: Callable[[], T], *errors: type[Exception]) -> T:
    """What `attempt` returns. These errors may come of time limits that a busy machine reaches: then again."""
    results: list[T] = []

    def succeeds() -> bool:
        try:
            results.append(attempt())
        except errors:
            return False
        return True

    wait_for(succeeds, f"{attempt} fails again and again")
    return results[0]
