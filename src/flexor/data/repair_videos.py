"""The video part of a repair: which frames of which file are an episode's, and whether they can be copied."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from flexor.data.layout import Layout, Span
from flexor.data.metadata import Feature
from flexor.data.remux import first_packet, is_intact, reorder_delay
from flexor.data.repaired import Clip, EpisodePlan
from flexor.data.video import VideoIndex, index_video
from flexor.errors import DatasetError

STEADY_S = 5e-5
"""How far frames that keep their times may lie from 1/fps: half of what LeRobot tolerates."""


def match_frames(times: np.ndarray, span: Span, clock: np.ndarray, fps: float) -> tuple[int, bool] | str:
    """The frame of the first row, and whether it is certain; later rows have the frames after it.

    Where there are exactly as many frames as rows, frame i is row i, whatever the clock says. Otherwise every
    row's time must lead to a frame, and these must follow each other. If not: what is wrong.
    """
    half = 0.5 / fps
    own = np.arange(len(times))
    if span.stop is not None:
        own = own[(times >= span.start - half) & (times < span.stop - half)]
    if len(own) == len(clock):
        return int(own[0]), True
    wanted = span.start + clock
    if len(times) and np.isfinite(wanted).all():
        after = np.searchsorted(times, wanted).clip(0, len(times) - 1)
        before = (after - 1).clip(0)
        frames = np.where(wanted - times[before] <= np.abs(times[after] - wanted), before, after)
        near = np.abs(times[frames] - wanted) <= half
        if near.all() and (np.diff(frames) == 1).all():
            return int(frames[0]), False
    return (
        f"its video has {len(own)} frames and its table {len(clock)} rows, and the timestamps do not lead to "
        "a frame for each"
    )


def find_clips(layout: Layout, camera: str, plans: list[EpisodePlan], fps: float) -> None:
    """Add to each plan where its frames of a camera are, or why it can't be used."""
    files: dict[str, list[EpisodePlan]] = {}
    for plan in plans:
        if plan.reason is None and camera not in plan.episode.videos:
            plan.reason = f"{camera}: the metadata does not say in which file its video is"
        elif plan.reason is None:
            files.setdefault(plan.episode.videos[camera].file, []).append(plan)
    for file, inside in files.items():
        index = read_index(layout.root / file)
        for plan in inside:
            span = plan.episode.videos[camera]
            found = index if isinstance(index, str) else find_clip(index, file, span, plan.clock, fps)
            if isinstance(found, str):
                plan.reason = f"{camera}: {found}"
            else:
                plan.clips[camera] = found
        _share_whole_file(camera, [plan for plan in inside if plan.reason is None])
        _settle_overlaps(camera, [plan for plan in inside if plan.reason is None])


def _share_whole_file(camera: str, plans: list[EpisodePlan]) -> None:
    """Where a file is copied whole for one episode, the others need not be cut out of it once more."""
    if any(plan.clips[camera].whole for plan in plans):
        for plan in plans:
            if plan.clips[camera].steady:
                plan.clips[camera] = replace(plan.clips[camera], whole=True, delay=0)


def read_index(path: Path) -> VideoIndex | str:
    """A file's frames, or why it has none."""
    if not path.is_file():
        return f"its video {path.name} is missing"
    try:
        return index_video(path)
    except (DatasetError, OSError, ValueError) as error:
        return f"its video can't be read: {str(error).split('. The video')[0]}"


def find_clip(index: VideoIndex, file: str, span: Span, clock: np.ndarray, fps: float) -> Clip | str:
    """An episode's frames in a file, or why they can't be had."""
    match = match_frames(index.times, span, clock, fps)
    if isinstance(match, str):
        return match
    first, certain = match
    count = len(clock)
    if not is_intact(index, first, count):
        return "its video ends in the middle of it"
    if (np.diff(index.frame_pts[first : first + count]) == 0).any():
        return "two frames of its video have the same time"
    start, size = float(index.times[first]), (index.height, index.width)
    late = index.times[first : first + count] - start - np.arange(count) / fps
    steady = bool(np.abs(late).max() <= STEADY_S)
    if first_packet(index, first, count) is not None:
        delay = reorder_delay(index, first, count)
        return Clip(file, first, count, start, certain, size, delay=delay, steady=steady)
    if not steady:
        return "its frames can't be cut out of the video (the first is no key frame), and are not steady"
    return Clip(file, first, count, start, certain, size, whole=True)


def _settle_overlaps(camera: str, plans: list[EpisodePlan]) -> None:
    """No frame is two episodes': one that has not exactly as many frames as rows gives way, or else both."""
    last: EpisodePlan | None = None  # the one that reaches furthest
    for plan in sorted(plans, key=lambda plan: plan.clips[camera].first):
        clip = plan.clips[camera]
        other_claims = last is not None and last.episode.index != plan.episode.index
        if last is not None and other_claims and clip.first < last.clips[camera].end:
            alike = clip.certain == last.clips[camera].certain
            for one, other in ((plan, last), (last, plan)):
                if alike or not one.clips[camera].certain:
                    one.reason = f"{camera}: episode {other.episode.index} claims frames of its video too"
            if last.reason is None or (plan.reason and clip.end <= last.clips[camera].end):
                continue
        last = plan


def settle_sizes(spec: dict[str, Any], camera: str, plans: list[EpisodePlan]) -> str | None:
    """Videos of another size than declared: if all are alike, it is the declaration that is wrong."""
    good = [plan for plan in plans if plan.reason is None]
    sizes = Counter(plan.clips[camera].size for plan in good)
    feature = Feature(camera, "video", tuple(spec["shape"]), spec.get("names"))
    declared = feature.chw[1:] if len(feature.shape) == 3 else None
    if len(sizes) == 1 and declared not in sizes:
        ((height, width),) = sizes
        note = (
            f"camera {camera} is declared {spec['shape']} but its pictures are {height}x{width}: declared so"
        )
        spec["shape"], spec["names"] = [height, width, 3], ["height", "width", "channels"]
        return note
    for plan in good:
        height, width = plan.clips[camera].size
        if (height, width) != declared:
            plan.reason = f"{camera}: its pictures are {height}x{width}, but {spec['shape']} is declared"
    return None
