"""macOS and Windows, as far as Linux can show: without what these systems lack, things work or say what is missing."""

import os
import subprocess
import sys
from pathlib import Path

import psutil  # noqa: F401  (for Linux, before this claims to be another system)
import pytest

from flexor.cli.main import main
from support import environment
from support.limits import LIMIT_S

ROOT = Path(__file__).parents[1]
WITHOUT_POSIX = """
import asyncio, ctypes, logging, multiprocessing, os, signal, socket, ssl, subprocess, sys, threading
for name in ("fcntl", "termios", "resource", "pwd", "grp", "tty", "pty"):
    sys.modules[name] = None
for name in ("SIGUSR1", "SIGUSR2", "SIGHUP", "SIGCHLD", "SIGKILL", "pthread_sigmask"):
    delattr(signal, name)
for name in ("fork", "sysconf", "statvfs", "sched_getaffinity", "memfd_create", "killpg", "geteuid", "getuid"):
    delattr(os, name)
"""
ONLY_LINUX = ("memfd_create", "sched_getaffinity", "sched_getscheduler", "posix_fadvise", "posix_fallocate")


def without_posix(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_POSIX + code],
        env=environment.for_cpu(PYTHONPATH=f"{ROOT / 'src'}{os.pathsep}{ROOT / 'client/src'}"),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


def test_windows_is_told_what_to_do():
    code = (
        "from flexor.cli.main import main; sys.platform = 'win32'; sys.exit(main(sys.argv[1:] or ['train']))"
    )
    done = without_posix(code)
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    assert "WSL 2" in done.stderr and "flexor-client" in done.stderr


def test_help_is_there_on_windows(monkeypatch, capsys):
    monkeypatch.setattr(sys, "platform", "win32")
    assert main(["--version"]) == main(["--help"]) == main([]) == 0
    assert "train" in capsys.readouterr().out


def test_the_robots_package_needs_no_posix():
    done = without_posix("import flexor_client; print(sorted(flexor_client.__all__)[0])")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_run_without_what_only_linux_has(dataset, tiny_act, tmp_path, monkeypatch):
    for name in ONLY_LINUX:
        monkeypatch.delattr(os, name)
    monkeypatch.setattr(sys, "platform", "darwin")
    flags = [f"--dataset.root={dataset}", f"--output_dir={tmp_path / 'run'}", "--steps=1", "--batch_size=2"]
    assert main(["train", *flags, "--policy.device=cpu", *tiny_act]) == 0
    evaluated = [str(tmp_path / "run"), "--env.type=place", "--env.kwargs.image_size=32"]
    assert main(["eval", *evaluated, "--eval.n_episodes=1", "--env.max_steps=2"]) == 0
