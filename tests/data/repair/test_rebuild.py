"""Metadata that is lost is rebuilt from tables and videos, or the repair says why that can't be done."""

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from flexor.core.errors import DatasetError
from flexor.data.check.check import check_dataset
from flexor.data.dataset import Dataset, open_dataset
from flexor.data.repair.repair import repair_advice, repair_dataset
from support.damage import EPISODES, VIDEO, edit_json, truncate
from support.legacy import to_v2
from support.small_datasets import LENGTHS, STILL, TASKS, TOP, write


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    root = tmp_path_factory.mktemp("originals")
    write(root / "one", still=True)
    write(root / "many", data_files_mb=1e-6, video_files_mb=1e-6)
    to_v2(root / "many", root / "v2.1", "v2.1")
    return root


def lose_all(root: Path) -> None:
    shutil.rmtree(root / "meta")


def lose_info(root: Path) -> None:
    (root / "meta/info.json").unlink()


def lose_episodes(root: Path) -> None:
    shutil.rmtree(root / "meta/episodes", ignore_errors=True)
    (root / "meta/episodes.jsonl").unlink(missing_ok=True)


def cut_info(root: Path) -> None:
    truncate(root / "meta/info.json", 0.5)


def lose_rate(root: Path) -> None:
    edit_json(root / "meta/info.json", lambda info: info.pop("fps"))


def assert_same(ours: Dataset, theirs: Dataset) -> None:
    assert ours.fps == theirs.fps and ours.episodes.length.tolist() == theirs.episodes.length.tolist()
    assert ours.cameras == theirs.cameras or {*ours.cameras} == {*theirs.cameras}
    left, right = (dataset.read(np.arange(len(dataset))) for dataset in (ours, theirs))
    for name in (*theirs.cameras, "observation.state", "action", "next.done", "task_index", "timestamp"):
        assert np.array_equal(left[name], right[name]), name


@pytest.mark.parametrize("lose", [lose_all, lose_info, lose_episodes, cut_info, lose_rate])
@pytest.mark.parametrize("kind", ["one", "many", "v2.1"])
def test_lost_metadata_is_rebuilt(originals, tmp_path, kind, lose):
    root = Path(shutil.copytree(originals / kind, tmp_path / "data"))
    lose(root)
    check = check_dataset(root, deep=False)
    assert not check.ok and "NEW_FOLDER` repairs what it can, and keeps 4 of 4" in repair_advice(check)
    report = repair_dataset(root, tmp_path / "repaired")
    assert report.ok and report.check.findings == [], str(report)
    ours = open_dataset(root=report.out)
    assert_same(ours, open_dataset(root=originals / kind))
    named = ["task 0", "task 1", "task 0", "task 2"] if lose is lose_all else list(TASKS)
    assert [tasks[0] for tasks in ours.episodes.tasks] == named
    assert ("texts of tasks are unknown: task 0, task 1, task 2" in str(report)) == (lose is lose_all)


def test_what_is_not_lost_is_not_rebuilt(originals, tmp_path):
    notes = repair_dataset(originals / "one", tmp_path / "repaired", dry_run=True).notes
    assert not any("rebuilt" in note or "unknown" in note for note in notes)


def test_a_camera_that_lacks_frames_is_not_guessed(originals, tmp_path):
    root = Path(shutil.copytree(originals / "many", tmp_path / "data"))
    lose_all(root)
    videos = root / f"videos/{TOP}/chunk-000"
    shutil.copy(videos / "file-001.mp4", videos / "file-000.mp4")
    with pytest.raises(DatasetError, match=rf"{TOP}, file-000.mp4: its {LENGTHS[1]} frames are not those"):
        repair_dataset(root, tmp_path / "repaired")
    assert repair_advice(check_dataset(root, deep=False)) == ""


def test_pointers_and_folders_without_tables_are_not_rebuilt(originals, tmp_path):
    root = Path(shutil.copytree(originals / "one", tmp_path / "data"))
    lose_all(root)
    (root / VIDEO).write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(DatasetError, match="git lfs install"):
        repair_dataset(root, tmp_path / "repaired")
    shutil.rmtree(root / "data")
    with pytest.raises(DatasetError, match=r"info\.json: the file is missing"):
        repair_dataset(root, tmp_path / "repaired")
    assert repair_advice(check_dataset(root, deep=False)) == ""


def test_images_in_the_tables_are_declared(originals, tmp_path):
    root = Path(shutil.copytree(originals / "one", tmp_path / "data"))
    lose_all(root)
    repair_dataset(root, tmp_path / "repaired")
    info = json.loads((tmp_path / "repaired/meta/info.json").read_text())
    assert info["features"][STILL]["dtype"] == "image" and info["features"][STILL]["shape"] == [32, 48, 3]
    assert info["features"]["action"] | {"names": None} == info["features"]["action"]
    assert pq.read_table(tmp_path / "repaired" / EPISODES).num_rows == 4
