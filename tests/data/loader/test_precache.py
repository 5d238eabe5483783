"""`flexor data cache`, from the command line to the files and back."""

import json
from pathlib import Path

import numpy as np
import pytest

from flexor.cli.main import main
from flexor.core.errors import DatasetError
from flexor.data.dataset import open_dataset
from flexor.data.frames import cache_folders as caches
from flexor.data.loader.precache import precache
from support.frame_caches import filled, own_folders

CAMERA = "observation.image"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    return own_folders(tmp_path, monkeypatch)


def run(capsys, *arguments) -> dict:
    assert main(["data", "cache", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    "flags", [[], ["--size=16x24"], ["--format=jpeg"], [f"--cameras={CAMERA}", "--workers=1"]]
)
def test_all_frames_are_kept(dataset, capsys, flags):
    count = len(open_dataset(root=dataset))
    result = run(capsys, dataset, *flags)
    assert result["complete"] and result["cameras"] == {CAMERA: {"frames": count, "kept": count, "broken": 0}}
    (info,) = run(capsys, "--list")["caches"]
    assert info["ready"] == info["frames"] == count and not info["in_use"]
    assert info["size"] == ([16, 24] if "--size=16x24" in flags else None)


def test_kept_frames_are_those_of_the_video(dataset):
    opened = open_dataset(root=dataset)
    ids = np.arange(len(opened))
    decoded = opened.store.get(CAMERA, ids)
    precache(opened)
    assert opened.store.is_cached(CAMERA, ids).all()
    assert (opened.store.get(CAMERA, ids) == decoded).all()


def test_nothing_is_decoded_twice(dataset, monkeypatch):
    precache(open_dataset(root=dataset))
    opened = open_dataset(root=dataset)
    calls = []
    monkeypatch.setattr(opened.store, "decode", lambda *arguments: calls.append(arguments))
    assert precache(opened)["complete"] and not calls


def test_list_and_prune(folder, capsys):
    filled(folder).close()
    assert main(["data", "cache", "--list"]) == 0
    assert "me/blocks" in capsys.readouterr().out
    assert run(capsys, "--prune", "--older-than=30d", "--to=50GB")["removed"] == []
    assert run(capsys, "--prune", "--dataset=me/blocks")["removed"][0]["dataset"] == "me/blocks"
    assert run(capsys, "--list") == {"caches": []}
    filled(folder).close()
    assert main(["data", "cache", "--prune", "--all"]) == 0
    assert "removed 1" in capsys.readouterr().out and caches.list_caches() == []


@pytest.mark.parametrize(
    "flags, words",
    [
        ([], "required"),
        (["ROOT", "--list"], "not allowed"),
        (["--list", "--size=3x3"], "--size is only valid with a dataset"),
        (["ROOT", "--all"], "--all is only valid with --prune"),
        (["--prune", "--older-than=soon"], "soon"),
        (["--prune", "--to=50"], "GB"),
        (["ROOT", "--size=big"], "HEIGHTxWIDTH"),
        (["ROOT", "--workers=0"], "threads"),
        (["ROOT", "--cameras=front"], CAMERA),
    ],
)
def test_mistakes(dataset, capsys, flags, words):
    code = main(["data", "cache", *[flag.replace("ROOT", str(dataset)) for flag in flags]])
    assert code in (1, 2) and words in capsys.readouterr().err


def test_no_room(dataset, monkeypatch):
    monkeypatch.setattr(caches, "free_bytes", lambda folder: 1000)
    with pytest.raises(DatasetError, match="--prune"):
        precache(open_dataset(root=dataset))


def test_no_cameras(lowdim):
    with pytest.raises(DatasetError, match="no readable camera"):
        precache(open_dataset(root=lowdim))
