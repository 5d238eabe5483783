"""Plans of large models against stored measurements of an H200. It needs no GPU.

    python benchmarks/plan_large_models.py [--only pi0 groot ...] [--output FILE.json]

Rows come from `results/large_models_h200_2026-11-19.json` (the second run), `results/vla_table_h200_2026-11-19.json`
and `results/step_speed_vla_h200_2026-11-17.json`. The last two were measured before RMSNorm, RoPE and gates of language
models had kernels of their own, so they are planned without these; their peak memory was that of another program, and
is not compared. Memory is the peak of torch's allocator.
Steps of `step_speed.py` and `flexor bench step` repeat one batch that stays on the GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

from flexor.config.parse import load_config
from flexor.config.schema import TrainConfig
from flexor.plan.data.imagined_robot import Robot
from flexor.plan.memory.memory import MemoryPlanner
from flexor.plan.site.hardware import load_hardware
from flexor.plan.speed.time import step_time
from flexor.plan.trace.events import Trace
from flexor.plan.trace.trace import trace_step

RESULTS = Path(__file__).parent / "results"
GPU = "H200"
TWO, SMALL, MEDIUM = Robot(), Robot(cameras=2, height=224, width=224), Robot(2, 256, 256)
GRAPH = "--step=graph --precision=bf16 --channels_last=false"
OFF, ONCE = "--dataset.cache.features=off", "--dataset.cache.features=ram"
FULL = "--policy.train_expert_only=false --policy.freeze_vision_encoder=false"
LOWER = "--policy.dtype=bfloat16"
STEPS: dict[str, tuple[str, Robot, str]] = {
    "eo1": ("eo1", TWO, ""),
    "xvla": ("xvla", MEDIUM, ""),
    "groot": ("groot", TWO, OFF),
    "groot images encoded once": ("groot", TWO, ONCE),
    "wall_x": ("wall_x", TWO, ""),
    "pi0 full": ("pi0", SMALL, LOWER),
    "pi0 full, checkpointing": ("pi0", SMALL, f"{LOWER} --policy.gradient_checkpointing=true"),
    "smolvla expert only": ("smolvla", TWO, OFF),
    "smolvla full": ("smolvla", TWO, FULL),
}
"""The cases of `step_speed.py` by their titles: policy, robot and flags."""


@dataclass(frozen=True)
class Row:
    """A step that was measured."""

    policy: str
    flags: str
    robot: Robot
    batch: int
    fused: bool
    """Measured with the kernels of language models."""
    ms: float
    peak: float | None
    """Bytes of torch's allocator; None where another program was measured."""

    def __str__(self) -> str:
        flags = [flag for flag in self.flags.split() if flag not in GRAPH.split()]
        kernels = "" if self.fused else "(without kernels of language models)"
        return " ".join(filter(None, [self.policy, str(self.batch), *flags, kernels]))

    def config(self) -> TrainConfig:
        flags = [f"--policy.type={self.policy}", f"--batch_size={self.batch}", "--dataset.repo_id=made/up"]
        config = load_config([*flags, *self.flags.split()])
        return replace(config, policy=self.robot.fill_in(config.policy))


def rows() -> Iterator[Row]:
    for step in read("large_models_h200_2026-11-19.json")["steps"]:
        policy, robot, flags = STEPS[step["policy"]]
        fused = step["run"] == 2
        peak = 1e6 * step["flexor_peak_mb"] if fused else None
        yield Row(policy, f"{GRAPH} {flags}".strip(), robot, step["batch"], fused, step["flexor_ms"], peak)
    for case in read("step_speed_vla_h200_2026-11-17.json")["cases"]:
        policy, robot, flags = STEPS[case["policy"]]
        ms = case["ways"]["graph, bf16"]["ms"]
        yield Row(policy, f"{GRAPH} {flags}", robot, case["batch"], False, ms, None)
    for row in read("vla_table_h200_2026-11-19.json")["rows"]:
        flags = " ".join(["--policy.load_vlm_weights=false", OFF, "--step=graph", *row["flags"]])
        yield Row(row["policy"], flags, TWO, 8, False, row["measured_ms"], None)


def read(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / name).read_text())


def trace_of(row: Row, config: TrainConfig) -> Trace:
    """As it was measured, with or without the kernels of language models."""
    without = mock.patch("flexor.kernels.language_model._fused", lambda *tensors: False)
    with nullcontext() if row.fused else without:
        return trace_step(config, row.batch, load_hardware().find(GPU), 1)


def planned(row: Row) -> dict[str, Any]:
    config, gpu = row.config(), load_hardware().find(GPU)
    trace = trace_of(row, config)
    step, memory = step_time(trace, gpu, config=config), MemoryPlanner(config, gpu).plan(trace)
    return {
        "ms": 1e3 * step.seconds,
        "allocated": memory.allocated,
        "gpu_ms": {k: 1e3 * s for k, s in step.gpu.items()},
    }


def line(row: Row, plan: dict[str, Any]) -> str:
    time = f"{row.ms:7.1f} ms {plan['ms'] / row.ms - 1:+6.1%}"
    memory = "" if row.peak is None else f"{row.peak / 1e9:7.2f} GB {plan['allocated'] / row.peak - 1:+7.3%}"
    return f"{time} {memory:20} {row}"


def summary(made: list[tuple[Row, dict[str, Any]]]) -> dict[str, Any]:
    def errors(values: list[float]) -> dict[str, float]:
        return (
            {"rows": len(values), "median": statistics.median(values), "worst": max(values)} if values else {}
        )

    times = {fused: [abs(p["ms"] / r.ms - 1) for r, p in made if r.fused == fused] for fused in (True, False)}
    memory = [abs(p["allocated"] / r.peak - 1) for r, p in made if r.peak is not None]
    return {
        "time": errors(times[True] + times[False]),
        "time, with kernels of language models": errors(times[True]),
        "time, without": errors(times[False]),
        "memory": errors(memory),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[""], help="only rows whose name has one of these in it")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    made = []
    for row in (row for row in rows() if any(part in str(row) for part in args.only)):
        made.append((row, planned(row)))
        print(line(*made[-1]), flush=True)
    result = {"rows": [{**asdict(row), "planned": plan} for row, plan in made], "summary": summary(made)}
    print(json.dumps(result["summary"], indent=1))
    if args.output:
        args.output.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
