"""How right plans are: real steps on the GPU of this machine, against what was planned for them.

    python benchmarks/plan_accuracy.py --out results.json

Over policies, batch sizes, precisions, memory formats, steps as CUDA graphs and eager ones, recomputing, accumulation,
moving averages, frozen parts, LoRA and bfloat16 weights: peak of torch's allocator, peak of the process, and time of a
step, uncalibrated and calibrated (in the summary only of steps that the calibration did not measure itself). Then for
three policies the largest batch that the plan says fits, and 10 % more than the smallest that it says does not.
`--calibrate-only` stops after the first part, which takes about half of the time.
Plans are made in processes that do not see the GPU; every run is measured in a process of its own. Where the host is
the bound, time is measured in several rounds over all of them (then some in one process): a shared machine is slow for
a while, and quick again.
Results are written as they come; the same command again goes on where it was stopped. What was measured can be compared
with plans made anew, which takes no GPU:

    python benchmarks/plan_accuracy.py --replan benchmarks/results/plan_accuracy_h200_2026-11-18.json
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # as the trainer sets it

import torch

from flexor.config.parse import load_config
from flexor.config.schema import TrainConfig
from flexor.plan.data.imagined_robot import Robot
from flexor.plan.memory.memory import MemoryPlanner
from flexor.plan.site.hardware import GPU, gpu_here, load_hardware
from flexor.plan.speed import calibrate
from flexor.plan.speed.measure import WINDOWS, MeasuredRun
from flexor.plan.speed.speeds import Speeds, assumed, read, save
from flexor.plan.speed.time import step_time
from flexor.plan.trace.trace import trace_step

ROBOTS = {
    "one": Robot(cameras=1, height=240, width=320),
    "square": Robot(cameras=1, height=224, width=224),
    "large": Robot(cameras=1, height=448, width=448),
    **{kind: Robot(*on[:3]) for kind, on in calibrate.calibrations().items()},
    "multi_task_dit": Robot(),
    "smolvla": Robot(),
    "pi0": Robot(cameras=2, height=224, width=224),
    "eo1": Robot(),
    "xvla": Robot(cameras=2, height=256, width=256),
}


@dataclass(frozen=True)
class Case:
    """A run: a policy, samples in each pass, what it sees, and flags of `flexor train`."""

    policy: str
    batch: int
    flags: str = ""
    robot: str = ""

    def __str__(self) -> str:
        return " ".join(filter(None, [self.policy, str(self.batch), self.robot, self.flags]))

    @staticmethod
    def named(name: str) -> Case:
        """The case of a name in results."""
        words = name.split()
        robot = words[2] if len(words) > 2 and not words[2].startswith("--") else ""
        return Case(words[0], int(words[1]), " ".join(words[3 if robot else 2 :]), robot)

    def after(self, flags: str) -> Case:
        """The same with flags before its own."""
        return replace(self, flags=f"{flags} {self.flags}".strip())

    def config(self) -> TrainConfig:
        flags = [f"--policy.type={self.policy}", "--dataset.repo_id=made/up", *self.flags.split()]
        config = load_config(flags)
        return replace(config, policy=ROBOTS[self.robot or self.policy].fill_in(config.policy))

    @property
    def fitted(self) -> bool:
        """Whether the calibration has measured the operations of just such a step."""
        usual = calibrate.calibrations().get(self.policy)
        plain = {FLOAT32, BF16, EAGER, NCHW}
        return (
            usual is not None
            and not usual.settings
            and not self.robot
            and self.batch in calibrate.BATCHES
            and {*self.flags.split()} <= plain
        )

    @property
    def accumulation(self) -> int:
        return self.config().gradient_accumulation_steps or 1


# Flags that a case does not name: the defaults, which mean a CUDA graph, channels last, and bf16 for some policies.
FLAGS = "--precision=auto --step=auto --channels_last=null"
FLOAT32, BF16 = "--precision=no", "--precision=bf16"
EAGER, NCHW = "--step=eager", "--channels_last=false"
AGAIN = "--activation_checkpointing=true"  # which keeps a step from being a graph
CASES = [
    *(Case("act", batch) for batch in (1, 8, 32, 64)),
    *(Case("act", batch, FLOAT32) for batch in (8, 32)),
    *(Case("act", batch, EAGER) for batch in (8, 32)),
    Case("act", 32, NCHW),
    Case("act", 8, f"{FLOAT32} {NCHW} {EAGER}"),
    Case("act", 16, "--precision=fp16"),
    Case("act", 16, "", "one"),
    Case("act", 32, AGAIN),
    Case("act", 8, "--ema.enable=true"),
    Case("act", 8, "--gradient_accumulation_steps=4"),
    Case("act", 8, "--policy.dim_model=768 --policy.dim_feedforward=4096"),
    Case("act", 32, "--lora.r=16"),
    Case("act", 32, "--weights_dtype=bf16"),
    *(Case("diffusion", batch) for batch in (2, 8, 32)),
    Case("diffusion", 8, FLOAT32),
    Case("diffusion", 8, EAGER),
    Case("diffusion", 32, NCHW),
    Case("diffusion", 16, AGAIN),
    Case("diffusion", 64, "", "one"),
    Case("diffusion", 16, "--lora.r=8"),
    Case("vqbet", 8),
    Case("vqbet", 256),
    Case("vqbet", 8, EAGER),
    Case("vqbet", 64, f"{BF16} {NCHW}"),
    Case("vqbet", 64, "--policy.crop_shape=null", "square"),
    Case("tdmpc", 16),
    Case("tdmpc", 256),
    Case("tdmpc", 256, EAGER),
    Case("tdmpc", 256, f"{BF16} {NCHW}"),
    Case("multi_task_dit", 32),
    Case("multi_task_dit", 8, f"{FLOAT32} {EAGER}"),
    Case("multi_task_dit", 32, "--policy.vision_encoder_lr_multiplier=0"),
    Case("smolvla", 8),
    Case("smolvla", 32, "--policy.freeze_vision_encoder=false --policy.train_expert_only=false"),
    Case("pi0", 8, "--policy.dtype=bfloat16 --policy.gradient_checkpointing=true"),
    Case("eo1", 8),
    Case("eo1", 32),
    Case("eo1", 8, AGAIN),
    Case("eo1", 8, "--precision=bf16 --lora.r=16"),
    Case("xvla", 8),
    Case("xvla", 32),
    Case("xvla", 8, FLOAT32),
    Case("xvla", 32, "--policy.freeze_vision_encoder=true --policy.freeze_language_encoder=true"),
]
TOGETHER = 8  # cases that are timed again in one process
LARGEST = [Case("act", 0), Case("diffusion", 0), Case("vqbet", 0, "--policy.crop_shape=null", "square")]


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
    with MeasuredRun(case.config(), case.batch, case.accumulation) as run:
        memory = run.memory()
        times = timed(run)
        return {"seconds": statistics.median(times), "times": times, **asdict(memory), "host": run.host(5)}


def times_of(cases: list[Case]) -> list[list[float]]:
    """One after the other in one process, which takes less time than one for each."""
    all_times = []
    for case in cases:
        with MeasuredRun(case.config(), case.batch, case.accumulation) as run:
            all_times.append(timed(run))
    return all_times


def timed(run: MeasuredRun) -> list[float]:
    return run.windows(max(2, min(8, int(0.3 / run.window(1)))))


def fits(case: Case) -> dict[str, Any]:
    try:
        with MeasuredRun(case.config(), case.batch):
            return {"fits": True}
    except torch.cuda.OutOfMemoryError:
        return {"fits": False}


def calibrated(gpu: GPU, path: Path) -> dict[str, Any]:
    started = time.perf_counter()
    save(
        calibrate.calibrate(gpu, lambda text: print("calibrating:", text, file=sys.stderr, flush=True)), path
    )
    return {"seconds": time.perf_counter() - started}


def see_no_gpu() -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.set_num_threads(1)


def planned(case: Case, gpu: GPU, speeds: Speeds | None) -> dict[str, Any]:
    """Made by a worker that sees no GPU."""
    config = case.config()
    started = time.perf_counter()
    trace = trace_step(config, case.batch, gpu, case.accumulation)
    memory = MemoryPlanner(config, gpu).plan(trace)
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
    for name, of in (("uncalibrated", assumed()), ("calibrated", speeds)):
        if of is not None:
            step = step_time(trace, gpu, config=config, speeds=of)
            out[name] = {
                "seconds": step.seconds,
                "gpu": step.gpu_seconds,
                "host": step.host_seconds,
                "spread": step.spread,
            }
    return out


def largest(case: Case, gpu: GPU) -> int:
    return MemoryPlanner(case.config(), gpu).largest_batch(1)


Row = dict[str, Any]


def compare(gpu: GPU, cases: list[Case], speeds: Speeds, pool: ProcessPoolExecutor) -> Iterator[Row]:
    for case, plan in zip(cases, plans(gpu, cases, speeds, pool)):
        row = {"case": str(case), "planned": plan, "measured": in_own_process(measured, case)}
        print(line(row), flush=True)
        yield row


def plans(gpu: GPU, cases: list[Case], speeds: Speeds, pool: ProcessPoolExecutor) -> list[dict[str, Any]]:
    """All at once: then the cores are free while the GPU is measured."""
    return list(pool.map(planned, cases, [gpu] * len(cases), [speeds] * len(cases)))


def another_round(rows: list[Row], number: int) -> Iterator[list[Row]]:
    """Measures those again that the host bounds, until all of them were in that many rounds."""
    left = [
        row
        for row in rows
        if "error" not in row["measured"]
        and len(row["measured"]["times"]) < WINDOWS * (number if bound(row) == "host" else 1)
    ]
    for at in range(0, len(left), TOGETHER):
        some = left[at : at + TOGETHER]
        all_times = in_own_process(times_of, [Case.named(row["case"]) for row in some])
        if isinstance(all_times, dict):
            sys.exit(f"Could not be measured again: {all_times['error']}")
        for row, times in zip(some, all_times):
            row["measured"]["times"] += times
            row["measured"]["seconds"] = statistics.median(row["measured"]["times"])
            print(line(row), flush=True)
        yield some


def check_largest(gpu: GPU, cases: list[Case], pool: ProcessPoolExecutor) -> Iterator[Row]:
    for case, size in zip(cases, pool.map(largest, cases, [gpu] * len(cases))):
        over = -(-11 * (size + 1) // 10)
        does = in_own_process(fits, replace(case, batch=size))
        does_not = in_own_process(fits, replace(case, batch=over))
        right = does.get("fits") is True and does_not.get("fits") is False
        row = {
            "case": str(case),
            "largest": size,
            "fits": does,
            "over": over,
            "over_fits": does_not,
            "right": right,
        }
        print(json.dumps(row), flush=True)
        yield row


def line(row: Row) -> str:
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
    )
    return f"{row['case']:60} {memory}  {real['seconds'] * 1e3:7.1f} ms {times} {bound(row)}"


def off(planned: float, measured: float) -> float:
    return planned / measured - 1


def bound(row: Row) -> str:
    """By the plan: which of the two has more to do."""
    times = row["planned"]["calibrated"]
    return "host" if times["host"] > times["gpu"] else "gpu"


def summary(rows: list[Row]) -> dict[str, Any]:
    good = [row for row in rows if "error" not in row["measured"]]
    if not good:
        return {"cases": 0, "failed": len(rows)}

    def errors(name: str) -> dict[str, float]:
        some = [abs(off(row["planned"][name], row["measured"][name])) for row in good]
        return {"median": statistics.median(some), "worst": max(some)}

    def times(kind: str, by: str) -> dict[str, float]:
        some = [
            abs(off(row["planned"][kind]["seconds"], row["measured"]["seconds"]))
            for row in good
            if bound(row) == by and not Case.named(row["case"]).fitted
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
    parser.add_argument("--out", type=Path, help="where results go; unless given: plan_accuracy.json")
    parser.add_argument("--speeds", type=Path, help="a calibration of this GPU; otherwise beside the results")
    parser.add_argument(
        "--only", nargs="+", default=[""], help="only cases whose name has one of these in it"
    )
    parser.add_argument("--no-largest", action="store_true")
    parser.add_argument("--calibrate-only", action="store_true", help="measure the cases another time")
    parser.add_argument(
        "--rounds", type=int, default=2, help="in which time is measured if the host bounds it"
    )
    parser.add_argument("--replan", type=Path, metavar="RESULTS", help="compare those with the plans of now")
    parser.add_argument("--plan-processes", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    args = parser.parse_args()
    workers = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.plan_processes, workers, initializer=see_no_gpu) as pool:
        if args.replan:
            replan(args, pool)
        else:
            measure(args, args.out or Path("plan_accuracy.json"), pool)


def beside(results: Path) -> Path:
    """The calibration that belongs to some results. Without the file it is the one that Flexor ships with."""
    return results.with_suffix(".speeds.json")


def replan(args: argparse.Namespace, pool: ProcessPoolExecutor) -> None:
    result = json.loads(args.replan.read_text())
    rows = [row for row in result["rows"] if any(part in row["case"] for part in args.only)]
    gpu, path = load_hardware().find(result["gpu"]), args.speeds or beside(args.replan)
    speeds = read(path) if path.is_file() else replace(assumed(), elsewhere=False)
    cases = [Case.named(row["case"]).after(result.get("flags", "")) for row in rows]
    for row, plan in zip(rows, plans(gpu, cases, speeds, pool)):
        row["planned"] = plan
        print(line(row))
    result |= {"rows": rows, "summary": summary(rows)}
    print(json.dumps(result["summary"], indent=1))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1))


def measure(args: argparse.Namespace, out: Path, pool: ProcessPoolExecutor) -> None:
    gpu = in_own_process(this_gpu)
    if not isinstance(gpu, GPU):
        sys.exit(f"There is no GPU here that is known: {gpu}")
    result: dict[str, Any] = {
        "gpu": gpu.name,
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "calibration": {},
        "flags": FLAGS,
        "rows": [],
        "largest": [],
    }
    if out.is_file():
        before = json.loads(out.read_text())
        if (before["gpu"], before["torch"]) != (result["gpu"], result["torch"]):
            sys.exit(f"{out} is of {before['gpu']} and torch {before['torch']}: name another file in --out.")
        result = before
        result["rows"] = [row for row in result["rows"] if "error" not in row["measured"]]
    path = args.speeds or beside(out)
    if not path.is_file():
        result["calibration"] = in_own_process(calibrated, gpu, path)
    if "error" in result["calibration"]:
        sys.exit(f"The calibration failed: {result['calibration']['error']}")
    if args.calibrate_only:
        out.write_text(json.dumps(result, indent=1))
        return
    speeds = read(path)

    def left(cases: list[Case], rows: str) -> list[Case]:
        done = [row["case"] for row in result[rows]]
        named = [case for case in cases if any(part in str(case) for part in args.only)]
        return [case for case in named if str(case) not in done]

    def write() -> None:
        result["summary"] = summary(result["rows"])
        out.write_text(json.dumps(result, indent=1))

    for row in compare(gpu, left(CASES, "rows"), speeds, pool):
        result["rows"].append(row)
        write()
    if not args.no_largest:
        for row in check_largest(gpu, left(LARGEST, "largest"), pool):
            result["largest"].append(row)
            write()
    for number in range(2, args.rounds + 1):
        for _ in another_round(result["rows"], number):
            write()
    print(json.dumps(result.get("summary"), indent=1), flush=True)


if __name__ == "__main__":
    main()
