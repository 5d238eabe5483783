"""Faults of rows: lengths, indices, tasks, clocks, and numbers that are none."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flexor.data.check.check import check_dataset
from flexor.data.check.report import CheckReport
from support.damage import (
    DATA,
    EPISODES,
    edit_json,
    edit_table,
    set_rows,
)
from support.small_datasets import SIDE, TOP


def kinds_of(report: CheckReport) -> set[tuple]:
    return {(p.severity, p.name, p.episode, p.feature) for p in report.findings}


# --- rows, lengths and indices


@pytest.mark.parametrize("name", ["one", "v2.1", "v2.0"])
def test_lost_rows(copy, name):
    root = copy(name)
    path = root / DATA if name == "one" else root / "data/chunk-001/episode_000002.parquet"
    table = pq.read_table(path)
    keep = [i for i, e in enumerate(table["episode_index"].to_pylist()) if e != 2]
    rows = [i for i, e in enumerate(table["episode_index"].to_pylist()) if e == 2]
    pq.write_table(table.take(sorted(keep + rows[:-2])), path)
    report = check_dataset(root, deep=False)
    assert kinds_of(report) == {("error", "length", 2, None)}
    assert "5 rows, but the metadata says 7" in report.errors[0].evidence
    assert report.good_episodes == [0, 1, 3]


def test_wrong_length_in_the_metadata(copy):
    root = copy("one")
    edit_table(root / EPISODES, length=set_rows(1, 2, 8))
    report = check_dataset(root, deep=False)
    assert {("error", "length", 1, None), ("warning", "totals", None, None)} <= kinds_of(report)
    assert ("error", "row-range", 2, None) in kinds_of(report)
    assert 0 in report.good_episodes and 1 not in report.good_episodes


@pytest.mark.parametrize("column", ["frame_index", "index"])
def test_indices_that_are_not_contiguous(copy, column):
    root = copy("one")
    edit_table(root / DATA, **{column: set_rows(15, 16, 999)})
    report = check_dataset(root, deep=False)
    assert kinds_of(report) == {("error", "index", 1, column)}
    assert "after frame 2" in report.errors[0].evidence


def test_indices_that_start_wrong(copy):
    root = copy("one")
    edit_table(root / DATA, index=set_rows(12, 21, lambda v, i: v + 100))
    assert kinds_of(check_dataset(root, deep=False)) == {("error", "index", 1, "index")}


def test_unknown_task(copy):
    root = copy("one")
    edit_table(root / DATA, task_index=set_rows(21, 28, 7))
    report = check_dataset(root, deep=False)
    assert kinds_of(report) == {("error", "task-unknown", 2, "task_index")}


def test_task_that_is_no_number(copy):
    """On ARM CPUs it is 0 as an integer, which is a task."""
    root = copy("one")
    table = pq.read_table(root / DATA)
    tasks = table["task_index"].to_numpy().astype(np.float32)
    tasks[21:28] = np.nan
    position = table.column_names.index("task_index")
    pq.write_table(table.set_column(position, "task_index", pa.array(tasks)), root / DATA)
    assert ("error", "task-unknown", 2, "task_index") in kinds_of(check_dataset(root, deep=False))


def test_rows_of_unknown_episodes(copy):
    root = copy("many")
    table = pq.read_table(root / EPISODES).slice(0, 3)
    pq.write_table(table, root / EPISODES)
    edit_json(root / "meta/info.json", lambda i: i.update(total_episodes=3, total_frames=28, total_tasks=3))
    edit_json(root / "meta/info.json", lambda i: i.update(splits={}))
    report = check_dataset(root, deep=False)
    assert report.ok and {p.name for p in report.warnings} == {"stray-files"}


# --- numbers


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("name", ["one", "v2.0"])
def test_not_finite(copy, bad, name):
    root = copy(name)
    path = root / (DATA if name == "one" else "data/chunk-000/episode_000001.parquet")
    row = 14 if name == "one" else 2
    edit_table(path, action=set_rows(row, row + 1, [bad, 0.0]))
    report = check_dataset(root, deep=False)
    assert kinds_of(report) == {("error", "not-finite", 1, "action")}
    assert "1 of 18 values" in report.errors[0].evidence and "frame 2" in report.errors[0].evidence
    assert report.good_episodes == [0, 2, 3]


def test_clock_that_goes_backwards(copy):
    root = copy("one")
    edit_table(root / DATA, timestamp=set_rows(4, 5, 0.1))
    report = check_dataset(root, deep=False)
    assert ("warning", "clock-backwards", 0, "timestamp") in kinds_of(report)
    assert report.good_episodes == [0, 1, 2, 3]


def test_dropped_frames_show_as_drift(copy):
    root = copy("one")
    edit_table(root / DATA, timestamp=set_rows(16, 21, lambda v, i: v + 0.3))
    report = check_dataset(root, deep=False)
    assert ("warning", "clock-drift", 1, "timestamp") in kinds_of(report)
    assert ("warning", "clock-video", 1, TOP) in kinds_of(report)
    assert "up to 0.300 s (3.0 frames)" in report.warnings[0].evidence
    assert report.good_episodes == [0, 1, 2, 3]


@pytest.mark.parametrize("name", ["one", "v2.0"])
def test_clock_that_starts_late_is_read_anyway(copy, name):
    root = copy(name)
    path = root / (DATA if name == "one" else "data/chunk-000/episode_000000.parquet")
    edit_table(path, timestamp=set_rows(0, 12, lambda v, i: v + 0.1))
    report = check_dataset(root, deep=False)
    assert kinds_of(report) == {("warning", "clock-video", 0, TOP), ("warning", "clock-video", 0, SIDE)}
    assert "up to 0.100 s from the video" in report.warnings[0].evidence


def test_unsteady_clock(copy):
    root = copy("one")
    edit_table(root / DATA, timestamp=set_rows(12, 21, lambda v, i: v + 0.01 * (i % 2)))
    report = check_dataset(root, deep=False)
    assert kinds_of(report) == {("warning", "clock-jitter", 1, TOP), ("warning", "clock-jitter", 1, SIDE)}
    assert "up to 10.00 ms" in report.warnings[0].evidence


def test_wrong_place_in_the_video(copy):
    root = copy("one")
    edit_table(root / EPISODES, **{f"videos/{TOP}/from_timestamp": set_rows(2, 3, 1.5)})
    report = check_dataset(root, deep=False)
    assert ("error", "video-overlap", 1, TOP) in kinds_of(report)
    assert ("error", "video-overlap", 2, TOP) in kinds_of(report)


def test_wrong_end_in_the_video(copy):
    root = copy("one")
    edit_table(root / EPISODES, **{f"videos/{TOP}/to_timestamp": set_rows(2, 3, 9.0)})
    assert kinds_of(check_dataset(root, deep=False)) == {("warning", "video-span", 2, TOP)}
