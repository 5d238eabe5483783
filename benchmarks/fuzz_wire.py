"""Fuzzes the decoder of frames: any bytes are either a message or a WireError, quickly and in little memory.

    python benchmarks/fuzz_wire.py [--inputs 1000000]

Inputs are noise, damaged frames, well-formed ones with arrays that lie about themselves, and headers that promise much.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from pathlib import Path

import numpy as np
from tqdm import trange

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from flexor_client.wire import WireError, decode_jpeg, unpack
from support.frames_to_fuzz import hostile_frame

MOST_GROWTH = 50e6  # bytes
SLOWEST_S = 0.2  # of one input, in time of the processor


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parsed = parser.parse_args()
    rng = np.random.default_rng(parsed.seed)
    refused, slowest, before = 0, 0.0, None
    for number in trange(parsed.inputs, disable=None):
        frame = hostile_frame(rng)
        started = time.thread_time()
        for read in (unpack, decode_jpeg) if frame[:3] == b"\xff\xd8\xff" else (unpack,):
            try:
                read(frame)
            except WireError:
                refused += 1
        slowest = max(slowest, time.thread_time() - started)
        if number == 10_000:
            before = peak_bytes()
    growth = peak_bytes() - (before or peak_bytes())
    print(
        f"{parsed.inputs:,} inputs: {refused:,} refused, the others read; no other exception. Slowest: "
        f"{1e3 * slowest:.1f} ms. Peak memory grew by {growth / 1e6:.1f} MB after the first 10,000."
    )
    return 0 if growth < MOST_GROWTH and slowest < SLOWEST_S else 1


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    raise SystemExit(main())
