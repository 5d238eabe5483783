"""The planned peak memory of eager steps and of CUDA graphs, against what `step_speed.py` measured. Needs no GPU.

    python benchmarks/step_memory.py benchmarks/results/step_speed_h200_2026-11-18.json

LeRobot lets cuDNN choose kernels by trial, and torch remembers the choice for the rest of the process. So a convolution
that Flexor has in common with LeRobot may run with another workspace than planned: that of TD-MPC in bf16 does, unless
it is in channels-last format.
"""

import argparse
import json
import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from flexor.config.parse import load_config
from flexor.plan.memory.allocator import replay
from flexor.plan.site.hardware import GPU, load_hardware
from flexor.plan.trace.trace import trace_step
from step_speed import CASES, WAYS, Case

DEFAULT = Path(__file__).parent / "results" / "step_speed_h200_2026-11-18.json"


class Peak(NamedTuple):
    case: str
    planned: float
    """MB."""
    measured: float

    @property
    def error(self) -> float:
        return self.planned / self.measured - 1


def peaks(results: Path, only: str = "") -> Iterator[Peak]:
    report = json.loads(results.read_text())
    gpu = load_hardware().find(report["gpu"])
    for measured in report["cases"]:
        case = next(c for c in CASES if (c.policy, c.batch) == (measured["policy"], measured["batch"]))
        for way in WAYS:
            name = f"{case.policy} {case.batch} {way}"
            if only in name and "peak_mb" in measured["ways"].get(way, {}):
                yield Peak(name, planned_peak(case, way, gpu) / 1e6, measured["ways"][way]["peak_mb"])


def planned_peak(case: Case, way: str, gpu: GPU) -> int:
    """Bytes. A run with a graph has eager steps before it."""
    config = load_config([f"--policy.type={case.policy}", "--dataset.repo_id=made/up", *WAYS[way]])
    config = replace(config, policy=case.robot.fill_in(config.policy))
    trace = trace_step(config, case.batch, gpu)
    eager = replay(trace).allocated
    return max(eager, replay(trace, graph=True).allocated) if way.startswith("graph") else eager


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, nargs="?", default=DEFAULT)
    parser.add_argument("--only", default="", help="only cases whose name has this in it")
    args = parser.parse_args()
    errors = []
    for peak in peaks(args.results, args.only):
        print(f"{peak.case:45} planned {peak.planned:8.0f} measured {peak.measured:8.0f} {peak.error:+.2%}")
        errors.append(abs(peak.error))
    print(f"{len(errors)} peaks: median error {statistics.median(errors):.2%}, worst {max(errors):.2%}")


if __name__ == "__main__":
    main()
