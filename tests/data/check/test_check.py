"""One fault per test: break a good dataset, and see that it is reported where it is and how bad it is.

The toy has 4 episodes of 12, 9, 7 and 10 frames at 10 fps, and two cameras.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from flexor.core.errors import DatasetError
from flexor.data.check.check import check_dataset
from flexor.data.check.report import CheckReport, ranges
from flexor.data.check.scan import scan_video
from flexor.data.dataset import open_dataset
from flexor.data.repair.repair import repair_advice
from support.damage import (
    DATA,
    EPISODES,
    VIDEO,
    damage_file,
    damage_frame,
    edit_json,
    edit_table,
    set_rows,
    truncate,
)
from support.small_datasets import LENGTHS, SIDE, STILL, TOP

ALL = [0, 1, 2, 3]


def kinds_of(report: CheckReport) -> set[tuple]:
    return {(p.severity, p.name, p.episode, p.feature) for p in report.findings}


@pytest.mark.parametrize("name", ["one", "many", "still", "gop30", "v2.1", "v2.0"])
@pytest.mark.parametrize("deep", [True, False])
def test_a_good_dataset_is_ok(originals, name, deep):
    report = check_dataset(originals / name, deep=deep)
    assert report.findings == []
    assert report.ok and report.good_episodes == ALL
    assert "OK: no problems found" in str(report)


def test_no_dataset_at_all(tmp_path):
    with pytest.raises(DatasetError, match="is not a folder"):
        check_dataset(tmp_path / "nowhere")
    report = check_dataset(tmp_path)
    assert kinds_of(report) == {("error", "info-missing", None, None)}
    assert not report.ok and report.good_episodes == []


def test_broken_info(copy):
    root = copy("one")
    (root / "meta/info.json").write_text('{"fps": 10, ')
    assert kinds_of(check_dataset(root)) == {("error", "info-unreadable", None, None)}


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"fps": 0}, "info-field"),
        ({"codebase_version": "v9.0"}, "version-unknown"),
    ],
)
def test_wrong_info(copy, change, kind):
    root = copy("one")
    edit_json(root / "meta/info.json", lambda info: info.update(change))
    report = check_dataset(root, deep=False)
    assert ("error", kind, None, None) in kinds_of(report)
    assert not report.ok and report.good_episodes == ALL


def test_totals_that_do_not_matter_are_warnings(copy):
    root = copy("one")
    edit_json(root / "meta/info.json", lambda i: i.update(total_tasks=9, splits={"train": "0:100"}))
    report = check_dataset(root, deep=False)
    assert kinds_of(report) == {("warning", "totals", None, None), ("warning", "splits", None, None)}
    assert report.ok


# --- files that are missing or cut short


def test_missing_data_file(copy):
    root = copy("many")
    (root / "data/chunk-000/file-001.parquet").unlink()
    report = check_dataset(root)
    assert kinds_of(report) == {("error", "data-missing", 1, None)}
    assert report.good_episodes == [0, 2, 3]


def test_truncated_data_file(copy):
    root = copy("many")
    path = root / "data/chunk-000/file-002.parquet"
    path.write_bytes(path.read_bytes()[:-200])
    report = check_dataset(root)
    assert kinds_of(report) == {("error", "data-unreadable", 2, None)}
    assert report.good_episodes == [0, 1, 3]


@pytest.mark.parametrize("deep", [True, False])
def test_missing_video_file(copy, deep):
    root = copy("many")
    (root / f"videos/{SIDE}/chunk-000/file-003.mp4").unlink()
    report = check_dataset(root, deep=deep)
    assert kinds_of(report) == {("error", "video-missing", 3, SIDE)}
    assert report.good_episodes == [0, 1, 2]


def test_a_camera_without_any_file_is_left_out(copy):
    root = copy("one")
    shutil.rmtree(root / f"videos/{SIDE}")
    report = check_dataset(root)
    assert kinds_of(report) == {("warning", "camera-absent", None, SIDE)}
    assert report.ok


@pytest.mark.parametrize("deep", [True, False])
def test_truncated_video_loses_the_episodes_behind_the_cut(copy, deep):
    root = copy("one")
    path = root / VIDEO
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * 0.7)])
    report = check_dataset(root, deep=deep)
    bad = {p.episode for p in report.errors if p.episode is not None}
    assert ("error", "video-truncated", None, TOP) in kinds_of(report)
    assert ("error", "video-frames", 3, TOP) in kinds_of(report)
    assert 3 in bad and 0 not in bad
    assert report.good_episodes == [e for e in ALL if e not in bad] and 0 in report.good_episodes


def test_video_without_its_index(copy):
    root = copy("many")
    path = root / f"videos/{TOP}/chunk-000/file-001.mp4"
    path.write_bytes(path.read_bytes()[:40])
    report = check_dataset(root)
    assert kinds_of(report) == {("error", "video-unreadable", 1, TOP)}


@pytest.mark.parametrize(("name", "at_least"), [("one", 1), ("gop30", 4)])
def test_a_damaged_picture_is_found_by_decoding_only(copy, name, at_least):
    """With long groups of pictures, all frames up to the next key frame are drawn over the damage."""
    root = copy(name)
    damage_frame(root / VIDEO, LENGTHS[0] + 4)
    assert check_dataset(root, deep=False).ok
    report = check_dataset(root, deep=True)
    assert kinds_of(report) == {("error", "video-undecodable", 1, TOP)}
    count, _, total = report.errors[0].evidence.split()[:3]
    assert int(count) >= at_least and int(total) == LENGTHS[1]
    assert "the first is frame 4" in report.errors[0].evidence
    assert report.good_episodes == [0, 2, 3]


def test_missing_episode_metadata(copy):
    root = copy("one")
    (root / EPISODES).unlink()
    report = check_dataset(root)
    assert ("error", "episodes-missing", None, None) in kinds_of(report)
    assert report.checked == [] and not report.ok


def test_truncated_episode_metadata(copy):
    root = copy("one")
    (root / EPISODES).write_bytes((root / EPISODES).read_bytes()[:500])
    assert ("error", "episodes-unreadable", None, None) in kinds_of(check_dataset(root))


def test_broken_line_in_the_episodes_of_v2(copy):
    root = copy("v2.1")
    lines = (root / "meta/episodes.jsonl").read_text().splitlines()
    (root / "meta/episodes.jsonl").write_text("\n".join([*lines[:3], lines[3][:15]]))
    report = check_dataset(root)
    assert ("error", "episodes-unreadable", None, None) in kinds_of(report)
    assert ("warning", "totals", None, None) in kinds_of(report)
    assert report.good_episodes == [0, 1, 2]


# --- statistics and declarations


def test_missing_statistics(copy):
    root = copy("one")
    (root / "meta/stats.json").unlink()
    report = check_dataset(root, deep=False)
    expected = {("error", "stats-missing", None, name) for name in ("action", "observation.state")}
    expected |= {("warning", "stats-missing", None, name) for name in (TOP, SIDE)}
    assert kinds_of(report) == expected and report.good_episodes == ALL


@pytest.mark.parametrize(
    ("change", "severity", "kind"),
    [
        ({"mean": [float("nan"), 0.0]}, "error", "stats-not-finite"),
        ({"std": [0.0, 1.0]}, "warning", "stats-wrong"),
        ({"mean": [0.0, 0.0, 0.0]}, "error", "stats-shape"),
        ({"max": [0.1, 9.0]}, "warning", "stats-stale"),
    ],
)
def test_wrong_statistics(copy, change, severity, kind):
    root = copy("one")
    edit_json(root / "meta/stats.json", lambda stats: stats["action"].update(change))
    assert kinds_of(check_dataset(root, deep=False)) == {(severity, kind, None, "action")}


def test_declared_but_absent(copy):
    root = copy("one")
    declared = {"dtype": "float32", "shape": [4], "names": None}
    edit_json(root / "meta/info.json", lambda info: info["features"].update(force=declared))
    assert kinds_of(check_dataset(root, deep=False)) == {("warning", "column-absent", None, "force")}


def test_a_dataset_without_actions_can_not_be_trained_on(copy):
    root = copy("one")
    edit_json(root / "meta/info.json", lambda info: info["features"].pop("action"))
    table = pq.read_table(root / DATA)
    pq.write_table(table.drop_columns(["action"]), root / DATA)
    (finding,) = check_dataset(root, deep=False).errors
    assert finding.name == "feature-names" and "no feature is called action" in finding.evidence
    assert "observation.state" in finding.evidence and "timestamp" not in finding.evidence
    assert repair_advice(check_dataset(root, deep=False)) == ""


def test_a_column_that_only_some_files_have(copy):
    root = copy("many")
    path = root / "data/chunk-000/file-001.parquet"
    pq.write_table(pq.read_table(path).drop_columns(["action"]), path)
    report = check_dataset(root, deep=False)
    assert kinds_of(report) == {("error", "column-missing", 1, "action")}


def test_wrong_shape(copy):
    root = copy("one")
    edit_json(root / "meta/info.json", lambda info: info["features"]["action"].update(shape=[3]))
    report = check_dataset(root, deep=False)
    assert ("error", "column-shape", 0, "action") in kinds_of(report) and report.good_episodes == []


def test_wrong_picture_size(copy):
    root = copy("one")
    edit_json(root / "meta/info.json", lambda info: info["features"][TOP].update(shape=[64, 48, 3]))
    report = check_dataset(root, deep=False)
    assert kinds_of(report) == {("error", "video-size", e, TOP) for e in ALL}
    assert "images are 32x48, but 64x48 is declared" in report.errors[0].evidence


def test_wrong_frame_rate(copy):
    root = copy("one")
    edit_json(root / "meta/info.json", lambda info: info.update(fps=20))
    kinds = {p.name for p in check_dataset(root, deep=False).findings}
    assert {"video-fps", "clock-drift"} <= kinds


def test_damaged_pictures_in_the_table(copy):
    root = copy("still")
    edit_table(root / DATA, **{STILL: set_rows(3, 4, {"bytes": b"\x89PNG no", "path": None})})
    assert check_dataset(root, deep=False).ok
    report = check_dataset(root)
    assert kinds_of(report) == {("error", "image-undecodable", 0, STILL)}
    assert "1 of 12 images" in report.errors[0].evidence


# --- whatever may happen to a file


@pytest.mark.parametrize("seed", range(24))
def test_no_damage_makes_the_check_fail(copy, seed):
    """Files cut, overwritten or deleted at random: a report comes out, and what it calls good is readable."""
    rng = np.random.default_rng(seed)
    root = copy(["one", "many", "still", "v2.1", "v2.0"][seed % 5])
    for path in rng.choice(sorted(p for p in root.rglob("*") if p.is_file()), size=2, replace=False):
        damage_file(path, rng)
    report = check_dataset(root)
    str(report)
    json.dumps(report.to_json())
    if report.ok or (report.good_episodes and all(p.episode is not None for p in report.errors)):
        dataset = open_dataset(root=root, episodes=report.good_episodes)
        dataset.read(np.arange(len(dataset)))


# --- the report itself


def test_only_the_chosen_episodes_are_judged(copy):
    root = copy("one")
    edit_table(root / DATA, action=set_rows(0, 1, [np.nan, 0.0]))
    report = check_dataset(root, deep=False, episodes=[1, 3])
    assert report.ok and report.good_episodes == [1, 3]
    with pytest.raises(DatasetError, match=r"no episodes \[9\]"):
        check_dataset(root, episodes=[1, 9])


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("many", lambda root: (root / "data/chunk-000/file-001.parquet").unlink()),
        ("many", lambda root: (root / f"videos/{SIDE}/chunk-000/file-003.mp4").unlink()),
        ("many", lambda root: truncate(root / f"videos/{TOP}/chunk-000/file-000.mp4", 0.1)),
        ("one", lambda root: truncate(root / VIDEO, 0.7)),
        ("one", lambda root: damage_frame(root / VIDEO, 14)),
        ("one", lambda root: edit_table(root / DATA, action=set_rows(14, 15, [np.nan, 0.0]))),
        ("one", lambda root: edit_table(root / DATA, timestamp=set_rows(16, 21, lambda v, i: v + 0.3))),
        ("one", lambda root: edit_table(root / DATA, timestamp=set_rows(0, 12, lambda v, i: v + 0.1))),
        ("v2.0", lambda root: truncate(root / "data/chunk-001/episode_000002.parquet", 0.5)),
        ("v2.1", lambda root: truncate(root / f"videos/chunk-000/{TOP}/episode_000001.mp4", 0.5)),
    ],
)
def test_good_episodes_can_all_be_read(copy, name, fault):
    """What the check calls good, the reader reads: every row, every camera."""
    root = copy(name)
    fault(root)
    report = check_dataset(root)
    assert report.findings and report.good_episodes
    dataset = open_dataset(root=root, episodes=report.good_episodes)
    batch = dataset.read(np.arange(len(dataset)))
    assert np.isfinite(batch["action"]).all()
    assert batch[TOP].shape == batch[SIDE].shape == (len(dataset), 3, 32, 48)


def test_several_faults_are_all_found(copy, tmp_path):
    root = copy("many")
    (root / "data/chunk-000/file-000.parquet").unlink()
    (root / f"videos/{TOP}/chunk-000/file-001.mp4").unlink()
    edit_json(root / "meta/info.json", lambda info: info.update(total_frames=1))
    calls = []
    report = check_dataset(root, progress=lambda done, total: calls.append((done, total)))
    kinds = {p.name for p in report.errors}
    assert kinds == {"data-missing", "video-missing"}
    assert calls[-1] == (2 * sum(LENGTHS), 2 * sum(LENGTHS))
    text = str(report)
    assert "NOT OK: 2 errors" in text and "2 of 4 episodes have no errors" in text
    data = json.loads(json.dumps(report.to_json()))
    assert data["good_episodes"] == [2, 3] and data["ok"] is False and len(data["problems"]) == 3
    report.write_good_episodes(tmp_path / "good.json")
    assert json.loads((tmp_path / "good.json").read_text()) == [2, 3]


def test_episodes_with_the_same_fault_are_one_entry():
    report = CheckReport(Path("d"), deep=False, checked=list(range(30)))
    for episode in range(5, 25):
        report.error("video-missing", "the file is missing", "fetch it", episode=episode, feature=TOP)
    assert str(report).count("video-missing") == 1 and "episodes 5-24" in str(report)


def test_ranges():
    assert ranges([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
    assert ranges(list(range(0, 60, 2))).endswith("18 and 20 more")


def test_scan_counts_groups_of_pictures(originals):
    assert scan_video(originals / "one" / VIDEO).gops().tolist()[:6] == [2] * 6
    assert scan_video(originals / "gop30" / VIDEO).gops().tolist() == list(LENGTHS)
