"""Edit small datasets: every row and frame of the result is one of the original, bit for bit.

The toy has 4 episodes of 12, 9, 7 and 10 frames at 10 fps, and two cameras.
"""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from flexor.cli import main as cli
from flexor.core.errors import ConfigError, DatasetError
from flexor.data.dataset import open_dataset
from flexor.data.edit.edit import (
    delete_episodes,
    merge_datasets,
    retask,
    split_dataset,
)
from flexor.data.edit.output import new_folders
from flexor.data.video.decode import index_video
from support.damage import DATA, EPISODES, edit_json, edit_table, set_rows, truncate
from support.edits import assert_copied, contents
from support.limits import LIMIT_S
from support.small_datasets import SIDE, STILL, TASKS, TOP

KINDS = ["one", "many", "still", "gop30", "av1", "b-frames", "v2.1", "v2.0"]


@pytest.mark.parametrize("kind", KINDS)
def test_deleting_leaves_the_others_as_they_are(originals, tmp_path, kind):
    root = originals / kind
    before = contents(root)
    report = delete_episodes(root, tmp_path / "new", "0,2")
    assert contents(root) == before
    assert_copied(report, [root], skip=("task_index",))
    assert [part.plan.episode.index for part in report.datasets[0].parts] == [1, 3]
    stats = json.loads((tmp_path / "new/meta/stats.json").read_text())
    dataset = open_dataset(root=tmp_path / "new")
    np.testing.assert_allclose(stats["action"]["mean"], dataset.columns["action"].mean(axis=0), atol=1e-6)
    np.testing.assert_allclose(stats["action"]["std"], dataset.columns["action"].std(axis=0), atol=1e-6)
    images = dataset.read(np.arange(len(dataset)))[TOP] / 255
    np.testing.assert_allclose(np.ravel(stats[TOP]["mean"]), images.mean(axis=(0, 2, 3)), atol=0.02)


def test_statistics_of_episodes_are_those_of_the_original(originals, tmp_path):
    """Written before the frames were encoded, they can't be computed from the copy."""
    delete_episodes(originals / "one", tmp_path / "new", "1")
    old = pq.read_table(originals / "one" / EPISODES).to_pylist()
    new = pq.read_table(tmp_path / "new" / EPISODES).to_pylist()
    for ours, theirs in zip(new, [old[0], old[2], old[3]], strict=True):
        for key in ("mean", "std", "min", "max", "q50", "count"):
            for name in (TOP, SIDE, "action", "observation.state"):
                np.testing.assert_allclose(
                    ours[f"stats/{name}/{key}"], theirs[f"stats/{name}/{key}"], rtol=1e-12
                )


def test_missing_statistics_are_computed(originals, tmp_path):
    delete_episodes(originals / "v2.0", tmp_path / "new", "1")
    stats = json.loads((tmp_path / "new/meta/stats.json").read_text())
    expected = json.loads((originals / "one/meta/stats.json").read_text())
    assert {*expected} == {*stats}
    assert np.allclose(stats[TOP]["mean"], expected[TOP]["mean"], atol=0.05)


@pytest.mark.parametrize("kind", ["many", "v2.0"])
def test_an_episode_that_cannot_be_copied_is_named_and_can_be_deleted(originals, tmp_path, kind):
    root = shutil.copytree(originals / kind, tmp_path / kind)
    sorted(root.rglob(f"*{SIDE}/**/*2.mp4"))[0].unlink()
    with pytest.raises(DatasetError, match=r"1 episode can't be copied \(2\).*2.mp4 is missing.*repair"):
        delete_episodes(root, tmp_path / "new", "0")
    assert not (tmp_path / "new").exists()
    assert_copied(delete_episodes(root, tmp_path / "new", "2"), [root], skip=("task_index",))


# --- split


def test_parts_are_datasets(originals, tmp_path):
    root = originals / "one"
    report = split_dataset(root, tmp_path / "parts", {"train": "0.75", "val": "rest"})
    assert_copied(report, [root])
    assert sorted(path.name for path in (tmp_path / "parts").iterdir()) == ["train", "val"]
    assert [part.plan.episode.index for part in report.datasets[0].parts] == [0, 1, 2]
    assert json.loads((tmp_path / "parts/val/meta/info.json").read_text())["total_episodes"] == 1


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        ({"a": "0.5", "b": "0.5"}, [[0, 1], [2, 3]]),
        ({"a": "0.3", "b": "0.3", "c": "0.4"}, [[0], [1], [2, 3]]),
        ({"a": "3", "b": "1"}, [[0, 1, 2], [3]]),
        ({"a": "1", "b": "1"}, [[0], [1]]),
        ({"a": "3,1", "b": "rest"}, [[1, 3], [0, 2]]),
        ({"a": "2:", "b": "0.5"}, [[2, 3], [0, 1]]),
        ({"a": "[0]", "b": "1", "c": "rest"}, [[0], [1], [2, 3]]),
    ],
)
def test_shares(originals, tmp_path, shares, expected):
    report = split_dataset(originals / "one", tmp_path / "parts", shares, dry_run=True)
    assert [[p.plan.episode.index for p in dataset.parts] for dataset in report.datasets] == expected
    assert not (tmp_path / "parts").exists()


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ({}, "Name the parts"),
        ({"a": "0.9", "b": "0.2"}, "add up to 1.1"),
        ({"a": "0.01", "b": "rest"}, "--a=0.01: no episode is left for it; the dataset has 4"),
        ({"a": "5"}, "need 5 episodes, but 4 of 4"),
        ({"a": "0:2", "b": "1,3"}, "Episode 1 is in --a and in --b"),
        ({"a": "7,8"}, "has no episodes 7-8"),
        ({"a": "most"}, "is not a share of a dataset"),
        ({"a": "1.5"}, "a fraction is more than 0"),
        ({"a": "rest", "b": "rest"}, "Only one"),
        ({"a/b": "0.5"}, "name of a folder"),
    ],
)
def test_shares_that_make_no_sense(originals, tmp_path, shares, message):
    with pytest.raises(ConfigError, match=message):
        split_dataset(originals / "one", tmp_path / "parts", shares)


def test_a_split_by_lot_depends_on_the_seed_alone(originals, tmp_path):
    def parts(seed: int) -> list[list[int]]:
        report = split_dataset(originals / "one", tmp_path / "p", {"a": "2", "b": "rest"}, seed, dry_run=True)
        return [[part.plan.episode.index for part in dataset.parts] for dataset in report.datasets]

    assert parts(1) == parts(1)
    assert len({str(parts(seed)) for seed in range(10)}) > 2
    assert all(
        sorted(episode for part in parts(seed) for episode in part) == [0, 1, 2, 3] for seed in range(10)
    )


def test_split_on_the_command_line(originals, tmp_path, capsys):
    words = ["data", "split", str(originals / "one"), str(tmp_path / "p"), "--train_set", "3", "--val=rest"]
    assert cli.main([*words, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [(Path(d["folder"]).name, d["episodes"]) for d in result["datasets"]] == [
        ("train_set", 3),
        ("val", 1),
    ]
    words = ["delete", str(originals / "one"), str(tmp_path / "q"), "--episodes=0", "--val=1"]
    assert cli.main(["data", *words]) == 2 and "Unknown option --val" in capsys.readouterr().err


# --- merge


def test_merged_datasets(originals, tmp_path):
    roots = [originals / kind for kind in ("one", "v2.1", "gop30", "b-frames")]
    report = merge_datasets(roots, tmp_path / "new")
    assert_copied(report, roots, skip=("task_index",))
    assert len(report.datasets[0].parts) == 16
    dataset = open_dataset(root=tmp_path / "new")
    assert dataset.tasks == ["push", "pull", "lift"]  # united
    assert list(dataset.episodes.tasks) == [[task] for task in TASKS] * 4


def test_tasks_are_united_by_their_text(originals, tmp_path):
    retask(originals / "one", tmp_path / "other", ["push=shove"])
    merge_datasets([tmp_path / "other", originals / "one"], tmp_path / "new")
    dataset = open_dataset(root=tmp_path / "new")
    assert dataset.tasks == ["shove", "pull", "lift", "push"]
    tasks = dataset.read(dataset.episodes.start)["task"]
    assert list(tasks) == ["shove", "pull", "shove", "lift", *TASKS]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda i: i["features"]["action"].update(names=["u", "w"]),
            r"action: names is \['u', 'v'\] in .*one",
        ),
        (
            lambda i: i["features"]["action"].update(dtype="float64"),
            "action: dtype is float32 in .*one and float64",
        ),
        (lambda i: i.update(robot_type="so101"), "robot_type differs: None, so101"),
    ],
)
def test_a_difference_is_named(originals, tmp_path, change, message):
    other = shutil.copytree(originals / "one", tmp_path / "other")
    edit_json(other / "meta/info.json", change)
    with pytest.raises(DatasetError, match=message):
        merge_datasets([originals / "one", other], tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_camera_that_one_lacks_is_named(originals, tmp_path):
    with pytest.raises(DatasetError, match=rf"one has no {STILL}, which .*still has.*mixture"):
        merge_datasets([originals / "one", originals / "still"], tmp_path / "new")


def test_robots_may_be_named(originals, tmp_path):
    other = shutil.copytree(originals / "one", tmp_path / "other")
    edit_json(other / "meta/info.json", lambda info: info.update(robot_type="so101"))
    merge_datasets([originals / "one", other], tmp_path / "new", robot_type="so101")
    assert open_dataset(root=tmp_path / "new").robot_type == "so101"


# --- tasks


def test_tasks_are_renamed_and_set(originals, tmp_path):
    root = originals / "one"
    report = retask(root, tmp_path / "new", ["push=push the cube"], ["3:=lift = the cube", "1=push the cube"])
    assert_copied(report, [root], skip=("task", "task_index"))
    dataset = open_dataset(root=tmp_path / "new")
    assert dataset.tasks == ["push the cube", "lift = the cube"]
    expected = [["push the cube"], ["push the cube"], ["push the cube"], ["lift = the cube"]]
    assert dataset.episodes.tasks == expected
    assert list(dataset.read(dataset.episodes.end - 1)["task"]) == [task for (task,) in expected]


def test_an_equals_sign_in_a_task(originals, tmp_path):
    retask(originals / "one", tmp_path / "a", ["push=x=1"])
    retask(tmp_path / "a", tmp_path / "b", ["x=1=x=2"])
    assert open_dataset(root=tmp_path / "b").tasks[0] == "x=2"


def test_an_episode_with_several_tasks_keeps_them(originals, tmp_path):
    root = shutil.copytree(originals / "one", tmp_path / "one")
    edit_table(root / DATA, task_index=set_rows(0, 6, 1))
    edit_table(root / EPISODES, tasks=set_rows(0, 1, ["pull", "push"]))
    retask(root, tmp_path / "new", ["pull=draw"])
    dataset = open_dataset(root=tmp_path / "new")
    assert dataset.episodes.tasks[0] == ["draw", "push"]
    assert list(dataset.read(np.arange(12))["task"]) == ["draw"] * 6 + ["push"] * 6


@pytest.mark.parametrize(
    ("renames", "settings", "message"),
    [
        ([], [], "Give --rename"),
        (["pus=x"], [], "no episode has this task. The tasks are 'push', 'pull', 'lift'"),
        (["push"], [], "OLD=NEW"),
        (["push="], [], "the new text is empty"),
        (["push=a", "push=b"], [], "'push' is renamed twice"),
        ([], ["0:5"], "give EPISODES"),
        ([], ["0,9=x"], "has no episodes 9"),
    ],
)
def test_tasks_that_make_no_sense(originals, tmp_path, renames, settings, message):
    with pytest.raises(ConfigError, match=message):
        retask(originals / "one", tmp_path / "new", renames, settings)


def test_tasks_are_listed(originals, capsys):
    assert cli.main(["data", "tasks", str(originals / "one"), "--json"]) == 0
    tasks = json.loads(capsys.readouterr().out)["tasks"]
    assert tasks == [
        {"task": "push", "episodes": 2},
        {"task": "pull", "episodes": 1},
        {"task": "lift", "episodes": 1},
    ]


# --- nothing is written by half


def test_targets_are_new_and_elsewhere(originals, tmp_path):
    root = originals / "one"
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").write_text("mine")
    with pytest.raises(DatasetError, match="exists and is not empty"):
        delete_episodes(root, tmp_path / "full", "0")
    with pytest.raises(DatasetError, match="exists and is not empty"):
        merge_datasets([root, root], tmp_path / "full")
    with pytest.raises(ConfigError, match="inside the other"):
        delete_episodes(root, root / "new", "0")
    with pytest.raises(ConfigError, match="nothing would be left"):
        delete_episodes(root, tmp_path / "new", "0:")
    assert [path.name for path in tmp_path.iterdir()] == ["full"]


def test_an_error_leaves_nothing(originals, tmp_path):
    root = shutil.copytree(originals / "v2.0", tmp_path / "old")
    video = sorted(root.rglob("*.mp4"))[0]
    size = index_video(video).packets.offset.max()
    data = bytearray(video.read_bytes())
    data[40 : int(size) - 1] = bytes(int(size) - 41)  # statistics are computed, so frames are decoded
    video.write_bytes(data)
    with pytest.raises(DatasetError):
        split_dataset(root, tmp_path / "parts", {"a": "3,2", "b": "rest"})
    assert [path.name for path in tmp_path.iterdir()] == ["old"]


def test_a_killed_process_leaves_no_dataset_and_the_next_one_cleans_up(originals, tmp_path):
    code = """
import os, signal, sys
from flexor.data.edit import edit
from flexor.data.check import check
edit.check_dataset = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
edit.delete_episodes(sys.argv[1], sys.argv[2], "0")
"""
    words = [sys.executable, "-c", code, str(originals / "one"), str(tmp_path / "new")]
    killed = subprocess.run(words, check=False, timeout=LIMIT_S, env=dict(os.environ))
    assert killed.returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert left.name.endswith(".incomplete")
    assert_copied(delete_episodes(originals / "one", tmp_path / "new", "0"), [originals / "one"])
    assert [path.name for path in tmp_path.iterdir()] == ["new"]


def test_only_folders_of_processes_that_ended_are_deleted(tmp_path):
    ended = subprocess.Popen(["true"])
    ended.wait(LIMIT_S)
    left = [
        tmp_path / f".new.{re.sub('[^A-Za-z0-9-]', '-', socket.gethostname())}.{n}.incomplete"
        for n in (1, ended.pid)
    ]
    for folder in left:
        folder.mkdir()
    with new_folders([tmp_path / "new"]) as (aside,):
        aside.mkdir()
    assert sorted(path.name for path in tmp_path.iterdir()) == [left[0].name, "new"]


def test_a_broken_dataset_is_refused_in_words(originals, tmp_path, capsys):
    root = shutil.copytree(originals / "one", tmp_path / "one")
    truncate(root / EPISODES, 0.5)
    assert cli.main(["data", "delete", str(root), str(tmp_path / "new"), "--episodes=0"]) == 1
    assert "flexor data check" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
