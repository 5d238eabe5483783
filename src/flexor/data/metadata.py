"""A LeRobot dataset's metadata, v2.0, v2.1 and v3.0, brought into one form.

The versions differ in where things are written down (JSON lines or parquet) and in how many episodes
share a file. Nothing above this module asks which version it is reading.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from flexor.data import stats as statistics
from flexor.data.source import Source
from flexor.errors import DatasetError

__all__ = [
    "EpisodeFiles",
    "Feature",
    "Metadata",
    "VideoSpans",
    "broken",
    "parquet_columns",
    "read_metadata",
    "read_parquet",
]

Stats = dict[str, dict[str, np.ndarray]]

CAMERA_CHANNELS = (1, 3, 4)


@dataclass(frozen=True)
class Feature:
    """One declared column or camera."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    names: object = None
    is_depth: bool = False

    @property
    def is_video(self) -> bool:
        return self.dtype == "video"

    @property
    def is_image(self) -> bool:
        return self.dtype == "image"

    @property
    def is_camera(self) -> bool:
        return self.is_video or self.is_image

    @property
    def is_numeric(self) -> bool:
        return self.dtype == "bool" or self.dtype.startswith(("float", "int", "uint"))

    @property
    def chw(self) -> tuple[int, int, int]:
        """A camera's (channels, height, width), whichever way round it was declared."""
        assert self.is_camera and len(self.shape) == 3, self
        a, b, c = self.shape
        names = list(self.names) if isinstance(self.names, list | tuple) else []
        if len(names) == 3 and str(names[0]).startswith("channel"):
            return a, b, c
        if len(names) == 3 and str(names[2]).startswith("channel"):
            return c, a, b
        # Without names: channels are few, pictures are not.
        return (a, b, c) if a in CAMERA_CHANNELS and c not in CAMERA_CHANNELS else (c, a, b)


@dataclass(frozen=True)
class VideoSpans:
    """Where one camera's episodes lie: file, and the episode's time span in it."""

    file: list[str]
    start: np.ndarray  # [E] seconds into the file at which the episode's clock is zero
    stop: np.ndarray  # [E] seconds; nan where the file is the episode's alone


@dataclass(frozen=True)
class EpisodeFiles:
    """All episodes of the dataset, selected or not, in order of their index."""

    index: np.ndarray  # [E]
    length: np.ndarray  # [E] frames
    tasks: list[list[str]]
    data_file: list[str]
    videos: dict[str, VideoSpans] = field(default_factory=dict)


@dataclass(frozen=True)
class Metadata:
    version: str
    fps: float
    robot_type: str | None
    features: dict[str, Feature]
    tasks: list[str]
    stats: Stats
    episodes: EpisodeFiles


def broken(source: Source, file: str, what: str) -> DatasetError:
    """An error about one file of a dataset, with the way to find out more."""
    return DatasetError(f"{source}: {file}: {what}. Run `flexor data check {source}`")


def read_metadata(source: Source) -> Metadata:
    info = _read_json(source, "meta/info.json")
    version = str(info.get("codebase_version", "missing"))
    try:
        features = {name: _feature(name, spec) for name, spec in info["features"].items()}
        fps = float(info["fps"])
    except (KeyError, TypeError, AttributeError) as error:
        raise broken(source, "meta/info.json", f"field {error} is missing or malformed") from error
    readers: dict[str, Callable[[Source, dict, dict[str, Feature]], tuple[EpisodeFiles, list[str]]]]
    readers = {"v3.0": _read_v3, "v2.1": _read_v2, "v2.0": _read_v2}
    if version not in readers:
        raise broken(
            source,
            "meta/info.json",
            f"codebase_version is {version!r}; Flexor reads {', '.join(readers)}. "
            f"Convert the dataset with LeRobot's conversion scripts",
        )
    episodes, tasks = readers[version](source, info, features)
    _check_totals(source, info, episodes)
    robot_type = info.get("robot_type")
    return Metadata(version, fps, robot_type, features, tasks, _read_stats(source, features), episodes)


def read_parquet(source: Source, name: str, columns: Sequence[str] | None = None) -> pa.Table:
    """Columns of a parquet file; anything wrong with the file is an error that names it."""
    with _open_parquet(source, name) as file:
        return file.read(columns=None if columns is None else list(columns))


def parquet_columns(source: Source, name: str) -> list[str]:
    with _open_parquet(source, name) as file:
        return file.schema_arrow.names


@contextmanager
def _open_parquet(source: Source, name: str) -> Iterator[pq.ParquetFile]:
    path = source.local(name)
    if not path.is_file():
        raise broken(source, name, "the file is missing")
    try:
        with pq.ParquetFile(path) as file:
            yield file
    except (pa.ArrowException, OSError) as error:
        raise broken(source, name, f"the file is damaged or cut short ({error})") from error


def _feature(name: str, spec: dict[str, Any]) -> Feature:
    info = {**(spec.get("video_info") or {}), **(spec.get("info") or {})}
    is_depth = bool(info.get("is_depth_map") or info.get("video.is_depth_map"))
    return Feature(name, spec["dtype"], tuple(spec.get("shape") or (1,)), spec.get("names"), is_depth)


def _read_v3(source: Source, info: dict, features: dict[str, Feature]) -> tuple[EpisodeFiles, list[str]]:
    files = source.list("meta/episodes", ".parquet")
    if not files:
        raise broken(source, "meta/episodes/", "there is no parquet file in it")
    videos = [name for name, feature in features.items() if feature.is_video]
    rows: dict[str, list] = {}
    for file in files:
        table = read_parquet(source, file, _episode_columns(source, file, videos))
        for name in table.column_names:
            rows.setdefault(name, []).extend(table[name].to_pylist())
    order = np.argsort(np.array(rows["episode_index"]), kind="stable")
    rows = {name: [values[i] for i in order] for name, values in rows.items()}
    chunks = zip(rows["data/chunk_index"], rows["data/file_index"])
    data_file = [info["data_path"].format(chunk_index=c, file_index=f) for c, f in chunks]
    spans = {name: _spans_v3(rows, info, name) for name in videos if f"videos/{name}/file_index" in rows}
    episodes = EpisodeFiles(
        np.array(rows["episode_index"], np.int64),
        np.array(rows["length"], np.int64),
        [list(tasks or []) for tasks in rows["tasks"]],
        data_file,
        spans,
    )
    return episodes, _read_tasks_v3(source)


def _episode_columns(source: Source, file: str, videos: list[str]) -> list[str]:
    """The columns to read of an episodes file: its statistics are most of it, and not wanted."""
    needed = ["episode_index", "length", "tasks", "data/chunk_index", "data/file_index"]
    parts = ("chunk_index", "file_index", "from_timestamp", "to_timestamp")
    present = set(parquet_columns(source, file))
    missing = [name for name in needed if name not in present]
    if missing:
        raise broken(source, file, f"columns {missing} are missing")
    video_columns = [f"videos/{name}/{part}" for name in videos for part in parts]
    return needed + [name for name in video_columns if name in present]


def _spans_v3(rows: dict[str, list], info: dict, name: str) -> VideoSpans:
    where = zip(rows[f"videos/{name}/chunk_index"], rows[f"videos/{name}/file_index"])
    return VideoSpans(
        [info["video_path"].format(video_key=name, chunk_index=c, file_index=f) for c, f in where],
        np.array(rows[f"videos/{name}/from_timestamp"], np.float64),
        np.array(rows[f"videos/{name}/to_timestamp"], np.float64),
    )


def _read_tasks_v3(source: Source) -> list[str]:
    if not source.exists("meta/tasks.parquet"):
        return []
    table = read_parquet(source, "meta/tasks.parquet")
    # pandas wrote the task strings as an index, whose column name depends on who wrote it.
    text = [f.name for f in table.schema if pa.types.is_string(f.type) or pa.types.is_large_string(f.type)]
    if not text or "task_index" not in table.column_names:
        raise broken(source, "meta/tasks.parquet", f"columns {table.column_names}: no task and task_index")
    return _by_index(zip(table["task_index"].to_pylist(), table[text[0]].to_pylist()))


def _read_v2(source: Source, info: dict, features: dict[str, Feature]) -> tuple[EpisodeFiles, list[str]]:
    rows = sorted(_read_jsonl(source, "meta/episodes.jsonl"), key=lambda row: row["episode_index"])
    index = np.array([row["episode_index"] for row in rows], np.int64)
    per_chunk = int(info.get("chunks_size") or 1000)

    def files(template: str, **more: str) -> list[str]:
        return [
            template.format(episode_chunk=i // per_chunk, episode_index=i, **more) for i in index.tolist()
        ]

    alone = np.full(len(index), np.nan)
    spans = {
        name: VideoSpans(files(info["video_path"], video_key=name), np.zeros(len(index)), alone)
        for name, feature in features.items()
        if feature.is_video and info.get("video_path")
    }
    length = np.array([row["length"] for row in rows], np.int64)
    tasks = [list(row.get("tasks") or []) for row in rows]
    task_rows = _read_jsonl(source, "meta/tasks.jsonl") if source.exists("meta/tasks.jsonl") else []
    names = _by_index((row["task_index"], row["task"]) for row in task_rows)
    return EpisodeFiles(index, length, tasks, files(info["data_path"]), spans), names


def _by_index(pairs: Any) -> list[str]:
    tasks = dict(pairs)
    return [tasks.get(i, "") for i in range(max(tasks, default=-1) + 1)]


def _check_totals(source: Source, info: dict, episodes: EpisodeFiles) -> None:
    frames, count = int(episodes.length.sum()), len(episodes.index)
    if "total_episodes" in info and info["total_episodes"] != count:
        what = f"total_episodes is {info['total_episodes']}, but the episode metadata has {count}"
        raise broken(source, "meta/info.json", what)
    if "total_frames" in info and info["total_frames"] != frames:
        what = f"total_frames is {info['total_frames']}, but the episodes' lengths add up to {frames}"
        raise broken(source, "meta/info.json", what)
    if count and not (episodes.index == np.arange(count)).all():
        raise broken(source, "the episode metadata", f"episodes are not numbered 0 to {count - 1}")


def _read_stats(source: Source, features: dict[str, Feature]) -> Stats:
    if source.exists("meta/stats.json"):
        stats = statistics.from_json(_read_json(source, "meta/stats.json"))
    elif source.exists("meta/episodes_stats.jsonl"):
        rows = sorted(_read_jsonl(source, "meta/episodes_stats.jsonl"), key=lambda r: r["episode_index"])
        stats = statistics.aggregate_stats([statistics.from_json(row["stats"]) for row in rows])
    else:
        return {}
    for name, group in stats.items():
        if name in features and features[name].is_camera:
            stats[name] = {k: v if k == "count" else v.reshape(-1, 1, 1) for k, v in group.items()}
    return stats


def _read_json(source: Source, name: str) -> dict:
    return _parse(source, name, json.loads)


def _read_jsonl(source: Source, name: str) -> list[dict]:
    return _parse(source, name, lambda text: [json.loads(line) for line in text.splitlines() if line.strip()])


def _parse(source: Source, name: str, parser: Callable[[str], Any]) -> Any:
    path = source.local(name)
    if not path.is_file():
        raise broken(source, name, "the file is missing")
    try:
        return parser(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise broken(source, name, f"this is not valid JSON ({error})") from error
