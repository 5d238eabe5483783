"""Finds the problems of a dataset before training does.

    report = check_dataset("path/to/dataset")
    print(report)
    report.write_good_episodes("good.json")        # flexor train --dataset.episodes=@good.json

The check does not stop at the first problem: unreadable files are reported, and the rest is checked.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from flexor.core.console import Progress
from flexor.core.errors import DatasetError
from flexor.data.check.feature_names import check_feature_names
from flexor.data.check.image_findings import check_recorded_images
from flexor.data.check.layout import EpisodeEntry, Layout, read_layout
from flexor.data.check.pointers import name_pointers
from flexor.data.check.recorded_stats import check_image_levels, check_recorded_stats
from flexor.data.check.report import CheckReport
from flexor.data.check.tables import check_tables
from flexor.data.check.tasks import check_tasks
from flexor.data.check.value_findings import check_values
from flexor.data.check.videos import check_videos


def check_dataset(
    root: str | Path,
    *,
    deep: bool = True,
    episodes: Sequence[int] | None = None,
    progress: Progress | None = None,
) -> CheckReport:
    """Check the dataset in folder `root`, v3.0, v2.1 or v2.0.

    `deep` decodes every frame. Without it, only the packets of the videos are read, which finds missing and
    truncated files but not damaged images. With `episodes`, only these are checked, but their files are
    read completely. `progress(done, total)` counts video frames.
    """
    report = CheckReport(Path(root), deep)
    layout = read_layout(root, report)
    selected = _selected(layout, episodes)
    report.checked = [episode.index for episode in selected]
    if not layout.info:
        name_pointers(layout, selected, report)
        return report
    check_episodes(layout, report)
    check_totals(layout, report)
    check_depth(layout, report)
    tables = check_tables(layout, selected, report)
    check_feature_names(layout, report)
    check_tasks(layout, tables, report)
    check_recorded_stats(layout, tables, report)
    check_values(layout, tables, report)
    levels = check_videos(layout, selected, tables, report, progress)
    check_image_levels(layout, levels, report)
    if not deep:
        check_recorded_images(layout, report)
    check_stray_files(layout, report)
    name_pointers(layout, selected, report)
    return report


def _selected(layout: Layout, episodes: Sequence[int] | None) -> list[EpisodeEntry]:
    if episodes is None:
        return layout.episodes
    wrong = sorted(set(episodes) - {episode.index for episode in layout.episodes})
    if wrong:
        raise DatasetError(
            f"{layout.root} has no episodes {wrong[:10]}: it has {len(layout.episodes)} episodes. Correct the list."
        )
    return [episode for episode in layout.episodes if episode.index in set(episodes)]


def check_episodes(layout: Layout, report: CheckReport) -> None:
    """Check indices, lengths and rows of the episodes in the metadata."""
    visited: set[int] = set()
    next_row = 0
    fix = "download meta/ again: episodes were added or removed without updating it"
    for position, episode in enumerate(layout.episodes):
        if episode.index in visited:
            report.error("episode-twice", "the metadata lists it twice", fix, episode=episode.index)
        elif episode.index != position and position not in visited and position - 1 in visited | {-1}:
            message = f"episode {position} is missing: the next one is {episode.index}"
            report.error("episode-missing", message, fix)
        visited.add(episode.index)
        if episode.length < 1:
            report.error("length", f"its length is {episode.length}", fix, episode=episode.index)
        if episode.first_row != next_row:
            message = f"its rows should start at {next_row}, but dataset_from_index is {episode.first_row}"
            report.error("row-range", message, "correct meta/episodes", episode=episode.index)
        next_row = episode.first_row + max(episode.length, 0)


def check_totals(layout: Layout, report: CheckReport) -> None:
    """Compare the totals in meta/info.json with the episodes, if these are known."""
    if not layout.episodes:
        return
    counted = {
        "total_episodes": len(layout.episodes),
        "total_frames": sum(episode.length for episode in layout.episodes),
        "total_tasks": len(layout.tasks),
    }
    for name, number in counted.items():
        declared = layout.info.get(name)
        if declared is None or declared == number:
            continue
        message = f"{name} is {declared}, but the metadata adds up to {number}"
        fix = "none needed to train with Flexor if no episode was lost; `flexor data repair` corrects it"
        report.warning("totals", message, fix, file="meta/info.json")
    splits = layout.info.get("splits")
    for split, span in splits.items() if isinstance(splits, dict) else ():
        end = str(span).partition(":")[2]
        if re.fullmatch("[0-9]{1,15}", end) and int(end) > len(layout.episodes):
            message = f"the split {split!r} is {span}, but there are {len(layout.episodes)} episodes"
            report.warning("splits", message, "none needed to train with Flexor", file="meta/info.json")
    if any(not task for task in layout.tasks.values()):
        report.warning("task-empty", "a task has no text", "policies that read the task need one: add it")


def check_depth(layout: Layout, report: CheckReport) -> None:
    """Check whether the depths of depth maps can be computed, and in which unit they are."""
    fix = "correct the feature's `info` in meta/info.json, or take it from the original dataset"
    for name, feature in layout.features.items():
        if feature.depth is None or not feature.is_camera or len(feature.shape) != 3:
            continue
        where = {"feature": name, "file": "meta/info.json"}
        if feature.chw[0] != 1:
            message = f"the depth map has {feature.chw[0]} channels instead of one: training leaves it out"
            report.warning("depth-scale", message, fix, **where)
        elif fault := feature.depth.fault():
            report.warning("depth-scale", f"{fault}: training leaves the depth map out", fix, **where)
        elif feature.depth.unit is None:
            message = "depth_unit is missing: statistics, and images in the tables, are used as they are"
            add_unit = "add `depth_unit` (m or mm) to the feature's `info`"
            report.warning("depth-unit", message, add_unit, **where)


def check_stray_files(layout: Layout, report: CheckReport) -> None:
    """Warn about files that no episode refers to: leftovers, or the metadata is out of date."""
    named = {episode.data_file for episode in layout.episodes}
    named |= {span.file for episode in layout.episodes for span in episode.videos.values()}
    named |= {*layout.misplaced.values()}
    for folder, suffix in (("data", "*.parquet"), ("videos", "*.mp4")):
        files = [path.relative_to(layout.root).as_posix() for path in (layout.root / folder).rglob(suffix)]
        stray = sorted(file for file in files if file not in named)
        if stray and layout.episodes:
            message = f"{len(stray)} files belong to no episode, such as {stray[0]}"
            report.warning("stray-files", message, "delete them, or download meta/ again", file=folder)
