"""Reads the metadata of LeRobot datasets v2.0, v2.1 and v3.0 into one form.

The versions differ in how metadata is stored (JSON lines or parquet) and in how many episodes
share a file. Code above this module does not depend on the version.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from flexor.core.errors import DatasetError
from flexor.core.foreign_files import MALFORMED, read_json_lines, read_json_object
from flexor.core.log import warn_once
from flexor.core.paths import UnsafePath
from flexor.data.format import stats as statistics
from flexor.data.format.depth import DepthScale, depth_scale
from flexor.data.format.file_names import FileNames, episode_tables
from flexor.data.format.schema import DEFAULT_FEATURES
from flexor.data.storage.other_layouts import POINTER, advice_on_version, how_to_pull, is_lfs_pointer
from flexor.data.storage.source import Source

__all__ = [
    "BrokenFile",
    "EpisodeFiles",
    "Feature",
    "Metadata",
    "VideoSpans",
    "parquet_columns",
    "read_metadata",
    "read_parquet",
]

Stats = dict[str, dict[str, np.ndarray]]

CAMERA_CHANNELS = (1, 3, 4)
MOST_TASKS = 10_000_000  # a larger number can't be a task index
LARGEST_INDEX = 1 << 40  # nor an episode's index or length
LARGEST_FRAME = 1 << 28  # values of a feature in one frame: an image of 16,000 x 5,000 pixels


@dataclass(frozen=True)
class Feature:
    """One declared column or camera."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    names: object = None
    depth: DepthScale | None = None
    """The scale of a depth map; None for all other features."""

    @property
    def is_video(self) -> bool:
        return self.dtype == "video"

    @property
    def is_image(self) -> bool:
        return self.dtype == "image" or self.is_array

    @property
    def is_array(self) -> bool:
        """Whether it is a camera whose images are in the tables as they are, without a format."""
        channels = {self.shape[0], self.shape[-1]} if len(self.shape) == 3 else set()
        is_named = self.name.startswith("observation.image")
        return self.dtype == "uint8" and bool(channels & ({*CAMERA_CHANNELS} if is_named else {3}))

    @property
    def is_camera(self) -> bool:
        return self.is_video or self.is_image

    @property
    def is_numeric(self) -> bool:
        is_number = self.dtype == "bool" or self.dtype.startswith(("float", "int", "uint"))
        return is_number and not self.is_array

    @property
    def chw(self) -> tuple[int, int, int]:
        """A camera's (channels, height, width), in whichever order its shape was declared."""
        assert self.is_camera and len(self.shape) == 3, self
        a, b, c = self.shape
        names = list(self.names) if isinstance(self.names, list | tuple) else []
        if len(names) == 3 and str(names[0]).startswith("channel"):
            return a, b, c
        if len(names) == 3 and str(names[2]).startswith("channel"):
            return c, a, b
        # Without names: the number of channels is small, height and width are not.
        return (a, b, c) if a in CAMERA_CHANNELS and c not in CAMERA_CHANNELS else (c, a, b)


@dataclass(frozen=True)
class VideoSpans:
    """Where one camera's episodes are stored: the file, and the episode's time span in it."""

    file: list[str | None]  # None if the metadata does not give it
    start: np.ndarray  # [E] position in the file, in seconds, where the episode's clock is zero
    stop: np.ndarray  # [E] seconds; nan if the file contains only this episode


@dataclass(frozen=True)
class EpisodeFiles:
    """All episodes of the dataset, selected or not, in order of their index."""

    index: np.ndarray  # [E]
    length: np.ndarray  # [E] frames
    tasks: list[list[str]]
    data_file: list[str]
    videos: dict[str, VideoSpans] = field(default_factory=dict)

    def files(self, selected: Iterable[int] | None = None) -> list[str]:
        """All tables and videos of some episodes, or of all."""
        some = range(len(self.index)) if selected is None else list(selected)
        names = [self.data_file[i] for i in some]
        for spans in self.videos.values():
            names += [file for i in some if (file := spans.file[i])]
        return list(dict.fromkeys(names))


@dataclass(frozen=True)
class Metadata:
    version: str
    fps: float
    robot_type: str | None
    features: dict[str, Feature]
    tasks: list[str]
    stats: Stats
    episodes: EpisodeFiles


class BrokenFile(DatasetError):
    """An error in one file of a dataset, with a hint how to find out more. `short` is the message without it."""

    def __init__(self, source: Source, file: str, problem: str):
        super().__init__(f"{source}: {file}: {problem}. Run `flexor data check {source}`")
        self.short = f"{file}: {problem}"


def read_metadata(source: Source) -> Metadata:
    info = _read(source, "meta/info.json", read_json_object)
    version = str(info.get("codebase_version", "missing"))
    try:
        features = {name: declared_feature(name, spec) for name, spec in info["features"].items()}
        fps = _frame_rate(info["fps"])
    except MALFORMED as error:
        raise BrokenFile(source, "meta/info.json", f"field {error} is missing or malformed") from error
    readers: dict[str, Callable[[Source, FileNames, list[str]], tuple[EpisodeFiles, list[str]]]]
    readers = {"v3.0": _read_v3, "v2.1": _read_v2, "v2.0": _read_v2}
    if version not in readers:
        problem = f"codebase_version is {version!r}, but Flexor supports only {', '.join(readers)}"
        raise BrokenFile(source, "meta/info.json", f"{problem}. {advice_on_version(version)}")
    try:
        names = FileNames(info, v3=version == "v3.0")
    except ValueError as error:
        raise BrokenFile(source, "meta/info.json", str(error)) from error
    videos = [name for name, feature in features.items() if feature.is_video]
    try:
        episodes, tasks = readers[version](source, names, videos)
    except UnsafePath as error:
        raise BrokenFile(source, "meta/info.json", str(error)) from error
    except UnicodeDecodeError as error:
        raise BrokenFile(source, "meta", f"a text in its tables is not UTF-8 ({error})") from error
    _check_totals(source, info, episodes)
    robot_type = info.get("robot_type")
    return Metadata(version, fps, robot_type, features, tasks, _read_stats(source, features), episodes)


def read_parquet(source: Source, name: str, columns: Sequence[str] | None = None) -> pa.Table:
    """Read columns of a parquet file; any problem with the file raises an error that names it."""
    with _open_parquet(source, name) as file:
        return file.read(columns=None if columns is None else list(columns))


def parquet_columns(source: Source, name: str) -> list[str]:
    with _open_parquet(source, name) as file:
        return file.schema_arrow.names


@contextmanager
def _open_parquet(source: Source, name: str) -> Iterator[pq.ParquetFile]:
    path = source.local(name)
    if not path.is_file():
        raise BrokenFile(source, name, "the file is missing")
    try:
        with pq.ParquetFile(path) as file:
            yield file
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        _refuse_pointer(source, name, path)
        raise BrokenFile(source, name, f"the file is damaged or truncated ({error})") from error


def _refuse_pointer(source: Source, name: str, path: Path) -> None:
    if is_lfs_pointer(path):
        raise BrokenFile(source, name, f"{POINTER}: {how_to_pull(source.root)}")


def declared_feature(name: str, spec: dict[str, Any]) -> Feature:
    """A feature as meta/info.json declares it. A declaration that can't be right raises one of MALFORMED."""
    info = {**(spec.get("video_info") or {}), **(spec.get("info") or {})}
    shape = tuple(int(size) for size in spec.get("shape") or (1,))
    feature = Feature(name, str(spec["dtype"]), shape, spec.get("names"), depth_scale(info))
    if min(shape) < 0 or math.prod(shape) > LARGEST_FRAME:
        raise ValueError(f"nothing has the shape {list(shape)}")
    if feature.is_camera and (len(shape) != 3 or min(shape) < 1):
        raise ValueError(f"a camera can't have the shape {list(shape)}")
    if name in DEFAULT_FEATURES and shape != (1,):
        raise ValueError(f"{name} can't have the shape {list(shape)}: it is a number")
    return feature


def _frame_rate(value: Any) -> float:
    if not 0 < float(value) < math.inf:
        raise ValueError(f"fps={value}")
    return float(value)


def _read_v3(source: Source, names: FileNames, cameras: list[str]) -> tuple[EpisodeFiles, list[str]]:
    files, ignored = episode_tables(source.list("meta/episodes", ".parquet"))
    if ignored:
        warn_once("%s: ignored, as LeRobot does: %s", source, ", ".join(ignored[:5]))
    if not files:
        raise BrokenFile(source, "meta/episodes/", "the folder contains no parquet file")
    needed = ["episode_index", "length", "tasks", "data/chunk_index", "data/file_index"]
    parts = ("chunk_index", "file_index", "from_timestamp", "to_timestamp")
    optional = [f"videos/{camera}/{part}" for camera in cameras for part in parts]
    columns: dict[str, list] = {name: [] for name in (*needed, *optional)}
    for file in files:
        present = parquet_columns(source, file)  # statistics are most of the file, and are not needed here
        missing = [name for name in needed if name not in present]
        if missing:
            raise BrokenFile(source, file, f"columns {missing} are missing")
        table = read_parquet(source, file, [name for name in columns if name in present])
        for name, values in columns.items():
            values += table[name].to_pylist() if name in present else [None] * table.num_rows
    rows = _Rows(source, "meta/episodes", columns)
    index, length = rows.integers("episode_index"), rows.integers("length")
    place = zip(index.tolist(), columns["data/chunk_index"], columns["data/file_index"])
    spans = {}
    for camera in cameras:
        column = {part: columns[f"videos/{camera}/{part}"] for part in parts}
        if any(number is not None for number in column["file_index"]):
            where = zip(index.tolist(), column["chunk_index"], column["file_index"])
            spans[camera] = VideoSpans(
                [names.video(camera, *at) if all(isinstance(n, int) for n in at) else None for at in where],
                rows.seconds(f"videos/{camera}/from_timestamp"),
                rows.seconds(f"videos/{camera}/to_timestamp"),
            )
    try:
        data_file = [names.data(*at) for at in place]
    except (ValueError, TypeError) as error:
        raise BrokenFile(source, "meta/episodes", str(error)) from error
    episodes = EpisodeFiles(index, length, [_texts(tasks) for tasks in columns["tasks"]], data_file, spans)
    return _in_order(source, episodes), _read_tasks_v3(source)


@dataclass(frozen=True)
class _Rows:
    """Columns of the episode metadata, which may contain invalid values."""

    source: Source
    file: str
    columns: Mapping[str, list]

    def integers(self, name: str) -> np.ndarray:
        for row, value in enumerate(self.columns[name]):
            if not isinstance(value, int) or not 0 <= value <= LARGEST_INDEX:
                raise BrokenFile(self.source, self.file, f"{name} of row {row} is {value!r}, not an integer")
        return np.array(self.columns[name], np.int64)

    def seconds(self, name: str) -> np.ndarray:
        """The column in seconds; nan for missing values."""
        values = self.columns[name]
        return np.array([v if isinstance(v, int | float) else math.nan for v in values], np.float64)


def _texts(tasks: Any) -> list[str]:
    tasks = [tasks] if isinstance(tasks, str) else tasks
    return [str(task) for task in tasks] if isinstance(tasks, list | tuple) else []


def _in_order(source: Source, episodes: EpisodeFiles) -> EpisodeFiles:
    """Sort episodes by index, which must be 0, 1, 2, ...; identical duplicates are dropped."""
    order = np.argsort(episodes.index, kind="stable")
    keep = [order[i] for i in range(len(order)) if i == 0 or not _same(episodes, order[i - 1], order[i])]
    if len(keep) < len(order):
        warn_once("%s: the metadata lists %d episodes twice; using each once", source, len(order) - len(keep))
    index = episodes.index[keep]
    if len(index) and not (index == np.arange(len(index))).all():
        problem = f"the episode indices are not 0 to {len(index) - 1}, each once. `flexor data repair` renumbers them"
        raise BrokenFile(source, "the episode metadata", problem)
    return EpisodeFiles(
        index,
        episodes.length[keep],
        [episodes.tasks[i] for i in keep],
        [episodes.data_file[i] for i in keep],
        {
            camera: VideoSpans([spans.file[i] for i in keep], spans.start[keep], spans.stop[keep])
            for camera, spans in episodes.videos.items()
        },
    )


def _same(episodes: EpisodeFiles, first: int, second: int) -> bool:
    def facts(i: int) -> tuple:
        spans = episodes.videos.values()
        videos = [(s.file[i], np.nan_to_num(s.start[i]), np.nan_to_num(s.stop[i])) for s in spans]
        return int(episodes.index[i]), int(episodes.length[i]), episodes.data_file[i], videos

    return facts(first) == facts(second)


def _read_tasks_v3(source: Source) -> list[str]:
    if not source.exists("meta/tasks.parquet"):
        return []
    table = read_parquet(source, "meta/tasks.parquet")
    # pandas stored the task strings as an index; its column name depends on the writer.
    text = [f.name for f in table.schema if pa.types.is_string(f.type) or pa.types.is_large_string(f.type)]
    if not text or "task_index" not in table.column_names:
        problem = f"columns task and task_index are missing in {table.column_names}"
        raise BrokenFile(source, "meta/tasks.parquet", problem)
    pairs = zip(table["task_index"].to_pylist(), table[text[0]].to_pylist())
    return _by_index(source, "meta/tasks.parquet", pairs)


def _read_v2(source: Source, names: FileNames, cameras: list[str]) -> tuple[EpisodeFiles, list[str]]:
    file = "meta/episodes.jsonl"
    lines = _read_jsonl(source, file)
    columns = {name: [line.get(name) for line in lines] for name in ("episode_index", "length", "tasks")}
    rows = _Rows(source, file, columns)
    index, length = rows.integers("episode_index"), rows.integers("length")
    start, stop = np.zeros(len(index)), np.full(len(index), np.nan)  # a file contains only one episode
    spans = {
        camera: VideoSpans([names.video(camera, i) for i in index.tolist()], start, stop)
        for camera in cameras
    }
    data_file = [names.data(i) for i in index.tolist()]
    episodes = EpisodeFiles(index, length, [_texts(tasks) for tasks in columns["tasks"]], data_file, spans)
    file = "meta/tasks.jsonl"
    pairs = [(line.get("task_index"), line.get("task")) for line in _read_jsonl(source, file, needed=False)]
    return _in_order(source, episodes), _by_index(source, file, pairs)


def _by_index(source: Source, file: str, pairs: Iterable[tuple[Any, Any]]) -> list[str]:
    tasks = {}
    for number, text in pairs:
        if not isinstance(number, int) or not 0 <= number < MOST_TASKS or not isinstance(text, str):
            raise BrokenFile(source, file, f"task {text!r} with task_index {number!r} is not valid")
        tasks[number] = text
    return [tasks.get(i, "") for i in range(max(tasks, default=-1) + 1)]


def _check_totals(source: Source, info: dict, episodes: EpisodeFiles) -> None:
    counted = {"total_episodes": len(episodes.index), "total_frames": int(episodes.length.sum())}
    wrong = [f"{name}={info[name]}, not {n}" for name, n in counted.items() if info.get(name, n) != n]
    if wrong:
        text = "%s: meta/info.json does not match the episode metadata: it has %s"
        warn_once(text, source, " and ".join(wrong))


def _read_stats(source: Source, features: dict[str, Feature]) -> Stats:
    """Statistics by feature. Unusable statistics are dropped: training computes its own."""
    file = "meta/stats.json" if source.exists("meta/stats.json") else "meta/episodes_stats.jsonl"
    if not source.exists(file):
        return {}
    try:
        if file == "meta/stats.json":
            stats = statistics.from_json(_read(source, file, read_json_object))
        else:
            rows = sorted(_read_jsonl(source, file), key=lambda row: row["episode_index"])
            stats = statistics.aggregate_stats([statistics.from_json(row["stats"]) for row in rows])
        for name, group in stats.items():
            for value in group.values():
                if value.dtype.kind not in "biuf":
                    raise ValueError(f"{name} has values that are not numbers")
            if name in features and features[name].is_camera:
                levels = _in_levels(group) if features[name].is_array else group
                stats[name] = {k: v if k == "count" else v.reshape(-1, 1, 1) for k, v in levels.items()}
    except (*MALFORMED, DatasetError) as error:
        warn_once(
            "%s: the statistics in %s can't be used (%s: %s). `flexor data stats DIR --write` computes them",
            *(source, file, type(error).__name__, error),
        )
        return {}
    return stats


def _in_levels(stats: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Statistics of bytes as those of images, which are from 0 to 1. Those of single pixels are none of images."""
    values = {key: value for key, value in stats.items() if key != "count"}
    if not values or max(value.size for value in values.values()) not in CAMERA_CHANNELS:
        return {}
    scale = 255 if max(float(np.max(value)) for value in values.values()) > 1 else 1
    return {**stats, **{key: value / scale for key, value in values.items()}}


def read_episode_stats(source: Source, feature: str, key: str) -> dict[int, np.ndarray]:
    """One statistic of a feature by episode, as far as the metadata has it: they are not needed to train."""
    pairs: list[tuple[Any, Any]] = []
    try:
        if source.exists("meta/episodes_stats.jsonl"):
            lines = _read_jsonl(source, "meta/episodes_stats.jsonl")
            pairs = [(line["episode_index"], line["stats"][feature][key]) for line in lines]
            return {int(episode): np.asarray(value, np.float64) for episode, value in pairs}
        column = f"stats/{feature}/{key}"
        for file in episode_tables(source.list("meta/episodes", ".parquet"))[0]:
            if column in parquet_columns(source, file):
                table = read_parquet(source, file, ["episode_index", column])
                pairs += zip(table["episode_index"].to_pylist(), table[column].to_pylist())
        return {int(episode): np.asarray(value, np.float64) for episode, value in pairs}
    except (*MALFORMED, DatasetError):
        return {}


def _read_jsonl(source: Source, name: str, needed: bool = True) -> list[dict]:
    """Read a file with one JSON object per line."""
    if not needed and not source.exists(name):
        return []
    rows = _read(source, name, lambda path: list(read_json_lines(path)))
    wrong = [number for number, row in enumerate(rows, 1) if not isinstance(row, dict)]
    if wrong:
        raise BrokenFile(source, name, f"line {wrong[0]} is not a JSON object")
    return rows


def _read(source: Source, name: str, reader: Callable[[Path], Any]) -> Any:
    path = source.local(name)
    if not path.is_file():
        raise BrokenFile(source, name, "the file is missing")
    try:
        return reader(path)
    except (ValueError, OSError) as error:
        _refuse_pointer(source, name, path)
        raise BrokenFile(source, name, f"the file is not valid JSON ({error})") from error
