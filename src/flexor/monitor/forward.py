"""A process that follows a run's `metrics.jsonl` and sends each line to one tracker, exactly once.

    python -m flexor.monitor.forward      a task as JSON on standard input, whose end is the end of the run

A tracker that is slow, hangs or crashes does not affect training. If training is killed, the lines it wrote are still
sent. `.sent-NAME.json` in the run's folder holds the position: a resumed run, which repeats some steps, does not send
them again. A tracker that is switched on later first gets the lines so far.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from flexor.core.log import log, setup_logging
from flexor.core.output_paths import replacing
from flexor.core.run_files import METRICS, sent_file
from flexor.monitor.services import SERVICES, Service, flat

POLL_S = 1.0


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C stops the run, which then stops this process
    setup_logging()
    task = json.loads(sys.stdin.readline())
    ended, parent = threading.Event(), os.getppid()
    threading.Thread(target=_wait_for_end, args=(ended,), daemon=True).start()
    folder, name = Path(task["folder"]), task["tracker"]
    with _locked(folder, name):  # the process of a killed run may still be sending
        service = SERVICES[name](folder, task["settings"])
        with (folder / METRICS).open("rb") as file:
            follower = Follower(file, service, sent_file(folder, name))
            while not ended.wait(POLL_S) and os.getppid() == parent:
                follower.send()
            follower.send()
        service.close()
    return 0


def _wait_for_end(ended: threading.Event) -> None:
    sys.stdin.read()
    ended.set()


@contextmanager
def _locked(folder: Path, name: str) -> Iterator[None]:
    with sent_file(folder, name).with_suffix(".lock").open("a") as lock:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


class Follower:
    """Reads new lines of a file and sends those that have not been sent."""

    def __init__(self, file: Any, service: Service, progress: Path):
        self.file, self.service, self.progress = file, service, progress
        self.step, self.lines = _read_progress(progress)  # the last step that was sent; how many of its lines
        self.position = (-1, 0)
        self.rest = b""

    def send(self) -> None:
        before = (self.step, self.lines)
        *complete, self.rest = (self.rest + self.file.read()).split(b"\n")
        for text in complete:
            with suppress(ValueError):
                self._send(json.loads(text))
        if (self.step, self.lines) == before:
            return
        self.service.flush()
        with replacing(self.progress) as aside:
            aside.write_text(json.dumps({"step": self.step, "lines": self.lines}))

    def _send(self, line: Any) -> None:
        if not isinstance(line, dict) or not isinstance(line.get("step"), int):
            return
        step = line["step"]
        self.position = (step, self.position[1] + 1 if self.position[0] == step else 1)
        if self.position <= (self.step, self.lines):
            return
        self.step, self.lines = self.position
        if step >= self.service.begin_at:
            self.service.log(step, flat({k: v for k, v in line.items() if k not in ("step", "time")}))


def _read_progress(path: Path) -> tuple[int, int]:
    try:
        progress = json.loads(path.read_text())
        return int(progress["step"]), int(progress["lines"])
    except (OSError, ValueError, KeyError, TypeError):
        return -1, 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Exception as error:
        log.error("%s: %s", type(error).__name__, error)
        sys.exit(1)
