"""Saving by many ranks at once, in the loop or beside it.

Rank 0 owns the checkpoint's folder and makes it appear. A sharded run writes its tensors with torch's distributed
checkpoint, each rank its own part, so that nothing is gathered. With `checkpoint.async` the loop only waits
until everything is copied to the host's memory; a thread does the rest.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from flexor.log import log
from flexor.train import checkpoint
from flexor.train.processes import FOREVER
from flexor.train.run import Run
from flexor.train.saved import SHARDS, STATE, failures_as_oserror
from flexor.train.state import Snapshot, TrainState


class Saver:
    """The checkpoints of a run."""

    def __init__(self, state: TrainState, run: Run):
        self.state, self.run = state, run
        self.processes = state.engine.processes
        self.asynchronous = state.config.checkpoint.asynchronous
        self.newest = checkpoint.newest(run.checkpoints)
        self.thread: threading.Thread | None = None
        self.error: BaseException | None = None
        self.group: Any = self.processes.control
        if self.asynchronous and self.processes.joined:
            # what the thread has to say must not get between what the loop says
            self.group = dist.new_group(backend="gloo", timeout=FOREVER)

    def save(self) -> None:
        """On all ranks, at the same step."""
        self.wait()
        state, config = self.state, self.state.config
        last = state.step == config.steps
        snapshot = state.snapshot(copy=self.asynchronous, export=config.checkpoint.export or last)
        folder = self._open_folder(state.step)
        shards = self._start_shards(snapshot, folder) if state.engine.sharded else None
        if not self.asynchronous:
            self._finish(snapshot, folder, shards)
            return
        self.thread = threading.Thread(
            target=self._finish_quietly, args=(snapshot, folder, shards), name="save", daemon=True
        )
        self.thread.start()

    def wait(self) -> None:
        """Until what is being written is there."""
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        self.check()

    def check(self) -> None:
        """Raise what went wrong beside the loop."""
        if self.error is not None:
            error, self.error = self.error, None
            raise error

    def _open_folder(self, step: int) -> checkpoint.Folder:
        folder = checkpoint.Folder(self.run.checkpoints, step, self.state.config.steps)
        if self.processes.is_main:
            folder.open()
        self.processes.barrier()
        return folder

    def _start_shards(self, snapshot: Snapshot, folder: checkpoint.Folder) -> Callable[[], Any]:
        """Each rank's part on its way to the disk; call what is returned to wait for it."""
        import torch.distributed.checkpoint as dcp

        writer = dcp.FileSystemWriter(folder.aside / STATE / SHARDS)
        if self.asynchronous:
            future = dcp.async_save(snapshot.tensors, storage_writer=writer, process_group=self.group)
            return future.result  # type: ignore[union-attr]
        return lambda: dcp.save(snapshot.tensors, storage_writer=writer, process_group=self.group)

    def _finish(
        self, snapshot: Snapshot, folder: checkpoint.Folder, shards: Callable[[], Any] | None
    ) -> None:
        with folder.failures_named():
            if shards is not None:
                with failures_as_oserror():
                    shards()  # returns when all ranks are done
            if self.processes.is_main:
                snapshot.write(folder.aside)
                self.newest = folder.finish()
                log.info("saved %s", self.newest)
                self._prune()
        if self.group is not None:
            dist.barrier(self.group)
            self.newest = folder.final

    def _finish_quietly(self, *arguments: Any) -> None:
        try:
            self._finish(*arguments)
        except BaseException as error:
            self.error = error

    def _prune(self) -> None:
        settings = self.state.config.checkpoint
        removed = checkpoint.prune(self.run.checkpoints, settings.keep_last, settings.keep_every)
        if removed:
            log.info("removed the checkpoints of steps %s", ", ".join(map(str, removed)))
