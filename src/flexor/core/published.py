"""Settings and records as others may read them: without passwords, and without the paths of this machine.

A path becomes the name of its file or folder. So a run from the Hub says which dataset it was trained on, and whoever
resumes it says where that is (`--dataset.root`).
"""

from __future__ import annotations

import re
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

from flexor.core.secrets import redacted_values

_LOCAL = re.compile(r"(?:file:)?/|~|[A-Za-z]:[\\/]")


def published(value: Any) -> Any:
    """Plain data without passwords, and with names instead of absolute paths. A list such as /a/x,/b/y has several."""
    return _with_names(redacted_values(value))


def is_local_path(text: str) -> bool:
    """Whether it is an absolute path on this machine."""
    return _LOCAL.match(text) is not None


def same_setting(saved: Any, value: Any) -> bool:
    """Whether a setting is the saved one, which may have been published: then only its name is left."""
    return bool(saved == value or saved == published(value))


def _with_names(value: Any) -> Any:
    if isinstance(value, str):
        return ",".join(map(_name, value.split(",")))
    if isinstance(value, dict):
        return {key: _with_names(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_with_names(part) for part in value]
    return value


def _name(text: str) -> str:
    path = text.strip()
    if not is_local_path(path):
        return text
    return (PureWindowsPath(path) if "\\" in path else PurePosixPath(path)).name or text
