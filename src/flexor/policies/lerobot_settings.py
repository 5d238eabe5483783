"""LeRobot's settings of a policy that Flexor's policy does not have: which values change nothing, and why others do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexor.core.errors import CheckpointError, ConfigError
from flexor.core.log import warn_once
from flexor.core.typed import Text, parse_yaml


@dataclass(frozen=True)
class LerobotSetting:
    """A setting that a policy of LeRobot's has."""

    reason: str = ""
    """Why Flexor does not have it."""
    harmless: tuple[Any, ...] | None = None
    """Values that ask for nothing; None: all."""
    loads: str = ""
    """How a checkpoint with another value is used; empty: it is refused."""


def without_lerobot_settings(
    declared: Mapping[str, LerobotSetting], settings: Mapping[str, Any], file: Path | None = None
) -> dict[str, Any]:
    """The settings without the `declared` ones. `file` is the checkpoint's that they are from; None: the user's."""
    remaining = {name: value for name, value in settings.items() if name not in declared}
    for name in settings.keys() & declared.keys():
        value, setting = settings[name], declared[name]
        value = parse_yaml(value) if isinstance(value, Text) else value
        if setting.harmless is None or value in setting.harmless:
            continue
        if file is None:
            raise ConfigError(f"policy.{name}={value} is not supported: {setting.reason}.")
        if not setting.loads:
            raise CheckpointError(f"{file}: {name}={value} is not supported: {setting.reason}.")
        warn_once("%s: %s=%s has no effect: %s. %s", file, name, value, setting.reason, setting.loads)
    return remaining
