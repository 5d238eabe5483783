"""Names that other programs give to actions, states and cameras, and those that LeRobot's policies expect."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping

from flexor.core.batch import ACTION, IMAGE_PREFIX, STATE
from flexor.core.errors import ConfigError
from flexor.data.format.metadata import Feature

OBSERVATION = "observation."
# the most usual first: if a dataset has several, the first one is meant
ACTIONS = ("actions", "act", "robot_action", "robot_actions")
STATES = (
    *("state", "states", "robot_state", "robot0_state", "qpos", "agent_pos", "proprio", "proprioception"),
    *("joint_position", "joint_positions"),
)
GROUPS = ("observation", "observations", "obs", "robot", "robot0")  # what a name may begin with
IMAGE_GROUPS = (*GROUPS, "images", "image")


def suggested_names(features: Mapping[str, Feature]) -> dict[str, str]:
    """Features under other names -> LeRobot's names; those that policies use already are left out."""
    numbers = [name for name, feature in features.items() if feature.is_numeric]
    names = {}
    for target, usual in ((ACTION, ACTIONS), (STATE, STATES)):
        unused = [name for name in numbers if not name.startswith((f"{ACTION}.", OBSERVATION))]
        matches = [name for word in usual for name in unused if _without(GROUPS, name) == word]
        if target not in features and matches:
            names[matches[0]] = target
    for name, feature in features.items():
        if feature.is_camera and not name.startswith(IMAGE_PREFIX):
            names[name] = f"{OBSERVATION}images.{_without(IMAGE_GROUPS, name)}"
    taken = {*features, *names.values()}
    return names if len(taken) == len(features) + len(names) else {}


def checked_names(cameras: Mapping[str, bool], rename_map: Mapping[str, str], dataset: str) -> dict[str, str]:
    """The map, if the dataset's features can have these names. `cameras` says of each feature whether it is one."""
    for old, new in rename_map.items():
        if old not in cameras:
            raise ConfigError(
                f"rename_map of {dataset}: it has no feature {old!r}, but {', '.join(cameras)}."
            )
        if new in cameras and new not in rename_map:
            raise ConfigError(f"rename_map of {dataset}: it has a feature {new!r} already; rename that too.")
        if cameras[old] != new.startswith(IMAGE_PREFIX) and new.startswith(OBSERVATION):
            kind, rule = ("a camera", "must begin") if cameras[old] else ("no camera", "can't begin")
            raise ConfigError(
                f"rename_map of {dataset}: {old} is {kind}, so its name {rule} with {IMAGE_PREFIX!r}, not {new!r}."
            )
    names = Counter(rename_map.get(name, name) for name in cameras)
    if twice := [name for name, count in names.items() if count > 1]:
        raise ConfigError(f"rename_map of {dataset} gives two features the name {', '.join(twice)}.")
    return dict(rename_map)


def rename_flag(names: Mapping[str, str]) -> str:
    return f"--rename_map='{json.dumps(dict(names))}'"


def _without(groups: tuple[str, ...], name: str) -> str:
    """A name such as observation/state without what it begins with."""
    words = [word for word in re.split(r"[./]", name.lower()) if word]
    while len(words) > 1 and words[0] in groups:
        words = words[1:]
    return "_".join(words)
