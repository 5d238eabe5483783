"""The folder of a run: its settings, metrics and checkpoints, and a lock, so that one process at a time uses it."""

from __future__ import annotations

import fcntl
import itertools
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from pathlib import Path

import yaml

from flexor.config.parse import read_run
from flexor.config.schema import TrainConfig
from flexor.core.errors import CheckpointError, ConfigError
from flexor.core.paths import inside, refuse_links_out
from flexor.core.run_files import CHECKPOINTS, LAUNCH, LOCK, METRICS, RUN_CONFIG, VIDEOS
from flexor.core.typed import QuickDumper
from flexor.monitor.system_file import forget_after, system_files
from flexor.train.checkpoint import folder as checkpoint
from flexor.train.ranks.processes import Processes

SHARED_WITHIN = 30  # seconds until another host must see what rank 0 wrote


class Run:
    """An open run folder. Only `open_run` makes one."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.checkpoints = folder / CHECKPOINTS
        self.videos = folder / VIDEOS

    def write_config(self, config: TrainConfig) -> None:
        """Everything needed to repeat the run, except passwords: `flexor train --config RUN/config.yaml`."""
        settings = config.to_saved()
        del settings["output_dir"]  # the folder may be moved, and a repeated run needs another one
        if (self.folder / RUN_CONFIG).is_file() and read_run(self.folder) == settings:
            return  # a run resumes on a full disk too
        text = yaml.dump(settings, Dumper=QuickDumper, sort_keys=False)
        temporary = self.folder / f".{RUN_CONFIG}"
        temporary.write_text(text)
        temporary.rename(self.folder / RUN_CONFIG)

    def forget_metrics_after(self, step: int) -> None:
        """Remove the lines of steps that will be repeated."""
        for path in (self.folder / METRICS, *system_files(self.folder)):
            forget_after(path, step)

    def note_launch(self, launch: str) -> None:
        """Save which launch started the run, so that a restart by the same launcher finds its folder."""
        with suppress(OSError):  # on a full disk: the user names the folder then
            (self.folder / LAUNCH).write_text(launch)


def restarted_folder(launch: str) -> Path | None:
    """The folder of the run that the same launcher started before, for a run without --output_dir."""
    files = sorted(Path("runs").glob(f"*/{LAUNCH}"), reverse=True)
    return next((file.parent for file in files if file.read_text() == launch), None)


def default_folder(job_name: str) -> Path:
    """A new one, also for runs that a script starts in the same second."""
    name = f"{datetime.now():%Y-%m-%d_%H-%M-%S}_{job_name.replace('/', '_')}"
    names = itertools.chain([name], (f"{name}_{number}" for number in itertools.count(2)))
    return next(folder for each in names if not (folder := inside(Path("runs"), each)).exists())


@contextmanager
def join_run(processes: Processes, folder: Path, resume: bool) -> Iterator[Run]:
    """The run folder on all ranks. Rank 0 locks it, the others only use it."""
    with ExitStack() as stack:
        run = processes.share(lambda: stack.enter_context(open_run(folder, resume)))
        _wait_for_shared(folder, processes)
        yield run


def _wait_for_shared(folder: Path, processes: Processes) -> None:
    until = time.monotonic() + SHARED_WITHIN
    while not (folder / LOCK).exists():
        if time.monotonic() > until:
            raise ConfigError(
                f"output_dir={folder}, which rank 0 created, is not visible on {processes.host}: choose a folder on a "
                "file system that all hosts share."
            )
        time.sleep(0.1)


@contextmanager
def open_run(folder: Path, resume: bool) -> Iterator[Run]:
    """Lock a run folder until the end of the block. The lock also ends with the process, however that ends."""
    if resume:
        if not (folder / RUN_CONFIG).is_file():
            raise CheckpointError(f"{folder} is not a Flexor run: it has no {RUN_CONFIG}.")
        refuse_links_out(folder)  # it may be from elsewhere, and its log, metrics and settings are written
    elif folder.exists() and any(p.name not in (LOCK, f".{RUN_CONFIG}") for p in folder.iterdir()):
        resumable = checkpoint.newest(folder / CHECKPOINTS)
        way = f"Continue that run with `flexor resume {folder}`, or choose" if resumable else "Choose"
        raise ConfigError(f"output_dir={folder} is not empty. {way} another folder.")
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.seek(0)
            raise ConfigError(
                f"{folder} is in use by another process ({lock.read().strip() or 'unknown'}): "
                "wait for it, stop it, or choose another --output_dir."
            ) from error
        with suppress(OSError):  # on a full disk; it is the lock that counts
            os.ftruncate(lock.fileno(), 0)
            os.write(lock.fileno(), f"pid {os.getpid()} on {os.uname().nodename}".encode())
        run = Run(folder)
        checkpoint.sweep(run.checkpoints)
        try:
            yield run
        finally:
            if not (folder / RUN_CONFIG).exists():  # failed before it started: leave nothing for the next try
                (folder / LOCK).unlink(missing_ok=True)
                with suppress(OSError):
                    folder.rmdir()
