"""What makes a run slow for real: a slow disk, a slow step, neighbours on its core."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from flexor.data.format.writer import DatasetWriter
from flexor.runs.diagnosis import live

BUSY = "import os, sys\nos.sched_setaffinity(0, {int(sys.argv[1])})\nprint(flush=True)\nwhile True: pass"


def slow_disk(seconds: float) -> None:
    """Every read of a file by position takes this much longer in this process: the time of a slow disk."""
    real = os.pread

    def pread(file: int, count: int, offset: int) -> bytes:
        time.sleep(seconds)
        return real(file, count, offset)

    os.pread = pread


def slow_saves(seconds: float) -> None:
    """Every checkpoint takes this much longer to write in this process: the time of a slow disk."""
    from flexor.train.checkpoint import folder

    real = folder.Folder.finish

    def finish(*arguments: object) -> None:
        time.sleep(seconds)
        real(*arguments)  # type: ignore[arg-type]

    folder.Folder.finish = finish  # type: ignore[assignment]


def slow_steps(seconds: float) -> None:
    """Computing takes this much longer in this process."""
    from flexor.train import step

    real = step.forward_backward

    def forward_backward(*arguments: object) -> object:
        time.sleep(seconds)
        return real(*arguments)  # type: ignore[arg-type]

    step.forward_backward = forward_backward  # type: ignore[assignment]


def look_often(then: Callable[[], object] | None = None) -> None:
    """A verdict comes as soon as there are enough reports for it; and what else befalls this process."""
    live.UPDATE_S = 0.5
    if then:
        then()


def on_core(core: int) -> None:
    os.sched_setaffinity(0, {core})


@contextmanager
def neighbours(core: int, count: int) -> Iterator[None]:
    """Processes that compute all the time, on one core."""
    processes = [
        subprocess.Popen([sys.executable, "-c", BUSY, str(core)], stdout=subprocess.PIPE)
        for _ in range(count)
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()  # it has begun
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def others_use(run: Path) -> float:
    """Cores that others used while a run trained, by the machine's own counters."""
    from flexor.monitor.system_file import read_lines, system_file

    lines = read_lines(system_file(run, 0))
    return sum(line.get("cpu_others", 0.0) for line in lines) / max(len(lines), 1)


def write_large_videos(root: Path, size: tuple[int, int] = (360, 640), length: int = 24) -> Path:
    """An episode of noisy images that take long to decode: every image needs those before it."""
    vector = {"dtype": "float32", "names": None, "shape": (2,)}
    features = {
        "observation.images.top": {
            "dtype": "video",
            "shape": (*size, 3),
            "names": ["height", "width", "channels"],
        },
        "observation.state": vector,
        "action": vector,
    }
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 256, (8, *size, 3), np.uint8)
    with DatasetWriter(root, 10, features, codec="h264", gop=length, crf=23) as writer:
        for frame in range(length):
            value = rng.normal(size=2).astype(np.float32)
            image = np.roll(noise[frame % 8], frame, axis=1)
            writer.add_frame({"observation.images.top": image, "observation.state": value, "action": value})
        writer.save_episode("push")
    return root
