"""What is wrong with a dataset, found before training finds it.

    report = check_dataset("path/to/dataset")
    print(report)
    report.write_good_episodes("good.json")        # flexor train --dataset.episodes=@good.json

Nothing stops at the first fault: files that cannot be read are reported, and the rest is checked.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from flexor.core.console import Progress
from flexor.core.errors import DatasetError
from flexor.data.check.layout import Episode, Layout, read_layout
from flexor.data.check.problems import CheckReport, Problem
from flexor.data.check.tables import OWN_COLUMNS, Tables, check_tables
from flexor.data.check.videos import check_videos
from flexor.data.format.metadata import Feature

__all__ = ["CheckReport", "Problem", "check_dataset"]

NEEDED_STATS = ("mean", "std", "min", "max")
COMPUTE = "compute them with `flexor data stats DIR --write`"


def check_dataset(
    root: str | Path,
    *,
    deep: bool = True,
    episodes: Sequence[int] | None = None,
    progress: Progress | None = None,
) -> CheckReport:
    """Check the dataset in folder `root`, v3.0, v2.1 or v2.0.

    `deep` decodes every frame; without it only the packets of the videos are looked at, which finds
    missing and shortened files but not damaged pictures. With `episodes`, only these are judged, but the
    files they lie in are looked through whole. `progress(done, total)` counts video frames.
    """
    report = CheckReport(Path(root), deep)
    layout = read_layout(root, report)
    selected = _selected(layout, episodes)
    report.checked = [episode.index for episode in selected]
    if not layout.info:
        return report
    check_episodes(layout, report)
    check_totals(layout, report)
    tables = check_tables(layout, selected, report)
    _check_stats(layout, tables, report)
    check_videos(layout, selected, tables.timestamps, report, progress)
    check_stray_files(layout, report)
    return report


def _selected(layout: Layout, episodes: Sequence[int] | None) -> list[Episode]:
    if episodes is None:
        return layout.episodes
    wrong = sorted(set(episodes) - {episode.index for episode in layout.episodes})
    if wrong:
        raise DatasetError(
            f"{layout.root} has no episodes {wrong[:10]}: it has {len(layout.episodes)}. Correct the list."
        )
    return [episode for episode in layout.episodes if episode.index in set(episodes)]


def check_episodes(layout: Layout, report: CheckReport) -> None:
    """Numbers, lengths and rows of the episodes, as the metadata has them."""
    seen: set[int] = set()
    next_row = 0
    fix = "fetch meta/ again: episodes were added or removed without it"
    for position, episode in enumerate(layout.episodes):
        if episode.index in seen:
            report.error("episode-twice", "the metadata has it twice", fix, episode=episode.index)
        elif episode.index != position and position not in seen and position - 1 in seen | {-1}:
            what = f"episode {position} is missing: the next one is {episode.index}"
            report.error("episode-missing", what, fix)
        seen.add(episode.index)
        if episode.length < 1:
            report.error("length", f"its length is {episode.length}", fix, episode=episode.index)
        if episode.first_row != next_row:
            what = f"its rows should start at {next_row}, but dataset_from_index is {episode.first_row}"
            report.error("row-range", what, "correct meta/episodes", episode=episode.index)
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
        what = f"{name} is {declared}, but the metadata adds up to {number}"
        fix = "none needed to train with Flexor, if no episode was lost; `flexor data repair` sets it right"
        report.warning("totals", what, fix, file="meta/info.json")
    splits = layout.info.get("splits")
    for split, span in splits.items() if isinstance(splits, dict) else ():
        end = str(span).partition(":")[2]
        if end.isdigit() and int(end) > len(layout.episodes):
            what = f"the split {split!r} is {span}, but there are {len(layout.episodes)} episodes"
            report.warning("splits", what, "none needed to train with Flexor", file="meta/info.json")
    if any(not task for task in layout.tasks.values()):
        report.warning("task-empty", "a task has no text", "policies that read the task need one: add it")


def _check_stats(layout: Layout, tables: Tables, report: CheckReport) -> None:
    """Statistics are what numbers are normalised with: a wrong one spoils every sample."""
    for name, feature in layout.features.items():
        if name in OWN_COLUMNS or not name.startswith(("action", "observation")):
            continue  # the rest is not normalised
        if feature.is_video and not any((layout.root / file).is_file() for file in layout.camera_files(name)):
            continue  # a feature that is not there at all is reported as such
        if not feature.is_camera and name not in tables.low:
            continue
        if feature.is_camera and len(feature.shape) != 3:
            continue  # neither is one that can't be an image
        stats = layout.stats.get(name) or {}
        lacking = [key for key in NEEDED_STATS if key not in stats]
        if lacking:
            # A camera is often normalised with other statistics than its own, a vector never.
            say = report.warning if feature.is_camera else report.error
            what = "no statistics" if len(lacking) == len(NEEDED_STATS) else f"no {', '.join(lacking)}"
            say("stats-missing", f"it has {what}, which policies normalise with", COMPUTE, feature=name)
            continue
        try:
            values = {key: np.asarray(value, np.float64).reshape(-1) for key, value in stats.items()}
        except (TypeError, ValueError) as error:
            report.error(
                "stats-unreadable", f"its statistics are no numbers ({error})", COMPUTE, feature=name
            )
            continue
        values.pop("count", None)
        low, high = tables.low.get(name), tables.high.get(name)
        if _check_values(feature, values, report) and low is not None and high is not None:
            _check_range(name, values, low, high, report)


def _check_values(feature: Feature, values: dict[str, np.ndarray], report: CheckReport) -> bool:
    """Are the statistics finite and as many as the feature has numbers?"""
    bad = [key for key, value in values.items() if not np.isfinite(value).all()]
    if bad:
        what = f"{', '.join(bad)} are NaN or infinite, and so would be every loss"
        report.error("stats-not-finite", what, COMPUTE, feature=feature.name)
        return False
    # Of a matrix LeRobot keeps the statistics of its columns only.
    expected = feature.chw[:1] if feature.is_camera else (int(np.prod(feature.shape)), feature.shape[-1])
    wrong = {key: value.size for key, value in values.items() if value.size not in expected}
    if wrong or len({value.size for value in values.values()}) > 1:
        sizes = wrong or {key: value.size for key, value in values.items()}
        what = f"the statistics have {sizes} numbers, the feature has {expected[0]}"
        report.error("stats-shape", what, COMPUTE, feature=feature.name)
        return False
    flat = np.flatnonzero(values["std"] < 1e-8)  # less than what normalising adds to it
    if len(flat):
        what = f"{_dimensions(flat, values['std'].size)} never change: their standard deviation is 0"
        fix = "if they can change on the robot, leave them out: any deviation is divided by almost zero"
        report.warning("std-zero", what, fix, feature=feature.name)
    return True


def _check_range(
    name: str, values: dict[str, np.ndarray], low: np.ndarray, high: np.ndarray, report: CheckReport
) -> None:
    """Do the statistics belong to these data?"""
    if low.size != values["min"].size:
        return
    slack = 1e-3 * (values["max"] - values["min"]) + 1e-6
    out = (low < values["min"] - slack) | (high > values["max"] + slack)
    if out.any():
        i = int(np.argmax(out))
        what = (
            f"the data go beyond the statistics in {_dimensions(np.flatnonzero(out), out.size)}: dimension "
            f"{i} runs from {low[i]:.4g} to {high[i]:.4g}, the statistics say {values['min'][i]:.4g} to "
            f"{values['max'][i]:.4g}"
        )
        report.warning("stats-stale", what, COMPUTE, feature=name)


def _dimensions(which: Iterable[int], size: int) -> str:
    which = list(which)
    shown = ", ".join(str(i) for i in which[:8]) + (" ..." if len(which) > 8 else "")
    return f"{len(which)} of {size} dimensions ({shown})"


def check_stray_files(layout: Layout, report: CheckReport) -> None:
    """Files that no episode refers to: forgotten, or the metadata is older than they are."""
    named = {episode.data_file for episode in layout.episodes}
    named |= {span.file for episode in layout.episodes for span in episode.videos.values()}
    for folder, suffix in (("data", "*.parquet"), ("videos", "*.mp4")):
        found = [path.relative_to(layout.root).as_posix() for path in (layout.root / folder).rglob(suffix)]
        stray = sorted(file for file in found if file not in named)
        if stray and layout.episodes:
            what = f"{len(stray)} files belong to no episode, such as {stray[0]}"
            report.warning("stray-files", what, "delete them, or fetch meta/ again", file=folder)
