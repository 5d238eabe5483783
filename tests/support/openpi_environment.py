"""An environment with the published openpi-client, apart from ours: it needs numpy before 2."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from pathlib import Path

from support.environment import BEFORE

# typing_extensions: it imports that without saying so
PACKAGES = ["openpi-client==0.1.2", "numpy<2", "typing_extensions"]
INSTALL = ["--quiet", "--disable-pip-version-check", "--only-binary=:all:", "--retries=1", "--timeout=30"]
ROOT = Path(__file__).resolve().parents[2]


def openpi_python() -> Path | str:
    """Its Python, made on the first call; or the reason why there is none."""
    folder = ROOT / ".venv-openpi"
    python, ready = folder / "bin/python", folder / ".ready"
    folder.mkdir(exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several processes run tests
        if ready.is_file() and ready.read_text() == " ".join(PACKAGES):
            return python
        for command in (
            [sys.executable, "-m", "venv", str(folder)],
            [str(python), "-m", "pip", "install", *INSTALL, *PACKAGES],
        ):
            # without our own packages, and with the registry that this machine is set up for
            clean = {name: value for name, value in BEFORE.items() if name != "PYTHONPATH"}
            done = subprocess.run(command, capture_output=True, text=True, env=clean)
            if done.returncode:
                last = (done.stderr.strip().splitlines() or ["no message"])[-1]
                return f"{PACKAGES[0]} can't be installed from the package registry: {last}"
        ready.write_text(" ".join(PACKAGES))
    return python
