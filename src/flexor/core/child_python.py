"""Starts small Python processes that import what this one could import."""

from __future__ import annotations

import os
import sys
from pathlib import Path

__all__ = ["module_command", "module_environment"]


def module_command(module: str, *arguments: object) -> list[str]:
    """The command that runs a module of Flexor's in another process. Use it with `module_environment`."""
    return [sys.executable, "-m", module, *map(str, arguments)]


def module_environment() -> dict[str, str]:
    """This process's environment, for a process that has one core: it imports from the same folders, and not from the
    working directory."""
    path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
    one_core = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1", **one_core}
