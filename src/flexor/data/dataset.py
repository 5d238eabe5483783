"""A LeRobot dataset, opened for reading: columns in memory, frames on request.

    dataset = open_dataset("lerobot/pusht", episodes=[0, 1])
    batch = dataset.read(rows, deltas={"action": range(16)})

All versions (v2.0, v2.1, v3.0) and all locations (folder, Hub, fsspec) give the same result. Rows are in the
order of the data files, as in LeRobot, not in the order in which episodes were requested.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flexor.core.batch import SAMPLE_WEIGHT
from flexor.core.digest import hash_json
from flexor.core.errors import DatasetError
from flexor.core.log import warn_once
from flexor.core.secrets import redacted
from flexor.data.format.episode_list import checked_episodes, select_episodes
from flexor.data.format.metadata import BrokenFile, Feature, Metadata, read_metadata
from flexor.data.format.row_tasks import episode_tasks, tasks_to_select_by
from flexor.data.format.table import FrameTable, fill_in, read_table
from flexor.data.format.windows import window_rows
from flexor.data.frames.bad_episodes import BadEpisodes, missing_files, unreadable_clips, video_cameras
from flexor.data.frames.clips import Clip, FrameRule, ImageClip, ImageFiles, VideoClip, VideoFile
from flexor.data.frames.store import FrameStore
from flexor.data.storage.source import Source, find_source
from flexor.data.video.frame_match import FrameBy

__all__ = ["Dataset", "Episodes", "Feature", "open_dataset"]


@dataclass(frozen=True, eq=False)
class Episodes:
    """The selected episodes, in row order."""

    index: np.ndarray  # [E] episode index in the dataset as published
    length: np.ndarray  # [E]
    tasks: list[list[str]]
    first_frame: np.ndarray  # [E] row of its first frame in the dataset as published

    @cached_property
    def end(self) -> np.ndarray:
        """One past each episode's last row in this dataset. [E]"""
        return np.cumsum(self.length)

    @cached_property
    def start(self) -> np.ndarray:
        """Each episode's first row in this dataset. [E]"""
        return self.end - self.length

    def __len__(self) -> int:
        return len(self.index)


@dataclass(eq=False)
class Dataset:
    """See `open_dataset`. Reading is safe from several threads at once."""

    repo_id: str
    root: Path
    version: str
    fps: float
    robot_type: str | None
    features: dict[str, Feature]
    """Readable features: every declared feature that exists, and LeRobot's own index columns."""

    cameras: list[str]
    absent: dict[str, str]
    """Declared features that can't be read, and why."""

    tasks: list[str]
    stats: dict[str, dict[str, np.ndarray]]
    columns: dict[str, np.ndarray]
    """Numeric and bool features, [N, ...]; features of shape [1] are [N], as LeRobot's items are scalars."""

    strings: dict[str, list[str]]
    episodes: Episodes
    skipped: dict[int, str]
    """Requested episodes that can't be read, and why; only with on_bad_episode="skip"."""

    store: FrameStore
    source: Source
    files: list[str]
    """All tables and videos, including those of episodes that are not selected."""
    layout: str
    """A hash of where the metadata says that the frames of all episodes are."""
    _file_sizes: dict[int, dict[str, int]]
    """Per episode: its files and their sizes in bytes."""

    def __len__(self) -> int:
        return int(self.episodes.length.sum())

    def episode_of(self, rows: np.ndarray) -> np.ndarray:
        """The position in `episodes` of the episode each row belongs to."""
        return np.searchsorted(self.episodes.end, rows, side="right")

    def frame_ids(self, rows: np.ndarray) -> np.ndarray:
        """The frame store's ids of these rows' frames."""
        episode = self.episode_of(rows)
        return rows + (self.episodes.first_frame - self.episodes.start)[episode]

    def read(
        self,
        rows: Sequence[int] | np.ndarray,
        deltas: Mapping[str, Sequence[int]] | None = None,
        cameras: Sequence[str] | None = None,
    ) -> dict[str, Any]:
        """A batch of rows, as numpy arrays.

        Every column is [B, ...]; one named in `deltas` is a window [B, T, ...] with `{name}_is_pad` [B, T].
        Cameras (default: all) are uint8 [B, C, H, W] or [B, T, C, H, W]: views of channels-last
        memory, which is the layout of decoded frames. Depth maps are float32 with one channel.
        "task" is a list of strings.
        """
        rows = self._checked_rows(rows)
        selected_cameras = self.cameras if cameras is None else list(cameras)
        self._check_names([*selected_cameras, *(deltas or {})])
        episode = self.episode_of(rows)
        start, end = self.episodes.start[episode], self.episodes.end[episode]
        window_of: dict[str, np.ndarray] = {}
        batch: dict[str, Any] = {}
        for name, steps in (deltas or {}).items():
            window_of[name], batch[f"{name}_is_pad"] = window_rows(rows, steps, start, end)
        for name in selected_cameras:
            batch[name] = self._frames(name, window_of.get(name, rows))
        for name, column in self.columns.items():
            batch[name] = column[window_of.get(name, rows)]
        for name, texts in self.strings.items():
            batch[name] = _pick(texts, window_of.get(name, rows))
        batch["task"] = self._tasks(self.columns["task_index"][rows])
        return batch

    def __getitem__(self, row: int) -> dict[str, Any]:
        """One row like LeRobot's item with return_uint8: tensors, scalars where the shape is [1]."""
        import torch

        batch = self.read(np.array([row + len(self) if row < 0 else row]))
        return {
            name: torch.as_tensor(value[0]) if isinstance(value, np.ndarray) else value[0]
            for name, value in batch.items()
        }

    def select(self, episodes: Sequence[int]) -> "Dataset":
        """A view of some episodes (indices of the whole dataset); frames are shared, not read twice."""
        requested = checked_episodes(episodes, self.episodes.index, f"{self.repo_id} as selected")
        keep = np.flatnonzero(np.isin(self.episodes.index, requested))
        spans = zip(self.episodes.start[keep].tolist(), self.episodes.end[keep].tolist())
        rows = np.concatenate([np.arange(start, end) for start, end in spans])
        adjoining = rows[-1] - rows[0] + 1 == len(rows)
        row_index: Any = slice(rows[0], rows[-1] + 1) if adjoining else rows
        return replace(
            self,
            columns={name: column[row_index] for name, column in self.columns.items()},
            strings={name: _pick(texts, rows) for name, texts in self.strings.items()},
            episodes=Episodes(
                self.episodes.index[keep],
                self.episodes.length[keep],
                [self.episodes.tasks[i] for i in keep],
                self.episodes.first_frame[keep],
            ),
        )

    def episode_files(self) -> list[str]:
        """The tables and videos of the selected episodes."""
        return sorted({name for i in self.episodes.index.tolist() for name in self._file_sizes[i]})

    def fingerprint(self) -> str:
        """A hash of episodes, lengths and file sizes, wherever the data is stored. `identity.py` has the contents."""
        identity = {
            "version": self.version,
            "fps": self.fps,
            "features": [(f.name, f.dtype, f.shape) for f in self.features.values()],
            "tasks": self.tasks,
            "episodes": self.episodes.index.tolist(),
            "lengths": self.episodes.length.tolist(),
            "sizes": [list(self._file_sizes[i].values()) for i in self.episodes.index.tolist()],
        }
        if self.skipped:  # not the same as leaving them out by choice: they may become readable
            identity["skipped"] = sorted(self.skipped)
        if SAMPLE_WEIGHT in self.columns:
            identity["weights"] = hashlib.sha256(self.columns[SAMPLE_WEIGHT].tobytes()).hexdigest()
        return hash_json(identity)

    def content(self) -> str:
        """A hash that changes with any frame of the dataset as published, the same for every selection of episodes."""
        return hashlib.sha256(f"{self.source.content(self.files)} {self.layout}".encode()).hexdigest()

    @property
    def video_bytes(self) -> int:
        """Bytes of all files that frames are read from."""
        return sum(dict(file for sizes in self._file_sizes.values() for file in sizes.items()).values())

    @property
    def source_kind(self) -> str:
        """Where its videos are read from: disk, hub or bucket."""
        return self.source.kind

    @property
    def stays_here(self) -> bool:
        """Whether data that was read once does not have to be downloaded again."""
        return self.source.holds(self.video_bytes)

    def _frames(self, camera: str, rows: np.ndarray) -> np.ndarray:
        """Pixels [*rows.shape, C, H, W] of rows [B] or [B, T]."""
        pixels = self.store.get(camera, self.frame_ids(rows.ravel()))
        return np.moveaxis(pixels.reshape(*rows.shape, *pixels.shape[1:]), -1, -3)

    def _tasks(self, column: np.ndarray) -> list[str]:
        """The tasks of the indices in a column, which are integers in every valid dataset."""
        tasks, count = self.tasks, len(self.tasks)
        return [tasks[int(index)] if 0 <= index < count else "" for index in column.tolist()]

    def _checked_rows(self, rows: Sequence[int] | np.ndarray) -> np.ndarray:
        rows = np.asarray(rows, np.int64)
        if rows.ndim != 1 or not len(rows) or rows.min() < 0 or rows.max() >= len(self):
            raise IndexError(f"rows {rows} are not valid in a dataset of {len(self)} rows")
        return rows

    def _check_names(self, names: Iterable[str]) -> None:
        readable = {*self.columns, *self.strings, *self.cameras}
        for name in names:
            if name not in readable:
                reason = self.absent.get(name, f"its features are {', '.join(sorted(self.features))}")
                raise DatasetError(f"{self.repo_id} has no readable feature {name!r}: {reason}")


def open_dataset(
    repo_id: str | None = None,
    root: str | Path | None = None,
    revision: str | None = None,
    episodes: Sequence[int] | str | None = None,
    tolerance_s: float | None = None,
    streaming: bool = False,
    size: tuple[int, int] | None = None,
    remote_bytes: int | None = None,
    exclude_episodes: Sequence[int] | str | None = None,
    frame_by: FrameBy = "auto",
    on_bad_episode: str = "raise",
    tasks: Sequence[str] | str | None = None,
    depth_unit: str = "mm",
) -> Dataset:
    """Open a LeRobot dataset from a folder, the Hub or any fsspec address.

    With `streaming`, byte ranges of a Hub dataset's videos are read when needed, instead of downloading first.
    Data read over a network is cached on disk, up to `remote_bytes` (default: a quarter of the free space).
    `size` (height, width) scales all images. Depth maps are read in `depth_unit`, mm or m.

    `episodes` and `exclude_episodes` are lists, or text such as "0:50,60:". `tasks` are parts of the task's text, or
    patterns with * and ? for all of it: only episodes with such a task are read.

    `tolerance_s` is the largest allowed distance of a frame from its row's timestamp; default: half a frame
    period. LeRobot allows 1e-4 s, and many real recordings fail that (its issues 933 and 1875) although no other
    frame is nearer. Beyond half a period the nearest frame belongs to another row. `frame_by` decides whether
    timestamps are used at all, see `frame_match.py`.

    Unreadable episodes raise an error. With `on_bad_episode="skip"` they are left out and listed in `skipped`.
    """
    source = find_source(repo_id, root, revision, streaming, remote_bytes)
    name = redacted(repo_id or str(source))
    meta = read_metadata(source)
    selected = select_episodes(
        name,
        meta.episodes.index,
        meta.episodes.tasks if tasks is None else tasks_to_select_by(source, meta),
        episodes=episodes,
        exclude=exclude_episodes,
        by_task=tasks,
    )
    if not selected:
        raise BrokenFile(source, "meta/info.json", "the dataset has no episode")
    source.fetch(meta.episodes.files(selected))
    bad = BadEpisodes(name, selected)
    rows = _read_rows(source, meta, bad)
    rule = FrameRule(meta.fps, 0.5 / meta.fps if tolerance_s is None else tolerance_s, frame_by)
    clips = _clips(source, meta, rows.table, rows.columns["timestamp"], rows.cameras, rule)
    if on_bad_episode == "skip" or bad.reasons:
        bad.reasons |= unreadable_clips(clips)
    bad.settle(on_bad_episode)
    rule.repeats.tell()
    store = FrameStore(clips, meta.episodes.length, size, source.streams, rule, depth_unit)
    dataset = _assemble(source, meta, rows, bad, store, size)
    return dataset if bad.good == rows.episodes else dataset.select(bad.good)


class _Rows(NamedTuple):
    """What is read of a dataset before its frames."""

    episodes: list[int]
    table: FrameTable
    columns: dict[str, np.ndarray]
    """Those of the table, and LeRobot's own index columns."""
    cameras: list[str]
    absent: dict[str, str]


def _read_rows(source: Source, meta: Metadata, bad: BadEpisodes) -> _Rows:
    """The tables of the selected episodes. What can't be read is noted in `bad`, or warned of if it is a feature."""
    videos, without_video = video_cameras(source, meta, bad.good)
    bad.reasons |= missing_files(source, meta, videos, bad.good)
    table = read_table(source, meta.features, meta.episodes, bad.good)
    bad.reasons |= table.bad
    episodes = bad.good
    absent = {**table.missing, **without_video}
    columns = dict(table.columns)
    fill_in(bad.dataset, columns, table, meta.fps, _first_tasks(meta, table))
    for feature, why in absent.items():
        warn_once("%s: feature %s can't be read: %s", bad.dataset, feature, why)
    cameras = [name for name, feature in meta.features.items() if feature.is_camera and name not in absent]
    return _Rows(episodes, table, columns, cameras, absent)


def _assemble(
    source: Source,
    meta: Metadata,
    rows: _Rows,
    bad: BadEpisodes,
    store: FrameStore,
    size: tuple[int, int] | None,
) -> Dataset:
    table = rows.table
    return Dataset(
        repo_id=bad.dataset,
        root=source.root,
        version=meta.version,
        fps=meta.fps,
        robot_type=meta.robot_type,
        features=_present(meta, rows, size),
        cameras=rows.cameras,
        absent=rows.absent,
        tasks=meta.tasks,
        stats=_in_depth_unit(meta, store.depth_unit),
        columns=rows.columns,
        strings=table.strings,
        episodes=Episodes(
            table.episode,
            table.length,
            episode_tasks(bad.dataset, meta, table.episode, table.length, rows.columns["task_index"]),
            (np.cumsum(meta.episodes.length) - meta.episodes.length)[table.episode],
        ),
        skipped=bad.reasons,
        store=store,
        source=source,
        files=meta.episodes.files(),
        layout=_layout(meta),
        _file_sizes=_file_sizes(source, meta, table.episode, rows.cameras),
    )


def _layout(meta: Metadata) -> str:
    episodes = meta.episodes
    content = hashlib.sha256(json.dumps([meta.fps, episodes.data_file]).encode())
    content.update(np.asarray(episodes.length, np.int64).tobytes())
    for camera, spans in sorted(episodes.videos.items()):
        content.update(json.dumps([camera, spans.file]).encode())
        content.update(np.asarray([spans.start, spans.stop], np.float64).tobytes())
    return content.hexdigest()


def _first_tasks(meta: Metadata, table: FrameTable) -> np.ndarray:
    """Task index [E] from the episodes' metadata, for tables without a task_index column."""
    number = {task: i for i, task in enumerate(meta.tasks)}
    return np.array([number.get(next(iter(meta.episodes.tasks[i]), ""), 0) for i in table.episode], np.int64)


def _present(meta: Metadata, rows: _Rows, size: tuple[int, int] | None) -> dict[str, Feature]:
    declared = {name: feature for name, feature in meta.features.items() if name not in rows.absent}
    features = {**declared, **rows.table.undeclared}
    for name, feature in features.items():
        if size and feature.is_camera:
            axes = ["channels", "height", "width"]
            features[name] = replace(feature, shape=(feature.chw[0], *size), names=axes)
    for name, column in rows.columns.items():
        features.setdefault(name, Feature(name, str(column.dtype), (1,)))
    return features


def _in_depth_unit(meta: Metadata, unit: str) -> dict[str, dict[str, np.ndarray]]:
    """The statistics, those of depth maps in the unit in which these are read."""
    stats = dict(meta.stats)
    for name, feature in meta.features.items():
        if feature.depth is None or name not in stats:
            continue
        if feature.depth.unit is None:
            warn_once("%s: meta/info.json does not say depth_unit: its statistics are used as they are", name)
        factor = feature.depth.reading(unit).factor
        stats[name] = {key: value if key == "count" else value * factor for key, value in stats[name].items()}
    return stats


def _clips(
    source: Source,
    meta: Metadata,
    table: FrameTable,
    timestamps: np.ndarray,
    cameras: list[str],
    rule: FrameRule,
) -> dict[tuple[str, int], Clip]:
    clips: dict[tuple[str, int], Clip] = {}
    end = np.cumsum(table.length)
    images = ImageFiles(source)
    for camera in cameras:
        feature = meta.features[camera]
        videos: dict[str, VideoFile] = {}
        for i, episode in enumerate(table.episode.tolist()):
            if feature.is_image:
                file, row = meta.episodes.data_file[episode], int(table.first_row[i])
                clips[camera, episode] = ImageClip(images, file, feature, row, int(table.length[i]))
                continue
            spans = meta.episodes.videos[camera]
            name = spans.file[episode]
            assert name is not None, "an episode without a video is not read"
            video = videos.setdefault(name, VideoFile(source, name, feature))
            times = timestamps[end[i] - table.length[i] : end[i]]
            start, stop = float(spans.start[episode]), float(spans.stop[episode])
            clips[camera, episode] = VideoClip(video, episode, start, stop, times, rule)
    return clips


def _file_sizes(
    source: Source, meta: Metadata, episodes: np.ndarray, cameras: list[str]
) -> dict[int, dict[str, int]]:
    """The files of each episode, with their sizes in bytes."""
    sizes: dict[str, int] = {}
    by_episode = {}
    for episode in episodes.tolist():
        files = [meta.episodes.data_file[episode]]
        spans = [meta.episodes.videos[camera] for camera in cameras if camera in meta.episodes.videos]
        files += [file for span in spans if (file := span.file[episode])]
        for file in files:
            if file not in sizes:
                sizes[file] = source.size(file)
        by_episode[episode] = {file: sizes[file] for file in files}
    return by_episode


def _pick(texts: Sequence[Any], rows: np.ndarray) -> list:
    """Strings by row: a list for rows [B], a list of lists for windows [B, T]."""
    if rows.ndim == 1:
        return [texts[row] for row in rows.tolist()]
    return [[texts[row] for row in window] for window in rows.tolist()]
