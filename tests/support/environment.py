"""The environment of the tests and of every process they start: the same for every user, on every machine.

What is kept is what Python and the machine need. Everything else that somebody may have set (HF_HUB_OFFLINE, RANK,
WANDB_MODE, a proxy, ...) is taken away, and the home folder is an empty one. `prepare` has to be called before torch
and huggingface_hub are imported, which read variables once.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import site
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).parents[1]
PASSED_ON = {
    *("PATH", "LD_LIBRARY_PATH", "LD_PRELOAD", "TMPDIR", "TERM", "USER", "LOGNAME", "SHELL", "CI"),
    *("PYTHONHOME", "PYTHONUSERBASE", "PYTHONPYCACHEPREFIX", "VIRTUAL_ENV"),
    *("CC", "CXX", "CUDA_HOME"),
    "CUDA_VISIBLE_DEVICES",  # which GPUs tests marked `gpu` may use; the others do without
}
PASSED_ON_PREFIXES = ("PYTEST_", "COV_", "COVERAGE_")


IN_MEMORY = Path("/dev/shm")  # Linux's folder in memory
BEFORE: dict[str, str] = {}
"""The environment as it was given, for installing packages: it may name a registry."""
HANDED_ON = (
    "FLEXOR_TESTS_BEFORE"  # the same, for the processes of pytest-xdist, which start with that of the tests
)
ENOUGH = 8 << 30  # bytes, for all that tests write at a time and then some


def prepare() -> Path:
    """Make this process's environment that of the tests. Gives the home folder, to be removed at the end."""
    signal.signal(
        signal.SIGHUP, signal.SIG_DFL
    )  # which nohup ignores, and a shell ignores Ctrl-C in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.setdefault("TMPDIR", str(_temporary()))
    tempfile.tempdir = None  # to be looked for again
    sys.dont_write_bytecode = (
        False  # as in the processes that tests start: else all compile everything, every time
    )
    home = Path(tempfile.mkdtemp(prefix="flexor-tests-"))
    ours = {
        "HOME": str(home),
        "PYTHONUSERBASE": site.getuserbase(),  # packages may be installed there: it would move with the home folder
        "PYTHONPATH": os.pathsep.join(_paths()),
        "LC_ALL": "C.UTF-8",
        "OMP_NUM_THREADS": "1",  # tests side by side do not fight
        # No question to a DNS server: torch asks for the name of 127.0.0.1 at every connection of a rank, and waits
        # 5 s for each answer that is lost. This machine's own names are in /etc/hosts.
        "RES_OPTIONS": "attempts:0",
        "HF_HUB_DOWNLOAD_TIMEOUT": "600",  # of servers of tests, which a busy machine may hold up
        "HF_HUB_ETAG_TIMEOUT": "600",
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # it would say each time that there is no name
        # Torch looks for it once, at a GPU's first matrix product: a deterministic run fails in a process without it.
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    }
    passed_on = {k: v for k, v in os.environ.items() if k in PASSED_ON or k.startswith(PASSED_ON_PREFIXES)}
    BEFORE.update(json.loads(os.environ.get(HANDED_ON, "{}")) or os.environ)
    ours[HANDED_ON] = json.dumps(BEFORE)
    os.environ.clear()
    os.environ.update(passed_on | ours)
    return home


def _temporary() -> Path:
    """Where tests write: in memory if there is room, since making and removing small files takes a disk its time."""
    roomy = os.access(IN_MEMORY, os.W_OK) and shutil.disk_usage(IN_MEMORY).free > ENOUGH
    return IN_MEMORY if roomy else Path(tempfile.gettempdir())


def _paths() -> list[str]:
    """Where modules are, also for processes that run in other folders."""
    paths = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]  # noqa: PTH100
    return [str(TESTS), *(path for path in paths if path != str(TESTS))]


def remove(home: Path) -> None:
    shutil.rmtree(home, ignore_errors=True)


def for_cpu(**more: str) -> dict[str, str]:
    """The environment of a process that sees no GPU, also where there is one."""
    return {**os.environ, "CUDA_VISIBLE_DEVICES": "", **more}
