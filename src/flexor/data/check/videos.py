"""The video part of a check: every row of the table must have its frame."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from threading import Lock
from typing import Any

import av
import numpy as np

from flexor.core.console import Progress
from flexor.core.errors import DatasetError
from flexor.data.check.image_findings import add_image_faults
from flexor.data.check.images import ImageWatch, cheap_samples, spread
from flexor.data.check.layout import FETCH_AGAIN, EpisodeEntry, Layout
from flexor.data.check.report import CheckReport
from flexor.data.check.sampled_images import EPISODES, look_at
from flexor.data.check.scan import VideoScan, scan_video
from flexor.data.check.tables import NOT_NEEDED, REPAIR_CLOCK, Tables
from flexor.data.format.metadata import Feature
from flexor.data.video.decode import decode_frames, index_video
from flexor.data.video.frame_match import NoMatch, match_frames, own_frames

LEROBOT_TOLERANCE = 1e-4
"""Largest distance of a frame from its timestamp, in seconds, that LeRobot accepts."""


def check_videos(
    layout: Layout,
    selected: list[EpisodeEntry],
    tables: Tables,
    report: CheckReport,
    progress: Progress | None,
) -> dict[str, np.ndarray]:
    """Check every camera's files, against what the tables have of the same episodes.

    Returns the levels of the colours of each camera, if its images were decoded: see `ImageWatch`.
    """
    levels: dict[str, np.ndarray] = {}
    files: list[_VideoFile] = []
    sampled = frozenset(selected[i].index for i in spread(len(selected), EPISODES).tolist())
    for camera in layout.video_features:
        episodes: dict[str, list[EpisodeEntry]] = {}
        for episode in selected:
            if camera.name in episode.videos:
                episodes.setdefault(episode.videos[camera.name].file, []).append(episode)
        if not _is_absent(layout, camera, episodes, report):
            _check_named(camera, selected, report)
            files += [
                _VideoFile(layout, camera, name, part, report, sampled) for name, part in episodes.items()
            ]
    counter = _FrameCounter(sum(e.length for file in files for e in file.episodes), progress)
    workers = max(1, min(len(files), os.cpu_count() or 1))
    threads = max(1, (os.cpu_count() or 1) // workers)

    def scan(file: _VideoFile) -> VideoScan:
        look = report.deep and file.camera.depth is None
        result = scan_video(layout.path(file.name), decode=report.deep, threads=threads, look=look)
        counter.add(sum(episode.length for episode in file.episodes))
        return result

    with ThreadPoolExecutor(workers) as pool:
        for file, result in zip(files, pool.map(scan, files)):
            file.check(result, tables)
            name = file.camera.name
            levels[name] = levels.get(name, np.zeros((3, 3))) + file.levels
    return levels


class _FrameCounter:
    """Counts finished frames from several threads, and reports progress."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._total, self._progress, self._done, self._lock = total, progress, 0, Lock()

    def add(self, frames: int) -> None:
        with self._lock:
            self._done += frames
            if self._progress:
                self._progress(self._done, self._total)


def _is_absent(
    layout: Layout, camera: Feature, files: dict[str, list[EpisodeEntry]], report: CheckReport
) -> bool:
    """Warn if a camera is declared but completely missing: the rest of the dataset can be used."""
    if not layout.episodes or any(layout.path(file).is_file() for file in layout.camera_files(camera.name)):
        return False
    example = next(iter(files), None)
    reason = (
        f"it has no video files (such as {example})"
        if example
        else "the episode metadata names no video file"
    )
    message = f"the camera is declared in meta/info.json, but {reason}: training leaves it out"
    fix = "remove it from `features` in meta/info.json, or download its videos"
    report.warning("camera-absent", message, fix, feature=camera.name)
    return True


def _check_named(feature: Feature, selected: list[EpisodeEntry], report: CheckReport) -> None:
    for episode in selected:
        if feature.name not in episode.videos:
            message = "the metadata does not name its video file"
            fix = "download meta/episodes again, or exclude the episode"
            report.error("video-unnamed", message, fix, episode=episode.index, feature=feature.name)


@dataclass
class _VideoFile:
    """One video file, and the checks of the episodes in it."""

    layout: Layout
    camera: Feature
    name: str
    episodes: list[EpisodeEntry]
    report: CheckReport
    sampled: frozenset[int] = frozenset()
    """Episodes of which some images are looked at, if not all are decoded."""
    levels: np.ndarray = field(default_factory=lambda: np.zeros((3, 3)))
    """Of the images of its episodes: see `ImageWatch`."""

    def _place(self, episode: EpisodeEntry | None = None) -> dict[str, Any]:
        return {"episode": episode and episode.index, "feature": self.camera.name, "file": self.name}

    def check(self, scan: VideoScan, tables: Tables) -> None:
        if not scan.path.is_file() or not len(scan.times):
            missing = not scan.path.is_file()
            message = "the file is missing" if missing else f"the video can't be read: {scan.error}"
            kind = "video-missing" if missing else "video-unreadable"
            for episode in self.episodes:
                self.report.error(kind, message, FETCH_AGAIN, **self._place(episode))
            return
        if scan.error:
            promised = f" of {scan.declared}" if scan.declared else ""
            message = f"{scan.error}: it has {len(scan.times)}{promised} frames"
            self.report.error("video-truncated", message, FETCH_AGAIN, **self._place())
        self._check_picture(scan)
        self._check_overlap()
        for episode in self.episodes:
            if self._check_frames(episode, scan):
                self._check_clock(episode, tables.timestamps.get(episode.index), scan)
                if self.camera.depth is None:
                    self._check_images(episode, scan, tables)

    def _check_picture(self, scan: VideoScan) -> None:
        _, height, width = self.camera.chw if len(self.camera.shape) == 3 else (0, 0, 0)
        fps = self.layout.fps
        if (scan.height, scan.width) != (height, width):
            message = (
                f"images are {scan.height}x{scan.width}, but {height}x{width} is declared (height x width)"
            )
            fix = "correct the feature's shape in meta/info.json, or download the right video"
            for episode in self.episodes:
                self.report.error("video-size", message, fix, **self._place(episode))
        step = float(np.median(np.diff(np.sort(scan.times)))) if len(scan.times) > 1 else 0.0
        if fps and step > 0 and abs(step * fps - 1) > 0.01:
            message = f"the video has {1 / step:.2f} frames per second, but {fps:g} are declared"
            fix = "re-encode it at the dataset's fps, or correct fps"
            self.report.warning("video-fps", message, fix, **self._place())

    def _check_overlap(self) -> None:
        """Check for episodes that claim the same time span of the file: one of them shows the other's frames."""
        name, fps = self.camera.name, self.layout.fps
        ordered = sorted(self.episodes, key=lambda episode: episode.videos[name].start)
        for earlier, later in pairwise(ordered if fps else []):
            overlap = earlier.videos[name].start + earlier.length / fps - later.videos[name].start
            if overlap > 0.5 / fps:
                frames = round(overlap * fps)
                message = (
                    f"episodes {earlier.index} and {later.index} claim the same {frames} frames of the file"
                )
                for episode in (earlier, later):
                    fix = "correct from_timestamp in meta/episodes"
                    self.report.error("video-overlap", message, fix, **self._place(episode))

    def _span(self, episode: EpisodeEntry, scan: VideoScan) -> tuple[np.ndarray, int, int]:
        """Packets in display order, and the first and the end of the episode's among them."""
        fps, span = self.layout.fps, episode.videos[self.camera.name]
        order = np.argsort(scan.times, kind="stable")
        first, end = own_frames(scan.times[order], span.start, span.end, fps)
        if span.stop is not None and end - first != episode.length:  # then use the duration of its rows
            first, end = own_frames(scan.times[order], span.start, span.start + episode.length / fps, fps)
        return order, first, end

    def _check_images(self, episode: EpisodeEntry, scan: VideoScan, tables: Tables) -> None:
        """Look for blank and frozen images: in all frames, or without decoding them, in a few."""
        order, first, end = self._span(episode, scan)
        watch = ImageWatch()
        if scan.blank is not None and scan.since is not None:
            decoded = np.flatnonzero(scan.since[order[first:end]] >= 0)
            packets = order[first:end][decoded]
            self.levels += sum(
                (scan.levels[i] for i in order[first:end] if i in scan.levels), np.zeros((3, 3))
            )
            watch.keys, watch.blank, watch.since = decoded.tolist(), scan.blank[packets], scan.since[packets]
        elif episode.index in self.sampled:
            watch = self._sample(first, end, scan)
        motion = tables.motions.get(episode.index)
        add_image_faults(watch, episode, self.layout.fps, motion, self.report, self._place(episode))

    def _sample(self, first: int, end: int, scan: VideoScan) -> ImageWatch:
        try:
            index = index_video(self.layout.path(self.name))
            if len(index) != len(scan.times):
                return ImageWatch()
            numbers = np.arange(first, end)
            frames = cheap_samples(index.packet[numbers] - index.start[numbers])
            return look_at(partial(decode_frames, index), numbers[frames], frames.tolist())[1]
        except (DatasetError, OSError, ValueError, av.FFmpegError):  # other checks say why
            return ImageWatch()

    def _check_frames(self, episode: EpisodeEntry, scan: VideoScan) -> bool:
        """Check that the video has one frame per row and that the frames can be decoded. True if so."""
        fps, place = self.layout.fps, self._place(episode)
        if not fps:
            return False
        span, seconds = episode.videos[self.camera.name], episode.length / fps
        order, first, end = self._span(episode, scan)
        frames, count = order[first:end], end - first
        if scan.decodes is not None and not scan.decodes[frames].all():
            bad = np.flatnonzero(~scan.decodes[frames])
            message = (
                f"{len(bad)} of {count} frames can't be decoded; the first is frame {bad[0]} of the episode"
            )
            self.report.error("video-undecodable", message, FETCH_AGAIN, frame=int(bad[0]), **place)
        if count < episode.length:
            message = f"the video has {count} frames, but the table has {episode.length} rows"
            self.report.error("video-frames", message, FETCH_AGAIN, frame=count, **place)
            return False
        if count > episode.length:
            extra = count - episode.length
            message = f"the video has {extra} more frames than the table has rows ({episode.length})"
            self.report.warning("video-frames", message, "none needed unless rows were lost", **place)
        declared = seconds if span.stop is None else span.stop - span.start
        if abs(declared - seconds) > 0.5 / fps:
            message = f"its span in the file is {declared:.3f} s, but its frames take {seconds:.3f} s"
            self.report.warning("video-span", message, "correct to_timestamp in meta/episodes", **place)
        return True

    def _check_clock(self, episode: EpisodeEntry, clock: np.ndarray | None, scan: VideoScan) -> None:
        """Match frames to rows, and check that the timestamps agree."""
        if clock is None or len(clock) != episode.length or not len(clock):
            return
        span, times, fps = episode.videos[self.camera.name], np.sort(scan.times), self.layout.fps
        place = self._place(episode)
        try:
            match = match_frames(times, clock, span.start, span.end, fps, 0.5 / fps)
        except NoMatch as error:
            fix = "exclude the episode, or download its video again"
            self.report.error("clock-video", f"rows and video do not match: {error}", fix, **place)
            return
        if match.seconds_off:
            message = (
                f"timestamps differ by up to {match.seconds_off:.3f} s from the video, which has one frame per row: "
                "Flexor reads frame i for row i"
            )
            self.report.warning("clock-video", message, REPAIR_CLOCK, **place)
            return
        distances = np.abs(times[match.numbers] - span.start - clock)
        distance = distances.max()
        # float32 timestamps of a long episode have limited precision themselves.
        if distance > LEROBOT_TOLERANCE + float(np.spacing(np.float32((span.start + clock).max()))):
            message = (
                f"frames are up to {distance * 1e3:.2f} ms from their rows' timestamps: less than half a frame, so "
                f"Flexor finds every row's frame; LeRobot accepts at most {LEROBOT_TOLERANCE * 1e3:g} ms"
            )
            frame = int(np.argmax(distances))
            self.report.warning("clock-jitter", message, NOT_NEEDED, frame=frame, **place)
