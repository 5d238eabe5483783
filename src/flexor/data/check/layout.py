"""Reads a dataset's metadata so that one broken file does not hide the rest.

`dataset.py` stops at the first error, as training should. This reader continues and adds each problem to the
report. `flexor data check` and `flexor data info` use it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from flexor.core.errors import DatasetError
from flexor.core.foreign_files import LARGEST_LINES, MALFORMED, parse_json, read_json, read_text
from flexor.core.paths import inside
from flexor.data.check.report import CheckReport
from flexor.data.format import stats as statistics
from flexor.data.format.file_names import FileNames, episode_tables, match_misplaced
from flexor.data.format.metadata import LARGEST_INDEX, Feature, declared_feature
from flexor.data.storage.other_layouts import CONVERT_V1, V1, advice_on_version, is_v1

VERSIONS = ("v3.0", "v2.1", "v2.0")
FETCH_AGAIN = "download or copy the file again; if it is lost, train on the other episodes"
FETCH_META = "download or copy meta/ again: without it the dataset can't be opened"


@dataclass(frozen=True)
class Span:
    """An episode's part of a video file, in seconds. `stop` is None if the file contains only this episode."""

    file: str
    start: float = 0.0
    stop: float | None = None

    @property
    def end(self) -> float:
        """`stop`, or nan."""
        return math.nan if self.stop is None else self.stop


@dataclass
class EpisodeEntry:
    """One episode as the metadata describes it."""

    index: int
    length: int
    tasks: list[str]
    data_file: str
    first_row: int
    """Its first row among all rows of the dataset."""

    videos: dict[str, Span] = field(default_factory=dict)
    other_fields: dict[str, Any] = field(default_factory=dict)
    """Other fields of its metadata, such as whether it was a success."""


@dataclass
class Layout:
    """The metadata that could be read."""

    root: Path
    info: dict[str, Any] = field(default_factory=dict)
    version: str = "unknown"
    fps: float = 0.0
    features: dict[str, Feature] = field(default_factory=dict)
    undeclared: set[str] = field(default_factory=set)
    """Features that only the data files have, not meta/info.json."""
    episodes: list[EpisodeEntry] = field(default_factory=list)
    tasks: dict[int, str] = field(default_factory=dict)
    stats: dict[str, dict[str, Any]] = field(default_factory=dict)
    is_v3: bool = True
    """Whether its metadata is read as that of v3.0."""
    misplaced: dict[str, str] = field(default_factory=dict)
    """Files that the metadata names -> where they really are."""

    @property
    def video_features(self) -> list[Feature]:
        return [feature for feature in self.features.values() if feature.is_video]

    def path(self, file: str) -> Path:
        """The path of a file that the metadata names, or of the misplaced one: see `core/paths.py`."""
        return inside(self.root, self.misplaced.get(file, file))

    def camera_files(self, camera: str) -> list[str]:
        """The files of a camera that the metadata names, each once, in episode order."""
        spans = [episode.videos[camera] for episode in self.episodes if camera in episode.videos]
        return list(dict.fromkeys(span.file for span in spans))


def read_layout(root: str | Path, report: CheckReport) -> Layout:
    """Read the metadata under `root`, and add its problems to `report`."""
    layout = Layout(Path(root))
    if not layout.root.is_dir():
        raise DatasetError(f"{root} is not a folder. Give the folder that contains meta/, data/ and videos/.")
    info = _read_json(layout.root, "meta/info.json", report)
    if not isinstance(info, dict):
        if not report.findings:
            message = f"the file contains a {type(info).__name__}, not a JSON object"
            report.error("info-unreadable", message, FETCH_META, file="meta/info.json")
        return layout
    return layout_of(layout.root, info, report)


def layout_of(root: Path, info: dict[str, Any], report: CheckReport) -> Layout:
    """The metadata of a dataset of which meta/info.json has this content."""
    layout = Layout(root, info, str(info.get("codebase_version", "unknown")))
    report.version = layout.version
    _read_features(layout, report)
    layout.is_v3 = _is_v3(layout)
    is_v3 = layout.is_v3
    if layout.version not in VERSIONS:
        report.error(
            "version-old" if layout.version.startswith(("v1.", "1.")) else "version-unknown",
            f"codebase_version is {layout.version!r}, but Flexor supports only {', '.join(VERSIONS)}",
            advice_on_version(layout.version),
            file="meta/info.json",
        )
    try:
        names = FileNames(info, is_v3)
    except ValueError as error:
        fix = "correct the template in meta/info.json, or take it from the original dataset"
        report.error("path-template", str(error), fix, file="meta/info.json")
        return layout
    rows = list(_episode_rows_v3(layout, report) if is_v3 else _read_jsonl(layout, "episodes", report))
    make = partial(_episode_v3 if is_v3 else _episode_v2, layout, names)
    for row in sorted(rows, key=_number):
        _add_episode(layout, make, row, report)
    layout.tasks = _tasks_v3(layout, report) if is_v3 else _tasks_v2(layout, report)
    layout.stats = _read_stats(layout, report)
    _find_misplaced(layout, report)
    return layout


def _find_misplaced(layout: Layout, report: CheckReport) -> None:
    """Look elsewhere for tables and videos that are not where the metadata says."""
    tables = list(dict.fromkeys(episode.data_file for episode in layout.episodes))
    cameras = {camera.name: layout.camera_files(camera.name) for camera in layout.video_features}
    named = {*tables, *(file for files in cameras.values() for file in files)}
    missing = {file for file in named if not layout.path(file).is_file()}
    if not missing:
        return
    suffixes = {suffix for file in missing if re.fullmatch(r"\.\w+", suffix := Path(file).suffix)}
    present = [
        path.relative_to(layout.root) for suffix in suffixes for path in layout.root.rglob(f"*{suffix}")
    ]
    elsewhere = [
        path.as_posix() for path in present if path.parts[0] != "meta" and path.as_posix() not in named
    ]
    layout.misplaced = match_misplaced(missing, elsewhere)
    for feature, files in (None, tables), *cameras.items():
        moved = [file for file in files if file in layout.misplaced]
        if moved:
            actual = layout.misplaced[moved[0]]
            kind = "video file" if feature else "data file"
            count = f"the {kind} is" if len(files) == 1 else f"{len(moved)} of {len(files)} {kind}s are"
            message = f"{count} not where meta/info.json says: {actual} instead of {moved[0]}"
            fix = f"{_move(layout, moved)}; `flexor data repair` puts them in their place"
            report.error("misplaced", message, fix, feature=feature)


def _move(layout: Layout, moved: list[str]) -> str:
    """How to move the files."""
    tops = {(layout.misplaced[file].split("/", 1)[0], file.split("/", 1)[0]) for file in moved}
    same = all(layout.misplaced[file].split("/")[1:] == file.split("/")[1:] for file in moved)
    ((source, target),) = tops if len(tops) == 1 else {("", "")}
    if same and source != target and not (layout.root / target).exists():
        return f"rename the folder {source} to {target}"
    return "move them, or correct the template in meta/info.json"


def _is_v3(layout: Layout) -> bool:
    """As the version says; a folder meta/episodes decides if the version is none that is known."""
    if layout.version in VERSIONS:
        return layout.version == "v3.0"
    return layout.version.startswith("v3") or (layout.root / "meta/episodes").is_dir()


def _checked_paths(layout: Layout, episode: EpisodeEntry) -> EpisodeEntry:
    """Refuse an episode whose files are links to outside of the dataset."""
    for file in (episode.data_file, *(span.file for span in episode.videos.values())):
        layout.path(file)
    return episode


def _read_features(layout: Layout, report: CheckReport) -> None:
    fix = "correct meta/info.json, or take it from the original dataset"
    fps = layout.info.get("fps")
    if isinstance(fps, int | float) and fps > 0:
        layout.fps = float(fps)
    else:
        report.error("info-field", f"fps is {fps!r}, not a frame rate", fix, file="meta/info.json")
    features = layout.info.get("features")
    if not isinstance(features, dict) or not features:
        report.error("info-field", "no features are declared", fix, file="meta/info.json")
        return
    for name, spec in features.items():
        try:
            layout.features[name] = declared_feature(name, spec)
        except MALFORMED as error:
            why = f"it has no {error.args[0]}" if isinstance(error, KeyError) else str(error)
            message = f"the feature is declared as {spec!r}: {why}"
            report.error("info-field", message, fix, feature=name, file="meta/info.json")


def _count(value: Any) -> int:
    """A number of rows or an index."""
    if not 0 <= int(value) <= LARGEST_INDEX:
        raise ValueError(f"{value} is not an index or a number of rows")
    return int(value)


def _number(row: dict[str, Any]) -> int:
    """The episode's index; -1 if it has none."""
    number = row.get("episode_index")
    return number if isinstance(number, int) else -1


def _add_episode(
    layout: Layout, make: Callable[[dict[str, Any]], EpisodeEntry], row: dict[str, Any], report: CheckReport
) -> None:
    try:
        layout.episodes.append(_checked_paths(layout, make(row)))
        return
    except KeyError as error:
        message = f"its metadata has no {error.args[0]}"
    except MALFORMED as error:
        message = f"its metadata can't be used: {error}"
    fix = "take meta/ from the original dataset, or exclude the episode"
    report.error("episode-metadata", message, fix, episode=None if _number(row) < 0 else _number(row))


def _episode_rows_v3(layout: Layout, report: CheckReport) -> Iterator[dict[str, Any]]:
    folder = layout.root / "meta/episodes"
    files, ignored = episode_tables(p.relative_to(layout.root).as_posix() for p in folder.rglob("*.parquet"))
    for file in ignored:
        message = "this copy is not read: LeRobot and Flexor read meta/episodes/chunk-*/file-*.parquet"
        report.warning("stray-files", message, "delete it, or move it away from meta/", file=file)
    if files and files[0].count("/") != 3:
        message = "LeRobot does not find this file: it reads meta/episodes/chunk-*/file-*.parquet"
        report.warning("misplaced", message, "move it there; `flexor data repair` does", file=files[0])
    if not files:
        message = "the folder contains no parquet file, so the episodes are unknown"
        report.error("episodes-missing", message, FETCH_META, file="meta/episodes/")
    for file in files:
        try:
            with pq.ParquetFile(layout.path(file)) as opened:
                names = [n for n in opened.schema_arrow.names if not n.startswith("stats/")]
                rows = opened.read(names).to_pylist()
        except (pa.ArrowException, OSError, ValueError) as error:
            message = f"damaged or truncated ({_short(error)}); its episodes are unknown"
            report.error("episodes-unreadable", message, FETCH_META, file=file)
        else:
            yield from rows


def _episode_v3(layout: Layout, names: FileNames, row: dict[str, Any]) -> EpisodeEntry:
    index = _count(row["episode_index"])
    episode = EpisodeEntry(
        index=index,
        length=_count(row["length"]),
        tasks=list(row.get("tasks") or []),
        data_file=names.data(index, row["data/chunk_index"], row["data/file_index"]),
        first_row=_count(row.get("dataset_from_index", _next_row(layout))),
        other_fields=_other_fields(row),
    )
    for feature in layout.video_features:
        prefix = f"videos/{feature.name}/"
        if row.get(prefix + "file_index") is None:
            continue
        file = names.video(feature.name, index, row[prefix + "chunk_index"], row[prefix + "file_index"])
        start, stop = float(row[prefix + "from_timestamp"]), float(row[prefix + "to_timestamp"])
        episode.videos[feature.name] = Span(file, start, stop)
    return episode


def _episode_v2(layout: Layout, names: FileNames, row: dict[str, Any]) -> EpisodeEntry:
    index = _count(row["episode_index"])
    videos = {f.name: Span(names.video(f.name, index)) for f in layout.video_features}
    tasks = list(row.get("tasks") or [])
    return EpisodeEntry(
        index, _count(row["length"]), tasks, names.data(index), _next_row(layout), videos, _other_fields(row)
    )


def _other_fields(row: dict[str, Any]) -> dict[str, Any]:
    standard = ("episode_index", "length", "tasks", "dataset_from_index", "dataset_to_index")
    return {k: v for k, v in row.items() if k not in standard and "/" not in k and k[:2] != "__"}


def _next_row(layout: Layout) -> int:
    last = layout.episodes[-1] if layout.episodes else None
    return last.first_row + last.length if last else 0


def _tasks_v3(layout: Layout, report: CheckReport) -> dict[int, str]:
    file = "meta/tasks.parquet"
    if not layout.path(file).is_file():
        report.warning(
            "tasks-missing",
            "the file is missing: frames have no task",
            "download or copy it again",
            file=file,
        )
        return {}
    try:
        with pq.ParquetFile(layout.path(file)) as opened:
            table = opened.read()
        # pandas stored the task strings as an index; its column name depends on the writer.
        text = next(name for name in table.column_names if name != "task_index")
        pairs = zip(table["task_index"].to_pylist(), table[text].to_pylist())
    except (pa.ArrowException, OSError, *MALFORMED, StopIteration) as error:
        report.error("tasks-unreadable", f"can't be read ({_short(error)})", FETCH_META, file=file)
        return {}
    return _task_texts(pairs, file, report)


def _tasks_v2(layout: Layout, report: CheckReport) -> dict[int, str]:
    rows = _read_jsonl(layout, "tasks", report, required=False)
    pairs = ((row.get("task_index"), row.get("task")) for row in rows)
    return _task_texts(pairs, "meta/tasks.jsonl", report)


def read_other_episodes(layout: Layout) -> dict[int, list[str]]:
    """The tasks of episodes in metadata of another version, which is not read otherwise. Its faults don't matter."""
    ignored = CheckReport(layout.root, deep=False)
    if layout.is_v3:
        present = layout.path("meta/episodes.jsonl").is_file()
        rows = _read_jsonl(layout, "episodes", ignored) if present else []
    else:
        rows = list(_episode_rows_v3(layout, ignored))
    tasks = {_number(row): row.get("tasks") for row in rows}
    return {
        number: [str(task) for task in texts] for number, texts in tasks.items() if isinstance(texts, list)
    }


def read_other_tasks(layout: Layout) -> dict[int, str]:
    """The texts of tasks in a table of another version."""
    ignored = CheckReport(layout.root, deep=False)
    return _tasks_v2(layout, ignored) if layout.is_v3 else _tasks_v3(layout, ignored)


def _task_texts(pairs: Iterable[tuple[Any, Any]], file: str, report: CheckReport) -> dict[int, str]:
    tasks = {}
    for number, text in pairs:
        try:
            tasks[_count(number)] = str(text)
        except MALFORMED:
            message = f"{number!r} is not the task_index of {text!r}"
            report.error("tasks-unreadable", message, FETCH_META, file=file)
    return tasks


def _read_stats(layout: Layout, report: CheckReport) -> dict[str, dict[str, Any]]:
    """Statistics by feature. A missing file is not reported here: `check` reports missing statistics."""
    if layout.path("meta/stats.json").is_file():
        raw = _read_json(layout.root, "meta/stats.json", report) or {}
    elif layout.path("meta/episodes_stats.jsonl").is_file():
        rows = _read_jsonl(layout, "episodes_stats", report)
        raw = _merged([row["stats"] for row in rows if isinstance(row.get("stats"), dict)], report)
    else:
        return {}
    try:
        return statistics.from_json(raw)
    except MALFORMED as error:
        message = f"the file does not contain the statistics of features ({_short(error)})"
        report.error("stats-unreadable", message, FETCH_META, file="meta/stats.json")
        return {}


def _merged(parts: list[dict[str, Any]], report: CheckReport) -> dict[str, Any]:
    try:
        return statistics.aggregate_stats([statistics.from_json(part) for part in parts])
    except MALFORMED as error:
        message = f"the episodes' statistics can't be merged ({_short(error)})"
        report.error("stats-unreadable", message, FETCH_META, file="meta/episodes_stats.jsonl")
        return {}


def _read_json(root: Path, file: str, report: CheckReport) -> Any:
    try:
        return read_json(inside(root, file))
    except FileNotFoundError:
        if file == "meta/info.json" and is_v1(root):
            report.error("version-old", f"this is {V1}", CONVERT_V1, file="meta_data/info.json")
            return None
        message = "the file is missing: this is not a dataset, or it was not written or copied completely"
        report.error("info-missing" if "info" in file else "file-missing", message, FETCH_META, file=file)
    except (ValueError, OSError) as error:
        kind = "info-unreadable" if "info" in file else "stats-unreadable"
        report.error(kind, f"not valid JSON ({_short(error)})", FETCH_META, file=file)
    return None


def _read_jsonl(layout: Layout, name: str, report: CheckReport, required: bool = True) -> list[dict]:
    file = f"meta/{name}.jsonl"
    try:
        lines = read_text(layout.path(file), LARGEST_LINES).rstrip("\n").split("\n")
    except FileNotFoundError:
        add_finding = report.error if required else report.warning
        add_finding(f"{name}-missing", "the file is missing", FETCH_META, file=file)
        return []
    except (OSError, ValueError) as error:
        report.error(f"{name}-unreadable", f"can't be read ({_short(error)})", FETCH_META, file=file)
        return []
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows += [parse_json(line)] if line.strip() else []
        except ValueError as error:
            message = f"line {number} of {len(lines)} is not valid JSON ({_short(error)})"
            report.error(f"{name}-unreadable", message, FETCH_META, file=file)
    return [row for row in rows if isinstance(row, dict)]


def _short(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return (text[0] if text else type(error).__name__)[:160]
