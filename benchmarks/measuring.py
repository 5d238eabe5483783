"""One measurement is one process: started alone on given cores, watched, and ended if it takes too much."""

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flexor.bench.memory import PeakMemory
from flexor.core.machine import total_memory

MOST_MEMORY = 0.85  # of the machine's: a program that takes more is stopped before the machine is


def measure(
    words: Sequence[object], env: dict[str, str], cores: Sequence[int], timeout: float
) -> dict[str, Any]:
    """Run a program that prints a JSON object last; that object with the peak memory of all its processes.

    A program that fails, or has to be stopped, gives {"error": why}.
    """
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(
            [str(word) for word in words],
            env=env,
            stdout=out,
            stderr=err,
            start_new_session=True,
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )
        memory = PeakMemory(process.pid)
        stopped = _watch(process, memory, timeout)
        for file in (out, err):
            file.seek(0)
        if stopped or process.returncode:
            last = err.read().strip().splitlines()[-1:] or ["no message"]
            return {"error": stopped or f"failed: {last[0][-300:]}", **memory.figures()}
        return {**memory.figures(), **json.loads(out.read().strip().splitlines()[-1])}


def _watch(process: subprocess.Popen, memory: PeakMemory, timeout: float) -> str | None:
    """Wait for the process's end; why it had to be stopped, if it had."""
    started, stopped = time.monotonic(), None
    while process.poll() is None and stopped is None:
        if memory.sample() > MOST_MEMORY * total_memory():
            stopped = f"stopped at {memory.total / 1e9:.1f} GB, before the machine ran out of memory"
        elif time.monotonic() - started > timeout:
            stopped = f"stopped after {timeout:.0f} s"
        time.sleep(memory.interval)
    if stopped:
        os.killpg(process.pid, signal.SIGKILL)  # a session of its own: its workers, and nobody else
    process.wait()
    return stopped


def machine() -> dict[str, Any]:
    """What a reader must know of the machine."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = {line.split(":", 1)[1].strip() for line in lines if line.startswith(("model name", "CPU part"))}
    system = os.uname()
    return {
        "processor": f"{system.machine}, {', '.join(sorted(models)) or 'unknown model'}",
        "kernel": system.release.split("-")[0],
        "memory_gb": round(total_memory() / 1e9, 1),
    }
