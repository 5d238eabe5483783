"""The processes of a run: which one this is, and how they talk when it is not about gradients.

Whoever started them (torchrun, Accelerate, srun, Flexor itself) says so in the environment. What ranks have to tell
each other goes through a group of its own on the CPU, whose waits have no time limit: rank 0 may evaluate or save
for hours and no collective gives up. That nobody waits for the dead is the watchdog's business.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from flexor.core.errors import ConfigError, FlexorError

T = TypeVar("T")
FOREVER = timedelta(days=30)
ALIKE_S = 2.0  # within which ranks make the same mistake
ERROR = "flexor/error"


@dataclass
class Processes:
    """This process among those of the run. The default is the only one."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    launcher: str = "none"  # torchrun, accelerate, srun, flexor
    run_id: str | None = None  # the same for all ranks, and after a restart
    restarts: int = 0
    host: str = field(default_factory=socket.gethostname)
    control: Any = None  # the group for everything but gradients

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def launch(self) -> str:
        """What the processes of one start have in common, restarts included."""
        if self.run_id and self.run_id != "none":  # torchrun's name for all that were given none
            return self.run_id
        return f"{self.host} {os.getppid()}"

    @property
    def store(self) -> dist.Store | None:
        """What the ranks met through; None if there is one process."""
        return dist.distributed_c10d._get_default_store() if self.joined else None

    @property
    def joined(self) -> bool:
        return self.control is not None

    def join(self, device: torch.device, timeout_s: float, backend: str = "auto") -> None:
        """Meet the other processes; from here on all of them take part in everything collective."""
        gpu = "gloo" if backend == "gloo" else "nccl"
        backend = f"cpu:gloo,cuda:{gpu}" if device.type == "cuda" else "gloo"
        timeout = timedelta(seconds=2 * timeout_s + 60)  # the watchdog says more, so it comes first
        try:
            store = self._meet(timedelta(seconds=timeout_s)) if self.world_size > 1 else dist.HashStore()
            dist.init_process_group(
                backend, store=store, rank=self.rank, world_size=self.world_size, timeout=timeout
            )
        except (RuntimeError, ValueError) as error:
            where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            raise FlexorError(
                f"Rank {self.rank} on {self.host} can't meet the other {self.world_size - 1} processes at "
                f"{where}: {error}. Are all of them started, and can this host reach that address?"
            ) from error
        self.control = dist.new_group(backend="gloo", timeout=FOREVER)
        # torchrun counts restarts host by host, and only where a process failed
        self.restarts = max(self.gather(self.restarts))

    def _meet(self, timeout: timedelta) -> dist.Store:
        """A store for the processes of this start alone.

        torchrun keeps its store when it starts processes again, and torch would look for them where those before were.
        So this start gets a name of its own, which rank 0 tells to whoever asks for it by a name of its own.
        """
        store, _, _ = next(dist.rendezvous("env://", self.rank, self.world_size, timeout=timeout))
        store.set_timeout(timeout)
        own = uuid.uuid4().hex
        if self.is_main:
            self._tell(store, own, timeout)
            return dist.PrefixStore(own, store)
        store.set(f"flexor/asks/{self.rank}", own)
        start = store.get(f"flexor/told/{own}").decode()  # waits for it
        store.set(f"flexor/{start}/{self.rank}", "")
        return dist.PrefixStore(start, store)

    def _tell(self, store: dist.Store, start: str, timeout: timedelta) -> None:
        """Rank 0: until all ranks know the name of this start. What one asked may be from the start before."""
        missing = set(range(1, self.world_size))
        until = time.monotonic() + timeout.total_seconds()
        while missing:
            if time.monotonic() > until:
                raise RuntimeError(f"rank {', '.join(map(str, sorted(missing)))} did not come")
            for rank in [rank for rank in missing if store.check([f"flexor/asks/{rank}"])]:
                store.set(f"flexor/told/{store.get(f'flexor/asks/{rank}').decode()}", start)
                if store.check([f"flexor/{start}/{rank}"]):
                    missing.remove(rank)
            time.sleep(0.01)

    def leave(self) -> None:
        """Together: a launcher may end those who are late."""
        if self.joined:
            self.barrier()
            self.control = None
            dist.destroy_process_group()

    def barrier(self) -> None:
        if self.joined:
            dist.barrier(self.control)

    def gather(self, value: T) -> list[T]:
        """What every rank has, in order, on all of them."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.control)
        return values

    def share(self, make: Callable[[], T]) -> T:
        """What rank 0 makes, on all ranks. If it fails there, all fail with its error, said once."""
        if self.world_size == 1:
            return make()
        answer: list[Any] = [None, None]
        if self.is_main:
            try:
                answer = [make(), None]
            except Exception as error:
                answer = [None, error if isinstance(error, FlexorError) else FlexorError(repr(error))]
                dist.broadcast_object_list(answer, 0, group=self.control)
                raise
        dist.broadcast_object_list(answer, 0, group=self.control)
        if answer[1] is not None:
            answer[1].said = True  # by rank 0
            raise answer[1]
        return answer[0]

    def say_once(self, error: FlexorError) -> None:
        """If all ranks fail alike, rank 0 says so and the others keep quiet; else each says who it is."""
        if self.world_size == 1 or not self.joined or error.said:
            return
        with suppress(RuntimeError):  # the store may be gone, with whoever kept it
            store = dist.distributed_c10d._get_default_store()
            if self.is_main:
                print(f"flexor: {error}", file=sys.stderr, flush=True)  # before anybody can end this process
                error.said = True
                store.set(ERROR, str(error))
                time.sleep(ALIKE_S / 2)  # the store may be this process's
                return
            until = time.monotonic() + ALIKE_S
            while time.monotonic() < until and not store.check([ERROR]):
                time.sleep(0.05)
            error.said = store.check([ERROR]) and store.get(ERROR).decode() == str(error)
        if not error.said:
            error.args = (f"rank {self.rank} on {self.host}: {error}",)

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """The first process of each host goes ahead: what it downloads or records, the others find."""
        if self.local_rank != 0:
            self.barrier()
        yield
        if self.local_rank == 0:
            self.barrier()


def find_processes(environment: Mapping[str, str] | None = None) -> Processes:
    """Which process this is, from what its launcher left in the environment."""
    env = os.environ if environment is None else environment
    if "RANK" in env and "WORLD_SIZE" in env:
        return _from_torchrun(env)
    if int(env.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        return _from_srun(env)
    return Processes(restarts=_restarts(env), run_id=env.get("SLURM_JOB_ID"))


def _from_torchrun(env: Mapping[str, str]) -> Processes:
    """torchrun's names, which `accelerate launch` and `flexor launch local` use too."""
    world_size = int(env["WORLD_SIZE"])
    launcher = "torchrun" if "TORCHELASTIC_RUN_ID" in env else "flexor"
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in env]
    if missing and world_size > 1:
        raise ConfigError(
            f"RANK={env['RANK']} of WORLD_SIZE={world_size} is set in the environment, but {missing[0]} is not: "
            "start with torchrun, accelerate launch or flexor launch, or unset them."
        )
    return Processes(
        rank=int(env["RANK"]),
        world_size=world_size,
        local_rank=int(env.get("LOCAL_RANK", 0)),
        local_world_size=int(env.get("LOCAL_WORLD_SIZE", 1)),
        launcher="accelerate" if "ACCELERATE_MIXED_PRECISION" in env else launcher,
        run_id=env.get("FLEXOR_RUN_ID") or env.get("TORCHELASTIC_RUN_ID") or env.get("SLURM_JOB_ID"),
        restarts=_restarts(env),
    )


def _from_srun(env: Mapping[str, str]) -> Processes:
    """SLURM's. torch reads where to meet from the environment, so that is completed here."""
    tasks = _tasks_per_node(env.get("SLURM_STEP_TASKS_PER_NODE", env["SLURM_STEP_NUM_TASKS"]))
    local = tasks[min(int(env.get("SLURM_NODEID", 0)), len(tasks) - 1)]
    os.environ.setdefault("MASTER_ADDR", _first_host(env))
    os.environ.setdefault(
        "MASTER_PORT", str(10_000 + int(env.get("SLURM_JOB_ID", 0)) % 20_000)
    )  # as in our scripts
    os.environ.setdefault("LOCAL_WORLD_SIZE", str(local))  # the loader divides the host's memory by it
    return Processes(
        rank=int(env["SLURM_PROCID"]),
        world_size=int(env["SLURM_STEP_NUM_TASKS"]),
        local_rank=int(env["SLURM_LOCALID"]),
        local_world_size=local,
        launcher="srun",
        run_id=env.get("SLURM_JOB_ID"),
        restarts=_restarts(env),
    )


def _restarts(env: Mapping[str, str]) -> int:
    names = ("FLEXOR_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
    return max(int(env.get(name, 0)) for name in names)


def _tasks_per_node(text: str) -> list[int]:
    """SLURM writes 4(x2),3 for four tasks on each of two nodes and three on the next."""
    counts: list[int] = []
    for part in text.split(","):
        count, _, times = part.partition("(x")
        counts += [int(count)] * int(times.rstrip(")") or 1)
    return counts


def _first_host(env: Mapping[str, str]) -> str:
    nodes = env.get("SLURM_STEP_NODELIST", env.get("SLURM_JOB_NODELIST", "localhost"))
    if "[" not in nodes and "," not in nodes:
        return nodes
    try:
        answer = subprocess.run(
            ["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError) as error:
        raise ConfigError(
            f"Which of the hosts {nodes} is the first? scontrol does not say ({error}): export MASTER_ADDR."
        ) from error
    return answer.stdout.split()[0]
