"""The table part of a check: rows, values, timestamps and indices, episode by episode."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from flexor.data.check.image_findings import add_image_faults
from flexor.data.check.images import SAMPLES, ImageWatch, Motion, motions, spread
from flexor.data.check.layout import FETCH_AGAIN, EpisodeEntry, Layout
from flexor.data.check.report import CheckReport
from flexor.data.format.metadata import Feature
from flexor.data.format.schema import ANNOTATIONS
from flexor.data.format.table import flat_numbers
from flexor.data.format.undeclared import undeclared_features
from flexor.data.frames.clips import image_bytes, image_frame

LOOKED_AT = 2  # files with images in which some are looked at, if not all are decoded
OWN_COLUMNS = ("timestamp", "frame_index", "episode_index", "index", "task_index")
"""Columns of every dataset; the reader derives missing ones."""

NOT_NEEDED = "none needed to train with Flexor"
REPAIR_CLOCK = f"{NOT_NEEDED} if no frame was dropped; `flexor data repair` corrects the timestamps"
RECORD_AGAIN = "exclude the episode, or repair the column from the original recording"


@dataclass
class Tables:
    """Data from the tables that the other checks need."""

    timestamps: dict[int, np.ndarray] = field(default_factory=dict)
    low: dict[str, np.ndarray] = field(default_factory=dict)
    high: dict[str, np.ndarray] = field(default_factory=dict)
    tasks: dict[int, list[float]] = field(default_factory=dict)
    """The task numbers of each episode's rows."""

    parts: dict[str, dict[int, np.ndarray]] = field(default_factory=dict)
    """States and actions [T, D] by feature and episode."""

    watches: list[tuple[EpisodeEntry, dict[str, Any], ImageWatch]] = field(default_factory=list)
    """Of images in the tables, by episode and place."""

    @cached_property
    def motions(self) -> dict[int, Motion]:
        return motions(self.parts)

    def rows(self, name: str) -> np.ndarray:
        """A feature's values of all checked episodes. [N, D]"""
        return np.concatenate([*self.parts[name].values()])


def check_tables(layout: Layout, selected: list[EpisodeEntry], report: CheckReport) -> Tables:
    """Check the data files of the selected episodes."""
    tables = Tables()
    files: dict[str, list[EpisodeEntry]] = {}
    for episode in selected:
        files.setdefault(episode.data_file, []).append(episode)
    present = stored_columns(layout, files)
    undeclared = take_undeclared(layout, present)
    undeclared += [
        name
        for name in ANNOTATIONS
        if name not in layout.features and any(name in names for names in present.values())
    ]
    if undeclared:
        message = f"the data files have {', '.join(undeclared)}, but meta/info.json does not declare them"
        fix = f"{NOT_NEEDED}; `flexor data repair` declares them for other programs"
        report.warning("column-undeclared", message, fix)
    _check_columns(layout, files, present, report)
    for file, episodes in files.items():
        if not layout.path(file).is_file():
            for episode in episodes:
                message = "the file is missing"
                report.error("data-missing", message, FETCH_AGAIN, episode=episode.index, file=file)
            continue
        names = [n for n, f in layout.features.items() if n in present[file] and (f.is_numeric or f.is_image)]
        names += [name for name in OWN_COLUMNS if name in present[file] and name not in names]
        if not report.deep and file not in [*files][:LOOKED_AT]:
            names = [n for n in names if not (n in layout.features and layout.features[n].is_image)]
        try:
            with pq.ParquetFile(layout.path(file)) as opened:
                table = opened.read(names)
        except (pa.ArrowException, OSError) as error:
            message = f"damaged or truncated ({str(error).splitlines()[0][:160]})"
            for episode in episodes:
                report.error("data-unreadable", message, FETCH_AGAIN, episode=episode.index, file=file)
            continue
        _File(layout, file, table, report, tables).check(episodes)
    for episode, place, watch in tables.watches:
        motion = tables.motions.get(episode.index)
        add_image_faults(watch, episode, layout.fps, motion, report, place)
    return tables


def stored_columns(layout: Layout, files: Iterable[str]) -> dict[str, list[str]]:
    """The columns of each data file; none of a file that can't be read."""
    return {file: _columns(layout.path(file)) for file in files}


def _columns(path: Path) -> list[str]:
    try:
        return pq.read_schema(path).names
    except (pa.ArrowException, OSError):
        return []


def take_undeclared(layout: Layout, present: dict[str, list[str]]) -> list[str]:
    """Add undeclared columns that are read like declared ones to the layout, if all data files have them."""
    readable = [file for file, names in present.items() if names]
    if not readable:
        return []
    features = undeclared_features(layout.path(readable[0]), layout.features)
    common = {n: f for n, f in features.items() if all(n in present[file] for file in readable)}
    layout.features |= common
    layout.undeclared |= set(common)
    return list(common)


def _check_columns(
    layout: Layout, files: dict[str, list[EpisodeEntry]], present: dict[str, list[str]], report: CheckReport
) -> None:
    """Check for declared columns that no file has (a warning) or that only some files have (an error)."""
    readable = {file: names for file, names in present.items() if names}
    for name, feature in layout.features.items():
        lacking = [file for file, names in readable.items() if name not in names]
        if feature.is_video or not lacking:
            continue
        if len(lacking) == len(readable):
            message = "the feature is declared in meta/info.json, but no data file has such a column"
            fix = "remove it from `features` in meta/info.json, or download the data files again"
            report.warning("column-absent", message, fix, feature=name)
            continue
        message = "the column is missing in this file, though other data files have it"
        for file in lacking:
            for episode in files[file]:
                where = {"episode": episode.index, "feature": name, "file": file}
                report.error("column-missing", message, FETCH_AGAIN, **where)
    columns = {*layout.features, *(name for names in readable.values() for name in names)}
    derived = [name for name in OWN_COLUMNS if name not in columns]
    if derived and readable:
        message = f"column {', '.join(derived)} is missing; Flexor derives it from the episodes' lengths"
        report.warning("column-derived", message, NOT_NEEDED)


@dataclass
class _File:
    """One data file, and the checks of the episodes in it."""

    layout: Layout
    name: str
    table: pa.Table
    report: CheckReport
    tables: Tables

    def check(self, episodes: list[EpisodeEntry]) -> None:
        self._columns = self._read()
        rows_of = self._rows_by_episode(episodes)
        for episode in episodes:
            rows = rows_of.get(episode.index, np.empty(0, int))
            if len(rows) != episode.length:
                message = f"the table has {len(rows)} rows, but the metadata says {episode.length}"
                fix = "download the data file and meta/ again: one of them is older than the other"
                self.report.error("length", message, fix, **self._place(episode))
            elif len(rows) and rows[-1] - rows[0] + 1 != len(rows):
                fix = "sort the data file by `index`"
                self.report.error(
                    "rows-scattered", "its rows are not contiguous", fix, **self._place(episode)
                )
            else:
                self._check_indices(episode, rows)
            if len(rows):
                self._check_clock(episode, rows)
                self._check_numbers(episode, rows)
                self._check_tasks(episode, rows)
                self._check_images(episode, rows)
        listed = {episode.index for episode in self.layout.episodes}
        unknown = sorted(int(e) for e in rows_of if e not in listed)
        if unknown:
            count = sum(len(rows_of[e]) for e in unknown)
            message = f"{count} rows belong to episodes {unknown[:10]}, which meta/ does not list"
            fix = "download meta/ again, or ignore them"
            self.report.warning("rows-unknown", message, fix, file=self.name)

    def _place(self, episode: EpisodeEntry, feature: str | None = None) -> dict[str, Any]:
        return {"episode": episode.index, "feature": feature, "file": self.name}

    def _read(self) -> dict[str, np.ndarray]:
        """The numeric columns as [N, D]; a column without its declared shape is reported."""
        columns = {}
        for name in self.table.column_names:
            feature = self.layout.features.get(name) or Feature(name, "int64", (1,))
            if not feature.is_numeric:
                continue
            values = numbers(self.table[name], feature)
            if isinstance(values, str):
                fix = "correct the feature in meta/info.json, or download the data file again"
                for episode in self.layout.episodes:
                    if episode.data_file == self.name:
                        self.report.error("column-shape", values, fix, **self._place(episode, name))
            else:
                columns[name] = values
        return columns

    def _rows_by_episode(self, episodes: list[EpisodeEntry]) -> dict[int, np.ndarray]:
        if "episode_index" not in self._columns:
            # Without the column a file contains one episode, as in v2.
            return {episodes[0].index: np.arange(self.table.num_rows)}
        index = self._columns["episode_index"][:, 0].astype(int)
        order = np.argsort(index, kind="stable")
        numbers, starts = np.unique(index[order], return_index=True)
        return dict(zip(numbers.tolist(), np.split(order, starts[1:])))

    def _check_indices(self, episode: EpisodeEntry, rows: np.ndarray) -> None:
        for name, start in (("frame_index", 0), ("index", episode.first_row)):
            if name not in self._columns or not len(rows):
                continue
            values, place = self._columns[name][rows, 0], self._place(episode, name)
            gaps = np.flatnonzero(np.diff(values) != 1)
            if len(gaps):
                message = (
                    f"{name} is not contiguous at {len(gaps)} places; the first is after frame {gaps[0]}"
                )
                self.report.error("index", message, RECORD_AGAIN, frame=int(gaps[0]), **place)
            elif values[0] != start:
                message = f"{name} starts at {values[0]:.0f} instead of {start}"
                add_finding = (
                    self.report.error if self.layout.version.startswith("v3") else self.report.warning
                )
                add_finding("index", message, "renumber the rows of the dataset", **place)

    def _check_clock(self, episode: EpisodeEntry, rows: np.ndarray) -> None:
        """Compare the timestamps with 1/fps. The video part of the check compares them with the video."""
        if "timestamp" not in self._columns or not self.layout.fps:
            # Missing timestamps are derived, so they are correct.
            self.tables.timestamps[episode.index] = np.arange(len(rows)) / (self.layout.fps or 1)
            return
        clock = self._columns["timestamp"][rows, 0].astype(np.float64)
        self.tables.timestamps[episode.index] = clock
        if len(clock) < 2 or not np.isfinite(clock).all():
            return
        period = 1 / self.layout.fps
        drift = np.abs(clock - clock[0] - np.arange(len(clock)) * period)
        back = np.flatnonzero(np.diff(clock) <= 0)
        if len(back):
            message = f"timestamps do not increase at {len(back)} places; the first is after frame {back[0]}"
            place = self._place(episode, "timestamp")
            self.report.warning("clock-backwards", message, REPAIR_CLOCK, frame=int(back[0]), **place)
        elif drift.max() > period / 2:
            frame = int(np.argmax(drift > period / 2))
            message = (
                f"timestamps drift up to {drift.max():.3f} s ({drift.max() / period:.1f} frames) from "
                f"{self.layout.fps:g} fps; from frame {frame} on it is more than half a frame"
            )
            place = self._place(episode, "timestamp")
            self.report.warning("clock-drift", message, REPAIR_CLOCK, frame=frame, **place)

    def _check_numbers(self, episode: EpisodeEntry, rows: np.ndarray) -> None:
        for name, values in self._columns.items():
            part = values[rows]
            if name.startswith(("action", "observation")):
                self.tables.parts.setdefault(name, {})[episode.index] = part
            if part.dtype.kind == "f":
                bad = ~np.isfinite(part)
                if bad.any():
                    frames = np.flatnonzero(bad.any(axis=1))
                    message = (
                        f"{bad.sum()} of {part.size} values are NaN or infinite, in {len(frames)} frames; "
                        f"the first is frame {frames[0]}"
                    )
                    place = self._place(episode, name)
                    self.report.error("not-finite", message, RECORD_AGAIN, frame=int(frames[0]), **place)
                    part = np.where(bad, np.nan, part)
            low, high = np.fmin.reduce(part, axis=0), np.fmax.reduce(part, axis=0)
            lows, highs = self.tables.low, self.tables.high
            lows[name] = np.fmin(lows[name], low) if name in lows else low
            highs[name] = np.fmax(highs[name], high) if name in highs else high

    def _check_tasks(self, episode: EpisodeEntry, rows: np.ndarray) -> None:
        if "task_index" not in self._columns or not self.layout.tasks:
            return
        column = self._columns["task_index"][rows, 0]
        used = np.unique(column).tolist()
        self.tables.tasks[episode.index] = used
        unknown = [task for task in used if task not in self.layout.tasks]  # NaN too
        if unknown:
            message = f"task_index {unknown[:5]} is not among the dataset's {len(self.layout.tasks)} tasks"
            fix = "download meta/tasks again, or correct the column"
            frame = int(np.argmin(np.isin(column, [*self.layout.tasks])))
            self.report.error("task-unknown", message, fix, frame=frame, **self._place(episode, "task_index"))

    def _check_images(self, episode: EpisodeEntry, rows: np.ndarray) -> None:
        for name in self.table.column_names:
            feature = self.layout.features.get(name)
            if feature is None or not feature.is_image:
                continue
            watch = ImageWatch()
            frames = np.arange(len(rows)) if self.report.deep else spread(len(rows), SAMPLES)
            images = zip(frames.tolist(), image_bytes(self.table[name].take(rows[frames])))
            faults = [
                (frame, self._image_fault(feature, image.as_py(), frame, watch)) for frame, image in images
            ]
            bad = [(frame, fault) for frame, fault in faults if fault]
            self.tables.watches.append((episode, self._place(episode, name), watch))
            if bad and self.report.deep:
                frame, why = bad[0]
                message = f"{len(bad)} of {len(rows)} images are unusable; the first is frame {frame}: {why}"
                place = self._place(episode, name)
                self.report.error("image-undecodable", message, FETCH_AGAIN, frame=frame, **place)

    def _image_fault(
        self, feature: Feature, data: bytes | None, number: int, watch: ImageWatch
    ) -> str | None:
        if not data:
            return "the image is empty"
        try:
            frame = image_frame(data, feature)
            shape = (frame.height, frame.width)
        except (av.FFmpegError, ValueError) as error:
            return str(error)[:100]
        _, height, width = feature.chw
        if shape != (height, width):
            return f"it is {shape[0]}x{shape[1]}, but meta/info.json declares {height}x{width}"
        if feature.depth is None:
            watch.add(number, frame)
        return None


def numbers(column: pa.ChunkedArray, feature: Feature) -> np.ndarray | str:
    """A column as [N, D], or its fault."""
    rows, width, values = len(column), int(np.prod(feature.shape)), flat_numbers(column)
    if values is None:
        return f"the column is {column.type}, not {feature.dtype}"
    if values.null_count or len(values) != rows * width:
        empty = f" ({values.null_count} are empty)" if values.null_count else ""
        return f"the column has {len(values)} values{empty} in {rows} rows, not shape {list(feature.shape)} per row"
    return values.to_numpy(zero_copy_only=False).reshape(rows, width)
