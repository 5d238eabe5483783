"""`--profile=STEP:COUNT`: where the time and the memory of some steps go.

A trace of these steps and, on an NVIDIA GPU, a snapshot of its memory are written to the run's `profile` folder. Other
steps are unaffected. If the files can't be written, the run warns and continues.

A step that is replayed as a CUDA graph has no operations on the host, only the launch of the graph. Its kernels are in
the trace by name, and the costliest are listed by kernel.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType

from flexor.config.profile import parse_profile
from flexor.core.console import table
from flexor.core.log import log
from flexor.core.run_files import PROFILE

ROWS = 10
NAME_LENGTH = 70
MAX_EVENTS = 200_000  # allocations in a snapshot


class Profiling:
    """Profiles those steps between `begin` and `end` that are selected."""

    def __init__(
        self,
        selection: str | None,
        folder: Path,
        device: torch.device,
        rank: int = 0,
        all_ranks: bool = False,
    ):
        self.steps = parse_profile(selection) if selection and (rank == 0 or all_ranks) else None
        self.folder, self.device, self.rank = folder / PROFILE, device, rank
        self._profiler: Any = None
        self._range: Any = None
        self._began = 0

    @property
    def is_on(self) -> bool:
        return self._profiler is not None

    def ends_with(self, step: int) -> bool:
        """Whether the results are written after this step, which may take a while."""
        return self.steps is not None and step == self.steps[1]

    def begin(self, step: int) -> None:
        """Call before a step, with its number."""
        if self.steps is None or not self.steps[0] <= step <= self.steps[1]:
            return
        if self._profiler is None:
            self._began = step
            self._start()
        self._range = torch.profiler.record_function(f"step {step}")
        self._range.__enter__()

    def end(self, step: int) -> None:
        """Call when all work of the step is queued."""
        self._end_range()
        if self._profiler is not None and self.ends_with(step):
            self._finish(step)

    def close(self) -> None:
        """At the end of the run: write what was profiled, or warn that nothing was."""
        self._end_range()
        if self._profiler is not None:
            self._finish(None)
        elif self.steps is not None and self._began == 0:
            log.warning(
                "profile: no step was profiled: this run trained none of the steps %d to %d", *self.steps
            )

    def _end_range(self) -> None:
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None

    def _start(self) -> None:
        kinds = [torch.profiler.ProfilerActivity.CPU]
        if self.device.type == "cuda":
            kinds.append(torch.profiler.ProfilerActivity.CUDA)
            # CUPTI that is taken down or started again while graphs exist crashes with some versions of CUDA
            os.environ.setdefault("TEARDOWN_CUPTI", "0")
            os.environ.setdefault("DISABLE_CUPTI_LAZY_REINIT", "1")
            torch.cuda.synchronize(self.device)
            torch.cuda.memory._record_memory_history(max_entries=MAX_EVENTS, stacks="python")
        self._profiler = torch.profiler.profile(activities=kinds, record_shapes=True, profile_memory=True)
        self._profiler.start()

    def _finish(self, last: int | None) -> None:
        profiler, self._profiler = self._profiler, None
        name = f"steps-{self._began}-{last}" if last is not None else f"steps-{self._began}-unfinished"
        name += f"-rank{self.rank}" if self.rank else ""
        try:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            profiler.stop()
            self._write(profiler, name)
        except (OSError, RuntimeError) as error:
            log.warning("the profile was not written to %s: %s", self.folder, error)
        finally:
            if self.device.type == "cuda":
                torch.cuda.memory._record_memory_history(enabled=None)

    def _write(self, profiler: Any, name: str) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.device.type == "cuda":
            torch.cuda.memory._dump_snapshot(str(self.folder / f"{name}.memory.pickle"))
        profiler.export_chrome_trace(str(self.folder / f"{name}.trace.json.gz"))
        text = costliest(profiler.key_averages(), self.device.type == "cuda")
        (self.folder / f"{name}.txt").write_text(f"{text}\n")
        log.info("profile of %s in %s\n%s", name.replace("-", " ", 1), self.folder, text)


def costliest(averages: Any, on_gpu: bool) -> str:
    """The operations with the most time of their own, as a table. Kernels, if most have no operation, as in a graph."""
    if not on_gpu:
        return _ranked([(e, e.self_cpu_time_total) for e in averages if not _is_label(e)], "operation", "CPU")
    operations = [(e, e.self_device_time_total) for e in averages if e.device_type == DeviceType.CPU]
    on_device = [e for e in averages if e.device_type != DeviceType.CPU and not _is_label(e)]
    kernels = [(e, e.self_device_time_total) for e in on_device]
    launched = sum(time for _, time in operations)
    if launched < 0.5 * sum(time for _, time in kernels):
        return _ranked(kernels, "kernel", "GPU")
    return _ranked([(e, time) for e, time in operations if not _is_label(e)], "operation", "GPU")


def _is_label(event: Any) -> bool:
    """Whether it is a range that a program marked, not an operation."""
    return bool(getattr(event, "is_user_annotation", False)) or re.match(r"step \d+$", event.key) is not None


def _ranked(timed: list[tuple[Any, float]], unit: str, device: str) -> str:
    total = sum(time for _, time in timed) or 1.0
    top = sorted(timed, key=lambda entry: -entry[1])[:ROWS]
    rows: list[tuple[object, ...]] = [(unit, f"{device} time", "share", "calls", "each")]
    for event, time in top:
        name = event.key if len(event.key) <= NAME_LENGTH else event.key[: NAME_LENGTH - 3] + "..."
        calls, share = max(event.count, 1), f"{100 * time / total:.1f} %"
        rows.append((name, f"{time / 1e3:.2f} ms", share, calls, f"{time / calls:.1f} us"))
    return table(rows)
