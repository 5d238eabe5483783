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
from typing import Any, TypedDict

import torch
import torch.distributed as dist
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

OTHERS_S = 60  # to complete a checkpoint after an error: the watchdog ends the other ranks then


class ShardResult(TypedDict):
    """What the ranks tell each other of the shards they wrote."""

    index: dict[str, Any]
    hashes: dict[str, str]
    error: str | None


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
        with folder.failures_named():
            if self.processes.is_main:
                folder.open()
            self._together()
            hashes = self._write_shards(snapshot, folder) if self.state.engine.sharded else {}
            if self.processes.is_main:
                snapshot.write(folder.aside)
                folder.finish(hashes)
                held = time.perf_counter() - self.started if held is None else held
                log.info("saved %s (held the loop for %.1f s)", folder.final, held)
                if self.saved is not None:
                    self.saved(folder.final)
                self._prune()
        self._together()
        self.newest = folder.final

    def _write_shards(self, snapshot: Snapshot, folder: checkpoint.Folder) -> dict[str, str]:
        """Write this rank's shard. Returns when all ranks are done, with the hash of every file.

        An error of one rank is raised on all of them.
        """
        shards = folder.aside / TRAINING_STATE / SHARDS
        result: ShardResult = {"index": {}, "hashes": {}, "error": None}
        try:
            shards.mkdir(parents=True, exist_ok=True)
            index, digest = write_shard(snapshot.tensors, shards, self.processes.rank)
            file = (shards / shard_file(self.processes.rank)).relative_to(folder.aside)
            result |= {"index": index, "hashes": {file.as_posix(): digest}}
        except OSError as error:
            result["error"] = f"rank {self.processes.rank}: {error!r}"
        results: list[ShardResult] = [result] * self.processes.world_size
        dist.all_gather_object(results, result, group=self.group)
        if errors := [each["error"] for each in results if each["error"]]:
            raise OSError("; ".join(errors))
        if self.processes.is_main:
            write_index(shards, [each["index"] for each in results])
        return {name: digest for each in results for name, digest in each["hashes"].items()}

    def _write_quietly(self, snapshot: Snapshot, folder: checkpoint.Folder, held: float) -> None:
        try:
            self._write(snapshot, folder, held)
        except BaseException as error:
            self.error = error

    def _together(self) -> None:
        if self.group is not None:
            dist.barrier(self.group)

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
