"""A thread that samples the GPUs and the host of a run every few seconds, beside training.

The first process of each host has one. The thread shares nothing with the loop but a few numbers, so a slow disk or a
driver that hangs stops only the sampling. A problem is logged once.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flexor.core.log import log
from flexor.monitor.gpus import Gpu, open_gpus
from flexor.monitor.host import HostCounters, count, load_average
from flexor.monitor.system_file import SystemFile, for_log, merge, summary, system_file

SHORTEST_S = 0.1
WORTH_S = 0.2  # a last sample, at the end of a run, stands for at least this long
LEAVE_S = 2.0  # how long the end of a run waits for the thread


@dataclass(frozen=True)
class ProcessOnHost:
    """A process of the run, as all others need to know it."""

    host: str
    rank: int
    pid: int
    gpu: str | None  # its id; none without an NVIDIA GPU


def this_process(host: str, rank: int, device: torch.device) -> ProcessOnHost:
    gpu = None
    if device.type == "cuda":
        uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
        gpu = None if uuid is None else str(uuid)
    return ProcessOnHost(host, rank, os.getpid(), gpu)


def sampler_for(
    me: ProcessOnHost, everyone: list[ProcessOnHost], folder: Path, every_s: float, step: int
) -> Sampler:
    """The thread of this host, if this is its first process; otherwise one that does nothing."""
    here = [process for process in everyone if process.host == me.host]
    if every_s <= 0 or me.rank != min(process.rank for process in here):
        return Sampler(None, me.host, {}, (), 0, step)
    gpus: dict[str, list[int]] = {}
    for process in here:
        if process.gpu is not None:
            gpus.setdefault(process.gpu, []).append(process.pid)
    pids = [process.pid for process in here]
    return Sampler(system_file(folder, me.rank), me.host, gpus, pids, every_s, step)


class Sampler:
    """Samples until the end of its block. `step` is what the loop has done so far."""

    def __init__(
        self,
        path: Path | None,
        host: str,
        gpus: dict[str, Any],
        pids: Collection[int],
        every_s: float,
        step: int = 0,
    ):
        self.host, self.uuids, self.pids, self.step = host, gpus, pids, step
        self.file = SystemFile(path) if path is not None else None
        self.every_s = max(every_s, SHORTEST_S)
        self._stop, self._lock = threading.Event(), threading.Lock()
        self._since_log: dict[str, Any] | None = None
        self._told: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="flexor-system", daemon=True)

    def __enter__(self) -> Sampler:
        if self.file is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self.file is not None:
            self._thread.join(LEAVE_S)

    def take(self) -> dict[str, float]:
        """Means since the last call; empty if there was no sample since."""
        with self._lock:
            merged, self._since_log = self._since_log, None
        return summary(merged)

    def _run(self) -> None:
        try:
            gpus, before = open_gpus(self.uuids), count(self.pids)
            if self.uuids and not gpus:
                self._tell(
                    "GPUs are not sampled: NVML (nvidia-ml-py and NVIDIA's driver) does not answer", ""
                )
            stopping = False
            while not stopping:
                stopping = self._stop.wait(self.every_s)
                if not stopping or time.monotonic() - before.time >= WORTH_S:
                    before = self._sample(gpus, before)
            assert self.file is not None
            self.file.close()
        except Exception as error:
            self._tell("the machine is no longer sampled", repr(error))

    def _sample(self, gpus: list[Gpu], before: HostCounters) -> HostCounters:
        assert self.file is not None
        now = count(self.pids)
        line: dict[str, Any] = {
            "time": round(time.time(), 3),
            "span": round(now.time - before.time, 3),
            "step": self.step,
            "host": self.host,
            **now.since(before),
            **load_average(),
        }
        if gpus:
            line["gpus"] = [gpu.read() for gpu in gpus]
        with self._lock:
            new = for_log(line)
            self._since_log = new if self._since_log is None else merge(self._since_log, new)
        try:
            self.file.append(line)
        except OSError as error:
            self._tell(f"can't write {self.file.path}: training continues without", str(error))
        return now

    def _tell(self, text: str, why: str) -> None:
        if text not in self._told:
            self._told.add(text)
            log.warning("%s%s", text, f" ({why})" if why else "")
