"""The command that trains on a dataset, if there is one that runs: the dataset is opened to find out."""

from __future__ import annotations

import shlex
from pathlib import Path

from flexor.core.batch import ACTION, ENV_STATE, IMAGE_PREFIX
from flexor.core.errors import DatasetError
from flexor.data.dataset import Dataset, open_dataset
from flexor.data.format.common_names import rename_flag, suggested_names
from flexor.data.format.episode_list import write_episodes


def train_command(root: Path, is_sound: bool = True) -> tuple[str | None, list[str]]:
    """The command, or None, and notes that say what it leaves out or why there is none.

    If not `is_sound`, all videos are opened too, not only the tables.
    """
    try:
        dataset = _opened(root, is_sound)
    except DatasetError:
        return None, [
            f"training can't read the dataset: `flexor data check {shlex.quote(str(root))}` says why"
        ]
    names = suggested_names(dataset.features)
    features = {names.get(name, name) for name in dataset.features}
    colour = [camera for camera in dataset.cameras if dataset.features[camera].depth is None]
    if ACTION not in features:
        return None, ["the dataset has no feature `action`: a policy has nothing to learn"]
    if ENV_STATE not in features and not any(
        names.get(camera, camera).startswith(IMAGE_PREFIX) for camera in colour
    ):
        return None, [f"the built-in policies need a camera that can be read, or {ENV_STATE}"]
    notes = (
        [f"names are not LeRobot's: {', '.join(f'{old} is {new}' for old, new in names.items())}"]
        if names
        else []
    )
    words = ["flexor train --policy.type=act", f"--dataset.root={shlex.quote(str(root))}"]
    if dataset.skipped:
        words.append(f"--dataset.exclude_episodes={write_episodes(dataset.skipped)}")
        notes.append(
            f"{len(dataset.skipped)} of {len(dataset.episodes) + len(dataset.skipped)} episodes can't be read: "
            f"`flexor data check {shlex.quote(str(root))}` says why"
        )
    words += [rename_flag(names)] if names else []
    return " ".join(words), notes


def _opened(root: Path, is_sound: bool) -> Dataset:
    if is_sound:
        try:
            return open_dataset(root=root)
        except DatasetError:  # perhaps of some episodes
            pass
    return open_dataset(root=root, on_bad_episode="skip")
