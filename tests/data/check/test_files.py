"""Files that are not where they should be, or not what they should be: named, and repaired."""

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from flexor.cli import main as cli
from flexor.core.errors import DatasetError
from flexor.data.check.check import check_dataset
from flexor.data.dataset import open_dataset
from flexor.data.format.file_names import match_misplaced
from flexor.data.repair.repair import repair_dataset
from flexor.data.video.frame_match import NoMatch, match_frames
from support.damage import EPISODES, edit_json, edit_table, overwrite_packets, truncate
from support.legacy import to_v2
from support.small_datasets import LENGTHS, SIDE, TASKS, TOP, write


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


# --- tasks that files name differently


def relist(root: Path, tasks: list[str]) -> None:
    """Change what the metadata lists; the rows stay as they are."""
    edit_table(root / EPISODES, tasks=lambda old: [[task] for task in tasks])


def test_rows_with_another_task_than_the_metadata_lists(copy, caplog):
    """As after a conversion that gave all episodes the task of the first: rows and the old metadata are right."""
    lines = [json.dumps({"episode_index": i, "tasks": [task]}) for i, task in enumerate(TASKS)]
    (copy / "meta/episodes.jsonl").write_text("\n".join(lines))
    assert check_dataset(copy, deep=False).findings == []
    relist(copy, ["push"] * 4)
    report = check_dataset(copy, deep=False)
    assert [(f.severity, f.name, f.episode) for f in report.findings] == [
        ("warning", "task-conflict", 1),
        ("warning", "task-conflict", 3),
    ]
    message = report.findings[1].evidence
    assert "its rows (task_index 2) say 'lift'" in message
    assert "meta/episodes says 'push'" in message and "meta/episodes.jsonl says 'lift'" in message
    assert "training uses the task of the rows" in report.findings[0].fix
    lift = open_dataset(root=copy, tasks="lift")
    assert lift.episodes.index.tolist() == [3] and lift.episodes.tasks == [["lift"]]
    assert set(lift.read([0, 1])["task"]) == {"lift"}
    assert open_dataset(root=copy).episodes.tasks == [[task] for task in TASKS]
    assert "2 episodes have another task than the metadata lists" in caplog.text


def test_repair_makes_conflicting_tasks_one(copy):
    relist(copy, ["push"] * 4)
    report = repair_dataset(copy, copy.with_name("repaired"))
    assert "episode 3: the metadata lists another task than its rows: set to that of the rows, 'lift'" in str(
        report
    )
    assert check_dataset(report.out).findings == []
    assert pq.read_table(report.out / EPISODES)["tasks"].to_pylist() == [[task] for task in TASKS]
    again = open_dataset(root=report.out)
    assert again.read([0, len(again) - 1])["task"] == ["push", "lift"]


def test_more_tasks_than_the_rows_have_are_no_conflict(copy):
    """Some datasets list a judgement beside the task."""
    edit_table(copy / EPISODES, tasks=lambda old: [[*tasks, "valid"] for tasks in old])
    assert check_dataset(copy, deep=False).findings == []
    assert open_dataset(root=copy, tasks="valid").episodes.index.tolist() == [0, 1, 2, 3]
    report = repair_dataset(copy, copy.with_name("repaired"))
    assert pq.read_table(report.out / EPISODES)["tasks"].to_pylist()[3] == ["lift", "valid"]


def test_task_tables_that_differ(copy):
    lines = [{"task_index": i, "task": task} for i, task in enumerate(("push", "pull", "lift"))]
    (copy / "meta/tasks.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert check_dataset(copy, deep=False).findings == []
    lines[2]["task"] = "raise"
    (copy / "meta/tasks.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (finding,) = check_dataset(copy, deep=False).findings
    assert (finding.name, finding.file) == ("task-conflict", "meta/tasks.jsonl")
    assert "task 2 is 'lift' in meta/tasks.parquet, but 'raise' in meta/tasks.jsonl" in finding.evidence


def test_tasks_out_of_order_are_told(copy):
    """LeRobot takes the task in a row of the file, not the one with the number."""
    table = pq.read_table(copy / "meta/tasks.parquet")
    pq.write_table(table.take([2, 0, 1]), copy / "meta/tasks.parquet")
    (finding,) = check_dataset(copy, deep=False).findings
    assert finding.name == "task-order"
    report = repair_dataset(copy, copy.with_name("repaired"))
    assert pq.read_table(report.out / "meta/tasks.parquet")["task_index"].to_pylist() == [0, 1, 2]
    assert open_dataset(root=report.out).read([12])["task"] == ["pull"]


def test_metadata_of_a_newer_version_beside_old_metadata(original, tmp_path):
    """A version decides which metadata is read, in a check as in training."""
    root = to_v2(original, tmp_path / "old", "v2.1")
    shutil.copytree(original / "meta/episodes", root / "meta/episodes")
    assert check_dataset(root).findings == []
    edit_table(root / EPISODES, tasks=lambda old: [["push"]] * 4)
    assert check_dataset(root).findings == []
    path = root / "meta/episodes.jsonl"
    path.write_text(path.read_text().replace('"pull"', '"lift"'))
    (finding,) = check_dataset(root).findings
    assert "meta/episodes.jsonl says 'lift', meta/episodes says 'push'" in finding.evidence


# --- files in another folder


@pytest.mark.parametrize("version", ["v3.0", "v2.1"])
def test_videos_in_another_folder_are_used_by_a_repair(original, copy, tmp_path, version, caplog):
    root = copy if version == "v3.0" else to_v2(original, tmp_path / "old", version)
    (root / "videos").rename(root / "video")
    report = check_dataset(root)
    assert {(f.severity, f.name, f.episode) for f in report.findings} == {("error", "misplaced", None)}
    count = "the video file is" if version == "v3.0" else "4 of 4 video files are"
    message, fix = report.findings[0].evidence, report.findings[0].fix
    assert f"{count} not where meta/info.json says: video/" in message
    assert "rename the folder video to videos" in fix
    assert open_dataset(root=root).cameras == [] and "may be it: `flexor data repair`" in caplog.text
    repaired = repair_dataset(root, tmp_path / "repaired")
    assert f"{TOP}: {message.split(':')[0]}" in str(repaired) and "moved to its place" in str(repaired)
    assert check_dataset(repaired.out).findings == []
    ours, theirs = open_dataset(root=repaired.out), open_dataset(root=original)
    rows = np.arange(len(theirs))
    for camera in (TOP, SIDE):
        assert np.array_equal(ours.read(rows)[camera], theirs.read(rows)[camera])


def test_videos_of_another_camera_are_not_taken(copy):
    """A camera without files: those of other cameras and unrelated files are not its own."""
    shutil.move(copy / f"videos/{SIDE}", copy / "videos/observation.images.side_old")
    report = check_dataset(copy, deep=False)
    assert {f.name for f in report.findings} == {"camera-absent", "stray-files"}


def test_tables_in_another_folder_and_order(original, tmp_path):
    root = to_v2(original, tmp_path / "old", "v2.1")
    for number, path in enumerate(sorted((root / "data").rglob("*.parquet"))):
        target = root / f"train/{path.name}" if number else path
        target.parent.mkdir(exist_ok=True)
        path.rename(target)
    for path in sorted((root / "videos").rglob("*.mp4")):
        chunk, camera, name = path.relative_to(root / "videos").parts
        target = root / "videos" / camera / chunk / name
        target.parent.mkdir(exist_ok=True, parents=True)
        path.rename(target)
    report = check_dataset(root, deep=False)
    assert {(f.name, f.feature) for f in report.findings} == {
        ("misplaced", name) for name in (None, TOP, SIDE)
    }
    repaired = repair_dataset(root, tmp_path / "repaired")
    assert repaired.ok and len(repaired.included) == 4


def test_two_candidates_are_not_guessed():
    missing = ["videos/chunk-000/top/episode_000001.mp4"]
    assert match_misplaced(missing, ["video/top/episode_000001.mp4"]) == {
        missing[0]: "video/top/episode_000001.mp4"
    }
    assert match_misplaced(missing, ["a/top/episode_000001.mp4", "b/top/episode_000001.mp4"]) == {}
    assert match_misplaced(missing, ["video/side/episode_000001.mp4", ".git/top/episode_000001.mp4"]) == {}
    part = ["videos/top/chunk-001/file-000.mp4"]
    assert match_misplaced(part, ["video/top/chunk-000/file-000.mp4"]) == {}


# --- what is no data yet


def make_pointer(path: Path) -> None:
    size = path.stat().st_size
    digest = "4665a5ea423c2713d436b5ee50593a9640e0018c1550b5a0002f74190d6caea8"
    path.write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{digest}\nsize {size}\n")


@pytest.mark.parametrize("version", ["v3.0", "v2.1"])
def test_pointers_of_git_lfs_are_named_with_the_command(original, copy, tmp_path, version):
    root = copy if version == "v3.0" else to_v2(original, tmp_path / "old", version)
    for path in [*root.rglob("*.mp4"), *(root / "data").rglob("*.parquet")]:
        make_pointer(path)
    report = check_dataset(root)
    assert {finding.name for finding in report.errors} == {"lfs-pointer"} and report.good_episodes == []
    assert f"git -C {root} lfs pull" in report.errors[0].fix
    assert str(report).count("[lfs-pointer]") == 3  # one for the tables, and one for each camera
    with pytest.raises(DatasetError, match=r"lfs\s+pull"):
        open_dataset(root=root)
    with pytest.raises(DatasetError, match="are Git LFS pointers"):
        repair_dataset(root, tmp_path / "repaired")


def test_one_pointer_does_not_hide_the_other_episodes(original, tmp_path):
    root = to_v2(original, tmp_path / "old")
    make_pointer(root / f"videos/chunk-000/{TOP}/episode_000001.mp4")
    report = check_dataset(root)
    assert [(f.name, f.episode, f.feature) for f in report.findings] == [("lfs-pointer", 1, TOP)]
    with pytest.raises(DatasetError, match=r"episode 1: .*Git LFS\s+pointer(.|\n)*exclude_episodes=1"):
        open_dataset(root=root)
    repaired = repair_dataset(root, tmp_path / "repaired", exclude=[1])
    assert len(repaired.included) == 3


def test_pointers_in_the_metadata(copy):
    for file in (EPISODES, "meta/stats.json", "meta/tasks.parquet"):
        make_pointer(copy / file)
    report = check_dataset(copy)
    assert {f.file for f in report.errors if f.name == "lfs-pointer"} == {
        EPISODES,
        "meta/stats.json",
        "meta/tasks.parquet",
    }
    assert not {"episodes-unreadable", "stats-unreadable", "tasks-unreadable"} & {
        f.name for f in report.findings
    }
    with pytest.raises(DatasetError, match=r"lfs\s+pull"):
        open_dataset(root=copy)
    make_pointer(copy / "meta/info.json")
    assert {f.name for f in check_dataset(copy).findings} == {"lfs-pointer"}
    with pytest.raises(DatasetError, match=r"lfs\s+pull"):
        open_dataset(root=copy)


def test_a_dataset_of_v1_is_called_old(tmp_path):
    (tmp_path / "meta_data").mkdir()
    (tmp_path / "meta_data/info.json").write_text('{"codebase_version": "v1.6", "fps": 30}')
    (finding,) = check_dataset(tmp_path).findings
    assert finding.name == "version-old" and "convert_dataset_v1_to_v2" in finding.fix
    for use in (
        lambda: open_dataset(root=tmp_path),
        lambda: repair_dataset(tmp_path, tmp_path.with_name("new")),
    ):
        with pytest.raises(DatasetError, match="LeRobot dataset v1"):
            use()


@pytest.mark.parametrize(
    ("version", "kind", "advice"),
    [
        ("v1.6", "version-old", "convert_dataset_v1_to_v2"),
        ("v3.4", "version-unknown", "update Flexor"),
        ("seven", "version-unknown", "conversion scripts"),
    ],
)
def test_other_versions(copy, version, kind, advice):
    edit_json(copy / "meta/info.json", lambda info: info.update(codebase_version=version))
    (finding,) = check_dataset(copy, deep=False).findings
    assert finding.name == kind and advice in finding.fix
    with pytest.raises(DatasetError, match=advice):
        open_dataset(root=copy)


def test_statistics_of_the_readable_episodes(original, tmp_path, capsys):
    root = to_v2(original, tmp_path / "old")
    truncate(root / "data/chunk-000/episode_000001.parquet", 0.5)
    command = ["data", "stats", str(root), "--json"]
    assert cli.main(command) == 1
    error = capsys.readouterr().err
    assert "episode 1" in error and "  --exclude_episodes=1" in error and "  --on_bad_episode=skip" in error
    assert cli.main([*command, "--on_bad_episode=skip"]) == 0
    skipped = json.loads(capsys.readouterr().out)
    assert skipped["action"]["count"] == [sum(LENGTHS) - LENGTHS[1]]
    assert cli.main([*command, "--exclude_episodes=1"]) == 0
    assert json.loads(capsys.readouterr().out) == skipped


def test_statistics_without_an_episode_whose_images_are_damaged(original, tmp_path, capsys):
    root = to_v2(original, tmp_path / "old")
    overwrite_packets(root / f"videos/chunk-000/{TOP}/episode_000001.mp4", range(4))
    command = ["data", "stats", str(root), "--json"]
    assert cli.main(command) == 1 and "episode 1, camera" in capsys.readouterr().err
    assert cli.main([*command, "--on_bad_episode=skip"]) == 0
    printed = capsys.readouterr()
    assert "skipped: episode 1, camera" in printed.err
    assert json.loads(printed.out)["action"]["count"] == [sum(LENGTHS) - LENGTHS[1]]


def test_counts_that_are_equal_are_not_contrasted():
    times = np.arange(6) / 10
    with pytest.raises(NoMatch, match=r"one frame per row, so dataset.frame_by=index or auto"):
        match_frames(times, times * 1.5, 0.0, float("nan"), 10, 0.05, "time")
    with pytest.raises(NoMatch, match="6 frames for 5 rows"):
        match_frames(times, times[:5] * 2, 0.0, float("nan"), 10, 0.05, "time")
