"""Idle ends of episodes are cut; every frame that stays is as it was."""

import json
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flexor.cli import main as cli
from flexor.data.dataset import open_dataset
from flexor.data.edit.edit import (
    trim_dataset,
)
from flexor.data.edit.trim import TrimSettings, motion_scale, motion_span
from support.damage import edit_json
from support.edits import assert_copied, idle
from support.small_datasets import FPS, TOP

# --- trim


@pytest.mark.parametrize("kind", ["one", "still", "gop30", "av1", "b-frames"])
@pytest.mark.parametrize("keep", [0, 0.2])
def test_idle_ends_are_cut_and_frames_stay_as_they_are(originals, tmp_path, kind, keep):
    """Wherever key frames are: what is cut begins in the middle of a group, and ends there."""
    root = idle(shutil.copytree(originals / kind, tmp_path / kind), {0: (3, 7), 1: (0, 4), 3: (5, 9)})
    report = trim_dataset(root, tmp_path / "new", TrimSettings(keep=keep))
    assert_copied(report, [root], skip=("next.done",))
    spans = [(part.first, part.end) for part in report.datasets[0].parts]
    margin = round(keep * FPS)
    assert spans == [(3 - margin, 8 + margin), (0, 5 + margin), (0, 7), (5 - margin, 10)]
    dataset = open_dataset(root=tmp_path / "new")
    done = dataset.columns["next.done"]
    assert np.flatnonzero(done).tolist() == (dataset.episodes.end - 1).tolist(), (
        "the end is marked, and no other"
    )
    stats = json.loads((tmp_path / "new/meta/stats.json").read_text())
    assert stats["index"]["count"] == [len(dataset)] and np.ravel(stats[TOP]["std"]).all()


def test_a_dry_run_lists_what_would_be_cut(originals, tmp_path, capsys):
    root = idle(shutil.copytree(originals / "one", tmp_path / "one"), {0: (3, 7), 1: (4, 4)})
    assert cli.main(["data", "trim", str(root), "--dry_run", "--keep=0.1"]) == 0
    text = capsys.readouterr().out
    assert "episode 0: 2 frames (0.20 s) at the start, 3 (0.30 s) at the end; 7 stay" in text
    assert "no motion in 1 episode, nothing is cut: 1" in text
    assert "5 of 38 frames would be cut (13.2%) from 1 of 4 episodes" in text
    assert cli.main(["data", "trim", str(root), "--dry_run", "--json", "--episodes=2"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["cut_frames"] == 0 and result["datasets"][0]["frames"] == 38


def test_a_reward_is_not_cut(originals, tmp_path):
    root = idle(shutil.copytree(originals / "one", tmp_path / "one"), {0: (3, 5)})
    for path in sorted(root.glob("data/*/*.parquet")):
        table = pq.read_table(path)
        reward = np.zeros(table.num_rows, np.float32)
        reward[9] = 1
        pq.write_table(table.append_column("next.reward", pa.array(reward)), path)
    declared = {"dtype": "float32", "shape": [1], "names": None}
    edit_json(root / "meta/info.json", lambda info: info["features"].update({"next.reward": declared}))
    report = trim_dataset(root, None, TrimSettings(keep=0), dry_run=True)
    part = report.datasets[0].parts[0]
    assert (part.first, part.end) == (3, 11)


def test_what_trembles_does_not_move():
    rng = np.random.default_rng(0)
    arm = np.concatenate([np.zeros(40), np.linspace(0, 90, 60), np.full(50, 90.0)]) + rng.normal(0, 0.1, 150)
    tremble, gripper = rng.normal(0, 1, 150), (np.arange(150) > 110).astype(float)
    motions = [np.stack(columns, 1) for columns in ([arm, tremble], [arm, tremble, gripper])]
    two, three = (motion * motion_scale([motion]) for motion in motions)
    first, end = motion_span(two, 0.02)
    assert 39 <= first <= 42 and 98 <= end <= 101
    assert motion_span(three, 0.02)[1] == 112, "a gripper that closes once is motion"
    assert motion_span(np.zeros((20, 2)), 0.02) is None
