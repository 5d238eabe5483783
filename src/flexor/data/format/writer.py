"""Write a LeRobot v3.0 dataset, frame by frame.

    with DatasetWriter(root, fps=30, features=features) as writer:
        for episode in episodes:
            for frame in episode:
                writer.add_frame(frame)
            writer.save_episode("pick up the cube")

Each frame is encoded immediately. In memory, an episode is its compressed video, its numeric values and
its pixel counts. The folder becomes a dataset only when the writer is closed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from flexor.core.errors import DatasetError
from flexor.core.log import log
from flexor.data.format import stats as statistics
from flexor.data.format.dataset_files import DatasetFiles, PacketClip
from flexor.data.format.encode import EpisodeEncoder, VideoSettings
from flexor.data.format.schema import DEFAULT_FEATURES, checked_features, checked_value
from flexor.pages.images import png


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
        if not fps > 0:
            raise DatasetError(f"fps={fps} is not a frame rate. Give the frames per second, such as fps=30.")
        self.features = {n: f for n, f in checked_features(features).items() if n not in DEFAULT_FEATURES}
        self._video = {
            name: VideoSettings(codec, f["shape"][1], f["shape"][0], fps, gop, crf, pix_fmt)
            for name, f in self.features.items()
            if f["dtype"] == "video"
        }
        for name, settings in self._video.items():
            settings.check(f"feature {name!r}")
        described = self.features | {n: self.features[n] | {"info": v.info()} for n, v in self._video.items()}
        sizes = data_files_mb, video_files_mb, chunk_size
        self._files = DatasetFiles(Path(root), fps, described, robot_type, *sizes)
        self.root, self.fps = self._files.root, self._files.fps
        self._closed = False
        self.discard_episode()

    @property
    def total_frames(self) -> int:
        return self._files.total_frames

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
                self._columns[name].append(png(value) if dtype == "image" else value)
        self.length += 1

    def discard_episode(self) -> None:
        """Discard the frames added since the last episode was saved."""
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
                f"save_episode: task must be text that describes the episode, such as 'open the drawer'; got {task!r}."
            )
        if self.length == 0:
            raise DatasetError("save_episode: the episode has no frames. Call add_frame first.")
        task_index = np.full(self.length, self._files.task_index(task))
        clips = {n: PacketClip(settings, self._encoders[n].finish()) for n, settings in self._video.items()}
        self._files.append(self._episode_columns(), task_index, clips, self._camera_stats())
        self.discard_episode()

    def close(self) -> None:
        """Finish the files and write the metadata, `info.json` last. Unsaved frames are dropped."""
        if self._closed:
            return
        if self.length:
            log.warning("%d frames were added but not saved as an episode: they are dropped", self.length)
        self._close_files()
        if not self._files.total_episodes:
            raise DatasetError(
                f"{self.root}: no episode was saved, so there is no dataset. Call save_episode."
            )
        self._files.write_metadata()

    def __enter__(self) -> DatasetWriter:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()
        else:  # the dataset is incomplete, so it gets no info.json
            self._close_files()

    def _close_files(self) -> None:
        self._closed = True
        self._files.close()

    def _checked_frame(self, frame: Mapping[str, Any]) -> dict[str, Any]:
        where = f"add_frame, episode {self._files.total_episodes}, frame {self.length}"
        for name in frame:
            if name in DEFAULT_FEATURES:
                raise DatasetError(f"{where}: {name!r} is filled in by the writer. Leave it out.")
            if name not in self.features:
                raise DatasetError(
                    f"{where}: unknown feature {name!r}. The features are {', '.join(self.features)}."
                )
        if missing := ", ".join(name for name in self.features if name not in frame):
            raise DatasetError(f"{where}: no value for {missing}. A frame needs a value for every feature.")
        return {n: checked_value(f"{where}: {n!r}", frame[n], f) for n, f in self.features.items()}

    def _episode_columns(self) -> dict[str, Any]:
        """The episode as columns: lists of PNG bytes or text, or arrays [T, ...]."""
        columns: dict[str, Any] = {}
        for name, values in self._columns.items():
            text = self.features[name]["dtype"] in ("image", "string")
            columns[name] = values if text else np.stack(values)
            if not text and list(self.features[name]["shape"]) == [1]:
                columns[name] = columns[name].reshape(-1)
        return columns

    def _camera_stats(self) -> dict[str, statistics.Stats]:
        sampled = statistics.sample_indices(self.length)
        result = {}
        for name, pixels in self._pixels.items():
            counts = np.stack([pixels[i] for i in sampled]).sum(axis=0, dtype=np.int64)
            result[name] = statistics.image_stats(counts, len(sampled))
        return result
