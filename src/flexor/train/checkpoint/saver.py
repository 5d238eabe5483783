"""Saving checkpoints from all ranks, in the training loop or in a thread beside it.

Rank 0 creates the checkpoint's folder and renames it into place. In a sharded run each rank writes its own shard, so
nothing is gathered. With `checkpoint.async`, the default, the loop waits only until all tensors are copied to host
memory; a thread writes them to disk. A rank without enough memory for the copy writes in the loop, whatever the others
do.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor

from flexor.core.log import log
from flexor.core.machine import free_memory, gigabytes, pinned_bytes
from flexor.core.run_files import SHARDS, TRAINING_STATE
from flexor.core.tensors import as_part, is_sharded, local
from flexor.train.checkpoint import folder as checkpoint
from flexor.train.checkpoint.run_folder import Run
from flexor.train.checkpoint.shards import shard_file, write_index, write_shard
from flexor.train.checkpoint.state import Snapshot, TrainState
from flexor.train.ranks.processes import FOREVER

T = TypeVar("T")
FAILURES = (OSError, SafetensorError)  # of a disk, or of a file system
OTHERS_S = 60  # to complete a checkpoint after an error: the watchdog ends the other ranks then


class Saver:
    """The checkpoints of a run."""

    def __init__(self, state: TrainState, run: Run, saved: Callable[[Path], None] | None = None):
        """`saved` is called on rank 0 with the folder of every complete checkpoint, before older ones are removed."""
        self.state, self.run, self.saved = state, run, saved
        self.processes = state.engine.processes
        self.newest = checkpoint.newest(run.checkpoints)
        self.thread: threading.Thread | None = None
        self.started = 0.0  # when the loop began to wait
        self.error: BaseException | None = None
        self.group: Any = self.processes.control
        self.room = HostCopy(state) if state.config.checkpoint.asynchronous else None
        if self.room and self.processes.joined:
            # collectives of the thread must not mix with those of the loop
            self.group = dist.new_group(backend="gloo", timeout=FOREVER)

    def save(self) -> None:
        """Save a checkpoint. All ranks must call this at the same step."""
        self.started = time.perf_counter()
        self.wait()
        state, config = self.state, self.state.config
        snapshot = state.snapshot(export=config.checkpoint.export or state.step == config.steps)
        folder = checkpoint.Folder(self.run.checkpoints, state.step, config.steps)
        if not self._copy(snapshot):
            self._write(snapshot, folder)
            return
        held = time.perf_counter() - self.started
        self.thread = threading.Thread(
            target=self._write_quietly, args=(snapshot, folder, held), name="save", daemon=True
        )
        self.thread.start()

    def _copy(self, snapshot: Snapshot) -> bool:
        """Whether the loop may go on: what this rank will write is now a copy."""
        if self.room is None:
            return False
        if self._writes_tensors:
            copied = self.room.copy(snapshot.tensors)
            snapshot.tensors = copied or snapshot.tensors
            return copied is not None
        return True

    @property
    def _writes_tensors(self) -> bool:
        return self.state.engine.sharded or self.processes.is_main

    def wait(self) -> None:
        """Wait until the checkpoint that is being written is complete."""
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        self.check()

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, Exception):
            self.complete()
        if self.room:
            self.room.close()

    def complete(self) -> None:
        """After an error elsewhere, the thread completes its checkpoint, if the other ranks still take part."""
        if self.thread is not None:
            self.thread.join(OTHERS_S if self.processes.world_size > 1 else None)
            self.thread = None
            if self.error is not None:
                log.error("%s", self.error)

    def check(self) -> None:
        """Once per step: raise an error of the thread that saves."""
        if self.room and self._writes_tensors:
            self.room.reserve(self.state.tensors)
        if self.error is not None:
            error, self.error = self.error, None
            raise error

    def _write(self, snapshot: Snapshot, folder: checkpoint.Folder, held: float | None = None) -> None:
        """`held`: how long the loop waited; None: it still waits."""
        try:
            try:
                self._write_files(snapshot, folder)
            except FAILURES as error:  # all ranks get here
                if not self._make_room(folder, error):
                    raise
                self._write_files(snapshot, folder)
            self._together(lambda: self._complete(folder, held) if self.processes.is_main else None)
        except FAILURES as error:
            failure = folder.failure(error)  # what it says of the free space is before that of the next line
            if self.processes.is_main:
                folder.drop()
            raise failure from error
        self.newest = folder.final

    def _complete(self, folder: checkpoint.Folder, held: float | None) -> None:
        held = time.perf_counter() - self.started if held is None else held
        log.info("saved %s (held the loop for %.1f s)", folder.final, held)
        if self.saved is not None:
            self.saved(folder.final)
        self._prune()

    def _write_files(self, snapshot: Snapshot, folder: checkpoint.Folder) -> None:
        """Write the whole checkpoint. If that fails on any rank, it fails on all of them."""
        is_main, shards = self.processes.is_main, folder.aside / TRAINING_STATE / SHARDS
        self._together(lambda: folder.open() if is_main else None)
        written: list[tuple[dict[str, Any], str]] = []  # of each rank: the index of its shard, and the hash
        if self.state.engine.sharded:
            written = self._gather(self._together(lambda: self._write_shard(snapshot, shards)))

        def write_the_rest() -> None:
            if written:
                write_index(shards, [index for index, _ in written])
            snapshot.write(folder.aside)
            names = [(shards / shard_file(rank)).relative_to(folder.aside) for rank in range(len(written))]
            folder.finish({name.as_posix(): digest for name, (_, digest) in zip(names, written)})

        self._together(lambda: write_the_rest() if is_main else None)

    def _write_shard(self, snapshot: Snapshot, shards: Path) -> tuple[dict[str, Any], str]:
        shards.mkdir(parents=True, exist_ok=True)
        return write_shard(snapshot.tensors, shards, self.processes.rank)

    def _make_room(self, folder: checkpoint.Folder, error: Exception) -> bool:
        """On a full disk: remove now what would be removed after this save. Returns whether there was anything."""
        removed: list[int] = []
        full = checkpoint.no_room(error, self.run.checkpoints) if self.processes.is_main else None
        if full:
            settings = self.state.config.checkpoint
            folder.drop()
            removed = folder.make_room(settings.keep_last, settings.keep_every)
            if removed:
                log.warning(
                    "%s: removed the checkpoints of steps %s before saving step %d instead of after it",
                    full,
                    ", ".join(map(str, removed)),
                    folder.step,
                )
        return any(self._gather(bool(removed)))

    def _write_quietly(self, snapshot: Snapshot, folder: checkpoint.Folder, held: float) -> None:
        try:
            self._write(snapshot, folder, held)
        except BaseException as error:
            self.error = error

    def _together(self, work: Callable[[], T]) -> T:
        """Do this rank's part. Returns when all ranks are done; if one of them fails, all fail."""
        failure: Exception | None = None
        try:
            result = work()
        except FAILURES as error:
            failure = error
        said = self._gather(None if failure is None else f"rank {self.processes.rank}: {failure!r}")
        if failure is None and any(said):
            failure = OSError("; ".join(filter(None, said)))
        if failure is not None:
            raise failure
        return result

    def _gather(self, value: T) -> list[T]:
        """What each rank has."""
        if self.group is None:
            return [value]
        gathered: list[Any] = [None] * self.processes.world_size
        dist.all_gather_object(gathered, value, group=self.group)
        return gathered

    def _prune(self) -> None:
        settings = self.state.config.checkpoint
        removed = checkpoint.prune(self.run.checkpoints, settings.keep_last, settings.keep_every)
        if removed:
            log.info("removed the checkpoints of steps %s", ", ".join(map(str, removed)))


class HostCopy:
    """A copy of a run's tensors in host memory. The next checkpoint reuses the memory.

    If the tensors are on a GPU, the memory is pinned: copying to it is ten times as fast, but allocating it is slow.
    So a thread allocates it as soon as the optimizer has a state, long before the first checkpoint. `refused` says
    why there is no copy: it must leave half of the free memory to the rest of the run, such as its frame cache.
    """

    def __init__(self, state: TrainState):
        self.pinned = state.engine.device.type == "cuda"
        processes = state.engine.processes
        self.copies = processes.local_world_size if state.engine.sharded else 1  # on this machine
        self.refused: str | None = None
        self.tensors: dict[str, Tensor] = {}
        self.getting: threading.Thread | None = None
        self.closed = False
        self.mesh = self._mesh(next((p for p in state.policy.parameters() if is_sharded(p)), None))

    @staticmethod
    def _mesh(sharded: Any) -> Any:
        """The device mesh of `sharded`, for tensors on the CPU."""
        if sharded is None or sharded.device_mesh.device_type == "cpu":
            return getattr(sharded, "device_mesh", None)
        from torch.distributed.device_mesh import init_device_mesh

        return init_device_mesh("cpu", tuple(sharded.device_mesh.mesh.shape))

    def reserve(self, tensors: Callable[[], dict[str, Tensor]]) -> None:
        """Start to allocate memory for these tensors, unless that has started before."""
        if self.getting is None:
            self.getting = threading.Thread(target=self._get, args=(tensors(),), name="room", daemon=True)
            self.getting.start()

    def _get(self, tensors: dict[str, Tensor]) -> None:
        new = {name: local(tensor) for name, tensor in tensors.items() if name not in self.tensors}
        sizes = [tensor.nbytes for tensor in new.values()]
        need = self.copies * sum(pinned_bytes(size) if self.pinned else size for size in sizes)
        free = free_memory()
        if self.refused is None and need > free / 2:
            self._refuse(f"{gigabytes(need)} of memory, and {gigabytes(free)} are free")
        if self.refused is not None:
            return
        try:
            for name, tensor in new.items():
                if self.closed:
                    return
                own = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self.pinned)
                self.tensors[name] = own.zero_()  # memory is taken when it is first written
        except RuntimeError as error:  # a limit on pinned memory
            self._refuse(f"{gigabytes(need)} of memory: {str(error).splitlines()[0]}")

    def close(self) -> None:
        """Stop allocating: a thread that is in torch when Python ends would abort the process."""
        self.closed = True
        if self.getting is not None:
            self.getting.join()

    def _refuse(self, why: str) -> None:
        self.refused = why
        self.tensors.clear()
        log.warning("training waits while checkpoints are written: a copy would take %s", why)

    @torch.no_grad()
    def copy(self, tensors: dict[str, Tensor]) -> dict[str, Tensor] | None:
        """The copy, or None if there is no memory for it."""
        if self.getting is not None:
            self.getting.join()
        self._get(tensors)
        if self.refused is not None:
            return None
        for name, tensor in tensors.items():
            self.tensors[name].copy_(local(tensor), non_blocking=True)
        if self.pinned:
            torch.cuda.synchronize()
        return {name: as_part(self.tensors[name], tensor, self.mesh) for name, tensor in tensors.items()}
