"""The video part of a check: does every row of the table have its frame?"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from threading import Lock

import numpy as np

from flexor.console import Progress
from flexor.data.layout import FETCH_AGAIN, Episode, Layout
from flexor.data.metadata import Feature
from flexor.data.problems import CheckReport
from flexor.data.scan import VideoScan, scan_video

LEROBOT_TOLERANCE = 1e-4
"""How far a frame may lie from its timestamp, in seconds, before LeRobot refuses it."""


def check_videos(
    layout: Layout,
    selected: list[Episode],
    timestamps: dict[int, np.ndarray],
    report: CheckReport,
    progress: Progress | None,
) -> None:
    """Check every camera's files. `timestamps` are the table's, of the episodes that have them."""
    jobs: list[tuple[Feature, str, list[Episode]]] = []
    for feature in layout.video_features:
        files: dict[str, list[Episode]] = {}
        for episode in selected:
            if feature.name in episode.videos:
                files.setdefault(episode.videos[feature.name].file, []).append(episode)
        if not _check_declared(layout, feature, files, report):
            _check_named(feature, selected, report)
            jobs += [(feature, file, episodes) for file, episodes in files.items()]
    done = _Done(sum(e.length for _, _, episodes in jobs for e in episodes), progress)
    workers = max(1, min(len(jobs), os.cpu_count() or 1))
    threads = max(1, (os.cpu_count() or 1) // workers)

    def scan(job: tuple[Feature, str, list[Episode]]) -> VideoScan:
        result = scan_video(layout.root / job[1], decode=report.deep, threads=threads)
        done.add(sum(episode.length for episode in job[2]))
        return result

    with ThreadPoolExecutor(workers) as pool:
        for (feature, file, episodes), result in zip(jobs, pool.map(scan, jobs)):
            _check_file(layout, feature, file, episodes, timestamps, result, report)


class _Done:
    """Counts frames done, from several threads, and tells whoever wants to know."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._total, self._progress, self._done, self._lock = total, progress, 0, Lock()

    def add(self, frames: int) -> None:
        with self._lock:
            self._done += frames
            if self._progress:
                self._progress(self._done, self._total)


def _check_declared(
    layout: Layout, feature: Feature, files: dict[str, list[Episode]], report: CheckReport
) -> bool:
    """Whether the camera is declared but not there at all, which is a warning: the rest can be used."""
    there = [file for file in layout.camera_files(feature.name) if (layout.root / file).is_file()]
    if there or not layout.episodes:
        return False
    example = next(iter(files), None)
    what = f"there is no video of it (such as {example})" if example else "no episode says where its video is"
    report.warning(
        "camera-absent",
        f"the camera is declared in meta/info.json, but {what}: it is left out",
        "remove it from `features` in meta/info.json, or fetch its videos",
        feature=feature.name,
    )
    return True


def _check_named(feature: Feature, selected: list[Episode], report: CheckReport) -> None:
    for episode in selected:
        if feature.name not in episode.videos:
            what = "the metadata does not say in which file its video is"
            fix = "fetch meta/episodes again, or leave the episode out"
            report.error("video-unnamed", what, fix, episode=episode.index, feature=feature.name)


def _check_file(
    layout: Layout,
    feature: Feature,
    file: str,
    episodes: list[Episode],
    timestamps: dict[int, np.ndarray],
    scan: VideoScan,
    report: CheckReport,
) -> None:
    where = {"feature": feature.name, "file": file}
    if not scan.path.is_file() or not len(scan.times):
        missing = not scan.path.is_file()
        what = "the file is missing" if missing else f"the video cannot be read: {scan.error}"
        for episode in episodes:
            kind = "video-missing" if missing else "video-unreadable"
            report.error(kind, what, FETCH_AGAIN, episode=episode.index, **where)
        return
    if scan.error:
        promised = f" of {scan.declared}" if scan.declared else ""
        what = f"{scan.error}: {len(scan.times)}{promised} frames are there"
        report.error("video-truncated", what, FETCH_AGAIN, **where)
    _check_picture(layout, feature, episodes, scan, report, where)
    _check_overlap(layout, feature, file, episodes, report)
    for episode in episodes:
        place = {"episode": episode.index, **where}
        if _check_frames(layout, episode, feature.name, scan, report, place):
            _check_clock(layout, episode, feature.name, timestamps.get(episode.index), scan, report, place)


def _check_picture(
    layout: Layout,
    feature: Feature,
    episodes: list[Episode],
    scan: VideoScan,
    report: CheckReport,
    where: dict,
) -> None:
    _, height, width = feature.chw if len(feature.shape) == 3 else (0, 0, 0)
    if (scan.height, scan.width) != (height, width):
        what = f"pictures are {scan.height}x{scan.width}, but {height}x{width} is declared (height x width)"
        fix = "correct the feature's shape in meta/info.json, or fetch the right video"
        for episode in episodes:
            report.error("video-size", what, fix, episode=episode.index, **where)
    step = float(np.median(np.diff(np.sort(scan.times)))) if len(scan.times) > 1 else 0.0
    if layout.fps and step > 0 and abs(step * layout.fps - 1) > 0.01:
        what = f"the video has {1 / step:.2f} frames per second, but {layout.fps:g} are declared"
        report.warning("video-fps", what, "encode it again at the dataset's rate, or correct fps", **where)


def _check_overlap(
    layout: Layout, feature: Feature, file: str, episodes: list[Episode], report: CheckReport
) -> None:
    """Two episodes that claim the same seconds of a file: one of them shows the other's frames."""
    if not layout.fps:
        return
    half = 0.5 / layout.fps
    ordered = sorted(episodes, key=lambda episode: episode.videos[feature.name].start)
    for one, other in pairwise(ordered):
        next_start = other.videos[feature.name].start
        end = one.videos[feature.name].start + one.length / layout.fps
        if next_start < end - half:
            frames = round((end - next_start) * layout.fps)
            what = f"episodes {one.index} and {other.index} claim the same {frames} frames of the file"
            for episode in (one, other):
                report.error(
                    "video-overlap",
                    what,
                    "correct from_timestamp in meta/episodes",
                    episode=episode.index,
                    feature=feature.name,
                    file=file,
                )


def _check_frames(
    layout: Layout, episode: Episode, camera: str, scan: VideoScan, report: CheckReport, place: dict
) -> bool:
    """Are there as many frames as rows, and do they decode? True if there are."""
    if not layout.fps:
        return False
    span, half, seconds = episode.videos[camera], 0.5 / layout.fps, episode.length / layout.fps
    own = (scan.times >= span.start - half) & (scan.times < span.start + seconds - half)
    if scan.decodes is not None and not scan.decodes[own].all():
        bad = np.sort(scan.times[own & ~scan.decodes])
        first = round((bad[0] - span.start) * layout.fps)
        what = f"{len(bad)} of {own.sum()} frames do not decode; the first is frame {first} of the episode"
        report.error("video-undecodable", what, FETCH_AGAIN, **place)
    if own.sum() < episode.length:
        what = f"the video has {own.sum()} of the {episode.length} frames the table has rows for"
        report.error("video-frames", what, FETCH_AGAIN, **place)
        return False
    alone = span.stop is None
    extra = int((len(scan.times) if alone else own.sum()) - episode.length)
    if extra > 0:
        what = f"the video has {extra} frames more than the table has rows ({episode.length})"
        report.warning("video-frames", what, "none needed, unless rows were lost", **place)
    if span.stop is not None and abs(span.stop - span.start - seconds) > half:
        what = f"its span in the file is {span.stop - span.start:.3f} s, but its frames take {seconds:.3f} s"
        report.warning("video-span", what, "correct to_timestamp in meta/episodes", **place)
    return True


def _check_clock(
    layout: Layout,
    episode: Episode,
    camera: str,
    clock: np.ndarray | None,
    scan: VideoScan,
    report: CheckReport,
    place: dict,
) -> None:
    """Does every row's timestamp lead to a frame, and to one of the episode's own?"""
    if clock is None or not len(clock) or not np.isfinite(clock).all():
        return
    start, half = episode.videos[camera].start, 0.5 / layout.fps
    stop = start + episode.length / layout.fps - half

    def astray(wanted: np.ndarray) -> np.ndarray:
        return (wanted < start - half) | (wanted >= stop) | (_distance(scan.times, wanted) > half)

    wanted, late = start + clock, float(clock[0])
    lost = astray(wanted)
    if not lost.any():
        _check_jitter(wanted, _distance(scan.times, wanted), report, place)
    elif late > half and len(clock) == episode.length and not astray(wanted - late).any():
        what = (  # the reader sets this right, see VideoClip
            f"the clock starts at {late:.3f} s instead of 0, so {lost.sum()} of {len(clock)} rows "
            "point past its video, which has a frame for every row: it is read from its first frame on"
        )
        report.warning("clock-offset", what, f"subtract {late:.3f} from the column `timestamp`", **place)
    else:
        row = int(np.argmax(lost))
        nearest = float(_distance(scan.times, wanted[row : row + 1])[0])
        what = (
            f"{lost.sum()} of {len(clock)} rows have no frame of their own at their time; the first is "
            f"row {row} at {clock[row]:.3f} s, the nearest frame {nearest:.3f} s away"
        )
        fix = "leave the episode out, or set `timestamp` to frame_index / fps if the frames are in order"
        report.error("clock-video", what, fix, **place)


def _check_jitter(wanted: np.ndarray, distance: np.ndarray, report: CheckReport, place: dict) -> None:
    # float32 timestamps of a long episode are themselves only good to so much.
    limit = LEROBOT_TOLERANCE + float(np.spacing(np.float32(wanted.max())))
    if distance.max() > limit:
        what = (
            f"frames lie up to {distance.max() * 1e3:.2f} ms from their rows' timestamps: less than half a "
            f"frame, so every row gets its own here; LeRobot refuses more than {LEROBOT_TOLERANCE * 1e3:g} ms"
        )
        report.warning("clock-jitter", what, "none needed to train with Flexor", **place)


def _distance(times: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Seconds from each wanted time to the nearest frame."""
    times = np.sort(times)
    after = np.searchsorted(times, wanted).clip(0, len(times) - 1)
    before = (after - 1).clip(0)
    return np.minimum(np.abs(times[after] - wanted), np.abs(times[before] - wanted))
