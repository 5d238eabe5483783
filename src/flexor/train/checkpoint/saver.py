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
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor

from flexor.core.disk_errors import disk_problem
from flexor.core.log import log
from flexor.core.machine import free_memory, gigabytes, pinned_bytes
from flexor.core.run_files import SHARDS, TRAINING_STATE
from flexor.core.shards import shard_file, write_index, write_shard
from flexor.core.tensors import as_part, is_sharded, local
from flexor.train.checkpoint import folder as checkpoint
from flexor.train.checkpoint.run_folder import Run
from flexor.train.checkpoint.state import Snapshot, TrainState
from flexor.train.ranks.processes import FOREVER

T = TypeVar("T")
FAILURES = (OSError, SafetensorError)  # of a disk, or of a file system
COMPLETE_S = 60  # to complete a checkpoint after an error: the watchdog ends the other ranks then


class Saver:
    """The checkpoints of a run."""

    def __init__(self, state: TrainState, run: Run, on_saved: Callable[[Path], None] | None = None):
        """`on_saved` is called on rank 0 with the folder of each complete checkpoint, before older ones are removed."""
        self.state, self.run, self.on_saved = state, run, on_saved
        self.processes = state.engine.processes
        self.newest = checkpoint.newest(run.checkpoints)
        self.thread: threading.Thread | None = None
        self.started = 0.0  # when the loop began to wait
        self.error: BaseException | None = None
        self.group: Any = self.processes.control
        self.host_copy = HostCopy(state) if state.config.checkpoint.asynchronous else None
        if self.host_copy and self.processes.joined:
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
        work = snapshot, folder, time.perf_counter() - self.started
        self.thread = threading.Thread(target=self._write_in_thread, args=work, name="save", daemon=True)
        self.thread.start()

    def _copy(self, snapshot: Snapshot) -> bool:
        """Whether the loop may go on: what this rank will write is now a copy."""
        if self.host_copy is None or not self._writes_tensors:
            return self.host_copy is not None
        copied = self.host_copy.copy(snapshot.tensors)
        snapshot.tensors = copied or snapshot.tensors
        return copied is not None

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
        if self.host_copy:
            self.host_copy.close()

    def complete(self) -> None:
        """After an error elsewhere, the thread completes its checkpoint, if the other ranks still take part."""
        if self.thread is not None:
            self.thread.join(COMPLETE_S if self.processes.world_size > 1 else None)
            self.thread = None
            if self.error is not None:
                log.error("%s", self.error)

    def check(self) -> None:
        """Once per step: raise an error of the thread that saves."""
        if self.host_copy and self._writes_tensors:
            self.host_copy.reserve(self.state.tensors)
        if self.error is not None:
            error, self.error = self.error, None
            raise error

    def _write(self, snapshot: Snapshot, folder: checkpoint.Folder, waited: float | None = None) -> None:
        """`waited`: for how many seconds the loop waited; None: it still waits."""
        try:
            try:
                self._write_files(snapshot, folder)
            except FAILURES as error:  # all ranks get here
                if not self._make_room(folder, error):
                    raise
                self._write_files(snapshot, folder)
            self._on_all_ranks(lambda: self._finish(folder, waited) if self.processes.is_main else None)
        except FAILURES as error:
            failure = folder.failure(error)  # it names the free space, so it comes before the next lines
            if self.processes.is_main:
                folder.remove()
            raise failure from error
        self.newest = folder.final

    def _finish(self, folder: checkpoint.Folder, waited: float | None) -> None:
        waited = time.perf_counter() - self.started if waited is None else waited
        log.info("saved %s (the loop waited for %.1f s)", folder.final, waited)
        if self.on_saved is not None:
            self.on_saved(folder.final)
        settings = self.state.config.checkpoint
        if removed := checkpoint.prune(self.run.checkpoints, settings.keep_last, settings.keep_every):
            log.info("removed the checkpoints of steps %s", ", ".join(map(str, removed)))

    def _write_files(self, snapshot: Snapshot, folder: checkpoint.Folder) -> None:
        """Write all of the checkpoint. If that fails on any rank, it fails on all of them."""
        is_main, shards = self.processes.is_main, folder.temporary / TRAINING_STATE / SHARDS
        self._on_all_ranks(lambda: folder.open() if is_main else None)
        written: list[tuple[dict[str, Any], str]] = []  # of each rank: the index of its shard, and the hash
        if self.state.engine.sharded:
            write = partial(write_shard, snapshot.tensors, shards, self.processes.rank)
            written = self._gather(self._on_all_ranks(write))

        def write_rest() -> None:
            if written:
                write_index(shards, [index for index, _ in written])
            snapshot.write(folder.temporary)
            names = [(shards / shard_file(i)).relative_to(folder.temporary) for i in range(len(written))]
            folder.finish({name.as_posix(): digest for name, (_, digest) in zip(names, written)})

        self._on_all_ranks(lambda: write_rest() if is_main else None)

    def _make_room(self, folder: checkpoint.Folder, error: Exception) -> bool:
        """On a full disk: remove now what would be removed after this save. Returns whether there was anything."""
        removed: list[int] = []
        problem = disk_problem(error, self.run.checkpoints) if self.processes.is_main else None
        if problem and problem.full:
            settings = self.state.config.checkpoint
            folder.remove()
            removed = folder.make_room(settings.keep_last, settings.keep_every)
            if removed:
                log.warning(
                    "%s: removed the checkpoints of steps %s before saving step %d instead of after it",
                    *(problem.cause, ", ".join(map(str, removed)), folder.step),
                )
        return any(self._gather(bool(removed)))

    def _write_in_thread(self, snapshot: Snapshot, folder: checkpoint.Folder, waited: float) -> None:
        try:
            self._write(snapshot, folder, waited)
        except BaseException as error:
            self.error = error

    def _on_all_ranks(self, work: Callable[[], T]) -> T:
        """Do this rank's part. Returns when all ranks are done; if one of them fails, all fail."""
        failure: Exception | None = None
        try:
            result = work()
        except FAILURES as error:
            failure = error
        errors = self._gather(None if failure is None else f"rank {self.processes.rank}: {failure!r}")
        if failure is None and any(errors):
            failure = OSError("; ".join(filter(None, errors)))
        if failure is not None:
            raise failure
        return result

    def _gather(self, value: T) -> list[T]:
        """The values of all ranks."""
        if self.group is None:
            return [value]
        gathered: list[Any] = [None] * self.processes.world_size
        dist.all_gather_object(gathered, value, group=self.group)
        return gathered


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
        self.constant = {f"model.{name}" for name in state.policy.float32_weights}
        self.refused: str | None = None
        self.tensors: dict[str, Tensor] = {}
        self.allocating: threading.Thread | None = None
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
        if self.allocating is None:
            work = (tensors(),)
            self.allocating = threading.Thread(target=self._allocate, args=work, name="copy", daemon=True)
            self.allocating.start()

    def _allocate(self, tensors: dict[str, Tensor]) -> None:
        new = {n: local(t) for n, t in self._changing(tensors).items() if n not in self.tensors}
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
                copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self.pinned)
                self.tensors[name] = copy.zero_()  # memory is taken when it is first written
        except RuntimeError as error:  # a limit on pinned memory
            self._refuse(f"{gigabytes(need)} of memory: {str(error).splitlines()[0]}")

    def close(self) -> None:
        """Stop allocating: a thread that is in torch when Python ends would abort the process."""
        self.closed = True
        if self.allocating is not None:
            self.allocating.join()

    def _refuse(self, reason: str) -> None:
        self.refused = reason
        self.tensors.clear()
        log.warning("training waits while checkpoints are written: a copy would take %s", reason)

    @torch.no_grad()
    def copy(self, tensors: dict[str, Tensor]) -> dict[str, Tensor] | None:
        """The copy, or None if there is no memory for it."""
        if self.allocating is not None:
            self.allocating.join()
        self._allocate(tensors)
        if self.refused is not None:
            return None
        changing = self._changing(tensors)
        for name, tensor in changing.items():
            self.tensors[name].copy_(local(tensor), non_blocking=True)
        if self.pinned:
            torch.cuda.synchronize()
        copies = {name: as_part(self.tensors[name], tensor, self.mesh) for name, tensor in changing.items()}
        return {**tensors, **copies}

    def _changing(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """All but frozen weights that are in host memory anyway."""
        return {name: tensor for name, tensor in tensors.items() if name not in self.constant}
