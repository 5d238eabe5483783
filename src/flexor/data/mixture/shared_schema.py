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
from flexor.data.format.common_names import checked_names
from flexor.data.format.metadata import Feature
from flexor.data.format.stats import NEEDED_STATS, Stats, aggregate_stats

REQUIRED = (STATE, ENV_STATE, ACTION)
"""Columns that policies use: no dataset may lack one that another has."""
PADDED = (STATE, ACTION)
OWN_COLUMNS = ("index", "episode_index", "task_index")


@dataclass(frozen=True, eq=False)
class RenamedDataset:
    """One of the datasets, under the names that its features have in the run."""

    name: str
    dataset: Dataset
    rename_map: dict[str, str]

    def __post_init__(self) -> None:
        cameras = {name: feature.is_camera for name, feature in self.dataset.features.items()}
        checked_names(cameras, self.rename_map, self.name)

    def new_name(self, name: str) -> str:
        return self.rename_map.get(name, name)

    @cached_property
    def features(self) -> dict[str, Feature]:
        """By their names in the run."""
        renamed = {self.new_name(name): feature for name, feature in self.dataset.features.items()}
        return {name: replace(feature, name=name) for name, feature in renamed.items()}

    @cached_property
    def cameras(self) -> list[str]:
        return [self.new_name(name) for name in self.dataset.cameras]

    @cached_property
    def columns(self) -> dict[str, np.ndarray]:
        return {self.new_name(name): column for name, column in self.dataset.columns.items()}

    @cached_property
    def stats(self) -> dict[str, Stats]:
        return {self.new_name(name): dict(stats) for name, stats in self.dataset.stats.items()}


@dataclass(eq=False)
class SharedSchema:
    """What all of them have."""

    features: dict[str, Feature]
    cameras: list[str]
    strings: list[str]
    blank: dict[str, list[int]]
    """Cameras that some of the datasets lack, and which."""
    padded: dict[str, str] = field(default_factory=dict)
    """Columns that are padded, and the lengths they have in each dataset, in words."""
    lengths: dict[str, list[int]] = field(default_factory=dict)
    """The lengths of padded columns in each dataset."""
    stats: list[dict[str, Stats]] = field(default_factory=list)
    """Of each dataset, padded like its columns; only what all its frames have."""


def build_schema(
    datasets: Sequence[RenamedDataset], on_missing_camera: str = "raise", allow_different_fps: bool = False
) -> SharedSchema:
    """The form of all datasets together, or an error that says what differs and what can be done."""
    _check_fps(datasets, allow_different_fps)
    cameras, blank = _cameras(datasets, on_missing_camera)
    features: dict[str, Feature] = {}
    padded: dict[str, str] = {}
    for name in _shared_columns(datasets):
        features[name], lengths = _column(name, datasets)
        if lengths:
            padded[name] = lengths
    widths = {name: [dataset.features[name].shape[0] for dataset in datasets] for name in padded}
    for camera in cameras:
        features[camera] = _camera(camera, datasets)
    members = [dataset.dataset for dataset in datasets]
    strings = [name for name in members[0].strings if all(name in member.strings for member in members)]
    schema = SharedSchema(features, cameras, strings, blank, padded, widths)
    schema.stats = [_padded_stats(dataset, schema) for dataset in datasets]
    for name, lengths in padded.items():
        log.info("%s is padded with zeros: it has %s", name, lengths)
    return schema


def mask_of(camera: str) -> str:
    """The column that says which samples have an image of a camera; LeRobot's name."""
    return f"{camera}_padding_mask"


def aligned_columns(dataset: RenamedDataset, schema: SharedSchema) -> dict[str, np.ndarray]:
    """The columns of one dataset in the form of all."""
    features = {name: f for name, f in schema.features.items() if name in dataset.columns and not f.is_camera}
    columns = {name: _as(dataset.columns[name], feature) for name, feature in features.items()}
    if ACTION in schema.padded:
        columns[ACTION_LENGTH] = np.full(len(dataset.dataset), dataset.features[ACTION].shape[0], np.int64)
    for camera in schema.blank:
        columns[mask_of(camera)] = np.full(len(dataset.dataset), camera in dataset.cameras)
    return columns


def merged_stats(schema: SharedSchema) -> dict[str, Stats]:
    """Statistics over all datasets, weighted by their frames, as LeRobot merges them. Left out: what one lacks.

    Padded zeros do not count: a dimension's statistics are those of the datasets that have it.
    """
    merged = {}
    for name in schema.features:
        lacking = schema.blank.get(name, [])
        numbers = [number for number in range(len(schema.stats)) if number not in lacking]
        parts = [stats for number in numbers if (stats := schema.stats[number].get(name)) is not None]
        if not parts or len(parts) < len(numbers):
            continue
        lengths = [schema.lengths[name][number] for number in numbers] if name in schema.padded else []
        merged[name] = _merged_by_length(parts, lengths) if lengths else _merged(parts)
    return merged


def _merged(parts: Sequence[Stats]) -> Stats:
    return aggregate_stats([{"": part} for part in parts])[""]


def _merged_by_length(parts: Sequence[Stats], lengths: Sequence[int]) -> Stats:
    """Statistics of padded vectors, of which the first `lengths` values are data."""
    pieces, start = [], 0
    for end in sorted({*lengths}):
        longer = [part for part, length in zip(parts, lengths) if length >= end]
        cut = [{k: v if k == "count" else v[start:end] for k, v in part.items()} for part in longer]
        pieces.append(_merged(cut))
        start = end
    keys = [key for key in pieces[0] if all(key in piece for piece in pieces)]
    joined = {key: np.concatenate([piece[key] for piece in pieces]) for key in keys}
    return joined | {"count": pieces[0]["count"]}


def _check_fps(datasets: Sequence[RenamedDataset], allowed: bool) -> None:
    rates = {dataset.dataset.fps for dataset in datasets}
    if len(rates) == 1:
        return
    named = ", ".join(f"{dataset.name} has {dataset.dataset.fps:g}" for dataset in datasets)
    if not allowed:
        raise ConfigError(
            f"The datasets have different frame rates (fps): {named}. A chunk of actions would span different times. "
            "To train on them nevertheless, counting time in frames, set --dataset.allow_different_fps."
        )
    log.warning("frame rates (fps) differ: %s. Time is counted in frames", named)


def _cameras(datasets: Sequence[RenamedDataset], on_missing: str) -> tuple[list[str], dict[str, list[int]]]:
    cameras = list(dict.fromkeys(camera for dataset in datasets for camera in dataset.cameras))
    missing = {
        camera: lacking
        for camera in cameras
        if (lacking := [number for number, dataset in enumerate(datasets) if camera not in dataset.cameras])
    }
    if missing and on_missing == "raise":
        raise ConfigError(
            "The datasets have different cameras: "
            + "; ".join(f"{dataset.name} has {', '.join(dataset.cameras) or 'none'}" for dataset in datasets)
            + ". Give the same camera the same name with rename_map of a dataset (in dataset.mix), or set "
            "--dataset.on_missing_camera: mask shows black images in place of the missing ones, drop leaves out the "
            "cameras that are not in all datasets."
        )
    if on_missing == "mask":
        for camera, lacking in missing.items():
            log.info("%s has no %s: black images", ", ".join(datasets[n].name for n in lacking), camera)
        return cameras, missing
    if missing:
        log.info("left out: %s, which not all datasets have", ", ".join(missing))
    return [camera for camera in cameras if camera not in missing], {}


def _camera(name: str, datasets: Sequence[RenamedDataset]) -> Feature:
    with_camera = [dataset for dataset in datasets if name in dataset.cameras]
    shapes = {dataset.features[name].chw for dataset in with_camera}
    if len(shapes) > 1:
        sizes = ", ".join(
            f"{h}x{w} with {c} channels in {dataset.name}"
            for dataset in with_camera
            for c, h, w in [dataset.features[name].chw]
        )
        advice = (
            "Scale them to one size with --dataset.cache.size=HEIGHTxWIDTH."
            if len({shape[0] for shape in shapes}) == 1
            else "Rename one of them with rename_map of its dataset (in dataset.mix)."
        )
        raise ConfigError(f"The images of {name} differ: {sizes}. {advice}")
    return with_camera[0].features[name]


def _shared_columns(datasets: Sequence[RenamedDataset]) -> list[str]:
    names = list(dict.fromkeys(name for dataset in datasets for name in dataset.columns))
    left_out = []
    for name in list(names):
        lacking = [dataset.name for dataset in datasets if name not in dataset.columns]
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


def _column(name: str, datasets: Sequence[RenamedDataset]) -> tuple[Feature, str]:
    """The feature, and the lengths of it in words if it must be padded."""
    features = [dataset.features[name] for dataset in datasets]
    columns = [dataset.columns[name] for dataset in datasets]
    feature = replace(features[0], dtype=_shared_type(name, columns))
    shapes = [tuple(each.shape) for each in features]
    if len(set(shapes)) == 1:
        same = all(each.names == features[0].names for each in features)
        return (feature if same else replace(feature, names=None)), ""
    words = ", ".join(f"{list(shape)} in {dataset.name}" for shape, dataset in zip(shapes, datasets))
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


def _padded_stats(dataset: RenamedDataset, schema: SharedSchema) -> dict[str, Stats]:
    """What a dataset publishes about its features, as if its columns had been padded before."""
    padded = {}
    for name, stats in dataset.stats.items():
        if name not in schema.features or not all(key in stats for key in NEEDED_STATS):
            continue
        missing = 0 if name not in schema.padded else schema.features[name].shape[0] - len(stats["mean"])
        padding = (0, missing)
        values = {k: np.pad(v, padding) if missing and k != "count" else v for k, v in stats.items()}
        padded[name] = {"count": np.array([len(dataset.dataset)]), **values}
    return padded
