"""Writes episodes of other datasets as a new one: rows and packets are copied."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow as pa

from flexor.core.errors import DatasetError
from flexor.core.paths import inside
from flexor.data.dataset import Dataset
from flexor.data.edit.cut import Cut, copy_cut, plan_cut
from flexor.data.edit.language import shifted
from flexor.data.edit.source import FLAGS_AT_END, EditSource, Part
from flexor.data.format.dataset_files import DatasetFiles, PacketClip
from flexor.data.format.schema import LANGUAGE
from flexor.data.format.stats import Stats, image_stats, pixel_counts, sample_indices
from flexor.data.repair.account import RepairClip
from flexor.data.repair.plan import RepairPlan
from flexor.data.repair.repair import FORMAT_FILES, OLD_INFO
from flexor.data.statistics import depth_stats, in_stored_unit
from flexor.data.video.open_file import open_video


def write_parts(
    parts: Sequence[Part],
    folder: Path,
    tasks: Sequence[str],
    features: dict[str, dict[str, Any]],
    robot_type: str | None,
    written: Callable[[int], None],
) -> list[str]:
    """Write a dataset into the new folder `folder`. `written` counts rows. Returns notes for the user."""
    writer = _Writer(parts, features)
    fps = _plan_of(parts[0].source).fps
    described = {n: writer.described(n) if f["dtype"] == "video" else f for n, f in features.items()}
    files = DatasetFiles(folder, fps, described, robot_type, tasks=tasks)
    try:
        for part in parts:
            writer.append(part, files)
            written(part.length)
        files.close()
        notes = _copy_other_files(parts, folder)
        info = parts[0].source.layout.info
        files.write_metadata({key: value for key, value in info.items() if key not in OLD_INFO})
    except (OSError, OverflowError, pa.ArrowException, av.FFmpegError) as error:
        raise DatasetError(
            f"{folder.parent}: the dataset could not be written: {error}. Nothing was changed: free some disk space "
            "and start again."
        ) from error
    finally:
        with suppress(OSError, pa.ArrowException, av.FFmpegError):  # the first error is reported
            files.close()
    return writer.notes + notes


def _plan_of(source: EditSource) -> RepairPlan:
    assert source.plan is not None
    return source.plan


class _Writer:
    def __init__(self, parts: Sequence[Part], features: dict[str, dict[str, Any]]) -> None:
        self.features = features
        self.notes: list[str] = []
        self.cameras = [name for name, spec in features.items() if spec["dtype"] == "video"]
        self._stored = [name for name, spec in features.items() if spec["dtype"] != "video"]
        self._parts = parts
        self._cuts = {camera: [self._cut(part, camera) for part in parts] for camera in self.cameras}
        self._delay = {
            camera: max((cut.delay for cut in cuts), default=0) for camera, cuts in self._cuts.items()
        }
        self._number = {id(part): i for i, part in enumerate(parts)}
        self._more = self._plain_metadata()
        self._language: dict[str, pa.DataType] = {}

    def append(self, part: Part, files: DatasetFiles) -> None:
        columns = part.source.columns(part.plan, self._stored)
        columns = {name: self._rows(name, values, part) for name, values in columns.items()}
        task_index = np.array([files.task_index(text) for text in part.task_texts()], np.int64)
        clips = {camera: self._clip(part, camera) for camera in self.cameras}
        more = {key: part.plan.episode.other_fields.get(key) for key in self._more}
        files.append(columns, task_index, clips, self._camera_stats(part), part.listed_tasks(), more)

    def _rows(self, name: str, values: Any, part: Part) -> Any:
        if self.features[name]["dtype"] != LANGUAGE:
            rows = values[part.first : part.end]
            if name in FLAGS_AT_END and part.end < part.plan.length:
                rows = np.concatenate([rows[:-1], values[-1:]])
            return rows
        cells = values.slice(part.first, part.length)
        if part.first:
            cells = shifted(cells, part.first / _plan_of(part.source).fps)
        kind = self._language.setdefault(name, cells.type)
        return cells if cells.type == kind else cells.cast(kind)

    def _cut(self, part: Part, camera: str) -> Cut:
        clip: RepairClip = part.plan.clips[camera]
        return plan_cut(part.source.index(clip.file), clip.first + part.first, part.length)

    def _clip(self, part: Part, camera: str) -> PacketClip:
        file = part.plan.clips[camera].file
        cut = self._cuts[camera][self._number[id(part)]]
        return copy_cut(part.source.index(file), part.source.layout.path(file), cut, self._delay[camera])

    def _camera_stats(self, part: Part) -> dict[str, Stats]:
        """The statistics of the episode's cameras: those of the source, or computed if it was cut or has none."""
        names = [name for name, spec in self.features.items() if spec["dtype"] in ("image", "video")]
        index = part.plan.episode.index
        unchanged = part.length == part.plan.episode.length
        recorded = {n: part.source.recorded_stats[n].get(index) for n in names} if unchanged else {}
        stats = {name: value for name, value in recorded.items() if value is not None}
        missing = [name for name in names if name not in stats]
        return stats | (camera_stats(part, missing) if missing else {})

    def _plain_metadata(self) -> list[str]:
        """Other fields of the episode metadata that a table can store."""
        values: dict[str, list[Any]] = {}
        for part in self._parts:
            for key, value in part.plan.episode.other_fields.items():
                values.setdefault(key, []).append(value)
        plain = [key for key, column in values.items() if _is_plain(column)]
        self.notes += [
            f"{key!r} in the metadata of episodes is not copied" for key in values.keys() - {*plain}
        ]
        return plain

    def described(self, camera: str) -> dict[str, Any]:
        """A camera's declaration, with the properties of its files."""
        spec = dict(self.features[camera])
        part = self._parts[0]
        file = part.plan.clips[camera].file
        with open_video(str(part.source.layout.path(file))) as container:
            context = container.streams.video[0].codec_context
            codec, pix_fmt = context.codec.canonical_name, context.pix_fmt
            if container.streams.audio:
                self.notes.append(f"camera {camera}: the audio in its videos is not copied")
        declared = {**(spec.pop("video_info", None) or {}), **(spec.get("info") or {})}
        facts = {"codec": codec, "pix_fmt": pix_fmt, "fps": _plan_of(part.source).fps}
        declared |= {f"video.{key}": value for key, value in facts.items() if f"video.{key}" not in declared}
        spec["info"] = declared | {"has_audio": False}
        return spec


def _is_plain(values: list[Any]) -> bool:
    try:
        kind = pa.array(values).type
    except (pa.ArrowException, OverflowError):
        return False
    return not pa.types.is_null(kind) and not pa.types.is_struct(kind)


def camera_stats(part: Part, names: Sequence[str]) -> dict[str, Stats]:
    """Statistics of cameras over a part of an episode, computed from frames as LeRobot chooses them."""
    dataset: Dataset = part.source.dataset
    position = int(np.flatnonzero(dataset.episodes.index == part.plan.episode.index)[0])
    first = int(dataset.episodes.start[position]) + part.first
    rows = first + sample_indices(part.length)
    readable = [name for name in names if name in dataset.cameras]
    images = dataset.read(rows, cameras=readable) if readable else {}
    stats = {}
    for name in readable:
        if dataset.features[name].depth is not None:
            stats[name] = depth_stats(images[name])
            continue
        counts = sum(pixel_counts(image) for image in np.moveaxis(images[name], 1, -1))
        stats[name] = image_stats(np.asarray(counts), len(rows))
    return in_stored_unit(dataset, stats)


def _copy_other_files(parts: Sequence[Part], folder: Path) -> list[str]:
    """Copy the other files of meta/: those that are the same in all sources."""
    sources = list(dict.fromkeys(part.source for part in parts))
    (folder / "meta").mkdir(exist_ok=True)
    notes = []
    for path in sorted((sources[0].root / "meta").glob("*")):
        if not path.is_file() or path.name in FORMAT_FILES or path.name.startswith((".", "stats.json.bak")):
            continue
        name = f"meta/{path.name}"
        content = inside(sources[0].root, name).read_bytes()
        copies = [inside(source.root, name) for source in sources[1:]]
        if all(copy.is_file() and copy.read_bytes() == content for copy in copies):
            shutil.copyfile(inside(sources[0].root, name), inside(folder, name))
            notes.append(f"{name} copied unchanged")
        else:
            notes.append(f"{name} is not the same in all datasets: not copied")
    return notes
