"""Relative actions of a dataset as groups of a kind of robot, with statistics for each step of a chunk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from flexor.core.batch import ACTION, STATE
from flexor.policies.processing.relative_actions import BY_STEP

SAVED = ("min", "max", "mean", "std", "q01", "q99")


def groups_of_dataset(
    names: Sequence[str], relative: Sequence[bool], stats: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """What NVIDIA's files say of a robot, of a dataset. `relative`: which actions are; `names` may be fewer."""
    places = _groups(names, relative)
    moving = {key: place for key, place in places.items() if relative[place.start]}
    raw_stats = {
        "state": {key: _sliced(stats[STATE], place) for key, place in places.items()},
        "action": {key: _sliced(stats[ACTION], place) for key, place in places.items()},
        "relative_action": {key: _sliced(stats[BY_STEP], place) for key, place in moving.items()},
    }
    kinds = {"type": "NON_EEF", "format": "DEFAULT", "state_key": None}
    absolute = [raw_stats["action"][key] for key in places if key not in moving]
    quantiles = all({"q01", "q99"} <= {*group} for group in (*raw_stats["state"].values(), *absolute))
    return {
        "raw_stats": raw_stats,
        "modality_config": {
            "state": {"modality_keys": [*places]},
            "action": {
                "modality_keys": [*places],
                "action_configs": [
                    {"rep": "RELATIVE" if key in moving else "ABSOLUTE", **kinds} for key in places
                ],
                "delta_indices": [*range(len(stats[BY_STEP]["min"]))],
            },
        },
        "use_percentiles": quantiles,
        "use_relative_action": True,
        "state_dropout_prob": 0.0,
        "max_action_horizon": len(stats[BY_STEP]["min"]),
    }


def _groups(names: Sequence[str], relative: Sequence[bool]) -> dict[str, slice]:
    """Neighbouring relative actions are a group; of the others, each one."""
    groups: dict[str, slice] = {}
    start = 0
    for number, counts in enumerate(relative):
        following = number + 1 < len(relative) and relative[number + 1]
        if counts and following:
            continue
        if counts:
            key = f"single_arm_{len(groups)}" if "single_arm" in groups else "single_arm"
        else:
            name = names[number] if number < len(names) else ""
            key = name.removesuffix(".pos").split(".")[-1].replace(" ", "_") or "action"
            key = f"{key}_{number}" if key in groups else key
        groups[key] = slice(start, number + 1)
        start = number + 1
    return groups


def _sliced(stats: Mapping[str, Any], place: slice) -> dict[str, list[Any]]:
    return {name: np.asarray(stats[name], np.float32)[..., place].tolist() for name in SAVED if name in stats}
