"""Runs that are killed with -9 at random instants, most of them during a save: each ends as if nothing had happened.

    python benchmarks/kill_resume.py [--kills 50] [--seed 0] [--cases act diffusion "act, fsdp"]

ACT and Diffusion Policy in one process, and ACT in two processes that share the model (FSDP), on the CPU. All of them
save every step. After each kill, a copy of the run is resumed to its end and compared, bit by bit, with a run that
nobody killed: losses, gradient norms, weights, optimizer, average. Then the run itself goes on, to be killed again. The
first difference ends the program with an error. Prints a table, and one JSON object with --json.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from flexor.core.console import progress, table
from support.killing import CASES, STEPS, Kill, Victim


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", nargs="+", choices=[*CASES], default=[*CASES])
    parser.add_argument("--json", action="store_true")
    parsed = parser.parse_args()
    folder, started = Path(tempfile.mkdtemp(prefix="flexor-kills-")), time.perf_counter()
    os.environ["FLEXOR_CACHE"] = str(folder / "cache")
    try:
        victims = [
            Victim(case, folder / str(number), parsed.seed) for number, case in enumerate(parsed.cases)
        ]
        report, kills = progress("kills"), []
        for number in range(parsed.kills):
            kills.append(victims[number % len(victims)].kill())
            report(number + 1, parsed.kills)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    seconds = time.perf_counter() - started
    if parsed.json:
        print(
            json.dumps(
                {"seed": parsed.seed, "seconds": round(seconds), "kills": [vars(each) for each in kills]}
            )
        )
        return 0
    print(summary(kills, parsed.cases))
    print(
        f"{len(kills)} kills in {seconds:.0f} s, each resumed to the same bits as a run of {STEPS} steps without kills"
    )
    return 0


def summary(kills: Sequence[Kill], cases: Sequence[str]) -> str:
    rows: list[list[object]] = [
        ["case", "kills", "during a save", "before the first checkpoint", "bitwise equal"]
    ]
    for case in cases:
        case_kills = [kill for kill in kills if kill.case == case]
        saving, early = (
            sum(kill.saving for kill in case_kills),
            sum(kill.saved is None for kill in case_kills),
        )
        rows.append([case, len(case_kills), saving, early, len(case_kills)])
    return table(rows)


if __name__ == "__main__":
    sys.exit(main())
