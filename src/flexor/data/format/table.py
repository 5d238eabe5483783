"""The frame table: parquet columns of the selected episodes as contiguous numpy arrays."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from flexor.core.log import warn_once
from flexor.data.format.metadata import BrokenFile, EpisodeFiles, Feature, parquet_columns, read_parquet
from flexor.data.format.schema import LANGUAGE
from flexor.data.format.undeclared import undeclared_features
from flexor.data.storage.source import Source

__all__ = ["FrameTable", "read_table"]

READERS = 4
"""Files read in parallel: reading is mostly decompression, which releases the GIL."""


@dataclass(frozen=True)
class FrameTable:
    """The rows of the selected episodes, in file order."""

    columns: dict[str, np.ndarray]  # numeric and bool, [N, ...]
    strings: dict[str, list[str]]
    missing: dict[str, str]
    """Declared features without a column, and why."""

    episode: np.ndarray  # [E] episode index, in row order
    length: np.ndarray  # [E] rows
    first_row: np.ndarray  # [E] the episode's first row in its own file
    bad: dict[int, str]
    """Selected episodes that can't be read, and why. None of the fields above contains them."""

    undeclared: dict[str, Feature] = field(default_factory=dict)
    """The features of columns that meta/info.json does not declare."""


@dataclass
class _Piece:
    """What one file contributes."""

    columns: dict[str, np.ndarray] = field(default_factory=dict)
    strings: dict[str, list[str]] = field(default_factory=dict)
    episode: list[int] = field(default_factory=list)
    length: list[int] = field(default_factory=list)
    first_row: list[int] = field(default_factory=list)
    bad: dict[int, str] = field(default_factory=dict)


def read_table(
    source: Source, features: dict[str, Feature], episodes: EpisodeFiles, selected: Sequence[int]
) -> FrameTable:
    """Read the needed columns of every file that contains a selected episode.

    Columns of a known meaning that are not declared are read too, if all files have them.
    """
    by_file: dict[str, list[int]] = {}
    for episode in selected:
        by_file.setdefault(episodes.data_file[episode], []).append(episode)
    files = sorted(by_file)
    first, present = _first_readable(source, files)
    readable = {n: f for n, f in features.items() if n in present and (f.is_numeric or f.dtype == "string")}
    undeclared = undeclared_features(source.local(first), features) if present else {}
    missing = {n: _why_missing(f, first) for n, f in features.items() if _is_missing(f, present, readable)}

    def read(file: str) -> _Piece:
        try:
            return _read_file(source, file, readable, episodes, by_file[file], undeclared)
        except BrokenFile as error:
            return _Piece(bad=dict.fromkeys(by_file[file], error.short))

    with ThreadPoolExecutor(READERS) as pool:
        results = list(pool.map(read, files))
    pieces = [piece for piece in results if piece.episode]
    bad = {episode: why for piece in results for episode, why in piece.bad.items()}
    if not pieces:  # nothing to make columns of
        none = np.empty(0, np.int64)
        return FrameTable({}, {}, missing, none, none, none, bad)
    common = [name for name in pieces[0].columns if all(name in piece.columns for piece in pieces)]
    columns = {n: np.concatenate([piece.columns[n] for piece in pieces]) for n in common}
    strings = {n: [text for piece in pieces for text in piece.strings[n]] for n in pieces[0].strings}
    return FrameTable(
        columns,
        strings,
        missing,
        np.array([e for piece in pieces for e in piece.episode], np.int64),
        np.array([n for piece in pieces for n in piece.length], np.int64),
        np.array([r for piece in pieces for r in piece.first_row], np.int64),
        bad,
        {name: feature for name, feature in undeclared.items() if name in columns},
    )


def _first_readable(source: Source, files: list[str]) -> tuple[str, list[str]]:
    """The first readable file, and its columns."""
    for file in files:
        try:
            return file, parquet_columns(source, file)
        except BrokenFile:
            continue  # reported for each episode in the file
    return files[0], []


def fill_in(
    name: str, columns: dict[str, np.ndarray], table: FrameTable, fps: float, task_of: np.ndarray
) -> None:
    """Add LeRobot's own columns if they are missing, because the rest of the code needs them.

    `task_of` [E] is the task index of each episode in row order.
    """
    length = table.length
    start = np.cumsum(length) - length
    frame = np.arange(length.sum()) - np.repeat(start, length)
    derived = {
        "episode_index": lambda: np.repeat(table.episode, length),
        "frame_index": lambda: frame,
        "index": lambda: np.arange(length.sum()),
        "task_index": lambda: np.repeat(task_of, length),
        "timestamp": lambda: (frame / fps).astype(np.float32),
    }
    added = [column for column in derived if column not in columns]
    for column in added:
        columns[column] = derived[column]()
    if added:
        warn_once("%s: column %s is missing; deriving it from the episode lengths", name, ", ".join(added))


def _is_missing(feature: Feature, present: list[str], readable: dict[str, Feature]) -> bool:
    stored = feature.name in readable or (feature.is_image and feature.name in present)
    return not feature.is_video and not stored


def _why_missing(feature: Feature, file: str) -> str:
    if feature.is_numeric or feature.is_image or feature.dtype == "string":
        return f"{file} has no such column"
    if feature.dtype == LANGUAGE:
        return "annotations are not used in training; edits and repairs copy them"
    return f"Flexor does not support features of dtype {feature.dtype!r}"


def _read_file(
    source: Source,
    file: str,
    features: dict[str, Feature],
    episodes: EpisodeFiles,
    selected: list[int],
    undeclared: dict[str, Feature],
) -> _Piece:
    present = parquet_columns(source, file)
    missing = [name for name in features if name not in present]
    if missing:
        raise BrokenFile(source, file, f"columns {missing} are missing, though other data files have them")
    more = {name: feature for name, feature in undeclared.items() if name in present}
    index_column = {"episode_index"} & {*present} - {*features, *more}
    table = read_parquet(source, file, [*features, *more, *index_column])
    spans, bad = _episode_spans(file, table, episodes, selected)
    if not spans:
        return _Piece(bad=bad)
    columns, strings = {}, {}
    for name, feature in more.items():
        with suppress(BrokenFile):  # as if it were not there
            values = _to_numpy(source, file, table[name], feature)
            columns[name] = np.concatenate([values[first : first + n] for _, first, n in spans])
    for name, feature in features.items():
        if feature.is_numeric:
            values = _to_numpy(source, file, table[name], feature)
            parts = [values[first : first + n] for _, first, n in spans]
            columns[name] = parts[0] if len(parts) == 1 else np.concatenate(parts)
        else:
            texts = table[name].to_pylist()
            strings[name] = [text for _, first, n in spans for text in texts[first : first + n]]
    index, first_row, length = (list(part) for part in zip(*spans))
    return _Piece(columns, strings, index, length, first_row, bad)


def _episode_spans(
    file: str, table: pa.Table, episodes: EpisodeFiles, selected: list[int]
) -> tuple[list[tuple[int, int, int]], dict[int, str]]:
    """(episode, first row, rows) of the selected episodes of one file, in row order; and the problems of the others."""
    if "episode_index" in table.column_names:
        index = table["episode_index"].to_numpy()
        if index.dtype.kind not in "iuf":
            problem = f"{file}: the column episode_index contains {index.dtype}, not numbers"
            return [], dict.fromkeys(selected, problem)
    else:  # v2 without the column: the file contains only this episode
        index = np.full(table.num_rows, selected[0])
    spans, bad = [], {}
    runs = _runs(index)
    for episode in selected:
        episode_runs = runs.get(episode, [])
        rows, expected = sum(length for _, length in episode_runs), int(episodes.length[episode])
        if rows != expected:
            bad[episode] = f"{file} has {rows} rows of this episode, but the metadata says {expected}"
        elif not rows:
            bad[episode] = "it has no rows"
        elif len(episode_runs) > 1:
            bad[episode] = f"its rows are not contiguous in {file}"
        else:
            spans.append((episode, *episode_runs[0]))
    return sorted(spans, key=lambda span: span[1]), bad


def _runs(index: np.ndarray) -> dict[int, list[tuple[int, int]]]:
    """The rows of each value: {value: [(first row, rows)]}, several entries if they are not contiguous."""
    runs: dict[int, list[tuple[int, int]]] = {}
    first = np.flatnonzero(np.diff(index, prepend=index[:1] - 1))
    lengths = np.diff(first, append=len(index))
    for value, row, length in zip(index[first].tolist(), first.tolist(), lengths.tolist()):
        runs.setdefault(value, []).append((row, length))
    return runs


def _to_numpy(source: Source, file: str, column: pa.ChunkedArray, feature: Feature) -> np.ndarray:
    """A parquet column [N, *shape] (or [N] for shape [1]) in the dtype that LeRobot's items have."""
    rows, values = len(column), flat_numbers(column)
    if values is None:
        problem = f"column {feature.name} contains {column.type}, but meta/info.json declares {feature.dtype}"
        raise BrokenFile(source, file, problem)
    if values.null_count:
        raise BrokenFile(source, file, f"column {feature.name} has {values.null_count} empty values")
    shape = (rows,) if feature.shape == (1,) else (rows, *feature.shape)
    flat = values.to_numpy(zero_copy_only=False)
    if flat.size != int(np.prod(shape)):
        problem = f"has {flat.size} values in {rows} rows, not shape {feature.shape} per row"
        raise BrokenFile(source, file, f"column {feature.name} {problem}")
    return np.ascontiguousarray(flat.reshape(shape), _item_dtype(flat.dtype))


def flat_numbers(column: pa.ChunkedArray) -> pa.Array | None:
    """A column of numbers or (nested) lists of numbers as one flat array; None for any other column."""
    values = pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
    while isinstance(values, pa.ExtensionArray) or _is_list(values.type):
        values = values.storage if isinstance(values, pa.ExtensionArray) else values.flatten()
    kind = values.type
    numeric = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
    return values if numeric else None


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def _item_dtype(stored: np.dtype) -> type:
    """LeRobot converts rows to Python numbers and then to tensors: float32, int64 or bool."""
    if stored.kind == "b":
        return np.bool_
    return np.float32 if stored.kind == "f" else np.int64
