"""Break a good dataset in one way after the other: a repair mends it, or leaves the episode out and says why.

The toy has 4 episodes of 12, 9, 7 and 10 frames at 10 fps, and two cameras.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexor.core.errors import DatasetError
from flexor.data.check.check import check_dataset
from flexor.data.check.layout import Span
from flexor.data.dataset import open_dataset
from flexor.data.repair.repair import RepairReport, repair_advice, repair_dataset
from flexor.data.repair.tables import row_order
from flexor.data.repair.videos import first_frame
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
from support.repairs import ALL, assert_same, declare, repair, rows
from support.small_datasets import LENGTHS, SIDE, STILL, TOP


def lines_of(report: RepairReport) -> str:
    return str(report).partition("\n" + str(report.out) + ": v3.0")[0]


# --- sound datasets


@pytest.mark.parametrize("name", ["one", "many", "still", "gop30", "v2.1", "v2.0"])
def test_a_sound_dataset_comes_out_the_same(originals, broken, name):
    report = repair(broken(name))
    assert [plan.new for plan in report.episodes] == ALL
    assert all(not plan.repairs for plan in report.episodes), str(report)
    assert_same(originals / ("still" if name == "still" else "one" if "v2" in name else name), report)
    if name.startswith("v2"):
        assert f"converted from {name} to v3.0" in str(report)
    ours = json.loads((report.out / "meta/stats.json").read_text())
    theirs = json.loads((originals / ("still" if name == "still" else "one") / "meta/stats.json").read_text())
    for feature in ("action", "observation.state", "timestamp", "index"):
        for key, value in theirs[feature].items():
            assert np.allclose(ours[feature][key], value), (feature, key)
    assert np.allclose(ours[TOP]["mean"], theirs[TOP]["mean"], atol=0.02)  # after encoding, and before


def test_what_else_is_in_the_metadata_is_kept(broken):
    root = broken("v2.0")
    edit_json(root / "meta/info.json", lambda i: i.update(robot_type="arm", license="mit"))
    (root / "meta/modality.json").write_text('{"state": {}}')
    report = repair(root)
    info = json.loads((report.out / "meta/info.json").read_text())
    assert (info["robot_type"], info["license"]) == ("arm", "mit")
    assert "total_chunks" not in info and info["features"][TOP]["info"]["video.codec"] == "h264"
    assert (report.out / "meta/modality.json").read_text() == '{"state": {}}'


def test_new_files_are_begun_when_full(originals, broken, monkeypatch):
    monkeypatch.setattr("flexor.data.format.dataset_files.MB", 4)  # of 100 and 200 MB
    report = repair(broken("one"))
    assert len(list(report.out.glob(f"videos/{TOP}/*/*.mp4"))) == 4
    assert_same(originals / "one", report)


# --- what is mended, and what is left out


def table_without(*names: str):
    def change(root: Path) -> None:
        for path in (root / "data").rglob("*.parquet"):
            pq.write_table(pq.read_table(path).drop_columns(list(names)), path)

    return change


def without_column(file: str, name: str):
    return lambda root: pq.write_table(pq.read_table(root / file).drop_columns([name]), root / file)


def info(**changes):
    return lambda root: edit_json(root / "meta/info.json", lambda data: data.update(changes))


def stats(**changes):
    return lambda root: edit_json(root / "meta/stats.json", lambda data: data["action"].update(changes))


def meta_rows(change):
    def edit(root: Path) -> None:
        table = pq.read_table(root / EPISODES)
        pq.write_table(pa.Table.from_pylist(change(table.to_pylist()), table.schema), root / EPISODES)

    return edit


def unlink(file: str):
    return lambda root: (root / file).unlink()


def lose_rows(file: str):
    def change(root: Path) -> None:
        table = pq.read_table(root / file)
        mine = np.flatnonzero(np.array(table["episode_index"]) == 2)
        pq.write_table(table.take(np.setdiff1d(np.arange(table.num_rows), mine[-2:])), root / file)

    return change


def shuffle(root: Path) -> None:
    table = pq.read_table(root / DATA)
    pq.write_table(table.take(np.random.default_rng(0).permutation(table.num_rows)), root / DATA)


def cut_line(root: Path) -> None:
    lines = (root / "meta/episodes.jsonl").read_text().splitlines()
    (root / "meta/episodes.jsonl").write_text("\n".join([*lines[:3], lines[3][:15]]))


MENDED = {
    "totals": ("one", info(total_frames=40, total_episodes=5, total_tasks=9), "total_frames is 40"),
    "splits": ("one", info(splits={"train": "0:100"}), "the split 'train' is 0:100"),
    "wrong length": ("one", meta_rows(lambda r: [*r[:1], r[1] | {"length": 8}, *r[2:]]), "episode 1: length"),
    "frame_index": ("one", rows(frame_index=set_rows(15, 16, 999)), "episode 1: frame_index renumbered"),
    "index": ("one", rows(index=set_rows(15, 16, 999)), "0 of them repaired"),
    "index starts wrong": ("one", rows(index=set_rows(12, 21, lambda v, i: v + 100)), "0 of them repaired"),
    "unknown task": ("one", rows(task_index=set_rows(21, 28, 7)), "episode 2: task_index 7, which has no"),
    "no task table": ("one", unlink("meta/tasks.parquet"), "texts taken from the episodes"),
    "no task table in v2": ("v2.1", unlink("meta/tasks.jsonl"), "texts taken from the episodes"),
    "clock goes back": ("one", rows(timestamp=set_rows(4, 5, 0.1)), "episode 0: timestamp set to"),
    "clock drifts": ("one", rows(timestamp=set_rows(16, 21, lambda v, i: v + 0.3)), "episode 1: timestamp"),
    "clock is late": ("one", rows(timestamp=set_rows(0, 12, lambda v, i: v + 0.1)), "episode 0: timestamp"),
    "clock is late in v2": (
        "v2.0",
        rows("data/chunk-000/episode_000000.parquet", timestamp=lambda v: [t + 0.1 for t in v]),
        "episode 0: timestamp",
    ),
    "clock jitters": (
        "one",
        rows(timestamp=lambda v: [t + 0.01 * (i % 2) for i, t in enumerate(v)]),
        "0-3: t",
    ),
    "clock is NaN": ("one", rows(timestamp=set_rows(14, 15, np.nan)), "episode 1: timestamp set to"),
    "wrong end": ("one", rows(EPISODES, **{f"videos/{TOP}/to_timestamp": set_rows(2, 3, 9.0)}), "2: observ"),
    "no statistics": ("one", unlink("meta/stats.json"), "0 of them repaired"),
    "statistics NaN": ("one", stats(mean=[float("nan"), 0.0]), "0 of them repaired"),
    "statistics of another shape": ("one", stats(mean=[0.0, 0.0, 0.0]), "0 of them repaired"),
    "declared but absent": ("one", declare("force"), "force is declared but no data file has"),
    "declared wide": (
        "one",
        declare("action", shape=[3]),
        "action is declared with shape [3] but has shape [2]",
    ),
    "declared int": ("one", declare("action", dtype="int64"), "declared as int64 but contains float32"),
    "declared large": ("one", declare(TOP, shape=[64, 48, 3]), "but its images are 32x48"),
    "frame rate": ("one", info(fps=20), "fps is 20, but timestamps and videos have 10"),
    "no own columns": (
        "v2.1",
        table_without("timestamp", "frame_index", "index"),
        "columns added: timestamp, f",
    ),
    "no episode_index": ("one", table_without("episode_index"), "columns added: episode_index"),
    "rows scattered": ("one", shuffle, "rows sorted by frame_index"),
    "metadata twice": (
        "one",
        meta_rows(lambda r: [*r, r[1]]),
        "episode 1: duplicate metadata entries reduced",
    ),
    "metadata twice, one wrong": (
        "one",
        meta_rows(lambda r: [r[0], r[1] | {"length": 4}, *r[1:]]),
        "episode 1: duplicate metadata entries",
    ),
    "episode_index of another": (
        "v2.0",
        rows("data/chunk-001/episode_000002.parquet", episode_index=lambda v: [0] * len(v)),
        "episode 2: episode_index corrected",
    ),
}


@pytest.mark.parametrize("case", MENDED)
def test_mended(originals, broken, case):
    name, fault, message = MENDED[case]
    report = repair(broken(name, fault))
    assert [plan.new for plan in report.episodes] == ALL, str(report)
    assert message in lines_of(report), str(report)
    skip = ("action",) if case == "declared int" else ()
    assert_same(originals / ("one" if "v2" in name else name), report, skip)


LEFT_OUT = {
    "data missing": ("many", unlink("data/chunk-000/file-001.parquet"), [1], "file-001.parquet is missing"),
    "data cut": ("many", lambda r: truncate(r / "data/chunk-000/file-002.parquet", 0.9), [2], "truncated"),
    "video missing": (
        "many",
        unlink(f"videos/{SIDE}/chunk-000/file-003.mp4"),
        [3],
        "file-003.mp4 is missing",
    ),
    "video without index": ("many", lambda r: truncate(r / VIDEO, 0.01), [0], "can't be read"),
    "damaged frame": ("one", lambda r: damage_frame(r / VIDEO, 16), [1], "frames can't be decoded"),
    "damaged frame, long group": ("gop30", lambda r: damage_frame(r / VIDEO, 16), [1], "can't be decoded"),
    "rows lost": ("one", lose_rows(DATA), [2], "5 rows"),
    "rows lost in v2": ("v2.1", lose_rows("data/chunk-001/episode_000002.parquet"), [2], "5 rows"),
    "NaN": (
        "one",
        rows(action=set_rows(14, 15, [np.nan, 0.0])),
        [1],
        "action is NaN or infinite in 1 frames",
    ),
    "infinite": ("one", rows(**{"observation.state": set_rows(0, 2, [np.inf] * 3)}), [0], "in 2 frames"),
    "column in some": ("many", without_column("data/chunk-000/file-001.parquet", "action"), [1], "no column"),
    "wrong place": (
        "one",
        rows(EPISODES, **{f"videos/{TOP}/from_timestamp": set_rows(2, 3, 1.5)}),
        [2],
        "episode 1 also claims frames of its video",
    ),
    "picture": (
        "still",
        rows(**{STILL: set_rows(3, 4, {"bytes": b"\x89PNG no", "path": None})}),
        [0],
        "image 3 of the episode is unusable",
    ),
    "metadata twice, both wrong": (
        "one",
        meta_rows(lambda r: [r[0], r[1] | {"length": 4}, r[1] | {"length": 5}, *r[2:]]),
        [1],
        "the metadata lists it 2 times",
    ),
    "no order": (
        "one",
        lambda r: edit_table(
            r / DATA, frame_index=set_rows(12, 21, 0), timestamp=set_rows(12, 21, lambda v, i: 0.0)
        ),
        [1],
        "neither frame_index nor timestamp",
    ),
}


@pytest.mark.parametrize("case", LEFT_OUT)
def test_left_out(originals, broken, case):
    name, fault, bad, message = LEFT_OUT[case]
    report = repair(broken(name, fault))
    assert [plan.episode.index for plan in report.excluded] == bad, str(report)
    good = [episode for episode in ALL if episode not in bad]
    assert [(p.episode.index, p.new) for p in report.included] == list(zip(good, range(len(good))))
    assert message in report.excluded[0].reason
    assert f"LEFT OUT episode {bad[0]}" in str(report)
    assert_same(originals / ("one" if "v2" in name else name), report)


def test_a_camera_without_any_file_is_no_longer_declared(originals, broken):
    report = repair(broken("one", lambda root: shutil.rmtree(root / f"videos/{SIDE}")))
    assert f"camera {SIDE} is declared but has no videos" in str(report)
    assert open_dataset(root=report.out).cameras == [TOP]
    assert_same(originals / "one", report, skip=(SIDE,))


def test_episodes_before_the_cut_of_a_video_are_kept(originals, broken):
    report = repair(broken("one", lambda root: truncate(root / VIDEO, 0.7)))
    assert 0 in [p.episode.index for p in report.included] and 3 in [p.episode.index for p in report.excluded]
    assert_same(originals / "one", report)


def test_episodes_that_the_metadata_lost_are_left_out(originals, broken):
    report = repair(broken("v2.1", cut_line))
    assert "line 4 of 4 is not valid JSON" in str(report) and "total_episodes is 4" in str(report)
    assert [p.episode.index for p in report.included] == [0, 1, 2]
    assert_same(originals / "one", report)


def test_rows_that_no_episode_names_are_not_copied(originals, broken):
    report = repair(broken("many", meta_rows(lambda r: r[:2] + r[3:]), info(total_episodes=3)))
    assert "stray" not in str(report) and "files belong to no episode" in str(report)
    assert [(p.episode.index, p.new) for p in report.included] == [(0, 0), (1, 1), (3, 2)]
    assert_same(originals / "many", report)


def test_undeclared_columns(broken):
    def add(root: Path) -> None:
        table = pq.read_table(root / DATA)
        table = table.append_column("force", pa.array(np.arange(table.num_rows, dtype=np.float64)))
        table = table.append_column("nested", pa.array([{"a": 1}] * table.num_rows))
        pq.write_table(table, root / DATA)

    report = repair(broken("one", add))
    assert "column force was not declared: declared as float64 [1]" in str(report)
    assert "column nested (struct<a: int64>) is not declared: left out" in str(report)
    assert open_dataset(root=report.out).columns["force"].tolist() == list(range(sum(LENGTHS)))


def test_what_else_is_known_of_episodes_is_kept(broken):
    def add(root: Path) -> None:
        lines = [json.loads(line) for line in (root / "meta/episodes.jsonl").read_text().splitlines()]
        lines = [line | {"success": i != 2, "parts": {"a": i}} for i, line in enumerate(lines)]
        (root / "meta/episodes.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    report = repair(broken("v2.1", add), exclude=[0])
    assert pq.read_table(report.out / EPISODES)["success"].to_pylist() == [True, False, True]
    assert "'parts' in the metadata of episodes is not copied" in str(report)


def test_pictures_whose_column_is_damaged(broken):
    def damage(root: Path) -> None:
        path = root / DATA
        column = pq.ParquetFile(path).schema_arrow.names.index(STILL)
        part = pq.ParquetFile(path).metadata.row_group(0).column(column)
        data = bytearray(path.read_bytes())
        data[part.data_page_offset : part.data_page_offset + 60] = b"\xff" * 60
        path.write_bytes(data)

    root = broken("still", damage)
    with pytest.raises(DatasetError, match=r"(?s)no episode can be kept.*is damaged"):
        repair_dataset(root, root.with_name("repaired"))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (info(codebase_version="v9.0"), "v9.0"),
        (info(codebase_version="v1.6"), "old format"),
        (info(data_path="{nonsense}"), "the field {nonsense} is unknown"),
        (unlink(DATA), "no episode can be kept"),
    ],
)
def test_hopeless(broken, fault, message):
    root = broken("one", fault)
    with pytest.raises(DatasetError, match=message):
        repair_dataset(root, root.with_name("repaired"))
    assert not root.with_name("repaired").exists()
    check = check_dataset(root)
    assert not check.ok and repair_advice(check) == ""


@pytest.mark.parametrize("seed", range(10))
def test_no_damage_makes_a_repair_fail(broken, seed):
    """Files cut, overwritten or deleted at random: what comes out is sound, or there is an error that says why.

    A repair is recommended exactly where it works.
    """
    rng = np.random.default_rng(seed)
    root = broken(["one", "many", "still", "v2.1", "v2.0"][seed % 5])
    for path in rng.choice(sorted(p for p in root.rglob("*") if p.is_file()), size=2, replace=False):
        damage_file(path, rng)
    advice = repair_advice(check_dataset(root))
    try:
        report = repair_dataset(root, root.with_name("repaired"))
    except DatasetError:
        assert not (root.with_name("repaired") / "meta/info.json").exists() and advice == ""
        return
    assert f"keeps {len(report.included)} of" in advice
    assert report.ok and check_dataset(report.out).ok, str(check_dataset(report.out))
    dataset = open_dataset(root=report.out)
    dataset.read(np.arange(len(dataset)))


# --- the rules themselves


def test_rows_are_in_the_order_of_their_count_or_else_of_their_clock():
    rows, clock = np.arange(4), np.array([0.0, 0.1, 0.2, 0.3])
    assert row_order(rows, np.array([2, 0, 1, 3]), None).tolist() == [1, 2, 0, 3]
    assert row_order(rows, np.array([7, 8, 9, 10]), clock[::-1]).tolist() == [0, 1, 2, 3]
    assert row_order(rows, np.array([0, 1, 99, 3]), clock).tolist() == [0, 1, 2, 3]
    assert row_order(rows, np.array([0, 1, 99, 3]), clock[::-1]) is None
    assert row_order(rows, np.array([0, 0, 0, 0]), None) is None
    assert row_order(rows, None, None).tolist() == [0, 1, 2, 3]
    assert row_order(np.array([0, 2, 5, 6]), None, None) is None


@given(st.integers(1, 30), st.integers(0, 5), st.integers(0, 5), st.floats(-0.04, 0.04), st.randoms())
def test_frames_by_time(length, before, after, jitter, random):
    """Among frames of other episodes, rows find their own, as long as their times lead to them."""
    times = np.arange(before + length + after) / 10
    clock = np.array([i / 10 + jitter * random.random() for i in range(length)])
    span = Span("file", before / 10, (before + length) / 10)
    assert first_frame(times, span, clock, 10) == (before, True)
    assert first_frame(times, span, clock * np.nan, 10) == (before, True)
    wide = Span("file", before / 10, (before + length + after) / 10)
    assert first_frame(times, wide, clock, 10) == (before, after == 0)
    if after:
        assert isinstance(first_frame(times, wide, clock * 2 + 0.2 * (length == 1) + 3, 10), str)
