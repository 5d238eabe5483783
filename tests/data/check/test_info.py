import json
import shlex
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from flexor.cli import main as cli
from flexor.core.errors import DatasetError
from flexor.data.check.info import describe, render
from flexor.data.dataset import open_dataset
from support.damage import edit_json, truncate
from support.legacy import to_v2
from support.small_datasets import LENGTHS, SIDE, STILL, TOP, write
from support.small_policies import TINY_ACT


def test_a_described_dataset(tmp_path):
    root = write(tmp_path / "my data", still=True, robot_type="toy arm")
    info = describe(root)
    assert (info["version"], info["robot_type"], info["episodes"]) == ("v3.0", "toy arm", 4)
    assert info["frames"] == sum(LENGTHS) and info["hours"] == pytest.approx(38 / 10 / 3600)
    assert info["tasks"] == ["push", "pull", "lift"]
    assert (info["action_dim"], info["state_dim"]) == (2, 3)
    top = info["cameras"][TOP]
    assert top["codec"] == ["h264"] and top["pix_fmt"] == ["yuv420p"] and top["resolution"] == ["32x48"]
    assert top["gop"] == {"typical": 2, "min": 1, "max": 2} and top["fps"] == 10
    assert info["cameras"][STILL]["stored_as"] == "image"
    assert info["statistics"]["missing"] == [] and info["notes"] == []
    videos = sum(path.stat().st_size for path in root.rglob("*.mp4"))
    assert info["bytes"]["videos"] == videos == top["bytes"] + info["cameras"][SIDE]["bytes"]
    json.dumps(info)
    text = render(info)
    assert f"flexor train --policy.type=act --dataset.root='{root}'" in text
    assert f"{TOP}: 32x48 h264 yuv420p, GOP 2, 1 to 2, 1 file" in text
    assert "action: float32 [2]" in text and "complete, with quantiles" in text


def test_an_open_dataset_is_described_alike(tmp_path):
    root = write(tmp_path / "d")
    assert describe(open_dataset(root=root)) == describe(root)


def test_older_formats(tmp_path):
    root = to_v2(write(tmp_path / "d"), tmp_path / "v2", "v2.1")
    info = describe(root)
    assert (info["version"], info["episodes"], info["frames"]) == ("v2.1", 4, sum(LENGTHS))
    assert info["cameras"][TOP]["files"] == 4


def test_notes_say_what_is_odd(tmp_path):
    root = write(tmp_path / "d", data_files_mb=1e-6, video_files_mb=1e-6)
    meta = root / "meta/info.json"
    info = json.loads(meta.read_text())
    info["features"]["observation.images.gone"] = dict(info["features"][TOP])
    info["features"][SIDE]["shape"] = [64, 48, 3]
    info["total_frames"] = 99
    meta.write_text(json.dumps(info))
    (root / f"videos/{TOP}/chunk-000/file-002.mp4").write_bytes(b"nothing")
    (root / "meta/stats.json").unlink()
    notes = "\n".join(describe(root)["notes"])
    assert "observation.images.gone is declared, but has no video files" in notes
    assert f"{SIDE}: images are 32x48, but meta/info.json declares 64x48" in notes
    assert f"{TOP}: 1 of 4 measured files are unreadable" in notes
    assert "no statistics of observation.state, action" in notes
    assert "declares 99 frames" in notes
    assert "notes" in render(describe(root))


def test_long_groups_of_pictures_are_noted(tmp_path, monkeypatch):
    monkeypatch.setattr("flexor.data.check.info.LONG_GOP", 8)
    info = describe(write(tmp_path / "d", gop=100))
    assert info["cameras"][TOP]["gop"]["typical"] == 9
    assert "the GOP size is 9 frames" in "\n".join(info["notes"])


def test_no_dataset(tmp_path):
    with pytest.raises(DatasetError, match=r"meta/info\.json: the file is missing"):
        describe(tmp_path)


def cut(pattern: str):
    def change(root: Path) -> None:
        for path in sorted(root.rglob(pattern)):
            truncate(path, 0.3)

    return change


def info_json(change):
    return lambda root: edit_json(root / "meta/info.json", change)


def no_cameras(root: Path) -> None:
    shutil.rmtree(root / "videos")


def pointers(root: Path) -> None:
    for path in root.rglob("*.mp4"):
        path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")


def other_names(root: Path) -> None:
    names = {"action": "actions", "observation.state": "state"}
    edit_json(
        root / "meta/info.json",
        lambda info: info.update(features={names.get(n, n): spec for n, spec in info["features"].items()}),
    )
    for path in root.rglob("data/*/*.parquet"):
        table = pq.read_table(path)
        pq.write_table(table.rename_columns([names.get(n, n) for n in table.column_names]), path)


@pytest.mark.parametrize(
    ("change", "runs", "note"),
    [
        (lambda root: None, True, None),
        (cut("*002.parquet"), True, "1 of 4 episodes can't be read"),
        (cut("*002.mp4"), True, "1 of 4 episodes can't be read"),
        (other_names, True, "actions is action, state is observation.state"),
        (info_json(lambda info: info["features"].pop("observation.state")), True, None),
        (cut("*.mp4"), False, "training can't read the dataset"),
        (pointers, False, "4 files, such as"),
        (no_cameras, False, "the built-in policies need a camera"),
        (info_json(lambda info: info["features"].pop("action")), True, None),  # it is read all the same
        (info_json(lambda info: info["features"]["action"].update(shape=[7])), False, "can't read"),
        (info_json(lambda info: info.update(codebase_version="v9.0")), False, "codebase_version"),
        (info_json(lambda info: info.update(fps=0)), False, "fps is 0, not a frame rate"),
    ],
)
def test_the_command_for_training_runs(tmp_path, split, change, runs, note):
    root = Path(shutil.copytree(split, tmp_path / "data"))
    change(root)
    info = describe(root)
    assert (info["train"] is not None) == runs
    assert note is None or note in "\n".join(info["notes"])
    plain = f"flexor train --policy.type=act --dataset.root={root}"
    more = [f"--output_dir={tmp_path / 'run'}", "--batch_size=2", "--num_workers=0", "--steps=1"]
    words = shlex.split(info["train"] or plain)[1:]
    code = cli.main([*words, *TINY_ACT, *more, "--save_checkpoint=false"])
    assert (code == 0) == runs


@pytest.fixture(scope="module")
def split(tmp_path_factory):
    root = tmp_path_factory.mktemp("split")
    return to_v2(write(root / "one"), root / "v2.1", "v2.1")


def test_alike_errors_are_one_note(tmp_path):
    root = write(tmp_path / "d")
    for path in root.rglob("*.mp4"):
        path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    notes = describe(root)["notes"]
    assert len([note for note in notes if "Git LFS" in note]) == 2, notes  # a file of each camera, 4 episodes
    shutil.rmtree(root / "meta/episodes")
    assert sum("episodes are unknown" in note for note in describe(root)["notes"]) == 1
