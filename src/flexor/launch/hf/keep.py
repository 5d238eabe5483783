"""Copies a run to a folder that outlives the machine: python -m flexor.launch.hf.keep BACKUP RUN -- train ...

On Hugging Face Jobs that folder is a mounted bucket. A file in a bucket is written once, from start to end,
and exists after it is closed, which waits for its upload. It can't be appended to or locked, and links are
not stored. A run needs all of that, so it trains on the machine's own disk, and finished files are copied:
complete checkpoints, manifest last, and the other files of the run. If a machine dies, only what came after
the last copy is lost. To lose nothing at a time limit, training is told to save and stop some time before it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from flexor.core.errors import CheckpointError
from flexor.core.log import log, setup_logging, warn_once
from flexor.train.checkpoint import folder as checkpoint

CHECKPOINTS = "checkpoints"
TOLD_TO_STOP = 75
LAST_TRIES = 5  # attempts to copy the remaining files after training has ended


def restore(backup: Path, run: Path) -> None:
    """Restore what an earlier machine copied: the newest complete checkpoint, and the other files of the run."""
    if run.exists():
        return  # the same machine again: its own files are newer
    for name in _beside(backup):
        _copy(backup / name, run / name)
    for folder in (backup / CHECKPOINTS).glob("*"):
        if not (folder / checkpoint.MANIFEST).is_file():
            shutil.rmtree(folder, ignore_errors=True)  # the earlier machine died while copying it
    for folder in reversed(checkpoint.complete(backup / CHECKPOINTS).values()):
        copy = run / CHECKPOINTS / folder.name
        try:
            shutil.copytree(folder, copy)
            checkpoint.verify(copy)
        except (OSError, CheckpointError) as error:
            log.warning("can't resume from %s, trying the previous checkpoint: %s", folder, error)
            shutil.rmtree(copy, ignore_errors=True)
        else:
            log.info("restored the run with its checkpoint %s", folder)
            return


class RunKeeper:
    """Copies new files of a run, and removes the copies of checkpoints that the run has removed."""

    def __init__(self, run: Path, backup: Path):
        self.run = run
        self.backup = backup
        self._files = {name: _state(run / name) for name in _beside(run)}
        self._checkpoints = {folder.name for folder in checkpoint.complete(run / CHECKPOINTS).values()}

    def copy(self) -> bool:
        """Copy new files. Returns whether all could be copied; the others are retried next time."""
        complete = {folder.name for folder in checkpoint.complete(self.run / CHECKPOINTS).values()}
        return all(
            [
                *(self._try(self._copy_file, name) for name in _beside(self.run)),
                *(self._try(self._copy_checkpoint, n) for n in sorted(complete - self._checkpoints, key=int)),
                *(
                    self._try(self._remove_checkpoint, n)
                    for n in sorted(self._checkpoints - complete, key=int)
                ),
            ]
        )

    def _try(self, action: Callable[[str], None], name: str) -> bool:
        try:
            action(name)
        except OSError as error:
            log.warning("%s could not be copied to %s yet: %s", name, self.backup, error)
            return False
        return True

    def _copy_file(self, name: str) -> None:
        state = _state(self.run / name)
        if state is not None and state != self._files.get(name):
            _copy(self.run / name, self.backup / name)
            self._files[name] = state

    def _copy_checkpoint(self, name: str) -> None:
        source, target = self.run / CHECKPOINTS / name, self.backup / CHECKPOINTS / name
        self._remove_checkpoint(name)
        paths = [path for path in source.rglob("*") if not _is_link(path) and path.is_file()]
        files = [path.relative_to(source).as_posix() for path in paths]
        try:
            for file in sorted(
                files, key=checkpoint.MANIFEST.__eq__
            ):  # the manifest last: it marks the checkpoint as complete
                _copy(source / file, target / file)
        except OSError:
            shutil.rmtree(target, ignore_errors=True)
            raise
        self._checkpoints.add(name)
        log.info("copied to %s", target)

    def _remove_checkpoint(self, name: str) -> None:
        target = self.backup / CHECKPOINTS / name
        (target / checkpoint.MANIFEST).unlink(missing_ok=True)
        if target.exists():
            shutil.rmtree(target)
        self._checkpoints.discard(name)


def _beside(folder: Path) -> Iterator[str]:
    """The files of a run that are not checkpoints, without hidden files (locks, and files being written)."""
    for where, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name != CHECKPOINTS and not name.startswith(".")]
        for name in files:
            if not name.startswith(".") and not _is_link(Path(where) / name):
                yield (Path(where) / name).relative_to(folder).as_posix()


def _is_link(path: Path) -> bool:
    """Links are not followed: they may lead to any file of the machine."""
    if path.is_symlink():
        warn_once("%s is a symbolic link, so it is not copied", path)
        return True
    return False


def _state(path: Path) -> tuple[int, int] | None:
    """A value that changes when a file changes; None if the file is gone, which can happen at any time."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_size, status.st_mtime_ns


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)


def train_and_keep(
    backup: Path, run: Path, words: Sequence[str], seconds: float | None = None, pause: float = 30.0
) -> int:
    """Run `flexor WORDS` and copy its finished files every `pause` seconds; returns its exit code."""
    restore(backup, run)
    keeper = RunKeeper(run, backup)
    process = subprocess.Popen([sys.executable, "-m", "flexor", *words])
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, _: process.send_signal(number))
    if seconds is not None:
        # a separate thread, because copying may take minutes
        timer = threading.Timer(max(seconds, 0), _stop, [process])
        timer.daemon = True
        timer.start()
    while process.poll() is None:
        keeper.copy()
        with suppress(subprocess.TimeoutExpired):
            process.wait(pause)
    if not _copy_the_rest(keeper, pause):
        log.error("the last files of the run could not be copied to %s", backup)
        return 1
    if process.returncode == TOLD_TO_STOP:
        log.info("saved and stopped: start it again with the same --output_dir to resume")
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


def _stop(process: subprocess.Popen[bytes]) -> None:
    log.info("the time limit is near: telling training to save and stop")
    process.terminate()


def _copy_the_rest(keeper: RunKeeper, pause: float) -> bool:
    for tries in range(LAST_TRIES):
        time.sleep(pause * tries)
        if keeper.copy():
            return True
    return False


def main(arguments: Sequence[str]) -> int:
    at = list(arguments).index("--")
    parser = argparse.ArgumentParser(prog="python -m flexor.launch.hf.keep")
    parser.add_argument("backup", type=Path, help="folder that outlives the machine")
    parser.add_argument("run", type=Path, help="folder of the run during training: its --output_dir")
    parser.add_argument("--seconds", type=float, help="after this many, tell training to save and stop")
    options = parser.parse_args(arguments[:at])
    setup_logging()
    return train_and_keep(options.backup, options.run, arguments[at + 1 :], options.seconds)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
