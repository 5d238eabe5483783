"""Fuzzes what strangers send: to a server, to a robot, and as images. Any bytes are read or refused, quickly and in
little memory.

    python benchmarks/fuzz_wire.py [--inputs 1000000]

A server gets noise, damaged frames, well-formed ones with arrays that lie about themselves, headers that promise much,
and observations with something else in the place of a value. It reads them as far as a policy would get them, for
policies with and without a history. A robot gets the same and damaged replies, as metadata and as results. Images are
JPEG files, damaged, or with their parts repeated and mixed up.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
from tqdm import trange

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from flexor_client.errors import WireError
from flexor_client.jpeg import open_jpeg
from flexor_client.replies import read_metadata, read_result
from support.frames_to_fuzz import hostile_file, hostile_frame, hostile_reply
from support.handle_requests import handle, reader_for

MOST_GROWTH = 50e6  # bytes
SLOWEST_S = 0.2  # of one input, in time of the processor
LARGEST_IMAGE = 10**6  # pixels that are decoded here; a server decodes only the size that its policy takes

READERS = [reader_for(8, 8), reader_for(8, 8, [-1, 0])]
METADATA = {"actions": [4, 2]}


def to_server(rng: np.random.Generator) -> Callable[[], bool]:
    frame, reader = hostile_frame(rng), READERS[rng.integers(len(READERS))]
    return lambda: handle(reader, frame) == "read"


def to_robot(rng: np.random.Generator) -> Callable[[], bool]:
    frame = hostile_reply(rng)
    return lambda: read_metadata(frame) is not None and read_result(frame, METADATA) is not None


def as_image(rng: np.random.Generator) -> Callable[[], bool]:
    data = hostile_file(rng)

    def decode() -> bool:
        file = open_jpeg(data)
        return file.height * file.width > LARGEST_IMAGE or file.decode() is not None

    return decode


KINDS = (to_server, to_server, to_robot, as_image)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parsed = parser.parse_args()
    rng = np.random.default_rng(parsed.seed)
    counts: Counter[str] = Counter()
    slowest, before = 0.0, None
    for number in trange(parsed.inputs, disable=None):
        kind = KINDS[number % len(KINDS)]
        read = kind(rng)
        started = time.thread_time()
        try:
            result = "read" if read() else "refused"
        except WireError:
            result = "refused"
        counts[f"{kind.__name__}: {result}"] += 1
        slowest = max(slowest, time.thread_time() - started)
        if number == 10_000:
            before = peak_bytes()
    growth = peak_bytes() - (before or peak_bytes())
    print(
        f"{parsed.inputs:,} inputs: {', '.join(f'{name} {count:,}' for name, count in sorted(counts.items()))}."
    )
    print(
        f"No other exception. Slowest: {1e3 * slowest:.1f} ms. Peak memory grew by {growth / 1e6:.1f} MB after the "
        "first 10,000."
    )
    return 0 if growth < MOST_GROWTH and slowest < SLOWEST_S else 1


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    raise SystemExit(main())
