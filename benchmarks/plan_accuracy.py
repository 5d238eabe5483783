"""How right plans are: real steps on the GPU of this machine, against what was planned for them.

    python benchmarks/plan_accuracy.py --out results.json

Over policies, batch sizes, precisions, recomputing, accumulation, moving averages, frozen parts, LoRA and bfloat16
weights: peak of torch's allocator, peak of the process, and time of a step, uncalibrated and calibrated. Then for each
policy the largest batch that the plan says fits, and 10 % more than the smallest that it says does not.
Plans are made in processes that do not see the GPU; every run is measured in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # as the trainer sets it

import torch

from flexor.config import EMAConfig, TrainConfig
from flexor.plan.calibrate import ROBOTS, calibrate
from flexor.plan.hardware import GPU, gpu_here, load_hardware
from flexor.plan.measure import Measured
from flexor.plan.memory import MemoryPlanner
from flexor.plan.robot import Robot
from flexor.plan.speeds import Speeds, assumed, read, save
from flexor.plan.time import step_time
from flexor.plan.trace import trace_step
from flexor.policies import policy_class


@dataclass(frozen=True)
class Case:
    policy: str
    batch: int
    precision: str = "no"
    robot: Robot | None = None
    checkpointing: bool = False
    ema: bool = False
    accumulation: int = 1
    more: dict[str, Any] = field(default_factory=dict)
    """Settings of the policy."""

    def __str__(self) -> str:
        words = [self.policy, f"B{self.batch}", "fp32" if self.precision == "no" else self.precision]
        words += [str(x) for x in self.more.items()]
        if self.robot:
            words.append(f"{self.robot.cameras}x{self.robot.height}x{self.robot.width}")
        words += [name for name in ("checkpointing", "ema") if getattr(self, name)]
        return " ".join(words + ([f"x{self.accumulation}"] if self.accumulation > 1 else []))

    def config(self) -> TrainConfig:
        policy = policy_class(self.policy).Config(**self.more)
        return TrainConfig(
            policy=(self.robot or ROBOTS[self.policy]).fill_in(policy),
            precision=self.precision,
            activation_checkpointing=self.checkpointing,
            ema=EMAConfig(enable=self.ema),
            gradient_accumulation_steps=self.accumulation,
        )


ONE = Robot(cameras=1, height=240, width=320)
SQUARE = Robot(cameras=1, height=224, width=224)
CASES = [
    *(Case("act", batch, precision) for batch in (1, 8, 32, 64) for precision in ("no", "bf16")),
    Case("act", 16, "fp16"),
    Case("act", 16, "no", ONE),
    Case("act", 64, "bf16", ONE),
    Case("act", 32, "no", checkpointing=True),
    Case("act", 32, "bf16", checkpointing=True),
    Case("act", 8, "bf16", ema=True),
    Case("act", 8, "no", accumulation=4),
    Case("act", 8, "bf16", accumulation=2),
    Case("act", 8, "bf16", more={"vision_backbone": "resnet34"}),
    Case("act", 8, "no", more={"dim_model": 768, "dim_feedforward": 4096}),
    *(Case("diffusion", batch, precision) for batch in (2, 8, 32) for precision in ("no", "bf16")),
    Case("diffusion", 16, "bf16", checkpointing=True),
    Case("diffusion", 16, "no", ONE),
    Case("diffusion", 64, "bf16", ONE),
    Case("diffusion", 8, "no", ema=True),
    Case("diffusion", 8, "bf16", accumulation=2),
    *(Case("vqbet", batch, precision) for batch in (8, 64, 256) for precision in ("no",)),
    Case("vqbet", 64, "bf16"),
    Case("vqbet", 32, "no", SQUARE, more={"crop_shape": None}),
    Case("vqbet", 128, "no", SQUARE, more={"crop_shape": (200, 200)}),
    *(Case("tdmpc", batch, precision) for batch in (16, 256) for precision in ("no", "bf16")),
    Case("tdmpc", 64, "no", SQUARE),
    Case("tdmpc", 64, "bf16", ema=True),
]
LARGEST = [
    Case("act", 0, "bf16"),
    Case("diffusion", 0, "bf16"),
    Case("vqbet", 0, "no", SQUARE, more={"crop_shape": None}),
    Case("tdmpc", 0, "no", SQUARE),
]


def in_own_process(function: Any, *arguments: Any) -> Any:
    """What a function returns, or what it raised as text; the process is forked before CUDA is there."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(False)

    def work() -> None:
        try:
            theirs.send(function(*arguments))
        except Exception as error:  # the next case goes on
            theirs.send({"error": f"{type(error).__name__}: {str(error)[:300]}"})

    process = context.Process(target=work)
    process.start()
    theirs.close()
    try:
        result = ours.recv()
    except EOFError:
        result = {"error": "the process died"}
    process.join()
    return result


def this_gpu() -> GPU | None:
    return gpu_here(load_hardware())


def measured(case: Case) -> dict[str, Any]:
    with Measured(case.config(), case.batch, case.accumulation) as run:
        memory = run.memory()
        rough = run.steps(2)
        seconds = run.steps(max(4, min(30, int(1.0 / rough))))
        return {"seconds": seconds, **asdict(memory)}


def fits(case: Case) -> dict[str, Any]:
    try:
        with Measured(case.config(), case.batch):
            return {"fits": True}
    except torch.cuda.OutOfMemoryError:
        return {"fits": False}


def calibrated(gpu: GPU, path: Path) -> dict[str, Any]:
    started = time.perf_counter()
    save(calibrate(gpu, lambda text: print("calibrating:", text, file=sys.stderr, flush=True)), path)
    return {"seconds": time.perf_counter() - started}


def planned(case: Case, gpu: GPU, speeds: Speeds | None) -> dict[str, Any]:
    """Made by a worker that sees no GPU."""
    torch.set_num_threads(1)
    config = case.config()
    started = time.perf_counter()
    trace = trace_step(config, case.batch, gpu, case.accumulation)
    memory = MemoryPlanner(config, gpu, expandable=True).plan(trace)
    took = time.perf_counter() - started
    out = {
        "allocated": memory.allocated,
        "reserved": memory.reserved,
        "process": memory.total,
        "phase": memory.phase,
        "operation": memory.operation,
        "parts": memory.parts,
        "planning_seconds": took,
    }
    for name, of in (("uncalibrated", assumed_or_none()), ("calibrated", speeds)):
        if of is not None:
            step = step_time(trace, gpu, config=config, speeds=of)
            out[name] = {
                "seconds": step.seconds,
                "gpu": step.gpu_seconds,
                "host": step.host_seconds,
                "spread": step.spread,
            }
    return out


def assumed_or_none() -> Speeds | None:
    try:
        return assumed()
    except FileNotFoundError:
        return None


def largest(case: Case, gpu: GPU) -> int:
    torch.set_num_threads(1)
    return MemoryPlanner(case.config(), gpu, expandable=True).largest_batch(1)


def compare(gpu: GPU, cases: list[Case], speeds: Speeds, pool: ProcessPoolExecutor) -> list[dict[str, Any]]:
    plans = [pool.submit(planned, case, gpu, speeds) for case in cases]
    rows = []
    for plan in plans:
        plan.result()  # so that all cores are free while the GPU is measured
    for case, plan in zip(cases, plans):
        rows.append({"case": str(case), "planned": plan.result(), "measured": in_own_process(measured, case)})
        print(line(rows[-1]), flush=True)
    return rows


def check_largest(gpu: GPU, pool: ProcessPoolExecutor) -> list[dict[str, Any]]:
    rows = []
    for case, size in zip(LARGEST, pool.map(largest, LARGEST, [gpu] * len(LARGEST))):
        over = -(-11 * (size + 1) // 10)
        does = in_own_process(fits, replace(case, batch=size))
        does_not = in_own_process(fits, replace(case, batch=over))
        right = does.get("fits") is True and does_not.get("fits") is False
        rows.append(
            {
                "case": str(case),
                "largest": size,
                "fits": does,
                "over": over,
                "over_fits": does_not,
                "right": right,
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    return rows


def line(row: dict[str, Any]) -> str:
    plan, real = row["planned"], row["measured"]
    if "error" in real:
        return f"{row['case']:60} {real['error']}"
    memory = " ".join(
        f"{name} {plan[name] / 1e9:7.3f}/{real[name] / 1e9:7.3f} {off(plan[name], real[name]):+6.1%}"
        for name in ("allocated", "reserved", "process")
    )
    times = " ".join(
        f"{name} {plan[name]['seconds'] * 1e3:7.1f} {off(plan[name]['seconds'], real['seconds']):+6.1%}"
        for name in ("uncalibrated", "calibrated")
        if name in plan
    )
    return f"{row['case']:60} {memory}  {real['seconds'] * 1e3:7.1f} ms {times} {bound(row)}"


def off(planned: float, measured: float) -> float:
    return planned / measured - 1


def bound(row: dict[str, Any]) -> str:
    """By the plan: which of the two has more to do."""
    times = row["planned"]["calibrated"]
    return "host" if times["host"] > times["gpu"] else "gpu"


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    good = [row for row in rows if "error" not in row["measured"]]

    def errors(name: str) -> dict[str, float]:
        some = [abs(off(row["planned"][name], row["measured"][name])) for row in good]
        return {"median": statistics.median(some), "worst": max(some)}

    def times(kind: str, by: str) -> dict[str, float]:
        some = [
            abs(off(row["planned"][kind]["seconds"], row["measured"]["seconds"]))
            for row in good
            if kind in row["planned"] and bound(row) == by
        ]
        return {"cases": len(some), "median": statistics.median(some), "worst": max(some)} if some else {}

    return {
        "cases": len(good),
        "failed": len(rows) - len(good),
        **{name: errors(name) for name in ("allocated", "reserved", "process")},
        **{
            f"time, {by}-bound, {kind}": times(kind, by)
            for by in ("gpu", "host")
            for kind in ("uncalibrated", "calibrated")
        },
        "slowest plan, seconds": max(row["planned"]["planning_seconds"] for row in good),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("plan_accuracy.json"))
    parser.add_argument("--speeds", type=Path, help="a calibration of this GPU; measured anew unless given")
    parser.add_argument("--only", default="", help="only cases whose name has this in it")
    parser.add_argument("--no-largest", action="store_true")
    parser.add_argument("--plan-processes", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    args = parser.parse_args()
    gpu = in_own_process(this_gpu)
    if not isinstance(gpu, GPU):
        sys.exit(f"There is no GPU here that is known: {gpu}")
    path = args.speeds or args.out.with_suffix(".speeds.json")
    took = in_own_process(calibrated, gpu, path) if args.speeds is None else {}
    if "error" in took:
        sys.exit(f"The calibration failed: {took['error']}")
    speeds = read(path)
    cases = [case for case in CASES if args.only in str(case)]
    workers = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.plan_processes, mp_context=workers) as pool:
        rows = compare(gpu, cases, speeds, pool)
        sizes = [] if args.no_largest else check_largest(gpu, pool)
    result = {
        "gpu": gpu.name,
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "calibration": took,
        "summary": summary(rows),
        "largest": sizes,
        "rows": rows,
    }
    args.out.write_text(json.dumps(result, indent=1))
    print(json.dumps(result["summary"], indent=1))


if __name__ == "__main__":
    main()
