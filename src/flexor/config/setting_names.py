"""The names of all settings, and which of them somebody meant who wrote another one."""

from __future__ import annotations

import dataclasses
import difflib
import typing
from collections.abc import Iterable, Iterator
from typing import Any

from flexor.config.schema import TrainConfig
from flexor.core.typed import field_types, join

__all__ = ["setting_names", "suggestion"]

ALIKE = 0.75
"""Least similarity of two names, from 0 to 1, to suggest one for the other."""
CLOSE = 0.1
"""By how much less similar than the most similar name others may be, to be suggested with it."""
MOST = 3
OTHER_NAMES = {
    "learning_rate": "lr",
    "max_steps": "steps",
    "num_train_steps": "steps",
    "num_epochs": "epochs",
}
"""What other programs call a setting."""


def setting_names(policy: Any = None) -> list[str]:
    """All settings of `flexor train`, such as "dataset.cache.tier"; those of a policy by its config class."""
    names = [name for name in _names(TrainConfig, "") if not name.startswith("policy")]
    return [*names, "policy.type", "policy.path", *(_names(policy, "policy") if policy else ())]


def suggestion(name: str, names: Iterable[str]) -> str:
    """What to do about a setting that does not exist: "Did you mean ...?", or where all are listed."""
    group, _, last = name.rpartition(".")
    near = _meant(join(group, OTHER_NAMES.get(last, last)), [*names])
    return f"Did you mean {' or '.join(near)}?" if near else "`flexor train --help` lists all settings."


def _meant(name: str, names: list[str]) -> list[str]:
    """The settings that it could mean, the likeliest first; of equal ones, the shorter first."""
    parts = name.split(".")
    for end in range(
        len(parts), min(len(parts), 2) - 1, -1
    ):  # `a.b.c` may be the entry c of the setting group.a.b
        same_end = [other for other in names if f".{other}".endswith("." + ".".join(parts[:end]))]
        if same_end:
            return sorted(same_end, key=len)[:MOST]
    scored = [(_similarity(name, other), other) for other in names]
    least = max(ALIKE, max(score for score, _ in scored) - CLOSE)
    near = sorted((-score, len(other), other) for score, other in scored if score >= least)
    return [other for *_, other in near[:MOST]]


def _similarity(name: str, other: str) -> float:
    """Of all of a name, or of its last parts: the group may be missing."""
    tail = ".".join(other.split(".")[-name.count(".") - 1 :])
    return max(difflib.SequenceMatcher(None, name, text).ratio() for text in {other, tail})


def _names(cls: Any, where: str) -> Iterator[str]:
    for name, kind in field_types(cls).items():
        options = [kind] if typing.get_origin(kind) is None else typing.get_args(kind)
        group = next((option for option in options if dataclasses.is_dataclass(option)), None)
        if group is None or typing.get_origin(kind) in (dict, list, tuple):
            yield join(where, name)
        else:
            yield from _names(group, join(where, name))
