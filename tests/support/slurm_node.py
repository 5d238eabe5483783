"""A real SLURM on this machine, with two nodes of one core each, for as long as a test needs it.

Jobs of its partition `urgent` preempt those of its default one, which then go back into the queue.
Both nodes are this machine: SLURM lets one machine play several, told apart by port. They are called 127.0.0.1 and
127.0.0.2, names that are addresses, so nothing has to be added to /etc/hosts for processes to find the first node.
Everything (keys, sockets, state, logs) lies in a folder of the test's, and all daemons are children of this process.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from support.limits import retried, wait_for

NODES = 2
ASK_S = 0.25  # each question starts a program
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "sinfo")
PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"  # where Debian has the daemons

CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
MessageTimeout=100
MinJobAge=86400
KillWait=600
SlurmdParameters=config_overrides
NodeName=127.0.0.[1-{nodes}] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{ports[1]}-{ports[2]}] CPUs=1
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0
MpiDefault=none
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=patient Nodes=ALL Default=YES PriorityTier=1
PartitionName=urgent Nodes=ALL PriorityTier=2
"""


def missing() -> str | None:
    """Why there can be no SLURM here, or None."""
    absent = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]
    if absent:
        return f"no {absent[0]}: install Debian's slurm-wlm and munge for a real SLURM"
    return None if os.geteuid() == 0 else "a real SLURM needs root"


@contextmanager
def running(folder: Path) -> Iterator[None]:
    """SLURM, for this process and those it starts."""
    folder.mkdir(parents=True)
    folder.chmod(0o755)
    (folder / "state").mkdir()
    host, ports = socket.gethostname().partition(".")[0], _free_ports(1 + NODES)
    config = folder / "slurm.conf"
    config.write_text(
        CONFIG.format(folder=folder, host=host, ports=[ports, ports + 1, ports + NODES], nodes=NODES)
    )
    before = dict(os.environ)
    os.environ |= {"SLURM_CONF": str(config), "PATH": PATH}
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        daemons.append(_munged(folder))
        wait_for(lambda: (folder / "munge.socket").exists(), f"munged does not start: see {folder}")
        daemons.append(_start(folder, "slurmctld", "-D"))
        for node in range(1, NODES + 1):
            daemons.append(_start(folder, "slurmd", "-D", "-N", f"127.0.0.{node}"))
        wait_for(_idle, f"the nodes do not come up: see {folder}", ASK_S)
        yield
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
            with suppress(subprocess.TimeoutExpired):
                daemon.wait(60)
            daemon.kill()
            daemon.wait()
        os.environ.clear()
        os.environ.update(before)


class SlurmJob:
    """A job that was submitted, and what SLURM knows about it."""

    def __init__(self, number: str, log: Path):
        self.number, self.log = number, log

    def state(self) -> dict[str, str]:
        command = ["scontrol", "show", "job", self.number]
        answer = retried(  # a busy controller may not answer in time
            lambda: subprocess.run(command, capture_output=True, text=True, check=True),
            subprocess.CalledProcessError,
        )
        return dict(re.findall(r"(\w+)=(\S*)", answer.stdout))

    def wait_for_state(self, name: str, restarts: int = 0) -> dict[str, str]:
        def reached() -> bool:
            now = self.state()
            ended = now["JobState"] not in (name, "PENDING", "RUNNING", "COMPLETING", "PREEMPTED")
            assert not ended, f"it ended: {self}"
            return now["JobState"] == name and now["Restarts"] == str(restarts)

        wait_for(reached, self, ASK_S)
        return self.state()

    def preempt(self) -> None:
        """A job that is more important takes both nodes, for a moment."""
        words = ["--partition=urgent", "--nodes=2", "--output=/dev/null", "--wrap=true"]
        subprocess.run(["sbatch", "--parsable", *words], check=True, capture_output=True)

    def time_is_nearly_up(self) -> None:
        """SLURM does the same then."""
        subprocess.run(["scancel", "--signal=USR1", self.number], check=True)

    def start_again(self, restarts: int) -> None:
        """Soon, and not after the two minutes that SLURM lets a requeued job wait."""
        self.wait_for_state("PENDING", restarts)
        time.sleep(2)  # the nodes count in seconds: at once, they would take it for the start that was ended
        subprocess.run(["scontrol", "update", f"jobid={self.number}", "StartTime=now"], check=True)
        self.wait_for_state("RUNNING", restarts)

    def __str__(self) -> str:
        return f"{self.state()}\n{self.log.read_text() if self.log.exists() else 'no log'}"


def _munged(folder: Path) -> subprocess.Popen[bytes]:
    """What SLURM trusts messages by; with a key and a socket of its own, so that one that runs here is left alone."""
    key = folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(128))
    files = {"key-file": key} | {f"{name}-file": folder / f"munge.{name}" for name in ("log", "pid", "seed")}
    return _start(
        folder,
        "munged",
        "--foreground",
        "--force",  # also where a folder above is writable by others, as /tmp is
        f"--socket={folder / 'munge.socket'}",
        *(f"--{name}={path}" for name, path in files.items()),
    )


def _start(folder: Path, *command: str) -> subprocess.Popen[bytes]:
    with (folder / "daemons.log").open("ab") as log:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)


def _idle() -> bool:
    answer = subprocess.run(["sinfo", "-h", "-o", "%t %D"], capture_output=True, text=True)
    return answer.stdout.split() == ["idle", str(NODES)]


def _free_ports(count: int) -> int:
    """The first of so many ports in a row that nobody listens on, below those that the system hands out."""
    while True:
        first = 20000 + secrets.randbelow(10000)
        with suppress(OSError):
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind(("", port))
            return first
