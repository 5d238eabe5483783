"""Edits a dataset into new ones. Nothing is decoded or re-encoded: every frame and value stays as it is.

    report = delete_episodes("path/to/dataset", "path/to/new", "3,7:9")
    print(report)

The originals are only read. A new folder appears when it is complete and checked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flexor.core.console import Progress
from flexor.core.errors import ConfigError
from flexor.data.check.check import check_dataset
from flexor.data.check.report import counted
from flexor.data.edit.merge import shared_features
from flexor.data.edit.output import check_targets, new_folders
from flexor.data.edit.report import EditReport, NewDataset
from flexor.data.edit.source import EditSource, Part, open_source, parts_of
from flexor.data.edit.split import divide
from flexor.data.edit.tasks import retasked, used_tasks
from flexor.data.edit.trim import TrimSettings, describe_trims, trimmed
from flexor.data.edit.write import write_parts
from flexor.data.repair.account import EpisodePlan

__all__ = ["EditReport", "delete_episodes", "merge_datasets", "retask", "split_dataset", "trim_dataset"]


def split_dataset(
    root: str | Path,
    out: str | Path,
    shares: Mapping[str, str],
    seed: int | None = None,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> EditReport:
    """Divide a dataset into folders of `out`: `shares` are a name and a fraction, number or list of episodes."""
    source = open_source(root)
    lists = divide(source, shares, seed)
    outs = [Path(out) / name for name in lists]
    check_targets(outs, [source.root])
    listed = sorted({episode for episodes in lists.values() for episode in episodes})
    parts = {part.plan.episode.index: part for part in parts_of(source, listed)}
    datasets = [
        NewDataset(folder, [parts[episode] for episode in episodes])
        for folder, episodes in zip(outs, lists.values())
    ]
    report = EditReport("split", datasets, dry_run=dry_run)
    return _write(report, _tasks_of(source), progress=progress)


def delete_episodes(
    root: str | Path,
    out: str | Path,
    episodes: str,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> EditReport:
    """Copy a dataset without some of its episodes. The others are renumbered."""
    source = open_source(root)
    deleted = source.parse(episodes, "--episodes")
    remaining = sorted(set(source.episodes) - set(deleted))
    if not remaining:
        raise ConfigError(f"--episodes={episodes} are all episodes of {root}: nothing would be left.")
    check_targets([Path(out)], [source.root])
    report = EditReport("delete", [NewDataset(Path(out), parts_of(source, remaining))], dry_run=dry_run)
    report.details = {"deleted": deleted}
    return _write(report, _tasks_of(source), progress=progress)


def merge_datasets(
    roots: Sequence[str | Path],
    out: str | Path,
    robot_type: str | None = None,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> EditReport:
    """Put the episodes of several datasets with equal features behind each other. Equal tasks become one."""
    check_targets([Path(out)], [Path(root) for root in roots])
    sources = [open_source(root) for root in roots]
    parts = [part for source in sources for part in parts_of(source)]
    report = EditReport("merge", [NewDataset(Path(out), parts)], dry_run=dry_run)
    features, robot_type, report.notes = shared_features(sources, robot_type)
    tasks = list(dict.fromkeys(task for source in sources for task in _tasks_of(source)))
    return _write(report, tasks, features, robot_type, progress)


def retask(
    root: str | Path,
    out: str | Path,
    renames: Sequence[str] = (),
    settings: Sequence[str] = (),
    dry_run: bool = False,
    progress: Progress | None = None,
) -> EditReport:
    """Copy a dataset with other tasks: `renames` are texts old=new, `settings` are EPISODES=text."""
    source = open_source(root)
    check_targets([Path(out)], [source.root])
    parts, lines = retasked(parts_of(source), renames, settings)
    report = EditReport("tasks", [NewDataset(Path(out), parts)], dry_run=dry_run, lines=lines)
    return _write(report, used_tasks(parts), progress=progress)


def trim_dataset(
    root: str | Path,
    out: str | Path | None,
    settings: TrimSettings,
    episodes: str | None = None,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> EditReport:
    """Copy a dataset without the idle beginnings and ends of its episodes."""
    source = open_source(root)
    selected = set(source.episodes if episodes is None else source.parse(episodes, "--episodes"))
    if out is not None:
        check_targets([Path(out)], [source.root])
    trims = trimmed(parts_of(source), settings, selected)
    folder = Path("the new dataset") if out is None else Path(out)
    report = EditReport("trim", [NewDataset(folder, [trim.part for trim in trims])], dry_run=dry_run)
    report.lines, report.details = describe_trims(trims, source.layout.fps, dry_run)
    return _write(report, _tasks_of(source), progress=progress)


def _tasks_of(source: EditSource) -> list[str]:
    assert source.plan is not None
    return list(source.plan.tasks)


def _write(
    report: EditReport,
    tasks: Sequence[str],
    features: dict[str, dict[str, Any]] | None = None,
    robot_type: str | None = None,
    progress: Progress | None = None,
) -> EditReport:
    """Write and check the datasets of a report, unless it is of a dry run."""
    first = report.datasets[0].parts[0].source
    assert first.plan is not None
    if features is None:
        features, robot_type = first.plan.columns.features, first.layout.info.get("robot_type")
    sources = dict.fromkeys(part.source for dataset in report.datasets for part in dataset.parts)
    report.notes += [note for source in sources for note in _changes(source)]
    if report.dry_run:
        return report
    total, done = sum(dataset.frames for dataset in report.datasets), 0

    def written(rows: int) -> None:
        nonlocal done
        done += rows
        if progress:
            progress(done, total)

    with new_folders([dataset.folder for dataset in report.datasets]) as folders:
        for dataset, folder in zip(report.datasets, folders):
            notes = write_parts(dataset.parts, folder, tasks, features, robot_type, written)
            report.notes += [note for note in notes if note not in report.notes]
            dataset.check = check_dataset(folder, deep=False)
            dataset.check.root = dataset.folder
    return report


def _changes(source: EditSource) -> list[str]:
    """What is not as in the source, because its metadata or clocks are not as they should be."""
    assert source.plan is not None
    notes = [f"{source.root}: {note}" for note in source.plan.notes if "copied unchanged" not in note]
    if source.layout.version != "v3.0":
        notes.append(f"{source.root}: converted from {source.layout.version} to v3.0")
    groups: dict[str, list[EpisodePlan]] = {}
    for plan in source.plan.included:
        for change in plan.repairs:
            groups.setdefault(change, []).append(plan)
    for change, plans in groups.items():
        notes.append(f"{source.root}: {counted(len(plans), 'episode')}: {change}")
    return notes


def tasks_table(root: str | Path) -> list[tuple[str, int]]:
    """The tasks of a dataset, and how many episodes have each."""
    parts: list[Part] = parts_of(open_source(root))
    return list(NewDataset(Path(root), parts).tasks().items())
