"""Columns that are in the tables but not declared are read, not derived or called missing."""

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flexor.core.errors import DatasetError
from flexor.data.check.check import check_dataset
from flexor.data.dataset import open_dataset
from flexor.data.repair.repair import repair_dataset
from support.small_datasets import TOP, write


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    return write(tmp_path_factory.mktemp("undeclared") / "data", data_files_mb=1e-6)


@pytest.fixture
def root(original, tmp_path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "data"))


def undeclare(root: Path, *names: str) -> None:
    path = root / "meta/info.json"
    info = json.loads(path.read_text())
    for name in names:
        del info["features"][name]
    path.write_text(json.dumps(info))


def kinds_of(root: Path) -> set[tuple]:
    return {(finding.severity, finding.name) for finding in check_dataset(root, deep=False).findings}


@pytest.mark.parametrize(
    "names", [("action",), ("observation.state", "next.done"), ("timestamp", "task_index")]
)
def test_they_are_read_like_declared_ones(original, root, names, caplog):
    undeclare(root, *names)
    expected, dataset = open_dataset(root=original), open_dataset(root=root)
    assert not dataset.absent and "missing" not in caplog.text
    for name in names:
        np.testing.assert_array_equal(dataset.columns[name], expected.columns[name])
        assert dataset.columns[name].dtype == expected.columns[name].dtype
        assert dataset.features[name].shape == expected.features[name].shape
    assert dataset.read([3, 4], {"action": [0, 1]})["action"].shape == (2, 2, 2)
    assert kinds_of(root) == {("warning", "column-undeclared")}
    repaired = root.parent / "repaired"
    repair_dataset(root, repaired)
    assert kinds_of(repaired) == set()


def test_the_clock_is_that_of_the_table(original, root):
    """A clock that drifts, but is not declared: by time, it was as if it did not."""
    undeclare(root, "timestamp")
    for file in (root / "data").rglob("*.parquet"):
        table = pq.read_table(file)
        position = table.column_names.index("timestamp")
        clock = pa.array(np.array(table["timestamp"]) * 0.93, pa.float32())
        pq.write_table(table.set_column(position, "timestamp", [clock]), file)
    rows = np.arange(10)
    frames = open_dataset(root=root).read(rows)[TOP]
    np.testing.assert_array_equal(frames, open_dataset(root=original).read(rows)[TOP])
    assert ("warning", "clock-drift") in kinds_of(root)
    with pytest.raises(DatasetError, match="timestamps drift more than half a frame"):
        open_dataset(root=root, frame_by="time").read(rows)
    open_dataset(root=original, frame_by="time").read(rows)


def test_what_not_all_files_have_or_has_no_numbers_is_left_alone(original, root):
    undeclare(root, "timestamp", "action")
    first, *rest = sorted((root / "data").rglob("*.parquet"))
    table = pq.read_table(first).append_column(
        "observation.note", pa.array(["x"] * pq.read_metadata(first).num_rows)
    )
    pq.write_table(table, first)
    pq.write_table(pq.read_table(rest[0]).drop_columns(["action"]), rest[0])
    dataset = open_dataset(root=root)
    assert {"action", "observation.note"} & {*dataset.features} == set()
    np.testing.assert_array_equal(
        dataset.columns["timestamp"], open_dataset(root=original).columns["timestamp"]
    )
