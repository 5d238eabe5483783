"""A server under many requests, with clients that come, go, attack it and die within a frame.

    python benchmarks/soak_serve.py [--requests 100000] [--processes 2]

Attackers send texts in the place of numbers, images of endless scans, images that are as expensive as is allowed,
messages that never end, and thousands of pings (`tests/support/soaking.py`). Well-behaved robots must get the right
answer every time, before their deadline, and keep their connection. The memory in use by the model's process must not
grow by more than 5 % from the first three tenths to the last three. The server runs in a process of its own, or in
several.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import multiprocessing
import sys
import time
from collections import Counter
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import mean

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from flexor.core.console import progress
from flexor.serve.web import resident_bytes
from support.serving import numbers, serving
from support.soaking import DEADLINE_S, IMAGE, Soak

MOST_GROWTH = 0.05


def serve(pipe: Connection, processes: int) -> None:
    with serving(numbers(image=IMAGE), requests_per_s=1e6, processes=processes) as (url, _):
        pipe.send(url)
        while pipe.recv() != "stop":
            pipe.send(memory_in_use())


def memory_in_use() -> int:
    """Of this process, in bytes. What is free inside of it is given back first: how much that is varies."""
    gc.collect()
    with suppress(AttributeError):  # of another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)
    return resident_bytes()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--processes", type=int, default=0, help="for connections")
    parsed = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, parsed.processes), daemon=True)
    process.start()
    url, report, started = ours.recv(), progress("requests"), time.perf_counter()
    parts = [max(1, parsed.requests // 10)] * 10
    sizes, wrong, totals, longest_s = [], [], Counter(), 0.0
    for number, requests in enumerate(parts):
        soak = Soak(url, requests, seed=number)
        soak.run()
        wrong += soak.wrong
        totals.update(soak.counts)
        longest_s = max(longest_s, soak.longest_s)
        ours.send("memory")
        sizes.append(ours.recv())
        report(number + 1, len(parts))
    seconds = time.perf_counter() - started
    ours.send("stop")
    process.join(60)
    growth = mean(sizes[-3:]) / mean(sizes[:3]) - 1
    print(", ".join(f"{count:,} {kind}" for kind, count in totals.items()), f"in {seconds:,.0f} s")
    print(f"wrong answers, waits beyond a deadline or lost connections: {len(wrong)} {wrong[:3]}")
    print(
        f"longest wait of a robot: {1e3 * longest_s:,.0f} ms; its deadline: {1e3 * DEADLINE_S:,.0f} ms, exceeded "
        f"{totals['late']} times"
    )
    print(
        f"memory in use after each tenth, MB: {', '.join(f'{size / 1e6:.1f}' for size in sizes)} ({growth:+.1%})"
    )
    return 0 if not wrong and growth <= MOST_GROWTH else 1


if __name__ == "__main__":
    raise SystemExit(main())
