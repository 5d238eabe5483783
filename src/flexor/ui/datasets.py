"""Datasets for the application: their episodes, with video, curves and what the check found; and lists to leave out."""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from flexor.core.errors import ConfigError, DatasetError
from flexor.core.output_paths import replacing
from flexor.core.text import one_line
from flexor.data.check.check import check_dataset
from flexor.data.check.report import CheckReport
from flexor.data.dataset import Dataset, open_dataset
from flexor.data.format.episode_list import parse_episodes
from flexor.data.frames.clips import VideoClip
from flexor.data.show.curves import CurveFeature, curve_features, episode_curves, frames_per_point
from flexor.data.show.page import check_to_json, frame_marks
from flexor.data.show.strips import camera_thumbnails
from flexor.evaluate.film import write_video
from flexor.pages.images import as_base64
from flexor.ui.replies import FileReply, NotFound

INFO = "meta/info.json"
PLAYABLE = ("h264", "av1", "vp9")  # by browsers; other videos are encoded again
CURVE_POINTS = 2000  # of a curve
CLIP_HEIGHT = 360  # pixels of an encoded clip
CLIP_FRAMES = 2000
KEPT_CLIPS = 24


def is_dataset(folder: Path) -> bool:
    return (folder / INFO).is_file()


@dataclass
class _Shelved:
    """A dataset that somebody may look at: opened and checked when it is."""

    name: str
    root: Path
    lock: Lock = field(default_factory=Lock)
    check: Future[CheckReport] | None = None
    checked: tuple[int, int] = (0, 0)  # video frames so far, and all

    @cached_property
    def dataset(self) -> Dataset:
        return open_dataset(root=self.root, on_bad_episode="skip")

    @cached_property
    def curves(self) -> list[CurveFeature]:
        return curve_features(self.dataset)

    @cached_property
    def positions(self) -> dict[int, int]:
        return {index: position for position, index in enumerate(self.dataset.episodes.index.tolist())}


class DatasetShelf:
    """Datasets that were named, and those of runs (`of_runs`) that are on this machine."""

    def __init__(
        self, folders: Sequence[Path], of_runs: Callable[[], Iterable[Mapping[str, Any]]], lists: Path
    ):
        self.folders, self.of_runs, self.lists = list(folders), of_runs, lists
        self._datasets: dict[str, _Shelved] = {}
        self._clips: OrderedDict[tuple[str, int, str], bytes] = OrderedDict()
        self._lock = Lock()
        self._checks = ThreadPoolExecutor(1, thread_name_prefix="check")

    def rows(self) -> list[dict[str, str]]:
        """All datasets, those that were named first."""
        for folder in [*self.folders, *_folders_of(self.of_runs())]:
            if is_dataset(folder):
                root = folder.resolve()
                dataset_id = hashlib.sha256(str(root).encode()).hexdigest()[:12]
                self._datasets.setdefault(dataset_id, _Shelved(one_line(root.name), root))
        return [
            {"id": dataset_id, "name": entry.name, "folder": one_line(str(entry.root))}
            for dataset_id, entry in self._datasets.items()
        ]

    def overview(self, dataset_id: str) -> dict[str, Any]:
        """Everything about a dataset but what is in its episodes."""
        entry = self._entry(dataset_id)
        with entry.lock:
            dataset = entry.dataset
        tasks = {
            task: number
            for number, task in enumerate(dict.fromkeys(t for ts in dataset.episodes.tasks for t in ts))
        }
        return {
            "id": dataset_id,
            "name": entry.name,
            "folder": one_line(str(entry.root)),
            "version": dataset.version,
            "robot": dataset.robot_type,
            "fps": dataset.fps,
            "frames": len(dataset),
            "cameras": dataset.cameras,
            "absent": dataset.absent,
            "skipped": sorted(dataset.skipped),
            "tasks": [one_line(task) for task in tasks],
            "episodes": dataset.episodes.index.tolist(),
            "lengths": dataset.episodes.length.tolist(),
            "episode_tasks": [tasks[names[0]] if names else None for names in dataset.episodes.tasks],
            "curves": [
                {"name": f.name, "names": f.names, "low": f.low.tolist(), "high": f.high.tolist()}
                for f in entry.curves
            ],
            "excluded": self._read_list(entry),
            "list": self._list_file(entry).name,
        }

    def opened(self, dataset_id: str) -> tuple[Dataset, Path]:
        """A dataset, and its folder."""
        entry = self._entry(dataset_id)
        with entry.lock:
            return entry.dataset, entry.root

    def episode(self, dataset_id: str, index: int) -> dict[str, Any]:
        """What is drawn of an episode: curves, and where its videos are."""
        entry, position = self._position(dataset_id, index)
        dataset, curves = entry.dataset, entry.curves
        length = int(dataset.episodes.length[position])
        every = frames_per_point(length, CURVE_POINTS)
        codes = episode_curves(curves, int(dataset.episodes.start[position]), length, every)
        return {
            "index": index,
            "length": length,
            "tasks": [one_line(task) for task in dict.fromkeys(dataset.episodes.tasks[position])],
            "every": every,
            "curves": as_base64(codes.astype("<u2").tobytes()),
            "videos": [_video(dataset, camera, index, length) for camera in dataset.cameras],
        }

    def video(self, dataset_id: str, index: int, camera: str) -> FileReply:
        """The file that has the episode's video, among others."""
        entry, _ = self._position(dataset_id, index)
        clip = entry.dataset.store.clips.get((camera, index))
        if not isinstance(clip, VideoClip):
            raise NotFound(f"Episode {index} has no video file of {camera}.")
        return FileReply(entry.dataset.source.local(clip.file.name), "video/mp4")

    def encoded(self, dataset_id: str, index: int, camera: str) -> FileReply:
        """The episode's images as a small video of its own, which any browser plays."""
        entry, position = self._position(dataset_id, index)
        if camera not in entry.dataset.cameras:
            raise NotFound(f"There is no camera {camera}.")
        key = (dataset_id, index, camera)
        with self._lock:
            if key not in self._clips:
                self._clips[key] = _encode(entry.dataset, position, camera)
                while len(self._clips) > KEPT_CLIPS:
                    self._clips.popitem(last=False)
            self._clips.move_to_end(key)
            return FileReply(self._clips[key], "video/mp4")

    def check(self, dataset_id: str) -> dict[str, Any]:
        """What the check found. It begins with the first request, and goes on between them."""
        entry = self._entry(dataset_id)

        def note(done: int, total: int) -> None:
            entry.checked = done, total

        with entry.lock:
            if entry.check is None:
                entry.check = self._checks.submit(check_dataset, entry.root, deep=False, progress=note)
        if not entry.check.done():
            return {"checking": entry.checked}
        report = entry.check.result()
        indices = sorted({f.episode for f in report.findings if f.episode is not None})
        return {
            **check_to_json(report),
            "marks": {k: v for k, v in frame_marks(report, indices).items() if v},
        }

    def exclude(self, dataset_id: str, episodes: object) -> dict[str, Any]:
        """Write the list of episodes to leave out, for `--dataset.exclude_episodes`."""
        entry = self._entry(dataset_id)
        if not isinstance(episodes, list) or not {type(index) for index in episodes} <= {int}:
            raise ConfigError("Send a list of episodes.")
        unknown = {*episodes} - {*entry.positions, *entry.dataset.skipped}
        if unknown:
            raise ConfigError(f"{entry.name} has no episode {min(unknown)}.")
        path = self._list_file(entry)
        with replacing(path) as aside:
            aside.write_text(json.dumps(sorted({*episodes})) + "\n")
        return {"file": str(path), "excluded": sorted({*episodes})}

    def _list_file(self, entry: _Shelved) -> Path:
        same = [other for other in self._datasets.values() if other.name == entry.name]
        name = re.sub(r"[^A-Za-z0-9_.-]", "_", entry.name)
        number = same.index(entry) if entry in same else 0
        return self.lists / f"exclude-{name}{f'-{number + 1}' if number else ''}.json"

    def _read_list(self, entry: _Shelved) -> list[int]:
        path = self._list_file(entry)
        if not path.is_file():
            return []
        return sorted({*parse_episodes(f"@{path}", str(path))} & {*entry.positions, *entry.dataset.skipped})

    def _entry(self, dataset_id: str) -> _Shelved:
        if dataset_id not in self._datasets:
            self.rows()
        if dataset_id not in self._datasets:
            raise NotFound("This dataset no longer exists.")
        return self._datasets[dataset_id]

    def _position(self, dataset_id: str, index: int) -> tuple[_Shelved, int]:
        entry = self._entry(dataset_id)
        if index not in entry.positions:
            raise NotFound(f"{entry.name} has no episode {index} that can be read.")
        return entry, entry.positions[index]


def _folders_of(configs: Iterable[Mapping[str, Any]]) -> list[Path]:
    """The folders of the datasets that runs were trained on."""
    folders = []
    for config in configs:
        dataset = config.get("dataset")
        root = dataset.get("root") if isinstance(dataset, Mapping) else None
        if isinstance(root, str) and "://" not in root:
            folders.append(Path(root))
    return folders


def _video(dataset: Dataset, camera: str, index: int, length: int) -> dict[str, Any]:
    """Where an episode is in its video file; without `start`, only an encoded clip can be played."""
    about: dict[str, Any] = {"camera": camera}
    clip = dataset.store.clips.get((camera, index))
    if (
        not isinstance(clip, VideoClip)
        or dataset.source_kind != "disk"
        or dataset.features[camera].depth is not None
    ):
        return about
    try:
        numbers, file = clip.numbers, clip.file.index
    except (DatasetError, OSError) as error:
        return about | {"problem": one_line(str(error))}
    if file.packets.codec not in PLAYABLE:
        return about
    begin, end = float(file.times[numbers[0]]), float(file.times[numbers[-1]])
    return about | {"start": begin, "stop": end + (end - begin) / max(length - 1, 1)}


def _encode(dataset: Dataset, position: int, camera: str) -> bytes:
    length = int(dataset.episodes.length[position])
    every = -(-length // CLIP_FRAMES)
    rows = int(dataset.episodes.start[position]) + np.arange(0, length, every)
    _, height, width = dataset.features[camera].chw
    scale = min(1.0, CLIP_HEIGHT / height)
    size = max(2, round(height * scale)), max(2, round(width * scale))
    frames, _ = camera_thumbnails(dataset, camera, rows, *size)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "clip.mp4"
        write_video(path, list(frames), dataset.fps / every)
        return path.read_bytes()
