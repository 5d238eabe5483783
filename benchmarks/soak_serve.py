"""A server under many requests, with clients that come, go, attack it and die within a frame.

    python benchmarks/soak_serve.py [--requests 100000] [--processes 2]

Well-behaved clients must get the right answer every time and keep their connection, and the server's memory must not
grow by more than 5 % after the first tenth. The server runs in a process of its own, or in several.
"""

from __future__ import annotations

import argparse
import multiprocessing
import re
import sys
import time
import urllib.request
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from flexor.core.console import progress
from support.serving import numbers, serving
from support.soaking import Soak

MOST_GROWTH = 0.05


def serve(pipe: Connection, processes: int) -> None:
    with serving(numbers(), requests_per_s=1e6, processes=processes) as (url, _):
        pipe.send(url)
        pipe.recv()


def memory(url: str) -> float:
    with urllib.request.urlopen(url.replace("ws", "http", 1) + "/metrics") as answer:
        found = re.search(r"^flexor_resident_memory_bytes (\S+)", answer.read().decode(), re.M)
    assert found
    return float(found[1])


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
    sizes, wrong, totals = [], [], dict.fromkeys(("answered", "left", "died", "hostile"), 0)
    for number, requests in enumerate(parts):
        soak = Soak(url, requests, seed=number)
        soak.run()
        wrong += soak.wrong
        totals = {kind: count + soak.found[kind] for kind, count in totals.items()}
        sizes.append(memory(url))
        report(number + 1, len(parts))
    seconds = time.perf_counter() - started
    ours.send("stop")
    process.join(60)
    growth = max(sizes[1:]) / sizes[0] - 1
    said = ", ".join(f"{count:,} {kind}" for kind, count in totals.items())
    print(f"{said}; {totals['answered'] / seconds:,.0f} requests/s")
    print(f"wrong answers or lost connections: {len(wrong)} {wrong[:3]}")
    print(f"memory after each tenth, MB: {', '.join(f'{size / 1e6:.1f}' for size in sizes)} ({growth:+.1%})")
    return 0 if not wrong and growth <= MOST_GROWTH else 1


if __name__ == "__main__":
    raise SystemExit(main())
