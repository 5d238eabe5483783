"""A dataset as one HTML page: filmstrips, curves, statistics, tasks, and the findings of the check."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from flexor.core.console import Progress
from flexor.core.errors import ConfigError
from flexor.core.machine import usable_cores
from flexor.data.check.check import check_dataset
from flexor.data.check.report import CheckReport, counted, group_findings, ranges
from flexor.data.dataset import Dataset, open_dataset
from flexor.data.show.budget import PAGE_BYTES, PageBudget, ThumbnailLayout, page_budget, thumbnail_layout
from flexor.data.show.curves import CurveFeature, curve_features, episode_curves, frames_per_point
from flexor.data.show.statistics import feature_statistics, length_histogram, task_counts
from flexor.data.show.strips import Strip, depth_ends, make_strip
from flexor.pages.images import as_base64
from flexor.pages.page import check_writable, page, write_page

STYLES = (("flexor.data.show", "show.css"),)
SCRIPTS = (("flexor.data.show", "show.js"),)
LEVEL_BINS = 32
MAX_TASKS = 500
MAX_GROUPS = 100
MAX_GROUP_EPISODES = 300
MAX_MARKS = 20  # of an episode
MAX_CAMERAS = 16
MAX_TEXT = 300  # of a text from the dataset
MIN_PAGE_BYTES = 2_000_000


def show_dataset(
    root: str | Path,
    output: Path,
    *,
    episodes: Sequence[int] | None = None,
    limit: int = PAGE_BYTES,
    deep: bool = False,
    checking: Progress | None = None,
    drawing: Progress | None = None,
) -> dict[str, Any]:
    """Write the page to `output`, in at most `limit` bytes; return a summary.

    The check decodes every frame only if `deep`. Unreadable episodes are left out; the check says why.
    """
    if limit < MIN_PAGE_BYTES:
        raise ConfigError(f"a page needs at least {MIN_PAGE_BYTES / 1e6:g} MB: choose a larger --max-mb.")
    check_writable(output)
    report = check_dataset(root, deep=deep, episodes=episodes, progress=checking)
    dataset = open_dataset(root=root, episodes=episodes, on_bad_episode="skip")
    data = page_data(dataset, report, limit, drawing)
    text = page(data["title"], data=data, styles=STYLES, scripts=SCRIPTS)
    write_page(output, text)
    return {
        "file": str(output),
        "bytes": output.stat().st_size,
        "episodes": len(dataset.episodes),
        "episodes_shown": len(data["episodes"]),
        "skipped_episodes": sorted(dataset.skipped),
        "errors": len(report.errors),
        "warnings": len(report.warnings),
    }


def render(result: dict[str, Any]) -> str:
    shown_count, total = result["episodes_shown"], result["episodes"]
    selection = f"{shown_count} of {total} episodes (--episodes chooses)"
    extent = counted(total, "episode") if shown_count == total else selection
    counts = f"{counted(result['errors'], 'error')}, {counted(result['warnings'], 'warning')}"
    return f"{result['file']}: {result['bytes'] / 1e6:.1f} MB, {extent}; the check found {counts}"


def page_data(
    dataset: Dataset, report: CheckReport, limit: int = PAGE_BYTES, progress: Progress | None = None
) -> dict[str, Any]:
    """The input of the page's script, as plain JSON values."""
    budget = page_budget(dataset.episodes.length.tolist(), limit)
    features = curve_features(dataset)
    cameras = dataset.cameras[:MAX_CAMERAS]
    sizes = {name: dataset.features[name].chw[1:] for name in cameras}
    sheet = thumbnail_layout(sizes, budget.image_bytes) if sizes else None
    marks = frame_marks(report, [int(dataset.episodes.index[at]) for at in budget.episodes])
    strips = _strips(dataset, budget, sheet, marks, progress)
    tasks = task_counts(dataset)[:MAX_TASKS]
    numbers = {task["text"]: number for number, task in enumerate(tasks)}
    return {
        "title": dataset.root.resolve().name or str(dataset.root),
        "facts": _facts(dataset),
        "notes": _notes(dataset, budget, features),
        "tasks": [task | {"text": _short(task["text"])} for task in tasks],
        "check": check_to_json(report),
        "lengths": length_histogram(dataset),
        "statistics": feature_statistics(features),
        "cameras": [_camera(dataset, name, sheet, strips) for name in cameras] if sheet else [],
        "sheet_height": sheet.height if sheet else 0,
        "curves": [
            {"name": f.name, "names": f.names, "low": f.low.tolist(), "high": f.high.tolist()}
            for f in features
        ],
        "episodes": [
            _episode(dataset, position, features, budget, strip, numbers)
            | {"marks": marks.get(int(dataset.episodes.index[position]), [])}
            for position, strip in zip(budget.episodes, strips)
        ],
    }


def _strips(
    dataset: Dataset,
    budget: PageBudget,
    sheet: ThumbnailLayout | None,
    marks: Mapping[int, list[dict[str, Any]]],
    progress: Progress | None,
) -> list[Strip]:
    """The strips of all shown episodes, decoded in threads."""
    if sheet is None:
        return [Strip([]) for _ in budget.episodes]
    strips: list[Strip] = []
    with ThreadPoolExecutor(min(usable_cores(), 16), thread_name_prefix="strips") as threads:
        nbytes = budget.image_bytes
        jobs = []
        for at in budget.episodes:
            marked = [mark["frame"] for mark in marks.get(int(dataset.episodes.index[at]), [])]
            jobs.append(threads.submit(make_strip, dataset, at, sheet, nbytes, marked))
        try:
            for job in jobs:
                strips.append(job.result())
                if progress:
                    progress(len(strips), len(jobs))
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            raise
    return strips


def _facts(dataset: Dataset) -> dict[str, Any]:
    return {
        "root": str(dataset.root.resolve()),
        "version": dataset.version,
        "robot": dataset.robot_type,
        "fps": dataset.fps,
        "episodes": len(dataset.episodes),
        "frames": len(dataset),
        "shortest": int(dataset.episodes.length.min()),
        "longest": int(dataset.episodes.length.max()),
    }


def _notes(dataset: Dataset, budget: PageBudget, features: list[CurveFeature]) -> list[str]:
    """What the page does not show."""
    notes = []
    if len(budget.episodes) < len(dataset.episodes):
        notes.append(
            f"The page shows {len(budget.episodes)} of {len(dataset.episodes)} episodes, evenly spaced. "
            "Select others with --episodes."
        )
    if dataset.skipped:
        notes.append(f"{len(dataset.skipped)} episodes can't be read: {ranges(sorted(dataset.skipped))}.")
    notes += [f"{name} can't be read: {why}." for name, why in dataset.absent.items()]
    if len(dataset.cameras) > MAX_CAMERAS:
        notes.append(f"The page shows {MAX_CAMERAS} of {len(dataset.cameras)} cameras.")
    notes += [
        f"The page shows the first {len(feature.names)} of {feature.size} values of {feature.name}."
        for feature in features
        if len(feature.names) < feature.size
    ]
    if len(dataset.tasks) > MAX_TASKS:
        notes.append(f"The page lists the {MAX_TASKS} most frequent tasks.")
    return notes


def check_to_json(report: CheckReport) -> dict[str, Any]:
    groups = []
    for group in group_findings(report.findings)[:MAX_GROUPS]:
        first = group[0]
        messages = list(dict.fromkeys(finding.evidence for finding in group))
        episodes = sorted({finding.episode for finding in group if finding.episode is not None})
        about = {"severity": first.severity, "kind": first.name, "fix": first.fix}
        about |= {"feature": _short(first.feature or ""), "file": _short(first.file or "")}
        texts = [_short(message) for message in messages[:3]]
        more = max(len(messages) - 3, 0)
        frames = {
            f.episode: f.frame for f in reversed(group) if f.episode is not None and f.frame is not None
        }
        places = [[episode, frames.get(episode)] for episode in episodes[:MAX_GROUP_EPISODES]]
        groups.append({**about, "episodes": places, "messages": texts, "more": more})
    counts = {"errors": len(report.errors), "warnings": len(report.warnings)}
    return {"ok": report.ok, "deep": report.deep, **counts, "groups": groups}


def frame_marks(report: CheckReport, episodes: Sequence[int]) -> dict[int, list[dict[str, Any]]]:
    """What the check found at a frame, by episode and in order."""
    marks: dict[int, list[dict[str, Any]]] = {episode: [] for episode in episodes}
    for finding in sorted(report.findings, key=lambda finding: finding.frame or 0):
        if finding.frame is None or finding.episode not in marks:
            continue
        about = {"frame": finding.frame, "severity": finding.severity, "kind": finding.name}
        about |= {"feature": _short(finding.feature or ""), "text": _short(finding.evidence)}
        if about not in marks[finding.episode] and len(marks[finding.episode]) < MAX_MARKS:
            marks[finding.episode].append(about)
    return marks


def _camera(dataset: Dataset, name: str, sheet: ThumbnailLayout, strips: list[Strip]) -> dict[str, Any]:
    _, height, width = dataset.features[name].chw
    levels = np.sum([strip.levels[name] for strip in strips], axis=0)  # [3, 256]
    counts = levels.reshape(3, LEVEL_BINS, -1).sum(-1).tolist()
    return {
        "name": name,
        "height": height,
        "width": width,
        "thumbnail_width": sheet.widths[name],
        "depth": _depth_text(dataset, name),
        "histograms": [{"low": 0, "high": 256, "counts": channel} for channel in counts],
    }


def _depth_text(dataset: Dataset, name: str) -> str | None:
    """The meaning of a depth map's colours."""
    if dataset.features[name].depth is None:
        return None
    near, far = depth_ends(dataset, name)
    unit = dataset.store.depth_unit
    return f"depth: yellow is {near:.4g} {unit}, violet {far:.4g} {unit}"


def _episode(
    dataset: Dataset,
    position: int,
    features: list[CurveFeature],
    budget: PageBudget,
    strip: Strip,
    task_numbers: dict[str, int],
) -> dict[str, Any]:
    length, tasks = int(dataset.episodes.length[position]), dict.fromkeys(dataset.episodes.tasks[position])
    every = frames_per_point(length, budget.points(sum(len(f.names) for f in features)))
    codes = episode_curves(features, int(dataset.episodes.start[position]), length, every)
    return {
        "index": int(dataset.episodes.index[position]),
        "length": length,
        "tasks": [task_numbers[task] for task in tasks if task in task_numbers][:5],
        "frames": strip.frames,
        "image": as_base64(strip.image),
        "problems": {camera: _short(why) for camera, why in strip.problems.items()},
        "every": every,
        "curves": as_base64(codes.astype("<u2").tobytes()),
    }


def _short(text: str) -> str:
    return text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT - 1]}…"
