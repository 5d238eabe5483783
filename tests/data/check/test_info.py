import json

import pytest

from flexor.core.errors import DatasetError
from flexor.data.check.info import describe, render
from flexor.data.dataset import open_dataset
from support.legacy import to_v2
from support.small_datasets import LENGTHS, SIDE, STILL, TOP, write


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
