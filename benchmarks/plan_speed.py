"""How long plans take: CPU seconds of this process, for each policy with its defaults.

    python benchmarks/plan_speed.py [--policies act pi0 ...] [--output FILE.json]

The requests are those of the plan page of `flexor ui`, one after the other: the first plan of a policy, whose step is
traced; another GPU, another batch and another number of steps, for which traces are there; and everything after the
plan, which the page shows part by part: the largest batch, and the same training on all GPUs. CPU seconds do not
depend on how busy the machine is as much as the time on a clock does. The page answers with the plan itself.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from pathlib import Path

from flexor.policies import POLICIES
from flexor.ui.plans import Planning, PlanRequest

HEAD = ("policy", "first plan", "another GPU", "another batch", "other steps", "the rest")
CHANGES = {
    "first plan": {"gpu": "RTX 4090"},
    "another GPU": {"gpu": "L40S"},
    "another batch": {"gpu": "L40S", "batch_size": "16"},
    "other steps": {"gpu": "L40S", "batch_size": "16", "steps": "50000"},
}


def plan(planning: Planning, query: dict[str, str]) -> tuple[float, float]:
    """CPU seconds until the plan is there, and of all that follows."""
    started = time.process_time()
    answered = None
    for message in planning.answers(PlanRequest.read(query)):
        if "error" in message:
            raise SystemExit(f"{query}: {message['error']}")
        if "plan" in message and answered is None:
            answered = time.process_time() - started
            if query["gpu"] != CHANGES["first plan"]["gpu"]:
                return answered, 0.0
    assert answered is not None
    return answered, time.process_time() - started - answered


def row(kind: str) -> dict[str, float]:
    planning, seconds = Planning(), {}
    for name, change in CHANGES.items():
        answered, rest = plan(planning, {"policy.type": kind, **change})
        seconds[name] = answered
        if rest:
            seconds["the rest"] = rest
        gc.collect()
    return {name: round(seconds[name], 2) for name in HEAD[1:]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policies", nargs="*", default=list(POLICIES), choices=list(POLICIES))
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    print(f"| {' | '.join(HEAD)} |\n|{' --- |' * len(HEAD)}", flush=True)
    result = {}
    for kind in args.policies:
        result[kind] = row(kind)
        print(f"| {kind} | {' | '.join(f'{seconds:.2f}' for seconds in result[kind].values())} |", flush=True)
    if args.output:
        args.output.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
