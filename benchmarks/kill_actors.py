"""Kill -9 at random instants: a learner of two robots, and an actor with a policy of its own.

    python benchmarks/kill_actors.py [--kills 20] [--steps 120] [--seed 0]

No transition may be lost but the one in flight: each actor's records are in the file once, without a gap, and what a
robot did is what was recorded. Another learner that gets nothing but these records must come to the same weights, bit
by bit. The first difference ends the program with an error. Prints a line of JSON for each.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support import actor_kills, online


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0)
    parsed = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="flexor-kills-"))
    os.environ["FLEXOR_CACHE"] = str(folder / "cache")
    try:
        for name in ("kill_learner", "kill_actor"):
            run = getattr(actor_kills, name)(folder / name, parsed.kills, parsed.steps, parsed.seed)
            stored = online.records(run)
            steps, actors = int((stored["is_step"] == 1).sum()), len(actor_kills.parts(stored))
            print(json.dumps({name: {"kills": parsed.kills, "steps": steps, "actors": actors}}), flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
