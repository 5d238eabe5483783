"""The video part of a repair: finds each episode's frames, and whether they can be copied."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from flexor.core.errors import DatasetError
from flexor.data.check.layout import Layout, Span
from flexor.data.format.metadata import Feature
from flexor.data.repair.account import EpisodePlan, RepairClip
from flexor.data.repair.remux import first_packet, is_intact, reorder_delay
from flexor.data.video.decode import VideoIndex, index_video
from flexor.data.video.frame_match import NoMatch, match_frames, own_frames

STEADY_S = 5e-5
"""Largest deviation from 1/fps of frames that keep their times: half of LeRobot's tolerance."""


def first_frame(times: np.ndarray, span: Span, clock: np.ndarray, fps: float) -> tuple[int, bool] | str:
    """The frame of the first row, and whether it is certain: the video has exactly one frame per row.

    The frames of the rows must be consecutive. If not, return the fault.
    """
    try:
        match = match_frames(times, clock, span.start, span.end, fps, 0.5 / fps)
    except NoMatch as error:
        return f"its rows and video do not match: {error}"
    if (np.diff(match.numbers) != 1).any():
        return "its timestamps do not match consecutive frames"
    first, end = own_frames(times, span.start, span.end, fps)
    return int(match.numbers[0]), end - first == len(clock)


def find_clips(layout: Layout, camera: str, plans: list[EpisodePlan], fps: float) -> None:
    """Add the location of a camera's frames to each plan, or why it can't be used."""
    files: dict[str, list[EpisodePlan]] = {}
    for plan in plans:
        if camera in plan.episode.videos:
            files.setdefault(plan.episode.videos[camera].file, []).append(plan)
        elif plan.reason is None:
            plan.reason = f"{camera}: the metadata does not name its video file"
    for file, file_plans in files.items():
        index = read_index(layout.path(file))
        claims = []
        for plan in file_plans:
            span = plan.episode.videos[camera]
            if plan.reason is None:
                clip = index if isinstance(index, str) else find_clip(index, file, span, plan.clock, fps)
                if isinstance(clip, RepairClip):
                    plan.clips[camera] = clip
                    claims.append(_Claim(plan, clip.first, clip.end, clip.certain))
                    continue
                plan.reason = f"{camera}: {clip}"
            if not isinstance(index, str):
                claims += _claim_of_left_out(plan, span, index.times, fps)
        _resolve_overlaps(camera, claims)


@dataclass(frozen=True)
class _Claim:
    """The frames of a file that an episode claims."""

    plan: EpisodePlan
    first: int
    end: int
    certain: bool


def _claim_of_left_out(plan: EpisodePlan, span: Span, times: np.ndarray, fps: float) -> list[_Claim]:
    """An episode that is left out may still own frames that another episode wrongly claims."""
    if span.stop is None:
        return []
    seconds = plan.episode.length / fps
    certain = abs(span.stop - span.start - seconds) <= 0.5 / fps
    bounds = np.array([span.start, min(span.stop, span.start + seconds)]) - 0.5 / fps
    first, end = np.searchsorted(times, bounds).tolist()
    return [_Claim(plan, first, end, certain)] if first < end else []


def share_whole_files(camera: str, plans: list[EpisodePlan]) -> int:
    """If a file is copied unchanged for one episode, use it for its other episodes too. Return the number of files."""
    uncut = {plan.clips[camera].file for plan in plans if plan.clips[camera].copied_whole}
    for plan in plans:
        clip = plan.clips[camera]
        if clip.file in uncut and clip.steady:
            plan.clips[camera] = replace(clip, copied_whole=True, delay=0)
    return len(uncut)


def read_index(path: Path) -> VideoIndex | str:
    """A file's index, or why it can't be read."""
    if not path.is_file():
        return f"its video {path.name} is missing"
    try:
        return index_video(path)
    except (DatasetError, OSError, ValueError) as error:
        return f"its video can't be read: {str(error).split('. The video')[0]}"


def find_clip(index: VideoIndex, file: str, span: Span, clock: np.ndarray, fps: float) -> RepairClip | str:
    """An episode's frames in a file, or why they can't be used."""
    match = first_frame(index.times, span, clock, fps)
    if isinstance(match, str):
        return match
    first, certain = match
    count = len(clock)
    if not is_intact(index, first, count):
        return "its video ends in the middle of the episode"
    if (np.diff(index.frame_pts[first : first + count]) == 0).any():
        return "two frames of its video have the same time"
    start, size = float(index.times[first]), (index.height, index.width)
    late = index.times[first : first + count] - start - np.arange(count) / fps
    steady = bool(np.abs(late).max() <= STEADY_S)
    if first_packet(index, first, count) is not None:
        delay = reorder_delay(index, first, count)
        return RepairClip(file, first, count, start, certain, size, delay=delay, steady=steady)
    if not steady:
        return "its frames can't be cut out of the video (the first is not a key frame), and their times are irregular"
    return RepairClip(file, first, count, start, certain, size, copied_whole=True)


def _resolve_overlaps(camera: str, claims: list[_Claim]) -> None:
    """Resolve frames claimed by two episodes: leave out the one without exactly one frame per row, or else both."""
    last: _Claim | None = None  # the claim that ends last
    for claim in sorted(claims, key=lambda claim: claim.first):
        index = claim.plan.episode.index
        if last is not None and claim.first < last.end and index != last.plan.episode.index:
            alike = claim.certain == last.certain
            for claimant, rival_claim in ((claim, last), (last, claim)):
                if claimant.plan.reason is None and (alike or not claimant.certain):
                    rival = rival_claim.plan.episode.index
                    claimant.plan.reason = f"{camera}: episode {rival} also claims frames of its video"
            stays = last.end >= claim.end if alike else last.certain
            last = last if stays else claim
        else:
            last = claim


def check_sizes(spec: dict[str, Any], camera: str, plans: list[EpisodePlan]) -> str | None:
    """Handle videos of another size than declared: if all have the same size, correct the declaration."""
    good = [plan for plan in plans if plan.reason is None]
    sizes = Counter(plan.clips[camera].size for plan in good)
    feature = Feature(camera, "video", tuple(spec["shape"]), spec.get("names"))
    declared = feature.chw[1:] if len(feature.shape) == 3 else None
    if len(sizes) == 1 and declared not in sizes:
        ((height, width),) = sizes
        note = f"is declared as {spec['shape']} but its images are {height}x{width}: corrected"
        spec["shape"], spec["names"] = [height, width, 3], ["height", "width", "channels"]
        return f"camera {camera} {note}"
    for plan in good:
        height, width = plan.clips[camera].size
        if (height, width) != declared:
            plan.reason = f"{camera}: its images are {height}x{width}, but {spec['shape']} is declared"
    return None
