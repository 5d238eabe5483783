"""What the loader's threads do with their time, for the lines of the log: reading, decoding, assembling, waiting.

Each piece of work is timed by its own thread, by the clock and by the time on a core. Work that takes long by the clock
and little on a core has waited: for a disk, or for a core that others use.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import Any, NamedTuple

from flexor.data.storage.read_time import read_seconds

SECONDS = (
    "read_s",  # waiting for bytes of videos or images
    "decode_s",  # making frames of them
    "decode_cpu_s",
    "keep_s",  # writing decoded frames to the cache
    "assemble_s",  # copying frames and rows into batches; of a cache on disk, also reading it
    "assemble_cpu_s",
    "host_steps_s",  # the policy's processing on the host, such as tokenising
    "wait_slots_s",  # waiting for room for decoded frames
    "plan_cpu_s",  # of the thread that plans which frames a step needs, and asks for them
)
COUNTS = ("bytes", "frames_decoded", "frames_cached", "threads")


class WorkClock(NamedTuple):
    """The clocks of a thread: wall clock, time on a core, and time spent reading."""

    wall: float
    cpu: float
    read: float

    def since(self, before: WorkClock) -> WorkClock:
        return WorkClock(self.wall - before.wall, self.cpu - before.cpu, self.read - before.read)

    def plus(self, other: WorkClock) -> WorkClock:
        return WorkClock(self.wall + other.wall, self.cpu + other.cpu, self.read + other.read)


NO_WORK = WorkClock(0.0, 0.0, 0.0)


def work_clock() -> WorkClock:
    return WorkClock(time.perf_counter(), time.thread_time(), read_seconds())


def count_seconds(counters: Counter[str], **seconds: float) -> None:
    """Add to sums of microseconds. Call with the counters' lock."""
    for name, value in seconds.items():
        counters[f"{name}_us"] += max(0, round(1e6 * value))


def work_since(current: Counter[str], before: Counter[str]) -> dict[str, Any]:
    """What was done between two looks at the counters."""
    done = {name: (current[f"{name}_us"] - before[f"{name}_us"]) / 1e6 for name in SECONDS}
    done["bytes"] = current["bytes"] - before["bytes"]
    done["frames_decoded"] = current["decoded"] - before["decoded"]
    done["frames_cached"] = current["cached"] - before["cached"]
    return done


def over_ranks(work: list[dict[str, Any]]) -> dict[str, Any]:
    """The loaders of all ranks as one: sums. Where data comes from, is decoded and is cached is the same for all."""
    sums = {name: round(sum(rank[name] for rank in work), 4) for name in (*SECONDS, *COUNTS)}
    return {**sums, **{name: work[0][name] for name in ("source", "cache", "decode_in")}}
