"""Decides about each episode: copy it, repair it, or leave it out with a reason.

Nothing is guessed. An episode is included if its rows are complete, their order is known, and the frame of every row
is known: its video has exactly one frame per row, or the timestamps identify the frames.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from flexor.core.errors import DatasetError
from flexor.data.check.layout import VERSIONS, Layout
from flexor.data.check.report import CheckReport
from flexor.data.format.row_tasks import disagree
from flexor.data.repair.account import EpisodePlan
from flexor.data.repair.tables import Columns, find_rows, plan_columns
from flexor.data.repair.videos import check_sizes, find_clips, read_index, share_whole_files

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
    def included(self) -> list[EpisodePlan]:
        return [plan for plan in self.episodes if plan.reason is None]

    @property
    def cameras(self) -> list[str]:
        return [name for name, spec in self.columns.features.items() if spec["dtype"] == "video"]

    def delay(self, camera: str) -> int:
        """The largest reordering of any episode: all episodes of a file use the same."""
        return max((plan.clips[camera].delay for plan in self.included), default=0)


def make_plan(layout: Layout, report: CheckReport, selected: Sequence[int] | None = None) -> RepairPlan:
    """Decide about every episode, without decoding or writing anything.

    All episodes are checked even if only some are `selected`: one may claim frames of another.
    """
    _check_repairable(layout, report)
    columns = plan_columns(layout, layout.episodes)
    tasks = _Tasks(layout)
    plans = [EpisodePlan(episode) for episode in layout.episodes]
    repair = RepairPlan(layout, layout.fps, columns, tasks.texts, plans, [])
    find_rows(layout, columns, repair.episodes)
    _correct_fps(repair)
    for camera in repair.cameras:
        find_clips(layout, camera, repair.episodes, repair.fps)
    for plan in repair.included:
        _correct_length(repair, plan)
    for plan in repair.included:
        _correct_clock(repair, plan)
        tasks.assign(plan)
    repair.episodes = _merge_duplicates(repair.episodes)
    for camera in repair.cameras:
        note = check_sizes(columns.features[camera], camera, repair.episodes)
        repair.notes += [note] if note else []
    if selected is not None:
        repair.episodes = [plan for plan in repair.episodes if plan.episode.index in set(selected)]
    for camera in repair.cameras:
        file_count = share_whole_files(camera, repair.included)
        if file_count:
            why = "their episodes do not start with key frames, so they can't be cut out"
            repair.notes.append(f"camera {camera}: {file_count} video files copied unchanged: {why}")
    repair.notes += columns.notes
    return repair


def _check_repairable(layout: Layout, report: CheckReport) -> None:
    """Raise an error for problems in meta/ that make a repair impossible."""
    fatal = [p for p in report.errors if p.name.startswith("info") and p.feature is None]
    fatal += [
        p
        for p in report.errors
        if p.name in ("version-unknown", "version-old") and layout.version not in VERSIONS
    ]
    fatal += report.errors if not layout.episodes else []
    if fatal:
        message = f"{fatal[0].file or 'meta/'}: {fatal[0].evidence}. This can't be repaired: {fatal[0].fix}"
        raise DatasetError(f"{layout.root}: {message}.")
    if not layout.episodes:
        raise DatasetError(f"{layout.root} has no episodes, so there is nothing to repair.")


def _correct_fps(repair: RepairPlan) -> None:
    """If timestamps and videos agree on another rate than the declared fps, correct fps."""
    steps = [np.median(np.diff(plan.clock)) for plan in repair.included if plan.length > 1]
    step = float(np.median([s for s in steps if np.isfinite(s) and s > 0] or [1 / repair.fps]))
    if abs(step * repair.fps - 1) < OTHER_RATE:
        return
    for camera in repair.cameras:
        for file in dict.fromkeys(
            plan.episode.videos[camera].file for plan in repair.included if camera in plan.episode.videos
        ):
            index = read_index(repair.layout.path(file))
            if isinstance(index, str) or len(index) < 2:
                continue
            if abs(float(np.median(np.diff(index.times))) / step - 1) > 0.01:
                return
            fps = round(1 / step) if abs(round(1 / step) * step - 1) < 0.01 else 1 / step
            message = f"fps is {repair.fps:g}, but timestamps and videos have {fps:g} frames per second"
            repair.notes.append(f"{message}: fps corrected")
            repair.fps = fps
            return


def _correct_length(repair: RepairPlan, plan: EpisodePlan) -> None:
    """If the number of rows differs from the metadata, the rows are correct if every video has one frame per row."""
    declared = plan.episode.length
    if plan.length == declared:
        return
    if repair.cameras and all(plan.clips[camera].certain for camera in repair.cameras):
        plan.repairs.append("length set to the number of its rows, which equals the number of its frames")
    else:
        plan.reason = f"the table has {plan.length} rows of this episode, but the metadata says {declared}"


def _correct_clock(repair: RepairPlan, plan: EpisodePlan) -> None:
    """Set timestamps to frame_index / fps. If they differ from it, there must be proof that no frame is missing."""
    ideal = np.arange(plan.length) / repair.fps
    steady = np.isfinite(plan.clock).all() and (
        np.abs(plan.clock - plan.clock[0] - ideal).max() <= 0.5 / repair.fps
    )
    pictures = any(spec["dtype"] in ("image", "video") for spec in repair.columns.features.values())
    if not steady and not pictures:
        step = np.median(np.diff(plan.clock)) * repair.fps
        if not (plan.counted and abs(step - 1) < OTHER_RATE):
            plan.reason = (
                f"its timestamps do not match {repair.fps:g} fps, and the correct ones can't be determined"
            )
            return
    # float32 timestamps of a long episode have limited precision themselves
    limit = CLOCK_S + float(np.spacing(np.float32(ideal[-1])))
    if not np.isfinite(plan.clock).all() or np.abs(plan.clock - ideal).max() > limit:
        plan.repairs.append("timestamp set to frame_index / fps")
    for camera, clip in plan.clips.items():
        if not clip.steady:
            plan.repairs.append(f"{camera}: frames moved to the times of their rows")
        span = plan.episode.videos[camera]
        seconds = plan.length / repair.fps
        if span.stop is not None and abs(span.stop - span.start - seconds) > 0.5 / repair.fps:
            plan.repairs.append(f"{camera}: to_timestamp corrected")
        if span.stop is None and not clip.certain:
            plan.repairs.append(f"{camera}: frames without a row removed")


def _merge_duplicates(plans: list[EpisodePlan]) -> list[EpisodePlan]:
    """One plan per episode. If its metadata entries differ, use the one that matches the data."""
    by_index: dict[int, list[EpisodePlan]] = {}
    for plan in plans:
        by_index.setdefault(plan.episode.index, []).append(plan)
    result = []
    for duplicates in by_index.values():
        if len(duplicates) > 1:
            first, *repeats = (replace(plan.episode, first_row=0) for plan in duplicates)
            alike = all(repeat == first for repeat in repeats)
            agree = [p for p in duplicates if p.reason is None and p.episode.length == p.length]
            if not alike and len(agree) == 1:
                duplicates = agree
            elif not alike:
                reason = f"the metadata lists it {len(duplicates)} times, and the entries differ"
                duplicates[0].reason = reason
            duplicates[0].repairs.append("duplicate metadata entries reduced to one")
        result.append(duplicates[0])
    return result


class _Tasks:
    """The tasks' texts, with new indices if the old ones have gaps or no text."""

    def __init__(self, layout: Layout) -> None:
        texts = [str(layout.tasks[i] or "") for i in sorted(layout.tasks)]
        self.texts = list(dict.fromkeys(texts))
        self._new = {i: self.texts.index(text) for i, text in zip(sorted(layout.tasks), texts)}

    def assign(self, plan: EpisodePlan) -> None:
        """Give every row of an episode the index of a task with a text."""
        texts = [str(task) for task in plan.episode.tasks]
        if plan.task_index is None:
            plan.task_index = np.full(plan.length, self._number(texts[0] if texts else ""))
            if not texts:
                plan.repairs.append("its task is unknown: set to an empty text")
            return
        new = np.empty(plan.length, np.int64)
        for old in np.unique(plan.task_index).tolist():
            if old in self._new:
                number = self._new[old]
            else:
                text = texts[0] if len(texts) == 1 else ""
                number = self._number(text)
                change = (
                    f"set to that of {text!r}, the episode's only task" if text else "given an empty text"
                )
                plan.repairs.append(f"task_index {old}, which has no text, {change}")
            new[plan.task_index == old] = number
        plan.task_index = new
        rows = [text for number in np.unique(new).tolist() if (text := self.texts[number])]
        if disagree(rows, texts):
            named = ", ".join(map(repr, rows))
            plan.repairs.append(
                f"the metadata lists another task than its rows: set to that of the rows, {named}"
            )
            plan.episode = replace(plan.episode, tasks=rows)

    def _number(self, text: str) -> int:
        if text not in self.texts:
            self.texts.append(text)
        return self.texts.index(text)
