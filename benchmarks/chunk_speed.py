"""Time of a chunk of actions on this GPU: LeRobot's, and Flexor's eager and as a CUDA graph.

    python benchmarks/chunk_speed.py [--policies pi0 smolvla eo1 xvla ...] [--batch 1] [--output FILE.json]

Policies are those of `step_speed.py`, with random weights, at their default precision and in bf16; ratios are to the
faster of LeRobot's. Flexor is timed from observations in host memory to actions in host memory, with its processing;
LeRobot from a batch that is processed and on the GPU.
"""

import argparse
import json
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from datetime import date
from pathlib import Path
from typing import Any

import torch

import step_speed
from flexor.bench.policy import computing_in, measure, untrained
from flexor.core.batch import ACTION
from flexor.core.console import table
from flexor.serve.open import Precision
from step_speed import CASES, DEVICE, LARGE, as_lerobot_trains, lerobot_batch, lerobot_policy, settings

WARM_UP, CALLS = 3, 15
DTYPES: dict[str, Precision | None] = {"its default": None, "bf16": "bfloat16"}


def lerobot_chunk(case: step_speed.Case, folder: Path, bf16: bool) -> float:
    """Milliseconds, without copies and processing."""
    config, policy, _ = lerobot_policy(case, folder)
    policy.to(DEVICE).eval()
    batch = {k: v for k, v in lerobot_batch(config, case.batch).items() if not k.startswith(ACTION)}

    def chunk() -> None:
        with torch.no_grad(), torch.autocast(DEVICE, torch.bfloat16) if bf16 else nullcontext():
            policy.reset()
            policy.predict_action_chunk(dict(batch)).cpu()

    with as_lerobot_trains():
        return median_ms(chunk)


def median_ms(call: Callable[[], None]) -> float:
    for _ in range(WARM_UP):
        call()
    times = []
    for _ in range(CALLS):
        torch.cuda.synchronize()
        started = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - started))
    return statistics.median(times)


def flexor_chunk(case: step_speed.Case, dtype: Precision | None) -> dict[str, float]:
    """Milliseconds, eager and as a graph."""
    policy = untrained(settings(case, []).policy, dtype)
    with computing_in(dtype, policy):
        return {way: measure(policy, case.batch, way, CALLS)["median_ms"] for way in ("eager", "graph")}


def measured_ways(case: step_speed.Case, folder: Path) -> dict[str, float | str]:
    ways: dict[str, float | str] = {}
    for title, dtype in DTYPES.items():
        for program, call in (
            ("LeRobot", lambda dtype=dtype: {"eager": lerobot_chunk(case, folder, dtype is not None)}),
            ("Flexor", lambda dtype=dtype: flexor_chunk(case, dtype)),
        ):
            torch.cuda.empty_cache()
            try:
                ways |= {f"{program}, {way}, {title}": round(ms, 1) for way, ms in call().items()}
            except Exception as error:
                traceback.print_exc(limit=5)
                ways[f"{program}, {title}"] = f"{type(error).__name__}: {error}"[:200]
    return ways


def rows(case: dict[str, Any]) -> list[list[str]]:
    times = {way: ms for way, ms in case["ways"].items() if isinstance(ms, float)}
    theirs = [ms for way, ms in times.items() if way.startswith("LeRobot")]
    ratios = {way: f"{min(theirs) / ms:.1f}" if theirs else "-" for way, ms in times.items()}
    return [[case["policy"], way, str(ms), ratios.get(way, "-")] for way, ms in case["ways"].items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policies", nargs="*", default=LARGE)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    report: dict[str, Any] = {
        "date": str(date.today()),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cases": [],
    }
    with tempfile.TemporaryDirectory() as folder:
        for policy in args.policies:
            case = next(case for case in CASES if case.policy == policy)._replace(batch=args.batch)
            ways = measured_ways(case, Path(folder))
            print(case.policy, ways, flush=True)
            report["cases"].append({"policy": case.policy, "batch": case.batch, "ways": ways})
            if args.output:
                args.output.write_text(json.dumps(report, indent=1))
    titles = ["policy", "way", "ms", "times LeRobot's speed"]
    print(table([titles, *(row for case in report["cases"] for row in rows(case))]))


if __name__ == "__main__":
    main()
