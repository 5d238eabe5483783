"""Metadata that is lost, rebuilt from tables and videos: rates, features, and where each episode's rows and frames are.

Nothing is guessed. Rows say which episode they belong to, and the videos of a camera must have exactly their frames.
Names of joints, the robot and the texts of tasks are only in meta/: they stay unknown.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from flexor.core.errors import DatasetError
from flexor.data.check.layout import EpisodeEntry, Layout, Span, layout_of, read_other_tasks
from flexor.data.check.report import CheckReport
from flexor.data.check.scan import scan_video
from flexor.data.format.file_names import V2, V3
from flexor.data.format.schema import DEFAULT_FEATURES
from flexor.data.format.undeclared import stored_features
from flexor.data.frames.clips import decode_image, image_bytes
from flexor.data.repair.videos import read_index
from flexor.data.storage.other_layouts import POINTER, how_to_pull, is_lfs_pointer

AXES = ["height", "width", "channels"]
LOST = ("info-missing", "info-unreadable", "episodes-missing", "episodes-unreadable")
"""Findings about metadata that can be rebuilt."""


def rebuild_metadata(layout: Layout, check: CheckReport) -> tuple[Layout, list[str]]:
    """The layout with what its metadata lacks, and notes. What can't be told from the data is an error."""
    lost = [finding.file or "meta/" for finding in check.findings if finding.name in LOST]
    has_rate = not layout.info or layout.fps
    if has_rate and (layout.episodes or not lost):
        return layout, []
    files = _DataFiles(layout.root)
    if not files.tables:
        return layout, []
    files.refuse_pointers()
    notes = [f"{file} rebuilt from the tables and videos" for file in lost]
    if not layout.info or not layout.fps:
        info = layout.info | {"fps": files.rate()} if layout.info else files.info()
        if not layout.info:
            notes.append("names of values and the robot are unknown")
        check.findings = [f for f in check.findings if f.name not in LOST and f.name != "info-field"]
        layout = layout_of(layout.root, info, check)
        notes.append(f"fps {layout.fps:g}, by the timestamps")
    if not layout.episodes:
        layout.episodes = files.episodes(layout)
    layout.tasks = layout.tasks or read_other_tasks(layout) or files.tasks()
    check.findings = [f for f in check.findings if f.name not in (*LOST, "tasks-missing")]
    if any(text == f"task {number}" for number, text in layout.tasks.items()):
        names = ", ".join(layout.tasks[number] for number in sorted(layout.tasks)[:3])
        notes.append(f"texts of tasks are unknown: {names} (`flexor data tasks` renames them)")
    return layout, notes


class _DataFiles:
    """The tables and videos of a dataset, by their names."""

    def __init__(self, root: Path):
        self.root = root
        self.tables = sorted(path for path in (root / "data").rglob("*.parquet") if path.is_file())
        self.videos: dict[str, list[Path]] = {}
        for path in sorted((root / "videos").rglob("*.mp4")):
            folders = path.relative_to(root).parts[1:-1]
            camera = next((name for name in reversed(folders) if not name.startswith("chunk-")), None)
            if camera is not None and path.is_file():
                self.videos.setdefault(camera, []).append(path)
        self.is_v3 = not any(path.name.startswith("episode_") for path in self.tables)

    def refuse_pointers(self) -> None:
        files = [*self.tables, *(path for paths in self.videos.values() for path in paths)]
        for path in filter(is_lfs_pointer, files):
            raise DatasetError(f"{self.root}: {path.name}: {POINTER}. First {how_to_pull(self.root)}.")

    def info(self) -> dict[str, Any]:
        """What meta/info.json declares."""
        columns = stored_features(self.tables[0])
        features = {
            name: {"dtype": feature.dtype, "shape": list(feature.shape), "names": None}
            for name, feature in columns.items()
            if name not in DEFAULT_FEATURES
        }
        features |= _images_in_tables(self.tables[0])
        for camera, paths in self.videos.items():
            if spec := _camera(paths):
                features[camera] = spec
        version, templates = ("v3.0", V3) if self.is_v3 else ("v2.1", V2)
        return {"codebase_version": version, "fps": self.rate(), "features": features, **templates}

    def rate(self) -> float:
        """Frames per second, by the timestamps in the tables, or else by the times of frames in the videos."""
        steps = [np.diff(self._column(path, "timestamp")) for path in self.tables]
        videos = [paths[0] for paths in self.videos.values()]
        for group in (steps, [np.diff(np.sort(scan_video(path).times)) for path in videos]):
            positive = [part[part > 0] for part in group if (part > 0).any()]
            if positive:
                rate = 1 / float(np.median(np.concatenate(positive)))
                return float(round(rate)) if abs(round(rate) / rate - 1) < 0.01 else rate
        raise DatasetError(f"{self.root}: neither timestamps nor videos say how many frames a second has.")

    def episodes(self, layout: Layout) -> list[EpisodeEntry]:
        entries: dict[int, EpisodeEntry] = {}
        first_row = 0
        for path in self.tables:
            file = path.relative_to(self.root).as_posix()
            for index, length in self._lengths(path):
                if index in entries:
                    files = f"{entries[index].data_file} and {file}"
                    raise DatasetError(f"{self.root}: {files} both have rows of episode {index}.")
                entries[index] = EpisodeEntry(index, length, [], file, first_row)
                first_row += length
        episodes = [entries[index] for index in sorted(entries)]
        for camera in layout.video_features:
            paths = self.videos.get(camera.name, [])
            if paths:
                place = self._place_in_videos if self.is_v3 else self._place_by_name
                place(camera.name, paths, episodes, layout.fps)
        return episodes

    def tasks(self) -> dict[int, str]:
        """A name for each task in the rows."""
        columns = [self._column(path, "task_index") for path in self.tables]
        numbers = np.unique(np.concatenate(columns)) if columns else np.empty(0)
        return {int(number): f"task {int(number)}" for number in numbers if number >= 0}

    def _lengths(self, path: Path) -> list[tuple[int, int]]:
        """The episodes of a table and their rows, in the order in which they begin."""
        numbers = self._column(path, "episode_index")
        if not len(numbers):
            if self.is_v3 or not (digits := path.stem.removeprefix("episode_")).isdecimal():
                return []
            return [(int(digits), _rows(path))]
        index, begin, counts = np.unique(numbers.astype(np.int64), return_index=True, return_counts=True)
        order = np.argsort(begin)
        return list(zip(index[order].tolist(), counts[order].tolist()))

    def _column(self, path: Path, name: str) -> np.ndarray:
        """A column of numbers; empty if the table does not have it or can't be read."""
        try:
            return np.ravel(pq.read_table(path, columns=[name])[name].to_numpy()).astype(np.float64)
        except (pa.ArrowException, OSError, KeyError, ValueError, TypeError):
            return np.empty(0)

    def _place_by_name(
        self, camera: str, paths: list[Path], episodes: list[EpisodeEntry], fps: float
    ) -> None:
        """A video per episode, which has its number."""
        by_name = {path.stem: path.relative_to(self.root).as_posix() for path in paths}
        for episode in episodes:
            if file := by_name.get(f"episode_{episode.index:06d}"):
                episode.videos[camera] = Span(file)

    def _place_in_videos(
        self, camera: str, paths: list[Path], episodes: list[EpisodeEntry], fps: float
    ) -> None:
        """Episodes follow each other in the files of a camera, and fill each of them."""
        remaining = list(episodes)
        for path in paths:
            index = read_index(path)
            frames = index if isinstance(index, str) else len(index)
            position = 0
            while not isinstance(index, str) and remaining and position + remaining[0].length <= len(index):
                episode = remaining.pop(0)
                start = float(index.times[position])
                file = path.relative_to(self.root).as_posix()
                episode.videos[camera] = Span(file, start, start + episode.length / fps)
                position += episode.length
            if position != frames:
                self._refuse_videos(camera, path, frames)
        if remaining:
            self._refuse_videos(camera, paths[-1], f"no frames of episode {remaining[0].index}")

    def _refuse_videos(self, camera: str, path: Path, why: int | str) -> None:
        reason = f"its {why} frames are not those of whole episodes" if isinstance(why, int) else why
        raise DatasetError(
            f"{self.root}: {camera}, {path.name}: {reason}. So tables and videos do not tell which frames belong to "
            "which episode: take meta/ from the original dataset."
        )


def _rows(path: Path) -> int:
    try:
        return int(pq.read_metadata(path).num_rows)
    except (pa.ArrowException, OSError):
        return 0


def _images_in_tables(path: Path) -> dict[str, dict[str, Any]]:
    """Images in the tables."""
    features: dict[str, dict[str, Any]] = {}
    try:
        with pq.ParquetFile(path) as table:
            schema = table.schema_arrow
            for name in schema.names:
                kind = schema.field(name).type
                if pa.types.is_struct(kind):
                    row = next(table.iter_batches(1, columns=[name]))
                    data = image_bytes(pa.chunked_array([row.column(0)]))[0].as_py()
                    height, width, channels = decode_image(data or b"").shape
                    features[name] = {"dtype": "image", "shape": [height, width, channels], "names": AXES}
    except (pa.ArrowException, OSError, StopIteration, av.FFmpegError, ValueError):
        pass  # such a column is left out, and the repair notes it
    return features


def _camera(paths: list[Path]) -> dict[str, Any] | None:
    """The declaration of a camera by its first readable video. None for a depth map: its scale is lost."""
    scans = (scan_video(path) for path in paths)
    scan = next((scan for scan in scans if scan.width), None)
    if scan is None or scan.pix_fmt.startswith(("gray10", "gray12", "gray16")):
        return None
    return {"dtype": "video", "shape": [scan.height, scan.width, 3], "names": AXES}
