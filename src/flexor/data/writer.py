"""Write a LeRobot v3.0 dataset, frame by frame.

    with DatasetWriter(root, fps=30, features=features) as writer:
        for episode in episodes:
            for frame in episode:
                writer.add_frame(frame)
            writer.save_episode("pick up the cube")

Frames go to the encoder as they come; what is kept of an episode is its compressed video, its numbers
and its pixel counts. `meta/info.json` is written last and in one step: a folder that has it is a whole
dataset, and a folder left by a crash does not.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from flexor.data import stats as statistics
from flexor.data.encode import EpisodeEncoder, VideoFile, VideoSettings, encode_png
from flexor.data.schema import DEFAULT_FEATURES, arrow_type, checked_features, checked_value, hf_feature
from flexor.errors import DatasetError
from flexor.log import log

DATA_PATH = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
VIDEO_PATH = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
EPISODES_PATH = "meta/episodes/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"

MB = 1024 * 1024


class DatasetWriter:
    """Writes a dataset of `features` = {name: {"dtype", "shape", "names"}} into the new folder `root`."""

    def __init__(
        self,
        root: str | Path,
        fps: float,
        features: Mapping[str, Mapping[str, Any]],
        robot_type: str | None = None,
        codec: str = "av1",
        gop: int = 2,
        crf: int = 30,
        pix_fmt: str = "yuv420p",
        data_files_mb: float = 100,
        video_files_mb: float = 200,
        chunk_size: int = 1000,
    ) -> None:
        self.root = _new_folder(Path(root))
        if not fps > 0:
            raise DatasetError(f"fps={fps} is not a frame rate. Give the frames per second, such as fps=30.")
        self.fps = int(fps) if fps == int(fps) else fps
        self.features = {n: f for n, f in checked_features(features).items() if n not in DEFAULT_FEATURES}
        self.robot_type = robot_type
        self.chunk_size, self.data_files_mb, self.video_files_mb = chunk_size, data_files_mb, video_files_mb
        self._video = {
            name: VideoSettings(codec, f["shape"][1], f["shape"][0], fps, gop, crf, pix_fmt)
            for name, f in self.features.items()
            if f["dtype"] == "video"
        }
        for name, settings in self._video.items():
            settings.check(f"feature {name!r}")
        self._files = {name: _VideoFiles(self, name, settings) for name, settings in self._video.items()}
        self._table = _TableFiles(self)
        self._tasks: dict[str, int] = {}
        self._episodes: list[dict[str, Any]] = []
        self._stats: list[dict[str, statistics.Stats]] = []
        self.total_frames = 0
        self._closed = False
        self.discard_episode()

    def add_frame(self, frame: Mapping[str, Any]) -> None:
        """Add one frame to the episode: a value for every feature, images as uint8 [H, W, 3]."""
        assert not self._closed, "add_frame after close"
        values = self._checked_frame(frame)
        for name, value in values.items():
            dtype = self.features[name]["dtype"]
            if dtype in ("image", "video"):
                self._pixels[name].append(statistics.pixel_counts(value).astype(np.uint32))
            if dtype == "video":
                if name not in self._encoders:
                    self._encoders[name] = EpisodeEncoder(self._video[name])
                self._encoders[name].add(value)
            else:
                self._columns[name].append(encode_png(value) if dtype == "image" else value)
        self.length += 1

    def discard_episode(self) -> None:
        """Forget the frames added since the last episode was saved."""
        self.length = 0
        self._columns: dict[str, list[Any]] = {n: [] for n in self.features if n not in self._video}
        self._pixels: dict[str, list[np.ndarray]] = {
            n: [] for n, f in self.features.items() if f["dtype"] in ("image", "video")
        }
        self._encoders: dict[str, EpisodeEncoder] = {}

    def save_episode(self, task: str) -> None:
        """End the episode: its frames are one demonstration of `task`."""
        if not isinstance(task, str) or not task:
            raise DatasetError(
                f"save_episode: task must say what was done, such as 'open the drawer'; got {task!r}."
            )
        if self.length == 0:
            raise DatasetError("save_episode: the episode has no frames. Call add_frame before it.")
        columns = self._episode_columns(self._tasks.setdefault(task, len(self._tasks)))
        episode_stats = self._episode_stats(columns)
        row = {"episode_index": len(self._episodes), "tasks": [task], "length": self.length}
        row |= self._table.append(self._arrow_table(columns), self.length)
        row |= {"dataset_from_index": self.total_frames, "dataset_to_index": self.total_frames + self.length}
        for name, files in self._files.items():
            row |= files.append(self._encoders[name].finish())
        for name, part in statistics.to_json(episode_stats).items():
            row |= {f"stats/{name}/{key}": value for key, value in part.items()}
        row |= {"meta/episodes/chunk_index": 0, "meta/episodes/file_index": 0}
        self._episodes.append(row)
        self._stats.append(episode_stats)
        self.total_frames += self.length
        self.discard_episode()

    def close(self) -> None:
        """Finish the files and write the metadata, `info.json` last. Frames not saved are dropped."""
        if self._closed:
            return
        if self.length:
            log.warning("%d frames were added and not saved as an episode: they are left out", self.length)
        self._close_files()
        if not self._episodes:
            raise DatasetError(
                f"{self.root}: no episode was saved, so there is no dataset. Call save_episode."
            )
        _write_tasks(self.root / "meta/tasks.parquet", self._tasks)
        path = self.root / EPISODES_PATH.format(chunk_index=0, file_index=0)
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_pylist(self._episodes), path)
        merged = statistics.to_json(statistics.aggregate_stats(self._stats))
        _write_json(self.root / "meta/stats.json", merged)
        _write_json(self.root / "meta/info.json", self._info())

    def __enter__(self) -> DatasetWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:  # the dataset is not whole, so it gets no info.json
            self._close_files()

    def _close_files(self) -> None:
        self._closed = True
        self._table.close()
        for files in self._files.values():
            files.close()

    def _checked_frame(self, frame: Mapping[str, Any]) -> dict[str, Any]:
        where = f"add_frame, episode {len(self._episodes)}, frame {self.length}"
        for name in frame:
            if name in DEFAULT_FEATURES:
                raise DatasetError(f"{where}: {name!r} is filled in by the writer. Leave it out.")
            if name not in self.features:
                raise DatasetError(
                    f"{where}: unknown feature {name!r}. The features are {', '.join(self.features)}."
                )
        missing = [name for name in self.features if name not in frame]
        if missing:
            raise DatasetError(f"{where}: no value for {', '.join(missing)}. A frame gives every feature.")
        return {
            name: checked_value(f"{where}: {name!r}", frame[name], f) for name, f in self.features.items()
        }

    def _episode_columns(self, task_index: int) -> dict[str, Any]:
        """The episode as columns: lists of PNG bytes or text, or arrays [T, ...]."""
        columns: dict[str, Any] = {}
        for name, values in self._columns.items():
            text = self.features[name]["dtype"] in ("image", "string")
            columns[name] = values if text else np.stack(values)
            if not text and list(self.features[name]["shape"]) == [1]:
                columns[name] = columns[name].reshape(-1)
        frames = np.arange(self.length)
        columns["timestamp"] = frames / self.fps
        columns["frame_index"] = frames
        columns["episode_index"] = np.full(self.length, len(self._episodes))
        columns["index"] = self.total_frames + frames
        columns["task_index"] = np.full(self.length, task_index)
        return columns

    def _episode_stats(self, columns: dict[str, Any]) -> dict[str, statistics.Stats]:
        sampled = statistics.sample_indices(self.length)
        result = {}
        for name, feature in (self.features | DEFAULT_FEATURES).items():
            if feature["dtype"] in ("image", "video"):
                counts = np.stack([self._pixels[name][i] for i in sampled]).sum(axis=0, dtype=np.int64)
                result[name] = statistics.image_stats(counts, len(sampled))
            elif feature["dtype"] != "string":
                result[name] = statistics.vector_stats(columns[name])
        return result

    def _arrow_table(self, columns: dict[str, Any]) -> pa.Table:
        features = {n: f for n, f in (self.features | DEFAULT_FEATURES).items() if f["dtype"] != "video"}
        schema = pa.schema([(name, arrow_type(feature)) for name, feature in features.items()])
        described = {"info": {"features": {n: hf_feature(f) for n, f in features.items()}}}
        schema = schema.with_metadata({"huggingface": json.dumps(described)})
        arrays = []
        for name, feature in features.items():
            values = columns[name]
            if feature["dtype"] == "image":
                values = [{"bytes": png, "path": f"frame-{i:06d}.png"} for i, png in enumerate(values)]
            elif isinstance(values, np.ndarray):
                values = values.astype(feature["dtype"])
                values = values if values.ndim == 1 else values.tolist()
            arrays.append(pa.array(values, type=schema.field(name).type))
        return pa.Table.from_arrays(arrays, schema=schema)

    def _info(self) -> dict[str, Any]:
        features: dict[str, dict[str, Any]] = {}
        for name, feature in (self.features | DEFAULT_FEATURES).items():
            features[name] = dict(feature)
            if name in self._video:
                features[name]["info"] = self._video[name].info()
        return {
            "codebase_version": "v3.0",
            "fps": self.fps,
            "features": features,
            "total_episodes": len(self._episodes),
            "total_frames": self.total_frames,
            "total_tasks": len(self._tasks),
            "chunks_size": self.chunk_size,
            "data_files_size_in_mb": self.data_files_mb,
            "video_files_size_in_mb": self.video_files_mb,
            "data_path": DATA_PATH,
            "video_path": VIDEO_PATH if self._video else None,
            "robot_type": self.robot_type,
            "splits": {"train": f"0:{len(self._episodes)}"},
        }


class _TableFiles:
    """The parquet files under data/: one row group per episode, a new file when one is full."""

    def __init__(self, writer: DatasetWriter) -> None:
        self._writer, self._number, self._rows = writer, -1, 0
        self._parquet: pq.ParquetWriter | None = None
        self._sink: Any = None

    def append(self, table: pa.Table, length: int) -> dict[str, int]:
        if self._parquet is not None:
            size = self._sink.tell()
            if size + size / self._rows * length >= self._writer.data_files_mb * MB:
                self.close()
        if self._parquet is None:
            self._number, self._rows = self._number + 1, 0
            path = self._writer.root / DATA_PATH.format(**self._place())
            path.parent.mkdir(parents=True, exist_ok=True)
            self._sink = pa.OSFile(str(path), "wb")
            self._parquet = pq.ParquetWriter(self._sink, table.schema, compression="snappy")
        self._parquet.write_table(table, row_group_size=length)
        self._rows += length
        return {f"data/{key}": value for key, value in self._place().items()}

    def _place(self) -> dict[str, int]:
        return _place(self._number, self._writer.chunk_size)

    def close(self) -> None:
        if self._parquet is not None:
            self._parquet.close()
            self._sink.close()
            self._parquet = None


class _VideoFiles:
    """The mp4 files of one camera: an episode is never cut, a new file is begun when one is full."""

    def __init__(self, writer: DatasetWriter, name: str, settings: VideoSettings) -> None:
        self._writer, self._name, self._settings, self._number = writer, name, settings, -1
        self._file: VideoFile | None = None

    def append(self, packets: list[Any]) -> dict[str, Any]:
        size = sum(packet.size for packet in packets)
        if self._file is not None and self._file.bytes + size >= self._writer.video_files_mb * MB:
            self.close()
        if self._file is None:
            self._number += 1
            path = VIDEO_PATH.format(video_key=self._name, **self._place())
            self._file = VideoFile(self._writer.root / path, self._settings)
        start, end = self._file.append(packets)
        place = self._place() | {"from_timestamp": start, "to_timestamp": end}
        return {f"videos/{self._name}/{key}": value for key, value in place.items()}

    def _place(self) -> dict[str, int]:
        return _place(self._number, self._writer.chunk_size)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _place(number: int, chunk_size: int) -> dict[str, int]:
    return {"chunk_index": number // chunk_size, "file_index": number % chunk_size}


def _new_folder(root: Path) -> Path:
    if root.exists() and (not root.is_dir() or any(root.iterdir())):
        unfinished = root.is_dir() and not (root / "meta/info.json").exists()
        hint = " (it has no meta/info.json: perhaps a write that was cut short)" if unfinished else ""
        raise DatasetError(f"{root} exists and is not empty{hint}. Give a new folder, or delete this one.")
    root.mkdir(parents=True, exist_ok=True)
    return root


def _write_tasks(path: Path, tasks: dict[str, int]) -> None:
    """tasks.parquet, described so that pandas makes the task strings the index."""
    path.parent.mkdir(parents=True, exist_ok=True)
    texts = {"pandas_type": "unicode", "numpy_type": "object"}
    pandas = {
        "index_columns": ["task"],
        "column_indexes": [
            {"name": None, "field_name": None, "metadata": {"encoding": "UTF-8"}, **texts},
        ],
        "columns": [
            {"name": "task_index", "field_name": "task_index", "metadata": None}
            | {"pandas_type": "int64", "numpy_type": "int64"},
            {"name": "task", "field_name": "task", "metadata": None, **texts},
        ],
        "pandas_version": "2.0.0",
    }
    table = pa.table({"task_index": pa.array(tasks.values(), pa.int64()), "task": list(tasks)})
    pq.write_table(table.replace_schema_metadata({"pandas": json.dumps(pandas)}), path)


def _write_json(path: Path, data: Any) -> None:
    """Write a JSON file in one step: whole, or not there."""
    aside = path.with_suffix(".json.part")
    with aside.open("w", encoding="utf-8") as file:
        json.dump(data, file, indent=4, ensure_ascii=False)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
