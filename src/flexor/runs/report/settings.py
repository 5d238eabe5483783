"""Settings of runs, and in which they differ."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any


def flat_settings(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """`optimizer.lr` -> `0.0001`. Lists are one setting."""
    settings: dict[str, str] = {}
    for name, value in config.items():
        if isinstance(value, dict) and value:
            settings |= flat_settings(value, f"{prefix}{name}.")
        else:
            settings[f"{prefix}{name}"] = _text(value)
    return settings


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.9g}"  # 0.0003, whatever arithmetic it is the result of
    return value if isinstance(value, str) else json.dumps(value, default=str)


def differing(configs: Sequence[Mapping[str, str]]) -> list[tuple[str, list[str | None]]]:
    """The settings that are not the same in all runs, with the value of each; None where a run has no such setting."""
    names = dict.fromkeys(name for config in configs for name in config)
    rows = [(name, [config.get(name) for config in configs]) for name in names]
    return [(name, values) for name, values in rows if len({*values}) > 1]
