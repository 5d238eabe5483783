"""Whose code may run: what the user has named on a command line of this machine, now or earlier, and nothing else.

Settings can name code: a policy in a file or module, the package of an environment. In a command it is the user's
choice. In the files of a run or checkpoint it is the choice of whoever wrote them. So a name from a file counts only if
the user has given it too, as a setting or with `--trust`. What was named is remembered in the user's own folder, not in
the run's: a run that was copied or downloaded brings no trust with it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from flexor.core.errors import ConfigError
from flexor.core.log import log

VARIABLE = "FLEXOR_TRUST"  # names separated by commas; the processes that this one starts inherit them


def settled(code: str) -> str:
    """file.py:CLASS with the absolute path of the file, so that it is the same from any folder; other names as is."""
    where, colon, name = code.rpartition(":") if not code.endswith(".py") else (code, "", "")
    if not where.endswith(".py"):
        return code
    return f"{os.path.abspath(Path(where).expanduser())}{colon}{name}"  # noqa: PTH100  (which also drops `..`)


def trust(names: Iterable[str]) -> None:
    """The user names this code: it may run, also in later commands. A file alone stands for all classes in it."""
    new = [name for name in map(settled, names) if not is_trusted(name)]
    if not new:
        return
    os.environ[VARIABLE] = ",".join([*_in_environment(), *new])
    file = _file()
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with file.open("a", encoding="utf-8") as remembered:
            remembered.writelines(f"{name}\n" for name in new if "\n" not in name)
    except OSError as error:
        log.debug("%s can't be written (%s): code is trusted by this command only", file, error)


def is_trusted(name: str) -> bool:
    name = settled(name)
    return not {name, name.rpartition(":")[0] or name}.isdisjoint([*_in_environment(), *_remembered()])


def require_trust(names: Iterable[str], named_by: object) -> None:
    """Refuse code that only the file `named_by` names."""
    for name in names:
        if not is_trusted(name):
            raise ConfigError(
                f"{named_by} says that the code to run is {name}. Code that only a file names is not run: it may be a "
                f"stranger's. If you know that code and trust it, add --trust={name}. Flexor remembers that."
            )


def _in_environment() -> list[str]:
    return [name for name in os.environ.get(VARIABLE, "").split(",") if name]


def _remembered() -> list[str]:
    try:
        return _file().read_text(encoding="utf-8").split("\n")
    except (OSError, ValueError):
        return []


def _file() -> Path:
    """In the user's own folder: a cache may be shared with others."""
    config = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(config).expanduser() / "flexor" / "trusted_code.txt"
