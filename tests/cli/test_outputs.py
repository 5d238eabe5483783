"""Every verb that writes checks where, before it works: a mistake is one line that names the flag."""

import shutil
from pathlib import Path

import pytest

from flexor.bench import limits
from flexor.cli.main import main
from support import runs

PLAN = ("plan", "--policy.type=act", "--cameras=1x32x32", "--gpu=4090", "--frames=1000")
FILES = {  # the command, with {} for the output, and the name by which a message calls it
    "plan --html": ((*PLAN, "--html={}"), "--html"),
    "data check --good-episodes": (("data", "check", "DATASET", "--good-episodes={}"), "--good-episodes"),
    "data show": (("data", "show", "DATASET", "--output={}"), "--output"),
    "data show --augmented": (("data", "show", "DATASET", "--augmented={}.png"), "--augmented"),
    "report": (("report", "RUN", "--output={}"), "--output"),
    "bench data, a file": (("bench", "data", "DATA", "--output={}.json"), "--output"),
}
SERVER = ("--server=ws://127.0.0.1:1",)
ROBOT = ("--robot=x.py:make", "--task=t", "--fps=1", "--seconds=1")
FOLDERS = {
    "bench data": (("bench", "data", "DATA", "--output={}"), "--output"),
    "data repair": (("data", "repair", "DATASET", "{}"), "root"),
    "data tokenizer": (("data", "tokenizer", "DATASET", "--output={}"), "--output"),
    "record": (("record", "{}", "--episodes=1"), "root"),
    "record --server": (("record", "{}", "--episodes=1", *SERVER), "root"),
    "record --robot": (("record", "{}", "--episodes=1", *SERVER, *ROBOT), "root"),
    "train": (("train", "TRAIN", "--output_dir={}"), "--output_dir"),
    "train --resume=auto": (("train", "TRAIN", "--output_dir={}", "--resume=auto"), "--output_dir"),
    "resume hub:": (("resume", "hub:ann/run", "--output_dir={}"), "--output_dir"),
    "launch local": (("launch", "local", "--processes=1", "TRAIN", "--output_dir={}"), "--output_dir"),
    "launch slurm": (
        ("launch", "slurm", "--time=1:00:00", "--gpus-per-node=1", "TRAIN", "--output_dir={}"),
        "--output_dir",
    ),
    "demo": (("demo", "--output-dir={}"), "--output-dir"),
    "export": (("export", "RUN", "--output={}"), "--output"),
    "eval --videos": (("eval", "RUN", "--env.type=place", "--videos={}"), "--videos"),
    "eval --server": (("eval", *SERVER, "--env.type=place", "--videos={}"), "--videos"),
}
WRITTEN = [  # those of which the whole command takes little time
    *("plan --html", "data check --good-episodes", "data show", "data show --augmented", "report"),
    *("bench data", "bench data, a file", "data repair", "data tokenizer", "record", "train", "export"),
    "eval --videos",
]


@pytest.fixture(autouse=True)
def briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this machine can do at most is measured for seconds."""
    monkeypatch.setattr(limits, "SECONDS", 0.05)
    monkeypatch.setattr(limits, "GATHERED", 1 << 20)


@pytest.fixture(scope="module")
def run(dataset, tiny_act, tmp_path_factory) -> Path:
    more = ("--steps=1", "--env.type=place", "--env.kwargs.image_size=32", "--env_eval_freq=0")
    return runs.train(
        dataset, tmp_path_factory.mktemp("runs") / "run", tiny_act, *more, "--eval.n_episodes=1"
    )


@pytest.fixture
def command(dataset, run, tiny_act):
    """The words of a command, with paths instead of the words in capitals, and `output` instead of {}."""
    data = [f"--dataset.root={dataset}", "--batch_size=2", "--num_workers=0"]
    words = {
        "DATASET": [str(dataset)],
        "DATA": [*data, "--device=host"],
        "TRAIN": [*data, *tiny_act, "--steps=1"],
        "RUN": [str(run)],
    }

    def make(verb: str, output: Path) -> list[str]:
        arguments = {**FILES, **FOLDERS}[verb][0]
        return [part for word in arguments for part in words.get(word, [word.format(output)])]

    return make


def flag_of(verb: str) -> str:
    return {**FILES, **FOLDERS}[verb][1]


def refusal(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a command ends with, before it has done anything."""
    assert main(arguments) == 2
    out, error = capsys.readouterr()
    assert out == "" and error.count("\n") == 1, error
    return error


@pytest.mark.parametrize("verb", [*FILES, *FOLDERS])
def test_a_file_in_place_of_a_folder_on_the_way(verb, command, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes").write_text("mine")
    error = refusal(command(verb, tmp_path / "notes" / "deep" / "output"), capsys)
    assert (
        f"{flag_of(verb)}={tmp_path}/notes/deep/output" in error and "notes is a file, not a folder" in error
    )
    assert (tmp_path / "notes").read_text() == "mine"


@pytest.mark.parametrize("verb", [*FILES, *FOLDERS])
@pytest.mark.parametrize("target", ["nowhere", "link"])  # or in a circle
def test_a_link_to_nothing_on_the_way(target, verb, command, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(target)
    error = refusal(command(verb, tmp_path / "link" / "output"), capsys)
    assert f"{flag_of(verb)}={tmp_path}/link/output" in error
    assert "link is a link to nowhere, which does not exist" in error or "can't be used" in error


@pytest.mark.parametrize("verb", [*FILES, *FOLDERS])
def test_the_wrong_kind_of_thing_is_there(verb, command, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for place in [tmp_path / f"output{suffix}" for suffix in ("", ".png", ".json")]:
        place.mkdir() if verb in FILES else place.write_text("mine")
    error = refusal(command(verb, tmp_path / "output"), capsys)
    expected = "is a folder: name a file" if verb in FILES else "is a file, but must be a folder"
    assert f"{flag_of(verb)}={tmp_path}/output" in error and expected in error


@pytest.mark.parametrize("verb", WRITTEN)
def test_missing_folders_are_created(verb, command, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(command(verb, tmp_path / "new" / "deep" / "output")) == 0
    assert any((tmp_path / "new" / "deep").iterdir())


def test_statistics_are_written_where_that_is_possible(dataset, tmp_path, capsys):
    copy = shutil.copytree(dataset, tmp_path / "copy")
    (copy / "meta" / "stats.json").unlink()
    (copy / "meta" / "stats.json").mkdir()
    assert "--write=" in refusal(["data", "stats", str(copy), "--write"], capsys)


def test_a_plan_does_not_overwrite_what_is_not_a_page(tmp_path, capsys):
    notes = tmp_path / "notes.html"
    notes.write_text("mine")
    assert "exists and is not a page" in refusal([*PLAN, f"--html={notes}"], capsys)
    assert notes.read_text() == "mine"


def test_the_default_folder_of_runs(tmp_path, capsys, monkeypatch, dataset, tiny_act):
    monkeypatch.chdir(tmp_path)
    Path("runs").write_text("mine")
    arguments = ["train", f"--dataset.root={dataset}", *tiny_act, "--steps=1", "--num_workers=0", "--json"]
    assert "runs is a file, not a folder" in refusal(arguments, capsys)
