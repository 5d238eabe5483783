"""The video part of a check: every row of the table must have its frame."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from threading import Lock

import numpy as np

from flexor.core.console import Progress
from flexor.data.check.layout import FETCH_AGAIN, EpisodeEntry, Layout
from flexor.data.check.report import CheckReport
from flexor.data.check.scan import VideoScan, scan_video
from flexor.data.check.tables import REPAIR_CLOCK
from flexor.data.format.metadata import Feature
from flexor.data.video.frame_match import NoMatch, match_frames, own_frames

LEROBOT_TOLERANCE = 1e-4
"""Largest distance of a frame from its timestamp, in seconds, that LeRobot accepts."""


def check_videos(
    layout: Layout,
    selected: list[EpisodeEntry],
    timestamps: dict[int, np.ndarray],
    report: CheckReport,
    progress: Progress | None,
) -> None:
    """Check every camera's files. `timestamps` are those of the table, for the episodes that have them."""
    jobs: list[tuple[Feature, str, list[EpisodeEntry]]] = []
    for feature in layout.video_features:
        files: dict[str, list[EpisodeEntry]] = {}
        for episode in selected:
            if feature.name in episode.videos:
                files.setdefault(episode.videos[feature.name].file, []).append(episode)
        if not _check_declared(layout, feature, files, report):
            _check_named(feature, selected, report)
            jobs += [(feature, file, episodes) for file, episodes in files.items()]
    counter = _FrameCounter(sum(e.length for _, _, episodes in jobs for e in episodes), progress)
    workers = max(1, min(len(jobs), os.cpu_count() or 1))
    threads = max(1, (os.cpu_count() or 1) // workers)

    def scan(job: tuple[Feature, str, list[EpisodeEntry]]) -> VideoScan:
        result = scan_video(layout.path(job[1]), decode=report.deep, threads=threads)
        counter.add(sum(episode.length for episode in job[2]))
        return result

    with ThreadPoolExecutor(workers) as pool:
        for (feature, file, episodes), result in zip(jobs, pool.map(scan, jobs)):
            _check_file(layout, feature, file, episodes, timestamps, result, report)


class _FrameCounter:
    """Counts finished frames from several threads, and reports progress."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._total, self._progress, self._done, self._lock = total, progress, 0, Lock()

    def add(self, frames: int) -> None:
        with self._lock:
            self._done += frames
            if self._progress:
                self._progress(self._done, self._total)


def _check_declared(
    layout: Layout, feature: Feature, files: dict[str, list[EpisodeEntry]], report: CheckReport
) -> bool:
    """Warn if a camera is declared but completely missing: the rest of the dataset can be used."""
    present = [file for file in layout.camera_files(feature.name) if layout.path(file).is_file()]
    if present or not layout.episodes:
        return False
    example = next(iter(files), None)
    message = (
        f"it has no video files (such as {example})"
        if example
        else "the episode metadata names no video file"
    )
    report.warning(
        "camera-absent",
        f"the camera is declared in meta/info.json, but {message}: training leaves it out",
        "remove it from `features` in meta/info.json, or download its videos",
        feature=feature.name,
    )
    return True


def _check_named(feature: Feature, selected: list[EpisodeEntry], report: CheckReport) -> None:
    for episode in selected:
        if feature.name not in episode.videos:
            message = "the metadata does not name its video file"
            fix = "download meta/episodes again, or exclude the episode"
            report.error("video-unnamed", message, fix, episode=episode.index, feature=feature.name)


def _check_file(
    layout: Layout,
    feature: Feature,
    file: str,
    episodes: list[EpisodeEntry],
    timestamps: dict[int, np.ndarray],
    scan: VideoScan,
    report: CheckReport,
) -> None:
    where = {"feature": feature.name, "file": file}
    if not scan.path.is_file() or not len(scan.times):
        missing = not scan.path.is_file()
        message = "the file is missing" if missing else f"the video can't be read: {scan.error}"
        for episode in episodes:
            kind = "video-missing" if missing else "video-unreadable"
            report.error(kind, message, FETCH_AGAIN, episode=episode.index, **where)
        return
    if scan.error:
        promised = f" of {scan.declared}" if scan.declared else ""
        message = f"{scan.error}: it has {len(scan.times)}{promised} frames"
        report.error("video-truncated", message, FETCH_AGAIN, **where)
    _check_picture(layout, feature, episodes, scan, report, where)
    _check_overlap(layout, feature, file, episodes, report)
    for episode in episodes:
        place = {"episode": episode.index, **where}
        if _check_frames(layout, episode, feature.name, scan, report, place):
            _check_clock(layout, episode, feature.name, timestamps.get(episode.index), scan, report, place)


def _check_picture(
    layout: Layout,
    feature: Feature,
    episodes: list[EpisodeEntry],
    scan: VideoScan,
    report: CheckReport,
    where: dict,
) -> None:
    _, height, width = feature.chw if len(feature.shape) == 3 else (0, 0, 0)
    if (scan.height, scan.width) != (height, width):
        message = f"images are {scan.height}x{scan.width}, but {height}x{width} is declared (height x width)"
        fix = "correct the feature's shape in meta/info.json, or download the right video"
        for episode in episodes:
            report.error("video-size", message, fix, episode=episode.index, **where)
    step = float(np.median(np.diff(np.sort(scan.times)))) if len(scan.times) > 1 else 0.0
    if layout.fps and step > 0 and abs(step * layout.fps - 1) > 0.01:
        message = f"the video has {1 / step:.2f} frames per second, but {layout.fps:g} are declared"
        report.warning("video-fps", message, "re-encode it at the dataset's fps, or correct fps", **where)


def _check_overlap(
    layout: Layout, feature: Feature, file: str, episodes: list[EpisodeEntry], report: CheckReport
) -> None:
    """Check for episodes that claim the same time span of a file: one of them shows the other's frames."""
    if not layout.fps:
        return
    half = 0.5 / layout.fps
    ordered = sorted(episodes, key=lambda episode: episode.videos[feature.name].start)
    for earlier, later in pairwise(ordered):
        next_start = later.videos[feature.name].start
        end = earlier.videos[feature.name].start + earlier.length / layout.fps
        if next_start < end - half:
            frames = round((end - next_start) * layout.fps)
            message = f"episodes {earlier.index} and {later.index} claim the same {frames} frames of the file"
            for episode in (earlier, later):
                report.error(
                    "video-overlap",
                    message,
                    "correct from_timestamp in meta/episodes",
                    episode=episode.index,
                    feature=feature.name,
                    file=file,
                )


def _check_frames(
    layout: Layout, episode: EpisodeEntry, camera: str, scan: VideoScan, report: CheckReport, place: dict
) -> bool:
    """Check that the video has one frame per row and that the frames can be decoded. True if so."""
    if not layout.fps:
        return False
    span, half, seconds = episode.videos[camera], 0.5 / layout.fps, episode.length / layout.fps
    order = np.argsort(scan.times, kind="stable")
    first, end = own_frames(scan.times[order], span.start, span.end, layout.fps)
    if span.stop is not None and end - first != episode.length:  # then use the duration of its rows
        first, end = own_frames(scan.times[order], span.start, span.start + seconds, layout.fps)
    frames, count = order[first:end], end - first
    if scan.decodes is not None and not scan.decodes[frames].all():
        bad = np.flatnonzero(~scan.decodes[frames])
        message = f"{len(bad)} of {count} frames can't be decoded; the first is frame {bad[0]} of the episode"
        report.error("video-undecodable", message, FETCH_AGAIN, **place)
    if count < episode.length:
        message = f"the video has {count} frames, but the table has {episode.length} rows"
        report.error("video-frames", message, FETCH_AGAIN, **place)
        return False
    if count > episode.length:
        extra = count - episode.length
        message = f"the video has {extra} more frames than the table has rows ({episode.length})"
        report.warning("video-frames", message, "none needed unless rows were lost", **place)
    if span.stop is not None and abs(span.stop - span.start - seconds) > half:
        message = (
            f"its span in the file is {span.stop - span.start:.3f} s, but its frames take {seconds:.3f} s"
        )
        report.warning("video-span", message, "correct to_timestamp in meta/episodes", **place)
    return True


def _check_clock(
    layout: Layout,
    episode: EpisodeEntry,
    camera: str,
    clock: np.ndarray | None,
    scan: VideoScan,
    report: CheckReport,
    place: dict,
) -> None:
    """Match frames to rows, and check that the timestamps agree."""
    if clock is None or len(clock) != episode.length or not len(clock):
        return
    span, times = episode.videos[camera], np.sort(scan.times)
    half = 0.5 / layout.fps
    try:
        match = match_frames(times, clock, span.start, span.end, layout.fps, half)
    except NoMatch as error:
        fix = "exclude the episode, or download its video again"
        report.error("clock-video", f"rows and video do not match: {error}", fix, **place)
        return
    if match.seconds_off:
        message = (
            f"timestamps differ by up to {match.seconds_off:.3f} s from the video, which has one frame per row: "
            "Flexor reads frame i for row i"
        )
        report.warning("clock-video", message, REPAIR_CLOCK, **place)
    else:
        _check_jitter(span.start + clock, np.abs(times[match.numbers] - span.start - clock), report, place)


def _check_jitter(timestamps: np.ndarray, distance: np.ndarray, report: CheckReport, place: dict) -> None:
    # float32 timestamps of a long episode have limited precision themselves.
    limit = LEROBOT_TOLERANCE + float(np.spacing(np.float32(timestamps.max())))
    if distance.max() > limit:
        message = (
            f"frames are up to {distance.max() * 1e3:.2f} ms from their rows' timestamps: less than half a "
            f"frame, so Flexor finds every row's frame; LeRobot accepts at most {LEROBOT_TOLERANCE * 1e3:g} ms"
        )
        report.warning("clock-jitter", message, "none needed to train with Flexor", **place)
