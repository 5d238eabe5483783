"""Which value of the state measures the joint that an action moves."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flexor.data.dataset import Dataset
from flexor.data.format.flat_names import flat_names

ENDINGS = (".pos", "_pos", ".position", "_position")


def paired_joints(joints: Sequence[str], states: Sequence[str]) -> list[int | None]:
    """For each action the place of its state: by names, or by position where the names say nothing."""
    short_joints, short_states = _without_endings(joints), _without_endings(states)
    if len({*short_states}) == len(states) and {*short_joints} & {*short_states}:
        place = {name: number for number, name in enumerate(short_states)}
        return [place.get(name) for name in short_joints]
    if len(joints) == len(states):
        return list(range(len(joints)))
    return [None] * len(joints)


def value_names(dataset: Dataset, feature: str) -> list[str]:
    """The names of a feature's values; numbers if they have none."""
    if feature not in dataset.features:
        return []
    size = int(np.prod(dataset.features[feature].shape))
    return flat_names(dataset.features[feature].names, size) or [str(number) for number in range(size)]


def _without_endings(names: Sequence[str]) -> list[str]:
    short = []
    for name in names:
        text = name.lower()
        ending = next((ending for ending in ENDINGS if text.endswith(ending)), "")
        short.append(text.removesuffix(ending))
    return short
