"""The files of a new v3.0 dataset: whole episodes are appended, one after the other.

This module does not know where their rows and frames come from: `writer.py` encodes them, `repair.py` copies
them. `meta/info.json` is written last and atomically: a folder with it is a complete dataset, and a folder
left by a crash does not have it.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from flexor.core.errors import DatasetError
from flexor.core.output_paths import check_output_folder, make_parents, replacing
from flexor.core.paths import inside
from flexor.data.format import stats as statistics
from flexor.data.format.encode import VideoStream, VideoWriter
from flexor.data.format.file_names import V3
from flexor.data.format.schema import DEFAULT_FEATURES, LANGUAGE, arrow_type, hf_feature

DATA_PATH, VIDEO_PATH = V3["data_path"], V3["video_path"]
EPISODES_PATH = "meta/episodes/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"

MB = 1024 * 1024


@dataclass(frozen=True)
class PacketClip:
    """An episode's packets of one camera, with times counted in frames from its start."""

    stream: VideoStream
    packets: list[Any]
    joins: bool = True
    """Whether it may follow other packets in a file; if not, it starts a new file."""

    lead: int = 0
    """Frames before the episode's, which are only there to decode them."""

    count: int | None = None
    """The episode's frames; None: all after the lead."""


@dataclass(frozen=True)
class FileClip:
    """An episode in a video file that is copied unchanged and completely."""

    file: Path
    start: float
    end: float


class DatasetFiles:
    """A dataset of `features` (without LeRobot's own columns) in the new folder `root`."""

    def __init__(
        self,
        root: Path,
        fps: float,
        features: Mapping[str, Mapping[str, Any]],
        robot_type: str | None = None,
        data_files_mb: float = 100,
        video_files_mb: float = 200,
        chunk_size: int = 1000,
        tasks: Sequence[str] = (),
    ) -> None:
        check_new_folder(root)
        root.mkdir(parents=True, exist_ok=True)
        self.root = root
        self.fps = int(fps) if fps == int(fps) else fps
        self.features = {name: dict(feature) for name, feature in features.items()}
        self.robot_type = robot_type
        self.chunk_size, self.data_files_mb, self.video_files_mb = chunk_size, data_files_mb, video_files_mb
        self.tasks = list(tasks)
        self.total_frames = 0
        cameras = [name for name, feature in self.features.items() if feature["dtype"] == "video"]
        self._videos = {name: _VideoFiles(self, name) for name in cameras}
        self._table = _TableFiles(self)
        self._episodes: list[dict[str, Any]] = []
        self._stats: list[dict[str, statistics.Stats]] = []

    @property
    def total_episodes(self) -> int:
        return len(self._episodes)

    def task_index(self, task: str) -> int:
        """The index of a task; a new task gets a new index."""
        if task not in self.tasks:
            self.tasks.append(task)
        return self.tasks.index(task)

    def append(
        self,
        columns: Mapping[str, Any],
        task_index: np.ndarray,
        clips: Mapping[str, PacketClip | FileClip],
        camera_stats: Mapping[str, statistics.Stats],
        tasks: Sequence[str] | None = None,
        more: Mapping[str, Any] | None = None,
    ) -> None:
        """Add an episode: arrays [T, ...] and lists of text or encoded images, and a clip of every camera.

        `tasks` are the episode's tasks; default: those of its frames. `more` is added to its metadata.
        """
        length = len(task_index)
        columns = {**columns, **self._own_columns(task_index)}
        stats = self._episode_stats(columns, camera_stats)
        if tasks is None:
            tasks = [self.tasks[i] for i in dict.fromkeys(task_index.tolist())]
        row = {**(more or {}), "episode_index": self.total_episodes, "tasks": list(tasks), "length": length}
        row |= self._table.append(self._arrow_table(columns), length)
        row |= {"dataset_from_index": self.total_frames, "dataset_to_index": self.total_frames + length}
        for name, files in self._videos.items():
            row |= files.append(clips[name])
        for name, part in statistics.to_json(stats).items():
            row |= {f"stats/{name}/{key}": value for key, value in part.items()}
        row |= {"meta/episodes/chunk_index": 0, "meta/episodes/file_index": 0}
        self._episodes.append(row)
        self._stats.append(stats)
        self.total_frames += length

    def close(self) -> None:
        """Finish tables and videos. The folder becomes a dataset only with `write_metadata`."""
        self._table.close()
        for files in self._videos.values():
            files.close()

    def write_metadata(self, more: Mapping[str, Any] | None = None) -> None:
        """Write the metadata that makes the files a dataset, `info.json` last; `more` is added to `info.json`."""
        _write_tasks(self.root / "meta/tasks.parquet", self.tasks)
        path = make_parents(self.root / EPISODES_PATH.format(chunk_index=0, file_index=0))
        pq.write_table(pa.Table.from_struct_array(pa.array(self._episodes)), path)
        merged = statistics.to_json(statistics.aggregate_stats(self._stats))
        write_json(self.root / "meta/stats.json", merged)
        write_json(self.root / "meta/info.json", {**(more or {}), **self._info()})

    def _own_columns(self, task_index: np.ndarray) -> dict[str, np.ndarray]:
        frames = np.arange(len(task_index))
        return {
            "timestamp": frames / self.fps,
            "frame_index": frames,
            "episode_index": np.full(len(frames), self.total_episodes),
            "index": self.total_frames + frames,
            "task_index": task_index,
        }

    def _episode_stats(
        self, columns: Mapping[str, Any], camera_stats: Mapping[str, statistics.Stats]
    ) -> dict[str, statistics.Stats]:
        result = {}
        for name, feature in (self.features | DEFAULT_FEATURES).items():
            if name in camera_stats:
                result[name] = camera_stats[name]
            elif feature["dtype"] not in ("image", "video", "string", LANGUAGE):
                result[name] = statistics.vector_stats(columns[name])
        return result

    def _arrow_table(self, columns: Mapping[str, Any]) -> pa.Table:
        features = {n: f for n, f in (self.features | DEFAULT_FEATURES).items() if f["dtype"] != "video"}
        schema = pa.schema([(name, arrow_type(f, columns[name])) for name, f in features.items()])
        if LANGUAGE not in {feature["dtype"] for feature in features.values()}:
            described = {"info": {"features": {n: hf_feature(f) for n, f in features.items()}}}
            schema = schema.with_metadata({"huggingface": json.dumps(described)})
        arrays: list[pa.Array | pa.ChunkedArray] = []
        for name, feature in features.items():
            values = columns[name]
            if feature["dtype"] == LANGUAGE:
                arrays.append(values)
                continue
            if feature["dtype"] == "image":
                values = [{"bytes": png, "path": f"frame-{i:06d}.png"} for i, png in enumerate(values)]
            elif isinstance(values, np.ndarray):
                values = values.astype(feature["dtype"])
                values = values if values.ndim == 1 else values.tolist()
            arrays.append(pa.array(values, type=schema.field(name).type))
        return pa.Table.from_arrays(arrays, schema=schema)

    def _info(self) -> dict[str, Any]:
        return {
            "codebase_version": "v3.0",
            "fps": self.fps,
            "features": {name: dict(f) for name, f in (self.features | DEFAULT_FEATURES).items()},
            "total_episodes": self.total_episodes,
            "total_frames": self.total_frames,
            "total_tasks": len(self.tasks),
            "chunks_size": self.chunk_size,
            "data_files_size_in_mb": self.data_files_mb,
            "video_files_size_in_mb": self.video_files_mb,
            "data_path": DATA_PATH,
            "video_path": VIDEO_PATH if self._videos else None,
            "robot_type": self.robot_type,
            "splits": {"train": f"0:{self.total_episodes}"},
        }


class _TableFiles:
    """The parquet files under data/: one row group per episode, a new file when one is full."""

    def __init__(self, files: DatasetFiles) -> None:
        self._files, self._number, self._rows = files, -1, 0
        self._parquet: pq.ParquetWriter | None = None
        self._sink: Any = None

    def append(self, table: pa.Table, length: int) -> dict[str, int]:
        if self._parquet is not None:
            size = self._sink.tell()
            if size + size / self._rows * length >= self._files.data_files_mb * MB:
                self.close()
        if self._parquet is None:
            self._number, self._rows = self._number + 1, 0
            path = make_parents(self._files.root / DATA_PATH.format(**self._place()))
            self._sink = pa.OSFile(str(path), "wb")
            self._parquet = pq.ParquetWriter(self._sink, table.schema, compression="snappy")
        self._parquet.write_table(table, row_group_size=length)
        self._rows += length
        return {f"data/{key}": value for key, value in self._place().items()}

    def _place(self) -> dict[str, int]:
        return _place(self._number, self._files.chunk_size)

    def close(self) -> None:
        if self._parquet is not None:
            self._parquet.close()
            self._sink.close()
            self._parquet = None


class _VideoFiles:
    """The mp4 files of one camera: an episode is never split, and a full file is followed by a new one."""

    def __init__(self, files: DatasetFiles, name: str) -> None:
        self._files, self._name, self._number = files, name, -1
        self._file: VideoWriter | None = None
        self._copied: dict[
            Path, int
        ] = {}  # files that were copied unchanged -> their numbers in this dataset

    def append(self, clip: PacketClip | FileClip) -> dict[str, Any]:
        if isinstance(clip, FileClip):
            place = self._copy(clip.file) | {"from_timestamp": clip.start, "to_timestamp": clip.end}
        else:
            start, end = self._file_for(clip).append(clip.packets, clip.lead, clip.count)
            place = self._place(self._number) | {"from_timestamp": start, "to_timestamp": end}
        return {f"videos/{self._name}/{key}": value for key, value in place.items()}

    def _file_for(self, clip: PacketClip) -> VideoWriter:
        size = sum(packet.size for packet in clip.packets)
        if self._file is not None:
            full = self._file.bytes + size >= self._files.video_files_mb * MB
            if full or not clip.joins or self._file.stream != clip.stream:
                self.close()
        if self._file is None:
            self._file = VideoWriter(self._next_path(), self._files.fps, clip.stream)
        return self._file

    def _copy(self, file: Path) -> dict[str, int]:
        if file not in self._copied:
            self.close()
            shutil.copyfile(file, make_parents(self._next_path()))
            self._copied[file] = self._number
        return self._place(self._copied[file])

    def _next_path(self) -> Path:
        self._number += 1
        name = VIDEO_PATH.format(video_key=self._name, **self._place(self._number))
        return inside(self._files.root, name)

    def _place(self, number: int) -> dict[str, int]:
        return _place(number, self._files.chunk_size)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _place(number: int, chunk_size: int) -> dict[str, int]:
    return {"chunk_index": number // chunk_size, "file_index": number % chunk_size}


def check_new_folder(root: Path) -> None:
    """Raise an error if the folder exists and is not empty, or can't be created."""
    check_output_folder(root, "root")
    if root.exists() and any(root.iterdir()):
        unfinished = not (root / "meta/info.json").exists()
        hint = " (it has no meta/info.json, so perhaps an earlier write did not finish)" if unfinished else ""
        raise DatasetError(f"{root} exists and is not empty{hint}. Choose a new folder, or delete this one.")


def _write_tasks(path: Path, tasks: Sequence[str]) -> None:
    """Write tasks.parquet with the metadata that makes pandas use the task strings as the index."""
    texts = {"pandas_type": "unicode", "numpy_type": "object"}
    pandas = {
        "index_columns": ["task"],
        "column_indexes": [{"name": None, "field_name": None, "metadata": {"encoding": "UTF-8"}, **texts}],
        "columns": [
            {"name": "task_index", "field_name": "task_index", "metadata": None}
            | {"pandas_type": "int64", "numpy_type": "int64"},
            {"name": "task", "field_name": "task", "metadata": None, **texts},
        ],
        "pandas_version": "2.0.0",
    }
    table = pa.table({"task_index": pa.array(range(len(tasks)), pa.int64()), "task": list(tasks)})
    pq.write_table(table.replace_schema_metadata({"pandas": json.dumps(pandas)}), make_parents(path))


def write_json(path: Path, data: Any) -> None:
    """Write a JSON file atomically: it is complete, or it does not exist."""
    with replacing(path) as aside, aside.open("w", encoding="utf-8") as file:
        json.dump(data, file, indent=4, ensure_ascii=False)
        file.flush()
        os.fsync(file.fileno())
