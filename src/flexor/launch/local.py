"""The processes of a run on this machine: started together, told to stop together, started again after a crash.

A supervisor of our own instead of torchrun: it passes on the signals by which a run saves itself, gives the ranks
the time they need for that, and ends with the exit code that says what to do next (75: start me again). In return
it knows only this machine; several are the business of torchrun, Accelerate or SLURM.
"""

from __future__ import annotations

import ctypes
import math
import os
import select
import shlex
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence

from flexor.core.log import log
from flexor.core.machine import usable_cores

SETTLE_S = 10.0  # after the first rank has ended, for the others to end by themselves and say why
GRACE_S = 30.0  # after a crash, from asking the others to stop until they are killed
TOLD_TO_STOP = (75, 130)  # exit codes of a rank that saved: SIGTERM or SIGUSR1, Ctrl-C
USERS_MISTAKE = (1, 2)  # exit codes after which starting again would fail again
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
PR_SET_PDEATHSIG = 1  # from linux/prctl.h


def flexor_command(arguments: Sequence[str]) -> list[str]:
    """`flexor ARGUMENTS` by the Python that runs now."""
    return [sys.executable, "-m", "flexor", *arguments]


def supervise(command: Sequence[str], processes: int, max_restarts: int = 0) -> int:
    """Run `command` as ranks 0 to processes - 1, to the end; the exit code of the first that failed, else 0.

    After a crash all are started again, at most `max_restarts` times. Needs the main thread, for its signals.
    """
    run_id = _run_id()
    with _Signals() as signals:
        for restart in range(max_restarts + 1):
            port = free_port()
            ranks = _Ranks(
                command, [rank_environment(i, processes, port, run_id, restart) for i in range(processes)]
            )
            code = ranks.watch(signals)
            crashed = code not in (0, *TOLD_TO_STOP, *USERS_MISTAKE) and not signals.told
            if not crashed or restart == max_restarts:
                break
            log.warning(
                "starting all %d processes again: restart %d of %d", processes, restart + 1, max_restarts
            )
    return code


def describe(command: Sequence[str], processes: int) -> str:
    """What `supervise` would start, as lines for a shell."""
    port, run_id = free_port(), _run_id()
    shared = {k: v for k, v in os.environ.items() if k == "CUDA_VISIBLE_DEVICES"}
    lines = []
    for rank in range(processes):
        variables = shared | rank_environment(rank, processes, port, run_id, 0)
        lines.append(
            " ".join([*(f"{k}={shlex.quote(v)}" for k, v in variables.items()), shlex.join(command)])
        )
    return "\n".join(lines)


def rank_environment(rank: int, processes: int, port: int, run_id: str, restart: int) -> dict[str, str]:
    """What a process finds out from its environment, in torchrun's names where it has one."""
    threads = str(max(usable_cores() // processes, 1))
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(processes),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "FLEXOR_RUN_ID": run_id,
        "FLEXOR_RESTART_COUNT": str(restart),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or threads,
    }


def free_port() -> int:
    """A port that nobody listens on now. Somebody may until the ranks do, in theory."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _run_id() -> str:
    """The same when SLURM starts the launcher anew, so that the run is found again."""
    return os.environ.get("FLEXOR_RUN_ID") or os.environ.get("SLURM_JOB_ID") or uuid.uuid4().hex


class _Signals:
    """The signals of this process in the order they came, read from a pipe instead of interrupting what it does."""

    def __enter__(self) -> _Signals:
        self.told = False  # whether somebody wants us to stop
        self.reader, writer = os.pipe()
        os.set_blocking(writer, False)
        self.writer, self.before_fd = writer, signal.set_wakeup_fd(writer)
        self.before = {n: signal.signal(n, _no_action) for n in (*STOP_SIGNALS, signal.SIGCHLD)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self.before_fd)
        os.close(self.reader)
        os.close(self.writer)

    def wait(self, seconds: float) -> list[int]:
        """Those that came, or none after so many seconds. The end of a child is one (SIGCHLD)."""
        limit = None if seconds == math.inf else max(seconds, 0.0)
        ready, _, _ = select.select([self.reader], [], [], limit)
        return list(os.read(self.reader, 4096)) if ready else []


def _no_action(number: int, frame: object) -> None:
    """A handler must be there for a signal to reach the pipe."""


class _Ranks:
    """The processes of one start, and what is done about them as they end."""

    def __init__(self, command: Sequence[str], environments: Sequence[dict[str, str]]):
        self.running: dict[int, subprocess.Popen[bytes]] = {}
        self.code = 0  # of the first that failed
        self.asked = False  # whether they have been asked to stop
        self.measures: list[
            tuple[float, Callable[[], None]]
        ] = []  # what is done to those that stay, and when
        try:
            for rank, environment in enumerate(environments):
                self.running[rank] = subprocess.Popen(
                    command,
                    env={**os.environ, **environment},
                    stdin=subprocess.DEVNULL,
                    # a terminal sends Ctrl-C to all of its session: a rank is to get it once, from us
                    start_new_session=True,
                    preexec_fn=_end_with(os.getpid()),
                )
        except BaseException:
            self.kill()
            raise
        pids = ", ".join(str(process.pid) for process in self.running.values())
        log.info("started %d processes on this machine: pids %s", len(environments), pids)

    def watch(self, signals: _Signals) -> int:
        """Until all have ended; the exit code of the first that failed, or 0."""
        try:
            while self.running:
                due = self.measures[0][0] if self.measures else math.inf
                for number in signals.wait(due - time.monotonic()):
                    if number in STOP_SIGNALS:
                        self.pass_on(number, again=signals.told)
                        signals.told = True
                self.reap()
                if self.running and time.monotonic() >= due:
                    _, measure = self.measures.pop(0)
                    measure()
        finally:
            self.kill()
        return self.code

    def pass_on(self, number: int, again: bool) -> None:
        """Tell every rank what we were told. The second Ctrl-C does not wait."""
        name = signal.Signals(number).name
        if number == signal.SIGINT and again:
            log.warning("%s while stopping: killing %s", name, self.names())
            self.code = self.code or 128 + number
            self.kill()
            return
        log.info("%s: waiting for %s to save and stop", name, self.names())
        self.send(number)

    def reap(self) -> None:
        """Notice who has ended, and decide about the others when the first has failed.

        Ranks that stop because they were told to may take as long as saving takes; after a crash they may not.
        """
        for rank, process in list(self.running.items()):
            if process.poll() is None:
                continue
            del self.running[rank]
            if process.returncode == 0 or self.code != 0:
                continue
            self.code = process.returncode if process.returncode > 0 else 128 - process.returncode
            now = time.monotonic()
            if self.code not in TOLD_TO_STOP:
                log.error("rank %d (pid %d) %s", rank, process.pid, _ending(process.returncode))
                self.measures = [(now + SETTLE_S, self.ask), (now + SETTLE_S + GRACE_S, self.give_up)]
            elif not self.asked:
                self.measures = [(now + SETTLE_S, self.ask)]

    def ask(self) -> None:
        log.info("asking %s to stop", self.names())
        self.send(signal.SIGTERM)

    def give_up(self) -> None:
        log.error("%s still there after %.0f s: killed", self.names(), GRACE_S)
        self.kill()

    def send(self, number: int) -> None:
        self.asked = True
        for process in self.running.values():
            process.send_signal(number)

    def kill(self) -> None:
        """End all that run, with what they have started themselves."""
        for process in self.running.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        for process in self.running.values():
            process.wait()
        self.running.clear()

    def names(self) -> str:
        ranks = ", ".join(map(str, self.running))
        return f"rank{'s' if len(self.running) > 1 else ''} {ranks}"


def _ending(returncode: int) -> str:
    """How a process ended, in words."""
    if returncode > 0:
        return f"ended with code {returncode}"
    name = next((s.name for s in signal.Signals if s == -returncode), f"signal {-returncode}")
    hint = " (if nobody sent it: the machine ran out of memory)" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint}"


def _end_with(launcher: int) -> Callable[[], None] | None:
    """What a child does before it becomes its program, so that a killed launcher leaves nobody behind."""
    if sys.platform != "linux":  # elsewhere nothing does that
        return None
    prctl = ctypes.CDLL(None).prctl

    def before_exec() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != launcher:  # it was killed before that counted
            os._exit(1)

    return before_exec
