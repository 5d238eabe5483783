"""The processes of a run: which one this is, and how they communicate apart from gradients.

The launcher (torchrun, Accelerate, srun, Flexor itself) sets this in the environment. Ranks exchange everything but
gradients through a separate CPU process group with a timeout of 30 days: rank 0 may evaluate or save for hours, and
no collective fails. The watchdog ends the run when a rank has died.
"""

from __future__ import annotations

import os
import socket
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from flexor.core.console import print_error
from flexor.core.errors import ConfigError, FlexorError
from flexor.train.ranks.gloo_interface import choose_interface, describe_name

T = TypeVar("T")
FOREVER = timedelta(days=30)
SAME_ERROR_S = 2.0  # seconds within which all ranks report the same error
ERROR, READ = "flexor/error", "flexor/error/heard"  # keys of the store


@dataclass
class Processes:
    """This process among those of the run. By default it is the only one."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    launcher: str = "none"  # torchrun, accelerate, srun, flexor
    run_id: str | None = None  # the same for all ranks, and after a restart
    restarts: int = 0
    host: str = field(default_factory=socket.gethostname)
    hosts: list[str] = field(default_factory=list)  # of all ranks
    control: Any = None  # the process group for everything but gradients

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def launch(self) -> str:
        """An id of this launch, the same for all its processes and restarts."""
        if self.run_id and self.run_id != "none":  # torchrun's id for runs that were given none
            return self.run_id
        return f"{self.host} {os.getppid()}"

    @property
    def store(self) -> dist.Store | None:
        """The store that connects the ranks; None before `join`."""
        return dist.distributed_c10d._get_default_store() if self.joined else None

    @property
    def joined(self) -> bool:
        return self.control is not None

    def join(self, device: torch.device, timeout_s: float, backend: str = "auto") -> None:
        """Connect to the other processes. After this, all of them take part in every collective."""
        gpu = "gloo" if backend == "gloo" else "nccl"
        backend = f"cpu:gloo,cuda:{gpu}" if device.type == "cuda" else "gloo"
        timeout = timedelta(seconds=2 * timeout_s + 60)  # the watchdog reports more, so it acts first
        try:
            store = (
                self._rendezvous(timedelta(seconds=timeout_s)) if self.world_size > 1 else dist.HashStore()
            )
            size = self.world_size
            if self.local_world_size < size:
                choose_interface(self.rank, size, store)
            dist.init_process_group(backend, store=store, rank=self.rank, world_size=size, timeout=timeout)
            control = dist.new_group(backend="gloo", timeout=timeout)
        except (RuntimeError, ValueError) as error:
            raise FlexorError(self._not_connected(str(error).rstrip("."))) from error
        dist.distributed_c10d._set_pg_timeout(FOREVER, control)  # connecting has a limit
        self.control = control
        self.hosts = self.gather(self.host)
        # torchrun counts restarts host by host, and only where a process failed
        self.restarts = max(self.gather(self.restarts))

    def _not_connected(self, reason: str) -> str:
        host, port = (str(os.environ.get(name)) for name in ("MASTER_ADDR", "MASTER_PORT"))
        return (
            f"Rank {self.rank} on {self.host} can't connect to the other {self.world_size - 1} processes at "
            f"{host}:{port}: {reason}. {describe_name(host)}Check that all of them are started and that this host can "
            "reach that address."
        )

    def _rendezvous(self, timeout: timedelta) -> dist.Store:
        """A store for the processes of this start only.

        torchrun keeps its store when it restarts processes, and torch would find the entries of the earlier ones in it.
        So each start gets a unique name. Every rank asks for that name under a unique key, and rank 0 answers.
        """
        store, _, _ = next(dist.rendezvous("env://", self.rank, self.world_size, timeout=timeout))
        store.set_timeout(timeout)
        key = uuid.uuid4().hex
        if self.is_main:
            self._answer_ranks(store, key, timeout)
            return dist.PrefixStore(key, store)
        store.set(f"flexor/asks/{self.rank}", key)
        start = store.get(f"flexor/told/{key}").decode()  # waits for the answer
        store.set(f"flexor/{start}/{self.rank}", "")
        return dist.PrefixStore(start, store)

    def _answer_ranks(self, store: dist.Store, start: str, timeout: timedelta) -> None:
        """Rank 0 answers until all ranks know the name of this start. A request may be from an earlier start."""
        missing = set(range(1, self.world_size))
        until = time.monotonic() + timeout.total_seconds()
        while missing:
            if time.monotonic() > until:
                raise RuntimeError(f"rank {', '.join(map(str, sorted(missing)))} did not connect")
            for rank in [rank for rank in missing if store.check([f"flexor/asks/{rank}"])]:
                store.set(f"flexor/told/{store.get(f'flexor/asks/{rank}').decode()}", start)
                if store.check([f"flexor/{start}/{rank}"]):
                    missing.remove(rank)
            time.sleep(0.01)

    def leave(self) -> None:
        """All ranks leave together: a launcher may end processes that are late."""
        if self.joined:
            self.barrier()
            self.control = None
            dist.destroy_process_group()

    def barrier(self) -> None:
        if self.joined:
            dist.barrier(self.control)

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, in rank order, on every rank."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.control)
        return values

    def share(self, make: Callable[[], T]) -> T:
        """What rank 0 makes, on all ranks. If rank 0 fails, all ranks fail with its error, which is printed once."""
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
        value, failure = answer
        if failure is not None:
            failure.already_logged = True  # rank 0 prints it
            raise failure
        return value

    def report_once(self, error: FlexorError) -> None:
        """If all ranks fail with the same error, only rank 0 prints it. Otherwise each rank adds its name to it."""
        if self.world_size == 1 or not self.joined:
            return
        with suppress(RuntimeError):  # the store may be gone with its process
            store = dist.distributed_c10d._get_default_store()
            if error.already_logged:
                store.add(READ, 1)
                return
            if self.is_main:
                print_error(f"flexor: {error}")  # before the launcher can end us
                error.already_logged = True
                store.set(ERROR, str(error))
                # the store may be in this process: the others read it first
                _poll(lambda: store.add(READ, 0) == self.world_size - 1, SAME_ERROR_S / 2)
                return
            _poll(lambda: store.check([ERROR]), SAME_ERROR_S)
            error.already_logged = store.check([ERROR]) and store.get(ERROR).decode() == str(error)
            store.add(READ, 1)
        if not error.already_logged:
            error.args = (f"rank {self.rank} on {self.host}: {error}",)

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """The first process of each host goes first, so that the others find what it downloads or records."""
        if self.local_rank != 0:
            self.barrier()
        yield
        if self.local_rank == 0:
            self.barrier()


def _poll(condition: Callable[[], bool], seconds: float) -> None:
    """Wait until a condition holds, but no longer than this."""
    until = time.monotonic() + seconds
    while time.monotonic() < until and not condition():
        time.sleep(0.05)


def find_processes(environment: Mapping[str, str] | None = None) -> Processes:
    """Which process this is, from the environment that its launcher set."""
    env = os.environ if environment is None else environment
    if "RANK" in env and "WORLD_SIZE" in env:
        return _from_torchrun(env)
    if int(env.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        return _from_srun(env)
    return Processes(restarts=_restarts(env), run_id=env.get("SLURM_JOB_ID"))


def _from_torchrun(env: Mapping[str, str]) -> Processes:
    """torchrun's variables, which `accelerate launch` and `flexor launch local` set too."""
    world_size = int(env["WORLD_SIZE"])
    launcher = "torchrun" if "TORCHELASTIC_RUN_ID" in env else "flexor"
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in env]
    if missing and world_size > 1:
        raise ConfigError(
            f"RANK={env['RANK']} and WORLD_SIZE={world_size} are set in the environment, but {missing[0]} is not: "
            "start with torchrun, accelerate launch or flexor launch, or unset RANK and WORLD_SIZE."
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
    """SLURM's variables. torch reads the address of rank 0 from the environment, so it is set here."""
    tasks = _tasks_per_node(env.get("SLURM_STEP_TASKS_PER_NODE", env["SLURM_STEP_NUM_TASKS"]))
    local = tasks[min(int(env.get("SLURM_NODEID", 0)), len(tasks) - 1)]
    os.environ.setdefault("MASTER_ADDR", _first_host(env))
    port = 10_000 + int(env.get("SLURM_JOB_ID", 0)) % 20_000  # as in our scripts
    os.environ.setdefault("MASTER_PORT", str(port))
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
    command = ["scontrol", "show", "hostnames", nodes]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise ConfigError(
            f"Can't find the first of the hosts {nodes}: scontrol failed ({error}). Set MASTER_ADDR to its name."
        ) from error
    return answer.stdout.split()[0]
