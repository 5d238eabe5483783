"""The table part of a repair: the new dataset's columns, and each episode's rows and their order."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from flexor.data.check.layout import EpisodeEntry, Layout
from flexor.data.check.tables import OWN_COLUMNS, numbers
from flexor.data.format.metadata import Feature
from flexor.data.format.schema import ANNOTATIONS, LANGUAGE, NUMERIC
from flexor.data.format.table import flat_numbers
from flexor.data.format.undeclared import stored_features
from flexor.data.repair.account import EpisodePlan


@dataclass
class Columns:
    """The columns of the new dataset, cameras included, as meta/info.json will declare them."""

    features: dict[str, dict[str, Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def feature(self, name: str) -> Feature:
        spec = self.features[name]
        return Feature(name, spec["dtype"], tuple(spec["shape"]), spec.get("names"))

    @property
    def stored(self) -> list[str]:
        """The columns that are stored in the tables."""
        return [name for name, spec in self.features.items() if spec["dtype"] != "video"]


def plan_columns(layout: Layout, episodes: list[EpisodeEntry]) -> Columns:
    """The columns that the new dataset declares: declared ones that exist, and undeclared ones of a simple type."""
    columns = Columns()
    files = list(dict.fromkeys(episode.data_file for episode in episodes))
    schemas = {file: schema for file in files if (schema := _schema(layout, file)) is not None}
    present = {name: s.field(name).type for s in reversed(schemas.values()) for name in s.names}
    for name, feature in layout.features.items():
        spec = {**layout.info["features"][name], "shape": list(feature.shape), "names": feature.names}
        if name in OWN_COLUMNS:
            continue
        if feature.is_video:
            if any(layout.path(file).is_file() for file in layout.camera_files(name)):
                columns.features[name] = spec
            else:
                columns.notes.append(f"camera {name} is declared but has no videos: declaration removed")
        elif name not in present:
            columns.notes.append(f"{name} is declared but no data file has the column: declaration removed")
        elif feature.dtype not in NUMERIC | {"string", "image", LANGUAGE}:
            columns.notes.append(f"{name} has the dtype {feature.dtype!r}, which can't be copied: left out")
        else:
            columns.features[name] = spec | ({"shape": [1]} if feature.dtype == "string" else {})
            if feature.is_array:
                _redeclare_array(columns, feature)
            if feature.is_numeric:
                _redeclare(layout, columns, name, present[name], list(schemas))
    undeclared = {n: kind for n, kind in present.items() if n not in layout.features and n not in OWN_COLUMNS}
    stored = [stored_features(layout.path(file), layout.features) for file in schemas] if undeclared else []
    for name, kind in undeclared.items():
        matching = next((features[name] for features in stored if name in features), None)
        _take_undeclared(columns, name, kind, matching)
    added = [name for name in OWN_COLUMNS if schemas and name not in present]
    if added:
        columns.notes.append(f"columns added: {', '.join(added)}")
    return columns


def _schema(layout: Layout, file: str) -> pa.Schema | None:
    try:
        return pq.read_schema(layout.path(file))
    except (pa.ArrowException, OSError):
        return None


def _redeclare(layout: Layout, columns: Columns, name: str, kind: pa.DataType, files: list[str]) -> None:
    """Correct the declaration if no file matches it and all files agree with each other."""
    spec = columns.features[name]
    leaf = kind
    while pa.types.is_nested(leaf) and leaf.num_fields:
        leaf = leaf.field(0).type
    stored = _numpy_name(leaf)
    if stored and not np.can_cast(np.dtype(stored), np.dtype(spec["dtype"]), "same_kind"):
        columns.notes.append(f"{name} is declared as {spec['dtype']} but contains {stored}: corrected")
        spec["dtype"] = stored
    declared = int(np.prod(spec["shape"]))
    if _width(layout, files[0], name) == declared:
        return
    widths = {_width(layout, file, name) for file in files} - {None}
    if declared not in widths and len(widths) == 1:
        (width,) = widths
        declared_shape = f"is declared with shape {spec['shape']}"
        columns.notes.append(f"{name} {declared_shape} but has shape [{width}]: corrected")
        spec["shape"] = [width]
        if isinstance(spec.get("names"), list) and len(spec["names"]) != width:
            spec["names"] = None


def _redeclare_array(columns: Columns, feature: Feature) -> None:
    """Pixels in the tables become PNG images, which other programs take for a camera too."""
    _, height, width = feature.chw
    axes = {"shape": [height, width, 3], "names": ["height", "width", "channels"]}
    columns.features[feature.name] |= {"dtype": "image", **axes}
    columns.notes.append(f"camera {feature.name} is stored as arrays of pixels: written as PNG images")


def _width(layout: Layout, file: str, name: str) -> int | None:
    """The number of values in the first row of a column."""
    try:
        with pq.ParquetFile(layout.path(file)) as parquet:
            batch = next(parquet.iter_batches(1, columns=[name]))
    except (pa.ArrowException, OSError, StopIteration, KeyError):
        return None
    values = flat_numbers(pa.chunked_array([batch.column(0)]))
    return len(values) or None if values is not None else None


def _take_undeclared(columns: Columns, name: str, kind: pa.DataType, feature: Feature | None) -> None:
    if name in ANNOTATIONS and pa.types.is_list(kind):
        feature = Feature(name, LANGUAGE, (1,))
    if feature is None or "/" in name:
        columns.notes.append(f"column {name} ({kind}) is not declared: left out")
        return
    dtype, shape = feature.dtype, list(feature.shape)
    columns.notes.append(f"column {name} was not declared: declared as {dtype} {shape}")
    columns.features[name] = {"dtype": dtype, "shape": shape, "names": None}


def _numpy_name(kind: pa.DataType) -> str | None:
    is_number = pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind)
    return str(np.dtype(kind.to_pandas_dtype())) if is_number else None


def find_rows(layout: Layout, columns: Columns, plans: list[EpisodePlan]) -> None:
    """Add the episode's rows to each plan, or why it can't be used."""
    files: dict[str, list[EpisodePlan]] = {}
    for plan in plans:
        files.setdefault(plan.episode.data_file, []).append(plan)
    for file, file_plans in files.items():
        data_file = _read(layout, columns, file)
        episodes = [e for e in layout.episodes if e.data_file == file]
        for plan in file_plans:
            if isinstance(data_file, str):
                plan.reason = data_file
            else:
                data_file.find(plan, episodes)


def _read(layout: Layout, columns: Columns, file: str) -> _DataFile | str:
    """The numeric columns of a data file, or why they can't be read."""
    path = layout.path(file)
    if not path.is_file():
        return f"its data file {file} is missing"
    schema = _schema(layout, file)
    if schema is None:
        return f"its data file {file} is damaged or truncated"
    missing = [name for name in columns.stored if name not in schema.names]
    if missing:
        return f"its data file {file} has no column {', '.join(missing)}, though other data files have it"
    declared = {n: columns.feature(n) for n in columns.stored if columns.feature(n).is_numeric}
    standard = {name: Feature(name, "int64", (1,)) for name in OWN_COLUMNS if name in schema.names}
    try:
        table = pq.read_table(path, columns=[*declared, *standard])
    except (pa.ArrowException, OSError) as error:
        return f"its data file {file} is damaged ({str(error).splitlines()[0][:100]})"
    values = {name: numbers(table[name], feature) for name, feature in (declared | standard).items()}
    for name, column in values.items():
        if isinstance(column, str) and name in declared:
            return f"{name} in its data file {file}: {column}"
    usable = {name: column for name, column in values.items() if not isinstance(column, str)}
    return _DataFile(
        layout,
        table.num_rows,
        {n: v for n, v in usable.items() if n in declared},
        {n: v[:, 0] for n, v in usable.items() if n in standard},
    )


@dataclass
class _DataFile:
    layout: Layout
    length: int
    values: dict[str, np.ndarray]  # [N, D]
    standard: dict[str, np.ndarray]  # [N] LeRobot's own columns that exist

    def find(self, plan: EpisodePlan, inside: list[EpisodeEntry]) -> None:
        rows = self._episode_rows(plan, inside)
        order = row_order(rows, self._standard("frame_index", rows), self._standard("timestamp", rows))
        if not len(rows) or order is None:
            order_unknown = "neither frame_index nor timestamp gives the recording order of its rows"
            plan.reason = order_unknown if len(rows) else "the table has no rows of this episode"
            return
        if (np.diff(rows[order]) != 1).any():
            plan.repairs.append("rows sorted by frame_index")
        plan.rows = rows = rows[order]
        clock, count = self._standard("timestamp", rows), self._standard("frame_index", rows)
        plan.clock = np.arange(len(rows)) / self.layout.fps if clock is None else clock.astype(np.float64)
        plan.counted = count is not None and bool((np.diff(count) == 1).all())
        if count is not None and not (count == np.arange(len(rows))).all():
            plan.repairs.append("frame_index renumbered")
        tasks = self._standard("task_index", rows)
        plan.task_index = None if tasks is None else tasks.astype(np.int64)
        plan.reason = self._not_finite(rows)

    def _standard(self, name: str, rows: np.ndarray) -> np.ndarray | None:
        return self.standard[name][rows] if name in self.standard else None

    def _episode_rows(self, plan: EpisodePlan, inside: list[EpisodeEntry]) -> np.ndarray:
        """The rows with the episode's index; all rows if the file contains only this episode under another index."""
        episode = plan.episode
        inside = list({e.index: e for e in inside}.values())  # metadata may list an episode twice
        alone = not self.layout.version.startswith("v3")
        column = self.standard.get("episode_index")
        if column is not None:
            rows = np.flatnonzero(column == episode.index)
            other = not len(rows) and self.length == episode.length and len(np.unique(column)) == 1
            if not (alone and other):
                return rows
            plan.repairs.append("episode_index corrected")
        if len(inside) == 1:
            return np.arange(self.length)
        if sum(e.length for e in inside) != self.length:
            return np.empty(0, int)
        start = sum(e.length for e in inside if e.index < episode.index)
        return np.arange(start, start + episode.length)

    def _not_finite(self, rows: np.ndarray) -> str | None:
        for name, values in self.values.items():
            if values.dtype.kind == "f":
                bad = ~np.isfinite(values[rows]).all(axis=1)
                if bad.any():
                    return f"{name} is NaN or infinite in {bad.sum()} frames"
        return None


def row_order(rows: np.ndarray, count: np.ndarray | None, clock: np.ndarray | None) -> np.ndarray | None:
    """The recording order of rows: by frame_index, or else by timestamp.

    None if neither gives it: frame_index does not count rows, and timestamps do not always increase.
    """
    if count is not None:
        order = np.argsort(count, kind="stable")
        if (np.diff(count) > 0).all() or (np.diff(count[order]) == 1).all():
            return order
    steps = np.diff(clock) if clock is not None else np.diff(rows) == 1 if count is None else np.zeros(1)
    return np.arange(len(rows)) if (steps > 0).all() else None
