"""Metrics of a run between two log lines: means of measured values, rates, and where the time goes."""

from __future__ import annotations

import math
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from flexor.monitor.step_times import COMPUTING, IDLE, PARTS, StepTimes

T = TypeVar("T")
RECENT = 20  # log lines that the time left is computed from
FIRST = 3  # steps of a process in which libraries and caches initialise themselves


def as_json(values: dict[str, Any]) -> dict[str, Any]:
    """Values that JSON can represent. JSON has no infinity, but fp16 sometimes has infinite gradient norms."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}


class Ranks(Protocol):
    """The methods of an engine that meters need."""

    def sum(self, values: Tensor) -> Tensor: ...
    def gather(self, value: T) -> list[T]: ...


@dataclass(frozen=True)
class Arithmetic:
    """The arithmetic of a step, to compare with the GPU's ceiling."""

    flops: float
    """FLOPs of one GPU in a step."""
    ceiling: float | None = None
    """FLOP/s of a large matrix product on this GPU, in the precision of the run."""


@dataclass(frozen=True)
class RankTimes:
    """Measurements of one rank since the last log line."""

    host: str
    elapsed: float
    steps: int
    seconds: dict[str, float]
    """Of all steps, by part."""
    memory: dict[str, float]
    exchanges: bool

    def per_step(self, part: str) -> float:
        """Seconds of a part, per step."""
        return self.seconds.get(part, 0.0) / max(self.steps, 1)

    @property
    def until_sync(self) -> float:
        """Seconds of a step before ranks synchronise. A sharded model does so in every block."""
        parts = ("data", "copy", "forward", "backward") if self.exchanges else ("data", "copy")
        return sum(self.per_step(part) for part in parts)


@dataclass(frozen=True)
class Spent:
    """Steps between two log lines and their time: of all, and of those that were not slow once."""

    steps: int
    seconds: float
    usual_steps: int
    usual_s: float


class Meters:
    """Collects values on their device, so that measuring never makes the loop wait for the GPU."""

    def __init__(
        self,
        device: torch.device | None = None,
        *,
        exchanges: bool = False,
        host: str = "",
        arithmetic: Arithmetic | None = None,
    ) -> None:
        self.device, self.host, self.arithmetic = device, host, arithmetic
        self.times = StepTimes(device, exchanges)
        self.recent: deque[Spent] = deque(maxlen=RECENT)
        self.first_left = FIRST
        self.slow_once = False  # the step that is computed
        self.measured: dict[str, None] = {}  # parts of a step, in order
        self.reset()

    def reset(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.counts: dict[str, int] = defaultdict(int)
        self.parts: set[str] = set()
        self.samples = self.steps = self.usual_steps = 0
        self.usual_s = 0.0
        self.started = self.counted = time.perf_counter()

    def add(self, name: str, value: Tensor, summed: bool = False) -> None:
        """`summed`: the value is this rank's part of a sum over ranks."""
        value = value.detach()
        self.sums[name] = self.sums[name] + value if name in self.sums else value
        self.counts[name] += 1
        if summed:
            self.parts.add(name)

    def leave_out_step(self) -> None:
        """The step that is computed takes longer than later ones: it compiles, warms up, or captures a CUDA graph."""
        self.slow_once = True

    def count_step(self, samples: int) -> None:
        now = time.perf_counter()
        if not (self.slow_once or self.first_left):
            self.usual_steps += 1
            self.usual_s += now - self.counted
        self.counted, self.slow_once, self.first_left = now, False, max(self.first_left - 1, 0)
        self.steps += 1
        self.samples += samples

    def report(self, engine: Ranks, steps_left: int = 0) -> dict[str, Any]:
        """Means since the last reset, rates, and times of a step. `steps_left`: steps until the end of the run.

        Losses are means over all ranks, times and memory those of the rank with the largest.
        """
        parts = sorted(self.parts)
        if parts:
            over_all = engine.sum(torch.stack([self.sums[name].float() for name in parts]))
            self.sums |= dict(zip(parts, over_all))
        values: dict[str, Any] = {name: float(total) / self.counts[name] for name, total in self.sums.items()}
        ranks = engine.gather(self._rank_times())
        elapsed = max(max(rank.elapsed for rank in ranks), 1e-9)
        values["samples_per_s"] = self.samples / elapsed
        values["data_wait"] = max(rank.seconds.get("data", 0.0) for rank in ranks) / elapsed
        if self.times.on_gpu:
            idle = max(sum(rank.seconds.get(part, 0.0) for part in IDLE) for rank in ranks)
            values["gpu_busy"] = max(0.0, 1 - idle / elapsed)
        if self.steps:
            values |= self._of_a_step(ranks, elapsed, steps_left)
        return values

    def _rank_times(self) -> RankTimes:
        elapsed = time.perf_counter() - self.started
        seconds, steps = self.times.take()
        memory = gpu_memory(self.device) if self.device is not None and self.times.on_gpu else {}
        return RankTimes(self.host, elapsed, steps, seconds, memory, self.times.exchanges)

    def _of_a_step(self, ranks: list[RankTimes], elapsed: float, steps_left: int) -> dict[str, Any]:
        values: dict[str, Any] = {"step_s": elapsed / self.steps}
        self.measured |= dict.fromkeys(part for rank in ranks for part in rank.seconds)
        timed = [part for part in (*PARTS, "launch") if part in self.measured and self._measures(part)]
        times = {part: [rank.per_step(part) for rank in ranks] for part in timed}
        values |= {f"{part}_s": max(seconds) for part, seconds in times.items()}
        values["left_s"] = self._left_s(elapsed, steps_left)
        if self.arithmetic is not None:
            values["flops_per_s"] = self.arithmetic.flops / values["step_s"]
            if self.arithmetic.ceiling:
                values["ceiling_share"] = values["flops_per_s"] / self.arithmetic.ceiling
        if ranks[0].memory:
            values["memory"] = {name: max(rank.memory[name] for rank in ranks) for name in ranks[0].memory}
        if len(ranks) > 1:
            values["max_rank"] = {part: seconds.index(max(seconds)) for part, seconds in times.items()}
            values["slowest"] = slowest(ranks)
        return values

    def _measures(self, part: str) -> bool:
        """Whether the time of a part can be measured: by the clock on a CPU, by events on a CUDA GPU."""
        if part in ("copy", "launch"):
            return self.times.on_gpu
        by_clock = self.device is not None and self.device.type == "cpu"
        return part not in COMPUTING or self.times.on_gpu or by_clock

    def _left_s(self, elapsed: float, steps_left: int) -> float:
        """Seconds left, from recent lines: from their usual steps, if they have any."""
        self.recent.append(Spent(self.steps, elapsed, self.usual_steps, self.usual_s))
        lines = list(self.recent)[1:] or list(self.recent)  # the first also fills caches
        usual = [line for line in lines if line.usual_steps]
        if usual:
            each = sum(line.usual_s for line in usual) / sum(line.usual_steps for line in usual)
        else:
            each = sum(line.seconds for line in lines) / sum(line.steps for line in lines)
        return steps_left * each


def slowest(ranks: Sequence[RankTimes]) -> dict[str, Any]:
    """The rank that the others wait for: it takes the longest until they synchronise."""
    seconds = [rank.until_sync for rank in ranks]
    rank = seconds.index(max(seconds))
    return {
        "rank": rank,
        "host": ranks[rank].host,
        "own_s": seconds[rank],
        "others_s": statistics.median(seconds[:rank] + seconds[rank + 1 :]),
    }


def gpu_memory(device: torch.device) -> dict[str, float]:
    """Of torch's allocator: allocated, reserved, the peak of allocated, and how often it was full and had to free
    blocks.
    """
    stats = torch.cuda.memory_stats(device)
    return {
        "allocated_gb": stats["allocated_bytes.all.current"] / 1e9,
        "reserved_gb": stats["reserved_bytes.all.current"] / 1e9,
        "peak_gb": stats["allocated_bytes.all.peak"] / 1e9,
        "retries": stats["num_alloc_retries"],
    }
