"""Checkpoints of strangers: nothing in them runs or leads out, and what is absurd or damaged is refused."""

import contextlib
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from flexor.cli.main import main
from flexor.core.errors import CheckpointError, ConfigError, FlexorError
from flexor.policies.pretrained import load_pretrained, read_config
from support import foreign_checkpoints, ranks, runs
from support.damage import edit_json
from support.mutations import Watch

POLICY = "checkpoints/000004/pretrained_model"


@pytest.fixture(scope="module")
def trained(lowdim, tiny_act, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("foreign")
    return runs.train(lowdim, folder / "run", tiny_act, "--steps=4", "--ema.enable")


@pytest.fixture(scope="module")
def sharded(lowdim, tiny_act, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("foreign_shards")
    flags = runs.flags(lowdim, folder / "run", tiny_act, "--steps=4", "--parallel.strategy=fsdp")
    ranks.run(folder / "out", 2, ["train", *flags])
    return folder / "run"


@pytest.fixture
def theirs(trained, tmp_path) -> Path:
    shutil.copytree(trained, tmp_path / "theirs", symlinks=True)
    return tmp_path / "theirs"


def settle(run: Path) -> None:
    """Whoever makes such a checkpoint makes its manifest fit."""
    foreign_checkpoints.settle(run / "checkpoints/000004/training_state/manifest.json")


def commands(run: Path, data: Path) -> list[list[str]]:
    start = [
        f"--policy.path={run}",
        f"--dataset.root={data}",
        "--steps=1",
        f"--output_dir={run.with_name('new')}",
    ]
    return [
        [
            "eval",
            str(run),
            "--env.type=place",
            "--eval.n_episodes=1",
            "--env.max_steps=1",
            "--policy.device=cpu",
        ],
        ["serve", str(run), "--port=0", "--device=cpu"],
        ["train", *start, "--policy.device=cpu"],
        ["resume", str(run), "--steps=5"],
    ]


# No file is code


class Marks:
    """A pickle of it leaves a mark when it is loaded."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch {self.mark}",)


@pytest.mark.ranks
@pytest.mark.parametrize("kind", ["trained", "sharded"])
def test_no_file_of_a_checkpoint_is_code(kind, request, tmp_path, capsys):
    """Each file in turn is a pickle that would leave a mark, with a manifest that fits."""
    run, mark = tmp_path / "run", tmp_path / "mark"
    shutil.copytree(request.getfixturevalue(kind), run, symlinks=True)
    bomb = pickle.dumps(Marks(mark))
    folder = run / "checkpoints/000004"
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    indices = sorted({path.with_name(".metadata") for path in files})  # of shards, as runs once had
    for path in [*files, *indices]:
        content = path.read_bytes() if path.exists() else None
        path.write_bytes(bomb)
        index = path.with_name("index.json")  # is read instead of .metadata
        if path.name == ".metadata" and index.exists():
            index.rename(tmp_path / index.name)
        if path.name != "manifest.json":
            settle(run)
        for action in ("load", "export", "resume"):
            with contextlib.suppress(FlexorError):
                foreign_checkpoints.ACTIONS[action](run)
        shutil.rmtree(run.with_name("exported"), ignore_errors=True)
        path.unlink() if content is None else path.write_bytes(content)
        if (tmp_path / index.name).exists():
            (tmp_path / index.name).rename(index)
        settle(run)
    assert not mark.exists() and "Traceback" not in capsys.readouterr().err
    pickle.loads(bomb)
    assert mark.exists()  # it would


# Names in it stay inside


@pytest.mark.parametrize("name", ["../../../secret.safetensors", "{tmp}/secret.safetensors", "a\0b", 3, None])
def test_no_state_of_the_processing_leads_out(name, theirs, tmp_path):
    secret = tmp_path / "secret.safetensors"
    state = next((theirs / POLICY).glob("policy_preprocessor_step_*"))
    shutil.copyfile(state, secret)
    name = name.format(tmp=tmp_path) if isinstance(name, str) else name

    def rename(saved: dict) -> None:
        next(step for step in saved["steps"] if "state_file" in step)["state_file"] = name

    edit_json(theirs / POLICY / "policy_preprocessor.json", rename)
    settle(theirs)
    with pytest.raises(CheckpointError, match="can't be read"):
        load_pretrained(str(theirs))


@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "policy_preprocessor.json"])
def test_no_link_leads_out(file, theirs, tmp_path):
    path = theirs / POLICY / file
    path.rename(tmp_path / file)
    path.symlink_to(tmp_path / file)
    with pytest.raises(FlexorError, match="leads out of the folder"):
        load_pretrained(str(theirs))
    shutil.copytree(theirs / POLICY, tmp_path / "alone", symlinks=True)  # without a manifest
    with pytest.raises(FlexorError, match="leads out of the folder"):
        load_pretrained(str(tmp_path / "alone"))


@pytest.mark.parametrize("name", ["../../../x", "/etc/passwd"])
def test_no_manifest_leads_out(name, theirs, capsys):
    manifest = theirs / "checkpoints/000004/training_state/manifest.json"
    edit_json(manifest, lambda listed: listed["files"].update({name: {"size": 1, "sha256": "0"}}))
    assert main(["resume", str(theirs)]) == 1
    assert "is damaged" in capsys.readouterr().err


# What is loaded is what was saved


@pytest.mark.parametrize("number", range(3))
def test_a_flipped_bit_reaches_no_robot(number, theirs, lowdim, capsys):
    weights = theirs / POLICY / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-100] ^= 0x40
    weights.write_bytes(data)
    assert main(commands(theirs, lowdim)[number]) == 1
    assert "model.safetensors has changed since it was saved" in capsys.readouterr().err


def test_a_flipped_bit_is_found_however_the_folder_is_named(theirs, tmp_path, monkeypatch):
    _flip(theirs / POLICY / "model.safetensors")
    (tmp_path / "best").symlink_to(theirs / POLICY)
    monkeypatch.chdir(theirs / POLICY)
    for name in (tmp_path / "best", ".", "../pretrained_model"):
        with pytest.raises(CheckpointError, match="is damaged"):
            load_pretrained(str(name))


def test_a_flipped_bit_of_the_policy_that_adapters_add_to_is_found(lowdim, tiny_act, theirs, tmp_path):
    flags = [f"--policy.path={theirs}", "--policy.device=cpu", "--lora.r=2", "--steps=1"]
    run = runs.train(lowdim, tmp_path / "lora", flags)
    adapter = run / "checkpoints/000001/pretrained_model/adapter"
    load_pretrained(str(adapter))
    _flip(theirs / POLICY / "model.safetensors")
    with pytest.raises(CheckpointError, match="is damaged"):
        load_pretrained(str(adapter))


@pytest.mark.ranks
def test_a_flipped_bit_of_exported_weights_is_found(sharded, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(sharded, run, symlinks=True)
    weights = run / POLICY / "model.safetensors"
    weights.unlink(missing_ok=True)
    settle_without(run, "pretrained_model/model.safetensors")
    assert main(["export", str(run)]) == 0
    load_pretrained(str(run))
    _flip(weights)
    with pytest.raises(CheckpointError, match="is damaged"):
        load_pretrained(str(run))
    weights.unlink()  # what can be made again may be deleted
    assert main(["export", str(run)]) == 0
    load_pretrained(str(run))


@pytest.mark.ranks
def test_listing_exported_weights_writes_through_no_link(sharded, tmp_path):
    run, mine = tmp_path / "run", tmp_path / "mine"
    shutil.copytree(sharded, run, symlinks=True)
    (run / POLICY / "model.safetensors").unlink(missing_ok=True)
    settle_without(run, "pretrained_model/model.safetensors")
    mine.write_text("precious")
    (run / "checkpoints/000004/training_state/.manifest.writing").symlink_to(mine)
    assert main(["export", str(run)]) == 0
    assert mine.read_text() == "precious"


def settle_without(run: Path, name: str) -> None:
    manifest = run / "checkpoints/000004/training_state/manifest.json"
    edit_json(manifest, lambda listed: listed["files"].pop(name, None))


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 64
    path.write_bytes(data)


def test_a_policy_alone_has_no_manifest_and_is_loaded(theirs, tmp_path):
    shutil.copytree(theirs / POLICY, tmp_path / "alone")
    weights = load_file(tmp_path / "alone/model.safetensors")
    save_file({name: weight + 1 for name, weight in weights.items()}, tmp_path / "alone/model.safetensors")
    load_pretrained(str(tmp_path / "alone"))  # somebody's own weights


# Whatever is in it


@pytest.mark.ranks
@pytest.mark.parametrize("action", foreign_checkpoints.ACTIONS)
def test_mutated_files(action, trained, sharded, lowdim, tmp_path, monkeypatch):
    """A part of benchmarks/fuzz_checkpoints.py, which has 10,000 of them."""
    canary, work, cache = (tmp_path / name for name in ("canary", "work", "cache"))
    for folder in (canary, work, cache):
        folder.mkdir()
    (canary / "x").write_text("precious")
    monkeypatch.setenv("FLEXOR_CACHE", str(cache))
    monkeypatch.setenv("FUZZED_DATA", str(lowdim))
    watch, take = Watch([work, cache], canary), foreign_checkpoints.ACTIONS[action]
    for number in range(8):
        rng, run = np.random.default_rng([3, number]), work / str(number) / "run"
        foreign_checkpoints.copied((trained, sharded)[number % 2], run)
        file = foreign_checkpoints.mutate(run, rng, canary)
        problem = watch.run(lambda: take(run))  # noqa: B023
        assert problem is None, f"{file} of {number}: {problem}"


@pytest.mark.parametrize(
    "text", ["[1]", "null", '{"type": ["act"]}', '{"type": "act", "dim_model": {}}', "[" * 99_999]
)
def test_a_config_that_is_none(text, tmp_path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises((CheckpointError, ConfigError)):
        read_config(str(tmp_path))


CHANGES: dict[str, Callable[[dict], object]] = {
    "no steps": lambda saved: saved.pop("steps"),
    "no list": lambda saved: saved.update(steps={"a": 1}),
    "a step that is none": lambda saved: saved["steps"].append(3),
    "a name that is none": lambda saved: saved["steps"].append({"registry_name": ["x"]}),
    "settings that are none": lambda saved: saved["steps"][0].update(config=[1]),
    "a type that is none": lambda saved: saved["steps"].append(
        {"registry_name": "device_processor", "config": {"float_dtype": "os"}}
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_processing_that_is_none(change, theirs):
    edit_json(theirs / POLICY / "policy_preprocessor.json", CHANGES[change])
    settle(theirs)
    with pytest.raises(CheckpointError):
        load_pretrained(str(theirs))
    assert json.loads((theirs / POLICY / "config.json").read_text())["type"] == "act"


@pytest.mark.parametrize("file", ["pretrained_model/policy_preprocessor.json", "training_state/flexor.json"])
def test_a_run_with_a_damaged_state_does_not_resume(file, theirs, capsys):
    edit_json(
        theirs / "checkpoints/000004" / file,
        lambda saved: saved.update(config=[], steps=saved.get("steps", [])[1:]),
    )
    settle(theirs)
    assert main(["resume", str(theirs), "--steps=5"]) == 1
    assert "is damaged" in capsys.readouterr().err


def test_statistics_that_normalisation_needs_and_that_are_missing(theirs):
    (file,) = (theirs / POLICY).glob("policy_preprocessor_step_*_normalizer_processor.safetensors")
    save_file({k: v for k, v in load_file(file).items() if k != "observation.state.std"}, file)
    settle(theirs)
    with pytest.raises(CheckpointError, match=r"std of observation.state is missing"):
        load_pretrained(str(theirs))


def test_how_an_optimizer_computes_is_not_the_checkpoints(theirs):
    def change(groups: list[dict]) -> None:
        for group in groups:
            group |= {"maximize": "no", "differentiable": True, "amsgrad": True}

    edit_json(theirs / "checkpoints/000004/training_state/optimizer_param_groups.json", change)
    settle(theirs)
    assert main(["resume", str(theirs), "--steps=5"]) == 0


# Nothing is written through links


LINKS = [
    "train.log",
    "metrics.jsonl",
    ".lock",
    ".config.yaml",
    "data_files.json",
    "videos",
    "checkpoints/.last.1",
]


@pytest.mark.parametrize("name", LINKS)
def test_a_run_with_a_link_that_leads_out_is_not_resumed(name, theirs, tmp_path, capsys):
    (tmp_path / "home").mkdir()
    (tmp_path / "home/precious").write_text("mine")
    (theirs / name).unlink(missing_ok=True)
    (theirs / name).symlink_to(tmp_path / "home/precious" if name != "videos" else tmp_path / "home")
    assert main(["resume", str(theirs), "--steps=5"]) == 1
    error = capsys.readouterr().err
    assert "leads out of the folder" in error and "FLEXOR_LINK_TARGETS=" in error
    assert (tmp_path / "home/precious").read_text() == "mine"
    assert [*(tmp_path / "home").iterdir()] == [tmp_path / "home/precious"]


def test_a_run_with_a_link_that_the_user_allows_is_resumed(theirs, tmp_path, monkeypatch):
    (theirs / "checkpoints").rename(tmp_path / "disk")
    (theirs / "checkpoints").symlink_to(tmp_path / "disk")
    monkeypatch.setenv("FLEXOR_LINK_TARGETS", str(tmp_path / "disk"))
    assert main(["resume", str(theirs), "--steps=5"]) == 0
    assert (tmp_path / "disk/000005").is_dir()


@pytest.mark.ranks
def test_an_export_does_not_write_through_a_link(sharded, tmp_path, capsys):
    theirs = shutil.copytree(sharded, tmp_path / "theirs", symlinks=True)
    (tmp_path / "precious").write_text("mine")
    weights = theirs / POLICY / "model.safetensors"
    weights.unlink()
    weights.with_name(".model.safetensors").symlink_to(tmp_path / "precious")
    manifest = theirs / "checkpoints/000004/training_state/manifest.json"
    edit_json(manifest, lambda listed: listed["files"].pop("pretrained_model/model.safetensors"))
    assert main(["export", str(theirs)]) == 1
    assert "is a symbolic link" in capsys.readouterr().err
    assert (tmp_path / "precious").read_text() == "mine" and not weights.exists()


def test_an_evaluation_writes_no_videos_through_a_link(theirs, tmp_path, capsys):
    (tmp_path / "home").mkdir()
    (theirs / "videos").symlink_to(tmp_path / "home")
    assert main(["eval", str(theirs), "--env.type=place", "--eval.n_episodes=1", "--eval.videos=1"]) == 1
    assert "leads out of the folder" in capsys.readouterr().err and not [*(tmp_path / "home").iterdir()]
