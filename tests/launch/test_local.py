"""The supervisor of local processes, with small programs as ranks, real signals and real kills."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from flexor.launch.local import supervise
from support.limits import LIMIT_S, wait_for

# What a test starts: argv is program of a rank, number of processes, restarts, times to wait.
LAUNCHER = """
import sys
from flexor.launch import local
from flexor.core.log import setup_logging
setup_logging()
program, processes, restarts, settle, grace = sys.argv[1:]
local.SETTLE_S, local.GRACE_S = float(settle), float(grace)
sys.exit(local.supervise([sys.executable, "-c", program], int(processes), int(restarts)))
"""

# How every rank begins: it says that it is there, and notes the signals it gets if it is asked to.
RANK = """
import json, os, pathlib, signal, sys, time
RANK, RESTART = int(os.environ["RANK"]), int(os.environ["FLEXOR_RESTART_COUNT"])
HERE = pathlib.Path(os.environ["HERE"])

def note(name, text):
    (HERE / f".{name}").write_text(text)
    (HERE / f".{name}").rename(HERE / name)

def on(*names):
    got = []
    for name in names:
        signal.signal(getattr(signal, name), lambda number, frame: got.append(number))
    return got

def wait(condition):
    while not condition():
        time.sleep(0.005)

def ready():
    note(f"{RESTART}-{RANK}.json", json.dumps({"pid": os.getpid(), **os.environ}))

def all_ready():
    wait(lambda: len(list(HERE.glob(f"{RESTART}-*.json"))) == int(os.environ["WORLD_SIZE"]))
"""

SAVES = """
got = on("SIGTERM", "SIGUSR1", "SIGINT")
ready()
wait(lambda: got)
time.sleep(0.2)
note(f"signals-{RANK}", json.dumps(got))
sys.exit(130 if got[0] == signal.SIGINT else 75)
"""
STAYS = "signal.signal(signal.SIGTERM, signal.SIG_IGN); ready(); time.sleep(100)\n"


class Launcher:
    """A launcher in a process group of its own, as a shell starts it, and the ranks it has started."""

    def __init__(
        self,
        folder: Path,
        program: str,
        processes: int = 2,
        restarts: int = 0,
        settle_s: float = 0.3,
        grace_s: float = LIMIT_S,
    ):
        self.folder, self.processes = folder, processes
        environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                LAUNCHER,
                RANK + program,
                *map(str, (processes, restarts, settle_s, grace_s)),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**environment, "HERE": str(folder)},
            process_group=0,
        )

    def ranks(self, restart: int = 0) -> list[dict[str, str]]:
        """The environment of every rank, and its pid, once all are there."""
        files = [self.folder / f"{restart}-{rank}.json" for rank in range(self.processes)]
        wait_for(lambda: all(file.exists() for file in files))
        return [json.loads(file.read_text()) for file in files]

    def pids(self, restart: int = 0) -> list[int]:
        return [int(rank["pid"]) for rank in self.ranks(restart)]

    def end(self) -> tuple[int, str]:
        """Its exit code and what it said; by then nothing that it started may be there."""
        try:
            _, output = self.process.communicate(timeout=LIMIT_S)
        finally:
            self.process.kill()
        pids = [json.loads(file.read_text())["pid"] for file in self.folder.glob("[0-9]*-*.json")]
        assert [pid for pid in pids if alive(pid)] == []
        return self.process.returncode, output


def alive(pid: int) -> bool:
    """Whether a process is there, and more than an entry that nobody has collected."""
    try:
        os.kill(pid, 0)
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    except ProcessLookupError:
        return False
    except FileNotFoundError:  # no /proc on this system, or just gone
        return not Path("/proc/self").exists()


# Starting and ending


def test_every_rank_finds_out_which_it_is(tmp_path):
    launcher = Launcher(tmp_path, "ready(); all_ready()", processes=3)
    ranks = launcher.ranks()
    assert launcher.end()[0] == 0
    assert [(r["RANK"], r["LOCAL_RANK"]) for r in ranks] == [("0", "0"), ("1", "1"), ("2", "2")]
    assert {(r["WORLD_SIZE"], r["LOCAL_WORLD_SIZE"], r["MASTER_ADDR"]) for r in ranks} == {
        ("3", "3", "127.0.0.1")
    }
    assert len({r["MASTER_PORT"] for r in ranks}) == len({r["FLEXOR_RUN_ID"] for r in ranks}) == 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    assert {r["OMP_NUM_THREADS"] for r in ranks} == {str(max(cores // 3, 1))}


def test_threads_that_the_user_chose_stay(monkeypatch, tmp_path):
    program = "import os, sys; sys.exit(0 if os.environ['OMP_NUM_THREADS'] == '7' else 9)"
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert supervise([sys.executable, "-c", program], 2) == 0
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("code", [1, 2, 3, 75, 130])
def test_all_end_with_the_same_code(code, tmp_path):
    launcher = Launcher(tmp_path, f"ready(); all_ready(); sys.exit({code})")
    returned, output = launcher.end()
    assert returned == code
    assert ("ended with code" in output) == (code < 75)


# A rank that fails


@pytest.mark.parametrize(
    "program, code, how",
    [
        ("sys.exit(3)", 3, "ended with code 3"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 128 + 11, "was killed by SIGSEGV"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 128 + 9, "was killed by SIGKILL .*memory"),
    ],
)
def test_the_first_that_failed_is_named_and_the_others_stop(program, code, how, tmp_path):
    """Rank 0 saves itself when asked, with another code."""
    launcher = Launcher(tmp_path, f"if RANK == 1:\n    ready(); all_ready(); {program}\n{SAVES}", processes=3)
    pid = launcher.pids()[1]
    returned, output = launcher.end()
    assert returned == code
    assert re.search(rf"rank 1 \(pid {pid}\) {how}", output)
    assert "asking ranks 0, 2 to stop" in output
    assert json.loads((tmp_path / "signals-0").read_text()) == [signal.SIGTERM]


def test_a_rank_that_does_not_stop_after_a_crash_is_killed_with_all_it_started(tmp_path):
    program = f"""
if RANK == 1:
    ready(); all_ready(); sys.exit(3)
import subprocess
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
note("grandchild", str(child.pid))
{STAYS}"""
    launcher = Launcher(tmp_path, program, grace_s=0.3)
    returned, output = launcher.end()
    assert returned == 3
    assert "rank 0 still running after" in output and "killed" in output
    wait_for(lambda: not alive(int((tmp_path / "grandchild").read_text())))


def test_others_that_end_by_themselves_are_not_disturbed(tmp_path):
    """Who fails for the same reason gets to say it."""
    program = """
got = on("SIGTERM")
ready(); all_ready()
if RANK == 1:
    sys.exit(2)
time.sleep(0.1)
note("said", str(got))
sys.exit(2)"""
    returned, output = Launcher(tmp_path, program, settle_s=LIMIT_S).end()
    assert returned == 2 and output.count("ended with code") == 1 and "asking" not in output
    assert (tmp_path / "said").read_text() == "[]"


# Being told to stop


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGINT, 130)])
def test_a_signal_reaches_every_rank_once_and_all_save(number, code, tmp_path):
    """To the whole group, as a terminal does with Ctrl-C."""
    launcher = Launcher(tmp_path, SAVES)
    launcher.ranks()
    os.killpg(launcher.process.pid, number)
    returned, output = launcher.end()
    assert returned == code
    assert f"{signal.Signals(number).name}: waiting for ranks 0, 1 to save" in output
    assert [json.loads((tmp_path / f"signals-{rank}").read_text()) for rank in (0, 1)] == [[number]] * 2


def test_a_rank_may_take_its_time_to_save(tmp_path):
    """Longer than what a crash grants."""
    program = """
got = on("SIGTERM")
ready()
wait(lambda: got)
time.sleep(1.2 if RANK == 0 else 0)
note(f"saved-{RANK}", json.dumps(got))
sys.exit(75)"""
    launcher = Launcher(tmp_path, program, grace_s=0.3)
    launcher.ranks()
    launcher.process.terminate()
    returned, output = launcher.end()
    assert returned == 75 and "killed" not in output
    assert json.loads((tmp_path / "saved-0").read_text()) == [signal.SIGTERM]  # not asked again


@pytest.mark.parametrize("number, code", [(signal.SIGUSR1, 75), (signal.SIGINT, 130)])
def test_told_by_one_rank_alone_the_others_stop_too(number, code, tmp_path):
    launcher = Launcher(tmp_path, SAVES, restarts=2)
    os.kill(launcher.pids()[1], number)
    returned, _ = launcher.end()
    assert returned == code
    assert json.loads((tmp_path / "signals-0").read_text()) == [signal.SIGTERM]
    assert not (tmp_path / "1-0.json").exists()


def test_the_second_interrupt_kills(tmp_path):
    program = """
got = on("SIGINT")
ready()
wait(lambda: got)
note(f"stuck-{RANK}", "")
time.sleep(100)"""
    launcher = Launcher(tmp_path, program)
    launcher.ranks()
    os.killpg(launcher.process.pid, signal.SIGINT)
    wait_for(lambda: len(list(tmp_path.glob("stuck-*"))) == 2)
    assert launcher.process.poll() is None
    os.killpg(launcher.process.pid, signal.SIGINT)
    returned, output = launcher.end()
    assert returned == 130 and "killing ranks 0, 1" in output


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends children with their parent")
def test_a_killed_launcher_leaves_nobody_behind(tmp_path):
    launcher = Launcher(tmp_path, STAYS)
    pids = launcher.pids()
    assert all(alive(pid) for pid in pids)
    launcher.process.kill()
    wait_for(lambda: not any(alive(pid) for pid in pids))
    assert launcher.process.wait(LIMIT_S) == -signal.SIGKILL


# Starting again


def test_after_a_crash_all_start_again(tmp_path):
    program = """
ready(); all_ready()
if RESTART < 2:
    os.kill(os.getpid(), signal.SIGKILL) if RANK == 1 else time.sleep(100)"""
    launcher = Launcher(tmp_path, program, restarts=3)
    ranks = [rank for restart in range(3) for rank in launcher.ranks(restart)]
    returned, output = launcher.end()
    assert returned == 0
    assert [r["FLEXOR_RESTART_COUNT"] for r in ranks] == list("001122")
    assert len({r["FLEXOR_RUN_ID"] for r in ranks}) == 1
    assert len({r["pid"] for r in ranks}) == 6
    assert "restart 1 of 3" in output and "restart 2 of 3" in output and "restart 3" not in output


def test_restarts_have_an_end(tmp_path):
    launcher = Launcher(tmp_path, "ready(); sys.exit(9)", processes=1, restarts=2)
    returned, output = launcher.end()
    assert returned == 9 and "restart 2 of 2" in output
    assert sorted(file.name for file in tmp_path.glob("*.json")) == ["0-0.json", "1-0.json", "2-0.json"]


@pytest.mark.parametrize("code", [0, 1, 2, 75, 130])
def test_what_would_not_help_is_not_started_again(code, tmp_path):
    returned, output = Launcher(tmp_path, f"ready(); all_ready(); sys.exit({code})", restarts=2).end()
    assert returned == code and "restart" not in output
    assert not (tmp_path / "1-0.json").exists()


def test_who_was_told_to_stop_does_not_start_again(tmp_path):
    """Even if the ranks have no time to save: SIGTERM ends them."""
    launcher = Launcher(tmp_path, "ready(); time.sleep(100)", restarts=2)
    launcher.ranks()
    launcher.process.terminate()
    returned, output = launcher.end()
    assert returned == 128 + signal.SIGTERM and "restart" not in output
