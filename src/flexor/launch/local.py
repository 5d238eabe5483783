"""Starts the processes of a run on this machine, stops them together, and restarts them after a crash.

This is Flexor's own supervisor, used instead of torchrun. It forwards the signals that make a run save and stop,
gives the ranks the time they need to save, and exits with the code that says what to do next (75: start me again).
It supports only one machine; for several, use torchrun, Accelerate or SLURM.
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
from flexor.core.stop_signals import STOP_SIGNALS, handled

SETTLE_S = 10.0  # after the first rank has ended: time for the others to end by themselves and log why
GRACE_S = 30.0  # after a crash: time between asking the others to stop and killing them
TOLD_TO_STOP = (75, 130)  # exit codes of a rank that saved: SIGTERM, SIGUSR1 or SIGHUP; Ctrl-C
USERS_MISTAKE = (1, 2)  # exit codes after which a restart would fail again
PR_SET_PDEATHSIG = 1  # from linux/prctl.h


def flexor_command(arguments: Sequence[str]) -> list[str]:
    """`flexor ARGUMENTS`, run by the current Python."""
    return [sys.executable, "-m", "flexor", *arguments]


def supervise(command: Sequence[str], processes: int, max_restarts: int = 0) -> int:
    """Run `command` as ranks 0 to processes - 1 until they end; the exit code of the first that failed, else 0.

    After a crash, all ranks are restarted, at most `max_restarts` times. Call it in the main thread, because it
    handles signals.
    """
    run_id = _run_id()
    with _Signals() as signals:
        for restart in range(max_restarts + 1):
            port = free_port()
            ranks = _Ranks(
                command, [rank_environment(i, processes, port, run_id, restart) for i in range(processes)]
            )
            code = ranks.watch(signals)
            crashed = code not in (0, *TOLD_TO_STOP, *USERS_MISTAKE) and not signals.stop_requested
            if not crashed or restart == max_restarts:
                break
            log.warning("restarting all %d processes: restart %d of %d", processes, restart + 1, max_restarts)
    return code


def describe(command: Sequence[str], processes: int) -> str:
    """The commands that `supervise` would start, as shell lines."""
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
    """The environment variables of a process, with torchrun's names where it has one."""
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
    """A port that is free now. In theory, another program could take it before the ranks do."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _run_id() -> str:
    """The id of this launch. It is the same if SLURM restarts the launcher, so that the run is found again."""
    return os.environ.get("FLEXOR_RUN_ID") or os.environ.get("SLURM_JOB_ID") or uuid.uuid4().hex


class _Signals:
    """The signals of this process in order of arrival, read from a pipe, so that they interrupt nothing."""

    def __enter__(self) -> _Signals:
        self.stop_requested = False  # whether the launcher has been told to stop
        self.reader, writer = os.pipe()
        os.set_blocking(writer, False)
        self.writer, self.before_fd = writer, signal.set_wakeup_fd(writer)
        self.before = {n: signal.signal(n, _no_action) for n in (*handled(), signal.SIGCHLD)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self.before_fd)
        os.close(self.reader)
        os.close(self.writer)

    def wait(self, seconds: float) -> list[int]:
        """The signals that arrived, or none after this many seconds. The end of a child is a signal too (SIGCHLD)."""
        limit = None if seconds == math.inf else max(seconds, 0.0)
        ready, _, _ = select.select([self.reader], [], [], limit)
        return list(os.read(self.reader, 4096)) if ready else []


def _no_action(number: int, frame: object) -> None:
    """Does nothing: a signal only reaches the pipe if it has a handler."""


class _Ranks:
    """The processes of one start, and how their ends are handled."""

    def __init__(self, command: Sequence[str], environments: Sequence[dict[str, str]]):
        self.running: dict[int, subprocess.Popen[bytes]] = {}
        self.code = 0  # exit code of the first that failed
        self.stop_requested = False  # whether they have been asked to stop
        self.schedule: list[
            tuple[float, Callable[[], None]]
        ] = []  # what to do with those that still run, and when
        try:
            for rank, environment in enumerate(environments):
                self.running[rank] = subprocess.Popen(
                    command,
                    env={**os.environ, **environment},
                    stdin=subprocess.DEVNULL,
                    # a terminal sends Ctrl-C to its whole session: a rank must get it only once, from the launcher
                    start_new_session=True,
                    preexec_fn=_end_with(os.getpid()),
                )
        except BaseException:
            self.kill()
            raise
        pids = ", ".join(str(process.pid) for process in self.running.values())
        log.info("started %d processes on this machine: pids %s", len(environments), pids)

    def watch(self, signals: _Signals) -> int:
        """Wait until all have ended; the exit code of the first that failed, or 0."""
        try:
            while self.running:
                due = self.schedule[0][0] if self.schedule else math.inf
                for number in signals.wait(due - time.monotonic()):
                    if number in STOP_SIGNALS:
                        self.pass_on(number, again=signals.stop_requested)
                        signals.stop_requested = True
                self.reap()
                if self.running and time.monotonic() >= due:
                    _, action = self.schedule.pop(0)
                    action()
        finally:
            self.kill()
        return self.code

    def pass_on(self, number: int, again: bool) -> None:
        """Forward a signal to every rank. The second Ctrl-C kills them at once."""
        name = signal.Signals(number).name
        if number == signal.SIGINT and again:
            log.warning("%s while stopping: killing %s", name, self.names())
            self.code = self.code or 128 + number
            self.kill()
            return
        log.info("%s: waiting for %s to save and stop", name, self.names())
        self.send(number)

    def reap(self) -> None:
        """Find the ranks that have ended; after the first failure, decide what to do with the others.

        Ranks that were told to stop may take as long as they need to save. After a crash, their time is limited.
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
                self.schedule = [
                    (now + SETTLE_S, self.ask_to_stop),
                    (now + SETTLE_S + GRACE_S, self.kill_remaining),
                ]
            elif not self.stop_requested:
                self.schedule = [(now + SETTLE_S, self.ask_to_stop)]

    def ask_to_stop(self) -> None:
        log.info("asking %s to stop", self.names())
        self.send(signal.SIGTERM)

    def kill_remaining(self) -> None:
        log.error("%s still running after %.0f s: killed", self.names(), GRACE_S)
        self.kill()

    def send(self, number: int) -> None:
        self.stop_requested = True
        for process in self.running.values():
            process.send_signal(number)

    def kill(self) -> None:
        """Kill all running ranks, and the processes they have started."""
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
    hint = " (unless you sent it, the machine probably ran out of memory)" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint}"


def _end_with(launcher: int) -> Callable[[], None] | None:
    """What a child runs before exec, so that a killed launcher leaves no process behind."""
    if sys.platform != "linux":  # not available elsewhere
        return None
    prctl = ctypes.CDLL(None).prctl

    def before_exec() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != launcher:  # the launcher was killed before this took effect
            os._exit(1)

    return before_exec
