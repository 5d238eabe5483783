"""Time of a chunk of actions for one robot on this GPU: LeRobot's, and Flexor's eager and as a CUDA graph.

    python benchmarks/chunk_speed.py [--policies wall_x ...] [--output FILE.json]

The policies and images are those of `step_speed.py`, with random weights. LeRobot 0.6.1 is measured if it is installed
here, from a processed observation on the GPU; Flexor from images in host memory to actions in host memory, as
`flexor bench policy` does.
"""

import argparse
import gc
import importlib.util
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from flexor.bench.policy import measure, untrained
from flexor.bench.step import Way
from flexor.core.batch import ACTION
from step_speed import CASES, Case, as_lerobot_trains, lerobot_batch, lerobot_policy, settings, timed

CALLS = 30
POLICIES = ["wall_x", "xvla", "pi0", "smolvla"]


def lerobot(case: Case, folder: Path) -> dict[str, float]:
    config, policy, _ = lerobot_policy(case, folder)
    policy.eval()
    batch = {name: value for name, value in lerobot_batch(config, 1).items() if not name.startswith(ACTION)}

    def chunk() -> None:
        with torch.inference_mode():
            policy.reset()
            policy.predict_action_chunk(dict(batch))

    with as_lerobot_trains():
        return timed(chunk)


def flexor(case: Case, way: Way) -> dict[str, Any]:
    figures = measure(untrained(settings(case, []).policy), 1, way, CALLS)
    return {"ms": round(figures["median_ms"], 2), "peak_mb": round(figures["peak_memory_bytes"] / 1e6)}


def ways_of(case: Case, folder: Path) -> dict[str, Callable[[], dict[str, Any]]]:
    ways: dict[str, Callable[[], dict[str, Any]]] = {
        "eager": lambda: flexor(case, "eager"),
        "graph": lambda: flexor(case, "graph"),
    }
    if importlib.util.find_spec("lerobot"):
        ways["LeRobot"] = lambda: lerobot(case, folder)
    return ways


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policies", nargs="*", default=POLICIES, choices=POLICIES)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    report: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "chunks": {}}
    with tempfile.TemporaryDirectory() as folder:
        for policy in args.policies:
            case = next(case for case in CASES if case.policy == policy)
            for name, measured in ways_of(case, Path(folder)).items():
                gc.collect()
                torch.cuda.empty_cache()
                report["chunks"].setdefault(policy, {})[name] = figures = measured()
                print(f"{policy}: {name}: {figures}", flush=True)
                if args.output:
                    args.output.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
