"""Decides what a repair does with each episode: keep it, repair it, or leave it out with a reason.

Nothing is guessed. An episode is kept if its rows are complete, their order is known, and the frame of every row
is known: its video has exactly one frame per row, or the timestamps identify the frames.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from flexor.core.errors import DatasetError
from flexor.data.check.layout import VERSIONS, Layout
from flexor.data.check.report import CheckReport
from flexor.data.repair.account import EpisodePlan
from flexor.data.repair.tables import Columns, find_rows, plan_columns
from flexor.data.repair.videos import find_clips, read_index, settle_sizes, share_whole_files

CLOCK_S = 1e-4
"""Timestamps that are off by less are not reported: LeRobot tolerates them."""

OTHER_RATE = 0.1
"""From this relative difference on, timestamps are not irregular but have another rate than declared."""


@dataclass
class RepairPlan:
    """All requested episodes, and the changes to the dataset as a whole."""

    layout: Layout
    fps: float
    columns: Columns
    tasks: list[str]
    episodes: list[EpisodePlan]
    notes: list[str]

    @property
    def kept(self) -> list[EpisodePlan]:
        return [plan for plan in self.episodes if plan.reason is None]

    @property
    def cameras(self) -> list[str]:
        return [name for name, spec in self.columns.features.items() if spec["dtype"] == "video"]

    def delay(self, camera: str) -> int:
        """The largest reordering of any episode: all episodes of a file use the same."""
        return max((plan.clips[camera].delay for plan in self.kept), default=0)


def make_plan(layout: Layout, found: CheckReport, selected: Sequence[int] | None = None) -> RepairPlan:
    """Decide about every episode, without decoding or writing anything.

    All episodes are checked, even if only some are `selected`: one may claim frames that belong to another.
    """
    _refuse_hopeless(layout, found)
    columns = plan_columns(layout, layout.episodes)
    tasks = _Tasks(layout)
    plan = RepairPlan(layout, layout.fps, columns, tasks.texts, [EpisodePlan(e) for e in layout.episodes], [])
    find_rows(layout, columns, plan.episodes)
    _settle_fps(plan)
    for camera in plan.cameras:
        find_clips(layout, camera, plan.episodes, plan.fps)
    for one in plan.kept:
        _settle_length(plan, one)
    for one in plan.kept:
        _settle_clock(plan, one)
        tasks.settle(one)
    plan.episodes = _settle_twice(plan.episodes)
    for camera in plan.cameras:
        note = settle_sizes(columns.features[camera], camera, plan.episodes)
        plan.notes += [note] if note else []
    wanted = None if selected is None else set(selected)
    plan.episodes = [one for one in plan.episodes if wanted is None or one.episode.index in wanted]
    for camera in plan.cameras:
        whole = share_whole_files(camera, plan.kept)
        if whole:
            what = "their episodes do not start with key frames, so they can't be cut out"
            plan.notes.append(f"camera {camera}: {whole} video files copied unchanged: {what}")
    plan.notes += columns.notes
    return plan


def _refuse_hopeless(layout: Layout, found: CheckReport) -> None:
    """Raise an error for problems in meta/ that make a repair impossible."""
    fatal = [p for p in found.errors if p.name.startswith("info") and p.feature is None]
    fatal += [p for p in found.errors if p.name == "version-unknown" and layout.version not in VERSIONS]
    fatal += found.errors if not layout.episodes else []
    if fatal:
        what = f"{fatal[0].file or 'meta/'}: {fatal[0].evidence}. This can't be repaired: {fatal[0].fix}"
        raise DatasetError(f"{layout.root}: {what}.")
    if not layout.episodes:
        raise DatasetError(f"{layout.root} has no episodes, so there is nothing to repair.")


def _settle_fps(plan: RepairPlan) -> None:
    """If timestamps and videos agree on another rate than the declared fps, correct fps."""
    steps = [np.median(np.diff(one.clock)) for one in plan.kept if one.length > 1]
    step = float(np.median([s for s in steps if np.isfinite(s) and s > 0] or [1 / plan.fps]))
    if abs(step * plan.fps - 1) < OTHER_RATE:
        return
    for camera in plan.cameras:
        for file in dict.fromkeys(
            o.episode.videos[camera].file for o in plan.kept if camera in o.episode.videos
        ):
            index = read_index(plan.layout.path(file))
            if isinstance(index, str) or len(index) < 2:
                continue
            if abs(float(np.median(np.diff(index.times))) / step - 1) > 0.01:
                return
            fps = round(1 / step) if abs(round(1 / step) * step - 1) < 0.01 else 1 / step
            what = f"fps is {plan.fps:g}, but timestamps and videos have {fps:g} frames per second"
            plan.notes.append(f"{what}: fps corrected")
            plan.fps = fps
            return


def _settle_length(plan: RepairPlan, one: EpisodePlan) -> None:
    """If the number of rows differs from the metadata, the rows are correct if every video has one frame per row."""
    declared = one.episode.length
    if one.length == declared:
        return
    if plan.cameras and all(one.clips[camera].certain for camera in plan.cameras):
        one.done.append("length set to the number of its rows, which equals the number of its frames")
    else:
        one.reason = f"the table has {one.length} rows of this episode, but the metadata says {declared}"


def _settle_clock(plan: RepairPlan, one: EpisodePlan) -> None:
    """Set timestamps to frame_index / fps. If they differ from it, there must be proof that no frame is missing."""
    ideal = np.arange(one.length) / plan.fps
    steady = np.isfinite(one.clock).all() and (
        np.abs(one.clock - one.clock[0] - ideal).max() <= 0.5 / plan.fps
    )
    pictures = any(spec["dtype"] in ("image", "video") for spec in plan.columns.features.values())
    if not steady and not pictures:
        step = np.median(np.diff(one.clock)) * plan.fps
        if not (one.counted and abs(step - 1) < OTHER_RATE):
            one.reason = (
                f"its timestamps do not match {plan.fps:g} fps, and the correct ones can't be determined"
            )
            return
    # float32 timestamps of a long episode have limited precision themselves
    limit = CLOCK_S + float(np.spacing(np.float32(ideal[-1])))
    if not np.isfinite(one.clock).all() or np.abs(one.clock - ideal).max() > limit:
        one.done.append("timestamp set to frame_index / fps")
    for camera, clip in one.clips.items():
        if not clip.steady:
            one.done.append(f"{camera}: frames moved to the times of their rows")
        span = one.episode.videos[camera]
        if span.stop is not None and abs(span.stop - span.start - one.length / plan.fps) > 0.5 / plan.fps:
            one.done.append(f"{camera}: to_timestamp corrected")
        if span.stop is None and not clip.certain:
            one.done.append(f"{camera}: frames without a row removed")


def _settle_twice(plans: list[EpisodePlan]) -> list[EpisodePlan]:
    """One plan per episode. If its metadata entries differ, use the one that matches the data."""
    by_index: dict[int, list[EpisodePlan]] = {}
    for plan in plans:
        by_index.setdefault(plan.episode.index, []).append(plan)
    result = []
    for same in by_index.values():
        if len(same) > 1:
            alike = all(
                replace(p.episode, first_row=0) == replace(same[0].episode, first_row=0) for p in same
            )
            agree = [p for p in same if p.reason is None and p.episode.length == p.length]
            if not alike and len(agree) == 1:
                same = agree
            elif not alike:
                same[0].reason = f"the metadata lists it {len(same)} times, and the entries differ"
            same[0].done.append("duplicate metadata entries reduced to one")
        result.append(same[0])
    return result


class _Tasks:
    """The tasks' texts, with new indices if the old ones have gaps or no text."""

    def __init__(self, layout: Layout) -> None:
        texts = [str(layout.tasks[i] or "") for i in sorted(layout.tasks)]
        self.texts = list(dict.fromkeys(texts))
        self._new = {i: self.texts.index(text) for i, text in zip(sorted(layout.tasks), texts)}

    def settle(self, plan: EpisodePlan) -> None:
        """Give every row of an episode the index of a task with a text."""
        own = [str(task) for task in plan.episode.tasks]
        if plan.task_index is None:
            plan.task_index = np.full(plan.length, self._number(own[0] if own else ""))
            if not own:
                plan.done.append("its task is unknown: set to an empty text")
            return
        new = np.empty(plan.length, np.int64)
        for old in np.unique(plan.task_index).tolist():
            if old in self._new:
                number = self._new[old]
            else:
                text = own[0] if len(own) == 1 else ""
                number = self._number(text)
                what = f"set to that of {text!r}, the episode's only task" if text else "given an empty text"
                plan.done.append(f"task_index {old}, which has no text, {what}")
            new[plan.task_index == old] = number
        plan.task_index = new

    def _number(self, text: str) -> int:
        if text not in self.texts:
            self.texts.append(text)
        return self.texts.index(text)
