"""What a repair takes and writes: a part of a dataset, nothing over something else, no dataset by half."""

import json
import signal
import subprocess
import sys

import numpy as np
import pytest

from flexor.cli import main as cli
from flexor.core.errors import DatasetError
from flexor.data.dataset import open_dataset
from flexor.data.repair.repair import repair_dataset
from flexor.data.video.decode import index_video
from support.damage import (
    EPISODES,
    VIDEO,
    damage_frame,
    set_rows,
)
from support.limits import LIMIT_S
from support.repairs import assert_same, repair, rows
from support.small_datasets import LENGTHS, TASKS, TOP, encoded

WRONG_PLACE = rows(EPISODES, **{f"videos/{TOP}/from_timestamp": set_rows(2, 3, 1.5)})  # of episode 2


# --- a part of a dataset


@pytest.mark.parametrize("name", ["one", "many", "still", "v2.1"])
def test_a_part(originals, broken, name):
    report = repair(broken(name), episodes=[3, 0, 1], exclude=[1])
    assert [(p.episode.index, p.new) for p in report.episodes] == [(0, 0), (3, 1)]
    assert "2 not selected" in str(report)
    assert_same(originals / ("one" if name == "v2.1" else name), report)
    assert open_dataset(root=report.out).read([0, LENGTHS[0]])["task"] == [TASKS[0], TASKS[3]]


def test_frames_of_an_episode_that_was_not_asked_for_are_not_taken(broken):
    root = broken("one", WRONG_PLACE)
    with pytest.raises(DatasetError, match="episode 1 also claims frames of its video"):
        repair_dataset(root, root.with_name("repaired"), episodes=[2])


def test_frames_of_an_episode_that_is_left_out_are_not_taken(broken):
    root = broken("one", WRONG_PLACE, rows(action=set_rows(14, 15, [np.nan, 0.0])))
    report = repair(root)
    assert [plan.episode.index for plan in report.included] == [0, 3]
    assert "NaN" in report.excluded[0].reason and "claims frames" in report.excluded[1].reason


def test_a_file_is_not_copied_whole_for_an_episode_that_can_be_cut_out(broken):
    root = broken("one", encoded(bf="0", g="12", sc_threshold="0"))
    assert "copied unchanged" in str(repair_dataset(root, root.with_name("all"), dry_run=True))
    report = repair(root, episodes=[0])
    assert "copied unchanged" not in str(report)
    assert len(index_video(report.out / VIDEO)) == LENGTHS[0]


def test_episodes_that_are_not_there(broken):
    root = broken("one")
    with pytest.raises(DatasetError, match=r"no episodes \[9\]"):
        repair_dataset(root, root.with_name("repaired"), exclude=[9])
    with pytest.raises(DatasetError, match="leave no episode"):
        repair_dataset(root, root.with_name("repaired"), episodes=[1], exclude=[1])


# --- writing


def test_nothing_is_written_over(broken, tmp_path):
    root = broken("one")
    for out in (root, root / "new", root.parent):
        with pytest.raises(DatasetError, match="one folder is inside the other"):
            repair_dataset(root, out)
    (tmp_path / "full").mkdir()
    (tmp_path / "full/notes.txt").write_text("mine")
    with pytest.raises(DatasetError, match="not empty"):
        repair_dataset(root, tmp_path / "full")


def test_a_dry_run_writes_nothing(broken):
    root = broken("one", lambda root: damage_frame(root / VIDEO, 16))
    report = repair_dataset(root, root.with_name("repaired"), dry_run=True)
    assert [plan.episode.index for plan in report.excluded] == [1]
    assert "3 episodes would be kept" in str(report)
    assert not root.with_name("repaired").exists()


def test_killed_in_the_middle_it_leaves_no_dataset(broken):
    root = broken("many")
    out = root.with_name("repaired")
    script = f"""
import os, signal
from flexor.data.repair.repair import repair_dataset
repair_dataset({str(root)!r}, {str(out)!r}, progress=lambda done, total: os.kill(os.getpid(), signal.SIGKILL))
"""
    done = subprocess.run([sys.executable, "-c", script], check=False, timeout=LIMIT_S)
    assert done.returncode == -signal.SIGKILL
    assert any(out.rglob("*.mp4")) and not (out / "meta/info.json").exists()
    with pytest.raises(DatasetError):
        open_dataset(root=out)
    with pytest.raises(DatasetError, match="an earlier write did not finish"):
        repair_dataset(root, out)


def test_command(broken, capsys):
    root = broken("one", rows(action=set_rows(14, 15, [np.nan, 0.0])))
    out = root.with_name("repaired")
    assert cli.main(["data", "repair", str(root), str(out), "--exclude_episodes=3", "--quick", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [(e["episode"], e["new"]) for e in report["episodes"]] == [(0, 0), (1, None), (2, 1)]
    assert report["check"]["ok"] and "NaN" in report["episodes"][1]["reason"]
    assert cli.main(["data", "check", str(out)]) == 0
    assert cli.main(["data", "repair", str(root), str(out)]) == 1
    assert "not empty" in capsys.readouterr().err
