"""Finds the problems of a dataset before training does.

    report = check_dataset("path/to/dataset")
    print(report)
    report.write_good_episodes("good.json")        # flexor train --dataset.episodes=@good.json

The check does not stop at the first problem: unreadable files are reported, and the rest is checked.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from flexor.core.console import Progress
from flexor.core.errors import DatasetError
from flexor.data.check.feature_names import check_feature_names
from flexor.data.check.layout import EpisodeEntry, Layout, read_layout
from flexor.data.check.pointers import name_pointers
from flexor.data.check.report import CheckReport
from flexor.data.check.tables import OWN_COLUMNS, Tables, check_tables
from flexor.data.check.tasks import check_tasks
from flexor.data.check.videos import check_videos
from flexor.data.format.metadata import Feature
from flexor.data.format.stats import NEEDED_STATS

COMPUTE = "compute them with `flexor data stats DIR --write`"


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
    check_feature_names(layout, report)
    tables = check_tables(layout, selected, report)
    check_tasks(layout, tables, report)
    _check_stats(layout, tables, report)
    check_videos(layout, selected, tables.timestamps, report, progress)
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


def _check_stats(layout: Layout, tables: Tables, report: CheckReport) -> None:
    """Check the statistics. Values are normalised with them, so a wrong one affects every sample."""
    for name, feature in layout.features.items():
        if name in OWN_COLUMNS or not name.startswith(("action", "observation")):
            continue  # other features are not normalised
        if feature.is_video and not any(layout.path(file).is_file() for file in layout.camera_files(name)):
            continue  # a completely missing feature is reported elsewhere
        if not feature.is_camera and name not in tables.low:
            continue
        if feature.is_camera and len(feature.shape) != 3:
            continue  # a shape that can't be an image is also reported elsewhere
        stats = layout.stats.get(name) or {}
        lacking = [key for key in NEEDED_STATS if key not in stats]
        if lacking:
            # Cameras are often normalised with other statistics; vectors never are.
            add_finding = report.warning if feature.is_camera else report.error
            part = "no statistics" if len(lacking) == len(NEEDED_STATS) else f"no {', '.join(lacking)}"
            message = f"it has {part}, which policies normalise with"
            add_finding("stats-missing", message, COMPUTE, feature=name)
            continue
        try:
            values = {key: np.asarray(value, np.float64).reshape(-1) for key, value in stats.items()}
        except (TypeError, ValueError) as error:
            message = f"its statistics are not numbers ({error})"
            report.error("stats-unreadable", message, COMPUTE, feature=name)
            continue
        values.pop("count", None)
        low, high = tables.low.get(name), tables.high.get(name)
        if _check_values(feature, values, report) and low is not None and high is not None:
            _check_range(name, values, low, high, report)


def _check_values(feature: Feature, values: dict[str, np.ndarray], report: CheckReport) -> bool:
    """Whether the statistics are finite and match the feature's size."""
    bad = [key for key, value in values.items() if not np.isfinite(value).all()]
    if bad:
        message = f"{', '.join(bad)} are NaN or infinite, and so would be every loss"
        report.error("stats-not-finite", message, COMPUTE, feature=feature.name)
        return False
    # For a matrix, LeRobot stores only the statistics of its columns.
    expected = feature.chw[:1] if feature.is_camera else (int(np.prod(feature.shape)), feature.shape[-1])
    wrong = {key: value.size for key, value in values.items() if value.size not in expected}
    if wrong or len({value.size for value in values.values()}) > 1:
        sizes = wrong or {key: value.size for key, value in values.items()}
        message = f"the statistics have {sizes} values, but the feature has {expected[0]}"
        report.error("stats-shape", message, COMPUTE, feature=feature.name)
        return False
    flat = np.flatnonzero(values["std"] < 1e-8)  # less than the epsilon that normalisation adds
    if len(flat):
        message = f"{_dimensions(flat, values['std'].size)} never change: their standard deviation is 0"
        fix = "if they can change on the robot, remove them: normalisation divides any change by almost zero"
        report.warning("std-zero", message, fix, feature=feature.name)
    return True


def _check_range(
    name: str, values: dict[str, np.ndarray], low: np.ndarray, high: np.ndarray, report: CheckReport
) -> None:
    """Check whether the statistics belong to this data."""
    if low.size != values["min"].size:
        return
    slack = 1e-3 * (values["max"] - values["min"]) + 1e-6
    out = (low < values["min"] - slack) | (high > values["max"] + slack)
    if out.any():
        i = int(np.argmax(out))
        message = (
            f"the data exceeds the statistics in {_dimensions(np.flatnonzero(out), out.size)}: dimension "
            f"{i} ranges from {low[i]:.4g} to {high[i]:.4g}, the statistics say {values['min'][i]:.4g} to "
            f"{values['max'][i]:.4g}"
        )
        report.warning("stats-stale", message, COMPUTE, feature=name)


def _dimensions(indices: Iterable[int], size: int) -> str:
    indices = list(indices)
    listing = ", ".join(str(i) for i in indices[:8]) + (" ..." if len(indices) > 8 else "")
    return f"{len(indices)} of {size} dimensions ({listing})"


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
