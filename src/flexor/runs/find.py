"""Which folders are runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flexor.core.errors import ConfigError
from flexor.core.run_files import LOCK, METRICS, RUN_CONFIG, RUN_RECORD

SIGNS = (RUN_CONFIG, METRICS, RUN_RECORD, LOCK)
DEPTH = 3  # how deep below a named folder runs are looked for


def is_run(folder: Path) -> bool:
    """Whether a folder is a run, even one that has just begun or was copied in part."""
    return any((folder / name).is_file() for name in SIGNS)


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """The runs at these paths and in folders at these paths, each once and in this order."""
    runs: dict[Path, Path] = {}
    for path in paths:
        if path.is_file() and path.name in SIGNS:
            path = path.parent
        if not path.is_dir():
            problem = "is a file" if path.exists() else "does not exist"
            raise ConfigError(f"{path} {problem}: name the folder of a run, or a folder with runs in it.")
        for run in [path] if is_run(path) else _below(path, DEPTH):
            runs.setdefault(run.resolve(), run)
    return list(runs.values())


def _below(folder: Path, depth: int) -> list[Path]:
    try:
        folders = sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
    except OSError:
        return []
    runs: list[Path] = []
    for path in folders:
        if is_run(path):
            runs.append(path)
        elif depth > 1:
            runs += _below(path, depth - 1)
    return runs


def short_names(folders: Sequence[Path]) -> list[str]:
    """A name for each: the last part of its path, or as many parts as make the names unique."""
    all_parts = [folder.resolve().parts for folder in folders]
    longest = max((len(parts) for parts in all_parts), default=1)
    for count in range(1, longest + 1):
        names = ["/".join(parts[-count:]) for parts in all_parts]
        if len({*names}) == len(names):
            return names
    return [str(folder) for folder in folders]
