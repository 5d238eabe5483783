"""Datasets of strangers: nothing in them leads out of their folder, runs, or ends in anything but a message."""

import json
import os
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest

from flexor.cli.main import main
from flexor.core.errors import DatasetError, FlexorError
from flexor.data.dataset import open_dataset
from support import foreign_datasets, legacy, small_datasets
from support.damage import edit_json
from support.mutations import Watch


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    return small_datasets.write(tmp_path_factory.mktemp("foreign") / "v3", still=True)


@pytest.fixture(scope="module")
def old(good) -> Path:
    return legacy.to_v2(good, good.with_name("v21"))


@pytest.fixture
def precious(tmp_path) -> Path:
    """A file of the user's, which must stay as it is."""
    (tmp_path / "home").mkdir()
    (tmp_path / "home/precious").write_text("mine")
    return tmp_path / "home/precious"


@pytest.fixture
def theirs(good, tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("FLEXOR_CACHE", str(tmp_path / "cache"))
    shutil.copytree(good, tmp_path / "theirs")
    return tmp_path / "theirs"


def served(root: Path, monkeypatch) -> str:
    """The dataset at a URL."""
    import fsspec

    memory = fsspec.filesystem("memory")
    monkeypatch.setattr(memory, "store", {})
    for path in root.rglob("*"):
        if path.is_file():
            memory.pipe_file(f"/theirs/{path.relative_to(root).as_posix()}", path.read_bytes())
    return "memory://theirs"


PATHS = [
    "{file}",
    "../home/precious",
    "data/../../home/precious",
    "../../home/precious",
    "data/\0",
    "a\\..\\b",
]


@pytest.mark.parametrize("key", ["data_path", "video_path"])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("verb", ["info", "check", "repair", "stats", "cache"])
def test_no_template_leads_out(verb, path, key, theirs, precious, tmp_path, monkeypatch, capsys):
    edit_json(theirs / "meta/info.json", lambda info: info.update({key: path.format(file=precious)}))
    out = [str(tmp_path / "out")] if verb == "repair" else []
    for address in (served(theirs, monkeypatch), str(theirs)):
        main(["data", verb, address, *out])
        assert precious.read_text() == "mine" and [*precious.parent.iterdir()] == [precious]
        assert "Traceback" not in capsys.readouterr().err
    with pytest.raises(DatasetError, match=r"is absolute|leads out|separator or control"):
        open_dataset(root=theirs)


@pytest.mark.parametrize("camera", ["../../../home/x", "/tmp/x", "a/../../../../home/x", "\x1b[2Jx"])
def test_no_camera_leads_out(camera, old, tmp_path, precious, capsys):
    """In a dataset of the old format, which names no file of a camera, and is converted by a repair."""
    theirs = tmp_path / "theirs"
    shutil.copytree(old, theirs)

    def rename(info: dict) -> None:
        info["features"][camera] = info["features"].pop(small_datasets.TOP)
        info["video_path"] = "videos/chunk-{episode_chunk:03d}/same/episode_{episode_index:06d}.mp4"

    edit_json(theirs / "meta/info.json", rename)
    for path in (theirs / "videos").glob(f"chunk-*/{small_datasets.TOP}"):
        path.rename(path.with_name("same"))
    before = sorted(tmp_path.rglob("*"))
    main(["data", "repair", str(theirs), str(tmp_path / "a/b/c/out")])
    made = [path for path in sorted(tmp_path.rglob("*")) if path not in before]
    assert all(path.is_relative_to(tmp_path / "a") for path in made), made
    outside = [path for path in made if path.is_file() and not path.is_relative_to(tmp_path / "a/b/c/out")]
    assert not outside
    output = capsys.readouterr()
    assert "\x1b" not in output.out + output.err and "Traceback" not in output.err


LINKED = [
    "meta/info.json",
    "meta/stats.json",
    "meta/episodes/chunk-000/file-000.parquet",
    "data/chunk-000/file-000.parquet",
    f"videos/{small_datasets.TOP}/chunk-000/file-000.mp4",
    "meta/notes.txt",
]


@pytest.mark.parametrize("name", LINKED)
def test_no_link_leads_out(name, theirs, precious, tmp_path, monkeypatch, capsys):
    path = theirs / name
    target = tmp_path / "home" / path.name
    target.write_bytes(path.read_bytes() if path.exists() else b"secret")
    path.unlink(missing_ok=True)
    path.symlink_to(target)
    main(["data", "check", str(theirs)])
    main(["data", "repair", str(theirs), str(tmp_path / "out")])
    assert "Traceback" not in capsys.readouterr().err
    copies = [each for each in (tmp_path / "out").rglob("*") if each.is_file()]
    assert not any(each.read_bytes() == b"secret" for each in copies)
    if name != "meta/notes.txt":
        with pytest.raises(FlexorError, match="leads out of the folder"):
            dataset = open_dataset(root=theirs)
            dataset.read([0])
    monkeypatch.setenv("FLEXOR_LINK_TARGETS", str(tmp_path / "home"))
    assert len(open_dataset(root=theirs).read([0])) > 3


class Marks:
    """A pickle of it leaves a mark when it is loaded."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch {self.mark}",)


def test_no_file_of_a_dataset_is_code(theirs, tmp_path, capsys):
    """Each file in turn is a pickle that would leave a mark."""
    mark = tmp_path / "mark"
    for path in sorted(path for path in theirs.rglob("*") if path.is_file()):
        content = path.read_bytes()
        path.write_bytes(pickle.dumps(Marks(mark)))
        for verb in ("info", "check", "stats"):
            main(["data", verb, str(theirs)])
        main(["data", "repair", str(theirs), str(tmp_path / "out"), "--quick"])
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        path.write_bytes(content)
    assert not mark.exists() and "Traceback" not in capsys.readouterr().err
    pickle.loads(pickle.dumps(Marks(mark)))
    assert mark.exists()  # it would


TEMPLATES = [
    "data/{chunk_index:0999999999d}.parquet",
    "data/{chunk_index:>99999999}",
    "data/{file_index!r:>9999999}",
]


@pytest.mark.parametrize("template", TEMPLATES)
def test_no_template_fills_the_memory(template, theirs):
    edit_json(theirs / "meta/info.json", lambda info: info.update(data_path=template))
    with pytest.raises(DatasetError, match="is not a valid format"):
        open_dataset(root=theirs)


@pytest.mark.parametrize("name", ["info.json", "stats.json"])
def test_a_document_of_brackets_is_no_crash(name, theirs, capsys):
    (theirs / "meta" / name).write_text("[" * 200_000)
    assert main(["data", "check", str(theirs)]) == 1
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("action", foreign_datasets.ACTIONS)
def test_mutated_metadata(action, good, old, tmp_path, monkeypatch):
    """A part of benchmarks/fuzz_datasets.py, which has 100,000 of them."""
    canary, work, cache = (tmp_path / name for name in ("canary", "work", "cache"))
    for folder in (canary, work, cache):
        folder.mkdir()
    (canary / "x").write_text("precious")
    monkeypatch.setenv("FLEXOR_CACHE", str(cache))
    watch = Watch([work, cache], canary)
    for number in range(12):
        rng, root = np.random.default_rng([7, number]), work / str(number)
        foreign_datasets.linked((good, old)[number % 2], root)
        file = foreign_datasets.mutate(root, rng, canary)
        problem = watch.run(lambda: foreign_datasets.ACTIONS[action](root))  # noqa: B023
        assert problem is None, f"{file} of {number}: {problem}"


def test_json_output_has_no_control_characters(theirs, capsys):
    edit_json(theirs / "meta/info.json", lambda info: info.update(robot_type="arm\x1b[2J\u202e"))
    assert main(["data", "info", str(theirs)]) == 0
    text = capsys.readouterr().out
    assert main(["data", "info", str(theirs), "--json"]) == 0
    raw = capsys.readouterr().out
    assert "\x1b" not in text + raw and json.loads(raw)["robot_type"] == "arm\x1b[2J\u202e"


def test_statistics_are_not_written_through_a_link(theirs, precious, capsys):
    (theirs / "meta/.stats.json").symlink_to(precious)
    edit_json(theirs / "meta/stats.json", lambda stats: stats["action"].update(mean=[9.0, 9.0]))
    assert main(["data", "stats", str(theirs), "--write"]) == 0
    assert precious.read_text() == "mine" and not (theirs / "meta/stats.json").is_symlink()
    assert not (theirs / "meta/.stats.json").exists()


def test_a_file_in_the_place_of_a_folder_of_the_cache(theirs, monkeypatch, capsys):
    """On a web server, `a` and `a/b` can both be files."""
    import fsspec

    templates = {"data_path": "a", "video_path": "a/{video_key}"}
    edit_json(theirs / "meta/info.json", lambda info: info.update(templates))
    address = served(theirs, monkeypatch)
    store = fsspec.filesystem("memory").store
    for name in ("a", f"a/{small_datasets.TOP}", f"a/{small_datasets.SIDE}"):
        store[f"/theirs/{name}"] = store["/theirs/data/chunk-000/file-000.parquet"]
    assert main(["data", "info", address]) == 1
    assert "can't be copied to" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["../theirs", "/etc", "a/../../b"])
def test_the_name_of_a_dataset_is_no_path(name, theirs, tmp_path, monkeypatch):
    """As in the settings of a stranger's run."""
    (tmp_path / "lerobot").mkdir()
    monkeypatch.setenv("HF_LEROBOT_HOME", str(tmp_path / "lerobot"))
    with pytest.raises(DatasetError, match=r"is not a dataset's name.*--dataset.root"):
        open_dataset(name)


@pytest.mark.parametrize("end", ["\u00b2", "9" * 5000])
def test_the_end_of_a_split_is_a_number(end, theirs, capsys):
    edit_json(theirs / "meta/info.json", lambda info: info.update(splits={"train": f"0:{end}"}))
    assert main(["data", "check", str(theirs), "--quick"]) == 0
    assert "Traceback" not in capsys.readouterr().err
