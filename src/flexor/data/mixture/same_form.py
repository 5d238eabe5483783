"""Brings the features of several datasets into one form: the same names, shapes and types.

- A camera must have the same size in all of them. One that some of them lack is an error, or masked, or dropped.
- States and actions of different lengths are padded with zeros. The policy must support that: `fit.py` checks it.
- Other columns that some of them lack are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from flexor.core.batch import ACTION, ACTION_LENGTH, ENV_STATE, STATE
from flexor.core.errors import ConfigError, DatasetError
from flexor.core.log import log
from flexor.data.dataset import Dataset
from flexor.data.format.metadata import Feature
from flexor.data.format.stats import Stats, aggregate_stats

REQUIRED = (STATE, ENV_STATE, ACTION)
"""Columns that policies use: no dataset may lack one that another has."""
PADDED = (STATE, ACTION)
OWN_COLUMNS = ("index", "episode_index", "task_index")
NEEDED = ("mean", "std", "min", "max")


@dataclass(frozen=True, eq=False)
class Given:
    """One of the datasets, under the names that its features have in the run."""

    name: str
    dataset: Dataset
    rename_map: dict[str, str]

    def __post_init__(self) -> None:
        features = self.dataset.features
        for old, new in self.rename_map.items():
            if old not in features:
                raise ConfigError(
                    f"rename_map of {self.name}: it has no feature {old!r}, but {', '.join(features)}."
                )
            if new in features and new not in self.rename_map:
                raise ConfigError(
                    f"rename_map of {self.name}: it has a feature {new!r} already; rename that too."
                )
        names = [self.new(name) for name in features]
        twice = {name for name in names if names.count(name) > 1}
        if twice:
            raise ConfigError(f"rename_map of {self.name} gives two features the name {', '.join(twice)}.")

    def new(self, name: str) -> str:
        return self.rename_map.get(name, name)

    @cached_property
    def features(self) -> dict[str, Feature]:
        """By their names in the run."""
        found = {self.new(name): feature for name, feature in self.dataset.features.items()}
        return {name: replace(feature, name=name) for name, feature in found.items()}

    @cached_property
    def cameras(self) -> list[str]:
        return [self.new(name) for name in self.dataset.cameras]

    @cached_property
    def columns(self) -> dict[str, np.ndarray]:
        return {self.new(name): column for name, column in self.dataset.columns.items()}

    @cached_property
    def stats(self) -> dict[str, Stats]:
        return {self.new(name): dict(stats) for name, stats in self.dataset.stats.items()}


@dataclass(eq=False)
class Form:
    """What all of them have."""

    features: dict[str, Feature]
    cameras: list[str]
    strings: list[str]
    blank: dict[str, list[int]]
    """Cameras that some of the datasets lack, and which."""
    padded: dict[str, str] = field(default_factory=dict)
    """Columns that are padded, and the lengths they have in each dataset, in words."""
    stats: list[dict[str, Stats]] = field(default_factory=list)
    """Of each dataset, padded like its columns; only what all its frames have."""


def agree(
    given: Sequence[Given], on_missing_camera: str = "raise", allow_different_fps: bool = False
) -> Form:
    """The form of all datasets together, or an error that says what differs and what can be done."""
    _check_fps(given, allow_different_fps)
    cameras, blank = _cameras(given, on_missing_camera)
    features: dict[str, Feature] = {}
    padded: dict[str, str] = {}
    for name in _shared_columns(given):
        features[name], lengths = _column(name, given)
        if lengths:
            padded[name] = lengths
    for camera in cameras:
        features[camera] = _camera(camera, given)
    strings = [n for n in given[0].dataset.strings if all(n in one.dataset.strings for one in given)]
    form = Form(features, cameras, strings, blank, padded)
    form.stats = [_padded_stats(one, form) for one in given]
    for name, lengths in padded.items():
        log.info("%s is padded with zeros: it has %s", name, lengths)
    return form


def mask_of(camera: str) -> str:
    """The column that says which samples have an image of a camera; LeRobot's name."""
    return f"{camera}_padding_mask"


def brought(one: Given, form: Form) -> dict[str, np.ndarray]:
    """The columns of one dataset in the form of all."""
    columns = {}
    for name, feature in form.features.items():
        if feature.is_camera:
            continue
        if name in one.columns:
            columns[name] = _as(one.columns[name], feature)
    if ACTION in form.padded:
        columns[ACTION_LENGTH] = np.full(len(one.dataset), one.features[ACTION].shape[0], np.int64)
    for camera in form.blank:
        columns[mask_of(camera)] = np.full(len(one.dataset), camera in one.cameras)
    return columns


def merged_stats(form: Form) -> dict[str, Stats]:
    """Statistics over all datasets, weighted by their frames, as LeRobot merges them. Left out: what one lacks."""
    merged = {}
    for name in form.features:
        lacking = form.blank.get(name, [])
        parts = [stats.get(name) for number, stats in enumerate(form.stats) if number not in lacking]
        if parts and all(part is not None for part in parts):
            merged[name] = aggregate_stats([{name: part} for part in parts if part is not None])[name]
    return merged


def _check_fps(given: Sequence[Given], allowed: bool) -> None:
    rates = {one.dataset.fps for one in given}
    if len(rates) == 1:
        return
    named = ", ".join(f"{one.name} has {one.dataset.fps:g}" for one in given)
    if not allowed:
        raise ConfigError(
            f"The datasets have different frame rates (fps): {named}. A chunk of actions would span different times. "
            "To train on them nevertheless, counting time in frames, set --dataset.allow_different_fps."
        )
    log.warning("frame rates (fps) differ: %s. Time is counted in frames", named)


def _cameras(given: Sequence[Given], on_missing: str) -> tuple[list[str], dict[str, list[int]]]:
    everything = list(dict.fromkeys(camera for one in given for camera in one.cameras))
    missing = {
        camera: lacking
        for camera in everything
        if (lacking := [number for number, one in enumerate(given) if camera not in one.cameras])
    }
    if missing and on_missing == "raise":
        raise ConfigError(
            "The datasets have different cameras: "
            + "; ".join(f"{one.name} has {', '.join(one.cameras) or 'none'}" for one in given)
            + ". Give the same camera the same name with rename_map of a dataset (in dataset.mix), or set "
            "--dataset.on_missing_camera: mask shows black images in place of the missing ones, drop leaves out the "
            "cameras that are not in all datasets."
        )
    if on_missing == "mask":
        for camera, lacking in missing.items():
            log.info("%s has no %s: black images", ", ".join(given[n].name for n in lacking), camera)
        return everything, missing
    if missing:
        log.info("left out: %s, which not all datasets have", ", ".join(missing))
    return [camera for camera in everything if camera not in missing], {}


def _camera(name: str, given: Sequence[Given]) -> Feature:
    having = [one for one in given if name in one.cameras]
    shapes = {one.features[name].chw for one in having}
    if len(shapes) > 1:
        sizes = ", ".join(
            f"{h}x{w} with {c} channels in {one.name}"
            for one in having
            for c, h, w in [one.features[name].chw]
        )
        advice = (
            "Scale them to one size with --dataset.cache.size=HEIGHTxWIDTH."
            if len({shape[0] for shape in shapes}) == 1
            else "Rename one of them with rename_map of its dataset (in dataset.mix)."
        )
        raise ConfigError(f"The images of {name} differ: {sizes}. {advice}")
    return having[0].features[name]


def _shared_columns(given: Sequence[Given]) -> list[str]:
    names = list(dict.fromkeys(name for one in given for name in one.columns))
    left_out = []
    for name in list(names):
        lacking = [one.name for one in given if name not in one.columns]
        if not lacking:
            continue
        if name in REQUIRED:
            raise ConfigError(
                f"{name} is missing in {', '.join(lacking)}. Rename the feature that corresponds to it with rename_map "
                "of that dataset (in dataset.mix)."
            )
        left_out.append(name)
        names.remove(name)
    if left_out:
        log.info("left out: %s, which not all datasets have", ", ".join(left_out))
    return names


def _column(name: str, given: Sequence[Given]) -> tuple[Feature, str]:
    """The feature, and the lengths of it in words if it must be padded."""
    features = [one.features[name] for one in given]
    columns = [one.columns[name] for one in given]
    feature = replace(features[0], dtype=_shared_type(name, columns))
    shapes = [tuple(each.shape) for each in features]
    if len(set(shapes)) == 1:
        same = all(each.names == features[0].names for each in features)
        return (feature if same else replace(feature, names=None)), ""
    words = ", ".join(f"{list(shape)} in {one.name}" for shape, one in zip(shapes, given))
    if name not in PADDED or any(len(shape) != 1 for shape in shapes):
        raise ConfigError(f"{name} has different shapes: {words}. Only {' and '.join(PADDED)} can be padded.")
    return replace(feature, shape=(max(shape[0] for shape in shapes),), names=None), words


def _shared_type(name: str, columns: Sequence[np.ndarray]) -> str:
    types = {column.dtype for column in columns}
    if len(types) == 1:
        return str(columns[0].dtype)
    if any(each.kind == "f" for each in types):
        return "float32"
    try:
        return str(np.result_type(*types))
    except TypeError as error:
        raise DatasetError(f"{name} has types that can't be joined: {', '.join(map(str, types))}") from error


def _as(column: np.ndarray, feature: Feature) -> np.ndarray:
    column = column.astype(feature.dtype, copy=False)
    if feature.shape == (1,) or len(feature.shape) != 1:
        return column
    column = column[:, None] if column.ndim == 1 else column
    return np.pad(column, ((0, 0), (0, feature.shape[0] - column.shape[1])))


def _padded_stats(one: Given, form: Form) -> dict[str, Stats]:
    """What a dataset publishes about its features, as if its columns had been padded before."""
    found = {}
    for name, stats in one.stats.items():
        if name not in form.features or not all(key in stats for key in NEEDED):
            continue
        missing = 0 if name not in form.padded else form.features[name].shape[0] - len(stats["mean"])
        own = {
            key: value if key == "count" or not missing else np.pad(value, (0, missing))
            for key, value in stats.items()
        }
        found[name] = {"count": np.array([len(one.dataset)]), **own}
    return found
