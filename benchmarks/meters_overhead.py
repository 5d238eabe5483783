"""What measuring costs: steps with all meters, log lines and samples of the machine against steps without any of them.

    python benchmarks/meters_overhead.py [--device=cuda] [--ways graph eager] [--repeats=15] [--output FILE.json]

ACT on made-up batches that lie on the device, at the batch size whose step takes about 10 ms; on a CPU it is a small
ACT. Steps are eager, and on an NVIDIA GPU also in CUDA graphs: one graph without meters, one for each part with them.
Windows of 40 steps with and without meters alternate. Those with meters end with a log line, five times as often as a
run has one by default, and the machine is sampled every second, also five times as often. The overhead is the median
over all pairs of windows; their quartiles say how far to trust it.
"""

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import torch

from flexor.bench.step import RepeatedStep, name_of
from flexor.config.for_gpu import settle_for_gpu
from flexor.config.parse import load_config
from flexor.config.schema import TrainConfig
from flexor.core.devices import find_device
from flexor.core.run_files import METRICS
from flexor.monitor.meters import Arithmetic, Meters, as_json
from flexor.monitor.step_times import StepTimes
from flexor.monitor.system import Sampler, sampler_for, this_process
from flexor.plan.data.imagined_robot import Robot
from flexor.plan.speed.ceilings import wait_for
from flexor.train.stopping import StopConditions

WAYS = ["graph", "eager"]
WANTED_S = 8e-3  # the first batch size whose step takes at least so long
STEPS = 40  # of a window, by default
WARM_UP = 8  # the steps of a graph are captured in these
SAMPLE_S = 1.0
SETTLE_S = 0.3  # for the thread that samples to start
SMALL = [
    "--policy.dim_model=64",
    "--policy.dim_feedforward=128",
    "--policy.chunk_size=20",
    "--policy.n_action_steps=20",
]
LARGEST = 256


class Loop:
    """The training loop's own work around a step, with its meters or without."""

    def __init__(self, config: TrainConfig, device: torch.device, on: bool, steps: int, folder: Path):
        self.on, self.device, self.steps, self.folder = on, device, steps, folder
        self.step = RepeatedStep(config, device)
        self.state = self.step.run.state
        self.meters = Meters(
            device if on else None, host="here", arithmetic=Arithmetic(1e12, 1e15) if on else None
        )
        self.times = self.state.times = self.meters.times if on else StepTimes()
        self.conditions = StopConditions(None, self.state.engine, lambda: None)  # type: ignore[arg-type]
        for _ in range(WARM_UP):
            self._once()
        self.step.check_captured()

    def _once(self) -> None:
        run, times = self.step.run, self.times
        times.waiting()
        times.has_batch()
        times.begins()
        loss, norm = run.run_step(self.step.batches, self.meters)
        times.queued()
        self.conditions.add_step(self.state.step, self.step.batches, loss, norm, None)
        times.mark("rest")
        self.meters.count_step(1)

    def window(self) -> float:
        """Seconds per step. With meters, the line of the log is part of it."""
        self.meters.reset()
        with self._sampler() as sampler:
            time.sleep(SETTLE_S)
            wait_for(self.device)
            started = time.perf_counter()
            for _ in range(self.steps):
                self._once()
            self.conditions.check()
            if self.on:
                self._log(sampler)
            wait_for(self.device)
            return (time.perf_counter() - started) / self.steps

    def _log(self, sampler: Sampler) -> None:
        self.line = {**self.meters.report(self.state.engine, steps_left=1), "system": sampler.take()}
        with (self.folder / METRICS).open("a") as file:
            file.write(json.dumps(as_json(self.line)) + "\n")

    def _sampler(self) -> Sampler:
        me = this_process("here", 0, self.device)
        return sampler_for(me, [me], self.folder, SAMPLE_S if self.on else 0.0, 0)


def settings(way: str, batch: int, device: torch.device) -> TrainConfig:
    small = device.type == "cpu"
    flags = ["--policy.type=act", f"--batch_size={batch}", f"--step={way}", "--dataset.repo_id=made/up"]
    config = load_config([*flags, f"--policy.device={device}", *(SMALL if small else [])])
    robot = Robot(cameras=1, height=32, width=32) if small else Robot(cameras=2)
    config = replace(config, policy=robot.fill_in(config.policy))
    return settle_for_gpu(config, None if small else torch.cuda.get_device_capability(device))


def of_wanted_length(way: str, device: torch.device, folder: Path) -> int:
    """The batch size whose step takes about 10 ms."""
    batch = 1
    while batch < LARGEST:
        if Loop(settings(way, batch, device), device, False, 5, folder).window() >= WANTED_S:
            break
        batch *= 2
    return batch


def overhead(way: str, device: torch.device, repeats: int, steps: int, folder: Path) -> dict[str, Any]:
    batch = of_wanted_length(way, device, folder)
    off, on = (
        Loop(settings(way, batch, device), device, metered, steps, folder) for metered in (False, True)
    )
    pairs = []
    for number in range(repeats):
        first = (off, on) if number % 2 else (on, off)
        seconds = {loop.on: loop.window() for loop in first}
        pairs.append((seconds[False], seconds[True]))
    shares = [with_ / without - 1 for without, with_ in pairs]
    lowest, _, highest = statistics.quantiles(shares, n=4)
    return {
        "way": way,
        "batch_size": batch,
        "off_ms": 1e3 * statistics.median(without for without, _ in pairs),
        "on_ms": 1e3 * statistics.median(with_ for _, with_ in pairs),
        "overhead": statistics.median(shares),
        "quartiles": [lowest, highest],
        "line": {name: value for name, value in on.line.items() if name.endswith("_s")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", help="default: the fastest there is")
    parser.add_argument("--ways", nargs="+", choices=WAYS, help="default: all that the device has")
    parser.add_argument("--repeats", type=int, default=15, help="pairs of windows, at least 2")
    parser.add_argument("--steps", type=int, default=STEPS, help="of a window")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    device = find_device(args.device)
    if device.type == "cpu":
        torch.set_num_threads(1)  # threads that wait for each other vary more than the meters cost
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for way in args.ways or (WAYS if device.type == "cuda" else ["eager"]):
            row = overhead(way, device, args.repeats, args.steps, Path(folder))
            rows.append(row)
            print(
                f"{way}: batch {row['batch_size']}, {row['off_ms']:.3f} ms without, {row['on_ms']:.3f} ms with meters: "
                f"{100 * row['overhead']:+.2f} % (quartiles {100 * row['quartiles'][0]:+.2f} to "
                f"{100 * row['quartiles'][1]:+.2f} %)",
                flush=True,
            )
    report = {
        "date": str(date.today()),
        "device": name_of(device),
        "torch": torch.__version__,
        "steps_per_window": args.steps,
        "rows": rows,
    }
    if args.output:
        args.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
