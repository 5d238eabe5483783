"""Files that are not where they should be, or not what they should be: named, and repaired."""

import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from flexor.data.check.check import check_dataset
from flexor.data.dataset import open_dataset
from flexor.data.repair.repair import repair_dataset
from support.damage import EPISODES
from support.small_datasets import LENGTHS, write


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return write(tmp_path_factory.mktemp("originals") / "one")


@pytest.fixture
def copy(original, tmp_path):
    return Path(shutil.copytree(original, tmp_path / "copy"))


def test_a_copy_beside_the_episode_metadata_is_named_and_ignored(copy):
    assert check_dataset(copy, deep=False).findings == []
    table = pq.read_table(copy / EPISODES)
    pq.write_table(table, copy / "meta/episodes/file-000.parquet")
    report = check_dataset(copy, deep=False)
    (finding,) = report.findings
    assert (finding.severity, finding.name, finding.file) == (
        "warning",
        "stray-files",
        "meta/episodes/file-000.parquet",
    )
    assert report.ok and len(open_dataset(root=copy)) == sum(LENGTHS)


def test_a_copy_of_an_older_dataset_is_not_read(copy):
    """Episodes that the dataset no longer has: reading both made hundreds of errors."""
    table = pq.read_table(copy / EPISODES).to_pylist()
    old = [row | {"length": row["length"] + 3, "data/file_index": 7} for row in table]
    pq.write_table(pq.read_table(copy / EPISODES).from_pylist(old), copy / "meta/episodes/file-000.parquet")
    report = check_dataset(copy)
    assert [finding.file for finding in report.findings] == ["meta/episodes/file-000.parquet"]
    dataset = open_dataset(root=copy)
    assert dataset.episodes.length.tolist() == list(LENGTHS)
    repaired = repair_dataset(copy, copy.with_name("repaired"))
    assert repaired.ok and len(repaired.included) == len(LENGTHS)
    assert "meta/episodes/file-000.parquet" in str(repaired)
    assert not (repaired.out / "meta/episodes/file-000.parquet").exists()


def test_episode_metadata_without_a_chunk_is_read_though_lerobot_does_not(copy):
    shutil.move(copy / EPISODES, copy / "meta/episodes/file-000.parquet")
    report = check_dataset(copy, deep=False)
    assert [(f.severity, f.name) for f in report.findings] == [("warning", "misplaced")]
    dataset = open_dataset(root=copy)
    repaired = repair_dataset(copy, copy.with_name("repaired"))
    assert (repaired.out / EPISODES).is_file() and check_dataset(repaired.out).findings == []
    again = open_dataset(root=repaired.out)
    assert np.array_equal(again.columns["action"], dataset.columns["action"])
