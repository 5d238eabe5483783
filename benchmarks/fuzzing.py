"""What the fuzzers of files share: inputs one after the other, under watch, and a report of what went wrong."""

from __future__ import annotations

import argparse
import faulthandler
import logging
import os
import resource
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import trange

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.mutations import HANG_S, Watch

MOST_GROWTH = 200e6  # bytes
MOST_MEMORY = 8 << 30  # bytes more than at the start are an error of what asks for them

Make = Callable[[Path, int, np.random.Generator, Path], str]
"""(folder, number, random numbers, canary) -> the name of the file that was changed."""


def fuzz(
    doc: str, inputs: int, prepare: Callable[[Path], tuple[Make, Mapping[str, Callable[[Path], Any]]]]
) -> int:
    """Run the fuzzer as a program. `prepare` makes what inputs are made of, and gives what makes and takes them."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--inputs", type=int, default=inputs)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="keep the first input of each problem in this folder")
    parsed = parser.parse_args()
    logging.getLogger("flexor").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as name:
        folder = Path(name)
        for place in ("canary", "work", "cache", "home"):
            (folder / place).mkdir()
        (folder / "canary/x").write_text("precious")
        os.environ |= {"FLEXOR_CACHE": str(folder / "cache"), "XDG_CONFIG_HOME": str(folder / "home")}
        make, actions = prepare(folder)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + MOST_MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        problems, growth = _run(folder, make, actions, parsed)
    for problem, count in problems.most_common(40):
        print(f"{count:6}  {problem}")
    print(
        f"{parsed.inputs:,} inputs: {sum(problems.values()):,} problems. Peak memory grew by {growth / 1e6:.1f} MB "
        "after the first tenth."
    )
    return 1 if problems or growth > MOST_GROWTH else 0


def _run(
    folder: Path, make: Make, actions: Mapping[str, Callable[[Path], Any]], parsed: argparse.Namespace
) -> tuple[Counter[str], float]:
    canary, work = folder / "canary", folder / "work"
    watch, problems, before = Watch([work, folder / "cache"], canary), Counter[str](), 0
    names = list(actions)
    for number in trange(parsed.inputs, disable=None):
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        file = make(work / "input", number, np.random.default_rng([parsed.seed, number]), canary)
        name = names[number % len(names)]
        faulthandler.dump_traceback_later(6 * HANG_S, exit=True)
        problem = watch.run(lambda: actions[name](work / "input"))  # noqa: B023
        if problem:
            text = f"{name}: {problem}"
            problems[text] += 1
            if parsed.keep and problems[text] == 1:
                shutil.copytree(
                    work / "input", parsed.keep / f"{number}-{name}-{Path(file).name}", symlinks=True
                )
        if number == parsed.inputs // 10:
            before = _peak_bytes()
    faulthandler.cancel_dump_traceback_later()
    return problems, _peak_bytes() - before


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
