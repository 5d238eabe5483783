"""R0 and R2: a run that was interrupted is the run that was not, and another run is refused."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import save_file

from flexor.cli.main import main
from flexor.train.checkpoint import folder as checkpoint
from support import runs

STEPS = 12  # 43 samples in batches of 4 to 8: the end of the first epoch lies inside

COMBINATIONS = {
    "plain": [],
    "accumulation": ["--gradient_accumulation_steps=2"],
    "ema": ["--ema.enable", "--ema.decay=0.9"],
    "fp16": ["--precision=fp16"],
    "bf16": ["--precision=bf16"],
    "cosine": ["--scheduler.type=cosine", "--scheduler.num_warmup_steps=3"],
    "no vae, no dropout": ["--policy.use_vae=false", "--policy.dropout=0"],
    "workers": ["--num_workers=3"],
    "adam": ["--optimizer.type=adam"],
    "sgd": ["--optimizer.type=sgd", "--optimizer.momentum=0.9"],
    "sgd without momentum": ["--optimizer.type=sgd"],
    "everything": [
        "--gradient_accumulation_steps=2",
        "--ema.enable=true",
        "--precision=fp16",
        "--scheduler.type=cosine",
        "--num_workers=2",
        "--dataset.eval_split=0.25",
        "--eval_steps=2",
        "--deterministic",
    ],
}


@pytest.fixture(scope="module")
def finished(lowdim, tiny_act, tmp_path_factory) -> Path:
    """An uninterrupted run that saved every step."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    return runs.train(
        lowdim, folder, tiny_act, f"--steps={STEPS}", "--save_freq=1", "--dataset.eval_split=0.25"
    )


@pytest.mark.parametrize("name", COMBINATIONS)
def test_resumed_run_is_bitwise_the_uninterrupted_one(name, lowdim, tiny_act, tmp_path):
    more = [f"--steps={STEPS}", "--save_freq=5", *COMBINATIONS[name]]
    uninterrupted = runs.train(lowdim, tmp_path / "whole", tiny_act, *more)
    cut = runs.cut_back(uninterrupted, tmp_path / "cut", 5)
    assert main(["resume", str(cut)]) == 0
    runs.assert_same(uninterrupted, cut, STEPS)
    held_out = [
        [{**line, "time": None} for line in runs.metrics(run) if "held_out_loss" in line]
        for run in (uninterrupted, cut)
    ]
    assert held_out[0] == held_out[1]
    assert bool(held_out[0]) == ("--eval_steps=2" in more)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [("ram", "ram"), ("stream", "stream"), ("stream", "disk")])
def test_resume_with_pictures(before, after, dataset, tiny_act, tmp_path):
    """Also on a machine with other room for frames: the order of samples is the run's, not the machine's."""
    more = ["--steps=4", "--save_freq=2", "--ema.enable", "--num_workers=2", "--batch_size=6"]
    uninterrupted = runs.train(
        dataset,
        tmp_path / "whole",
        tiny_act,
        *more,
        f"--dataset.cache.tier={before}",
        "--dataset.order.pool=5",
    )
    cut = runs.cut_back(uninterrupted, tmp_path / "cut", 2)
    assert main(["resume", str(cut), f"--dataset.cache.tier={after}", "--dataset.cache.pool_gb=0.001"]) == 0
    runs.assert_same(uninterrupted, cut, 4)


AUGMENTED = ["--dataset.image_transforms.enable=true", "--dataset.image_transforms.random_order=true"]


def test_resume_with_augmented_images(dataset, tiny_act, tmp_path):
    more = ["--steps=4", "--save_freq=2", "--dataset.eval_split=0.25", "--eval_steps=4"]
    uninterrupted = runs.train(dataset, tmp_path / "whole", tiny_act, *more, *AUGMENTED)
    cut = runs.cut_back(uninterrupted, tmp_path / "cut", 2)
    assert main(["resume", str(cut)]) == 0
    runs.assert_same(uninterrupted, cut, 4)
    without = runs.train(dataset, tmp_path / "without", tiny_act, *more)
    first, second = (runs.metrics(run)[0]["loss"] for run in (uninterrupted, without))
    assert first != second
    files = (
        "policy_preprocessor.json",
        "policy_postprocessor.json",
        "config.json",
    )  # what a robot gets is the same
    for name in files:
        texts = [
            (run / "checkpoints/last/pretrained_model" / name).read_text() for run in (uninterrupted, without)
        ]
        assert texts[0] == texts[1]
    saved = json.loads((uninterrupted / "checkpoints/last/pretrained_model/train_config.json").read_text())
    assert (
        saved["dataset"]["image_transforms"]["enable"]
        and saved["dataset"]["image_transforms"]["random_order"]
    )
    assert main(["resume", str(cut), "--steps=5", "--dataset.image_transforms.max_num_transforms=1"]) != 0


def test_augmentation_does_not_depend_on_how_a_batch_is_split(dataset, tiny_act, tmp_path):
    more = ["--steps=2", "--policy.dropout=0", "--policy.use_vae=false", *AUGMENTED]
    uninterrupted = runs.train(dataset, tmp_path / "whole", tiny_act, *more)
    parts = ["--batch_size=2", "--gradient_accumulation_steps=2"]
    split = runs.train(dataset, tmp_path / "split", tiny_act, *more, *parts)
    losses = [
        [line["loss"] for line in runs.metrics(run) if "loss" in line] for run in (uninterrupted, split)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_order_of_samples_can_not_change(dataset, tiny_act, tmp_path, capsys):
    uninterrupted = runs.train(
        dataset, tmp_path / "whole", tiny_act, "--steps=1", "--dataset.cache.tier=stream"
    )
    assert main(["resume", str(uninterrupted), "--steps=2", "--dataset.order.kind=uniform"]) != 0
    assert "dataset.order.kind can't change" in capsys.readouterr().err


@pytest.mark.parametrize("step", [1, 6, 11])
def test_resume_from_any_step(step, finished, tmp_path):
    cut = runs.cut_back(finished, tmp_path / "cut", step)
    assert main(["resume", str(cut)]) == 0
    runs.assert_same(finished, cut, STEPS)


def test_interrupted_twice(finished, tmp_path):
    once = runs.cut_back(finished, tmp_path / "once", 3)
    assert main(["resume", str(once)]) == 0
    twice = runs.cut_back(once, tmp_path / "twice", 8)
    assert main(["resume", str(twice)]) == 0
    runs.assert_same(finished, twice, STEPS)


@pytest.mark.parametrize("workers", [2, 3])
def test_worker_threads_change_nothing(workers, finished, tmp_path):
    cut = runs.cut_back(finished, tmp_path / "cut", 4)
    assert main(["resume", str(cut), f"--num_workers={workers}"]) == 0
    runs.assert_same(finished, cut, STEPS)


def test_saved_settings_alone_make_the_run_again(finished, tmp_path):
    again = tmp_path / "again"
    assert main(["train", "--config", str(finished / "config.yaml"), f"--output_dir={again}"]) == 0
    runs.assert_same(finished, again, STEPS)


def test_longer_run_goes_on_where_the_shorter_ended(finished, tmp_path):
    cut = runs.cut_back(finished, tmp_path / "cut", 5)
    assert main(["resume", str(cut), "--steps=8"]) == 0
    assert runs.figures(cut) == runs.figures(finished)[:8]
    assert main(["resume", str(cut), f"--steps={STEPS}"]) == 0
    runs.assert_same(finished, cut, STEPS)


def test_finished_run_has_nothing_left_to_do(finished, tmp_path):
    copy = runs.cut_back(finished, tmp_path / "copy", STEPS)
    assert main(["resume", str(copy)]) == 0
    runs.assert_same(finished, copy, STEPS)
    assert (copy / "checkpoints" / "last").resolve().name == f"{STEPS:06d}"


def test_fewer_steps_than_done_are_refused(finished, tmp_path, capsys):
    copy = runs.cut_back(finished, tmp_path / "copy", 9)
    before = (copy / "config.yaml").read_text()
    assert main(["resume", str(copy), "--steps=8"]) == 2
    assert "step 9" in capsys.readouterr().err
    assert (copy / "config.yaml").read_text() == before


def test_stretched_schedule_is_said(lowdim, tiny_act, tmp_path, log_lines):
    run = runs.train(lowdim, tmp_path / "run", tiny_act, "--steps=2", "--scheduler.type=cosine")
    assert main(["resume", str(run), "--steps=3"]) == 0
    assert any("schedule stretches" in line for line in log_lines)


# What may change, and what may not


def test_what_may_change_may(finished, tmp_path):
    cut = runs.cut_back(finished, tmp_path / "cut", 10)
    changes = [
        "--log_freq=2",
        "--save_freq=4",
        "--checkpoint.keep_last=2",
        "--job_name=other",
        "--eval.n_episodes=3",
    ]
    assert main(["resume", str(cut), *changes]) == 0
    assert list(checkpoint.complete(cut / "checkpoints")) == [10, 12]


def test_batch_may_be_split_otherwise_but_not_grow(finished, tmp_path, capsys):
    cut = runs.cut_back(finished, tmp_path / "cut", 10)
    assert main(["resume", str(cut), "--global_batch_size=8"]) == 2
    assert "global_batch_size can't change" in capsys.readouterr().err
    assert main(["resume", str(cut), "--batch_size=3", "--gradient_accumulation_steps=2"]) == 0
    state = runs.state(cut, STEPS)["training_step.json"]
    assert state["batch_size"] == 2 and state["samples_seen"] == 4 * STEPS


@pytest.mark.parametrize(
    "change",
    [
        "--optimizer.lr=1",
        "--seed=3",
        "--policy.dropout=0",
        "--precision=bf16",
        "--ema.enable",
        "--nonsense=1",
    ],
)
def test_change_of_meaning_is_refused_by_name(change, finished, capsys):
    assert main(["resume", str(finished), change]) == 2
    error = capsys.readouterr().err
    assert change[2:].split("=")[0] in error and "num_workers" in error


def test_settings_file_edited_by_hand_is_refused_by_name(finished, tmp_path, capsys):
    cut = runs.cut_back(finished, tmp_path / "cut", 10)
    file = cut / "config.yaml"
    file.write_text(file.read_text().replace("seed: 1000\n", "seed: 1001\n", 1))
    assert main(["resume", str(cut)]) == 1
    assert "seed was 1000, is now 1001" in capsys.readouterr().err


def test_a_run_from_before_a_setting_was_there_goes_on(finished, tmp_path):
    """A setting's default is what runs did without it."""
    cut = runs.cut_back(finished, tmp_path / "cut", 10)
    edit_saved(cut, 10, lambda state: [state["config"].pop(name) for name in ("lora", "weights_dtype")])
    assert main(["resume", str(cut)]) == 0
    runs.assert_same(finished, cut, STEPS)


@pytest.fixture
def own_data(lowdim, tiny_act, tmp_path) -> tuple[Path, Path]:
    """A run on a dataset that may be changed."""
    data = shutil.copytree(lowdim, tmp_path / "data")
    return data, runs.train(data, tmp_path / "run", tiny_act, "--steps=2")


def test_dataset_with_an_episode_less_is_refused(own_data, tmp_path, capsys):
    data, run = own_data
    from support.samples import write_lowdim

    shutil.rmtree(data)
    write_lowdim(data, (11, 9, 13))
    assert main(["resume", str(run), "--steps=3"]) == 1
    assert "dataset is not the one" in capsys.readouterr().err


def test_dataset_with_another_file_is_refused(own_data, capsys):
    data, run = own_data
    file = next((data / "data").rglob("*.parquet"))
    pq.write_table(pq.read_table(file), file, compression="none")
    assert main(["resume", str(run), "--steps=3"]) == 1
    assert "dataset is not the one" in capsys.readouterr().err


@pytest.fixture
def half(lowdim, tiny_act, tmp_path) -> tuple[Path, Path, Path]:
    """Data that may be changed, a run on it, and the same run as if it had been killed at the half."""
    data = shutil.copytree(lowdim, tmp_path / "data")
    run = runs.train(data, tmp_path / "run", tiny_act, "--steps=4", "--save_freq=2")
    return data, run, runs.cut_back(run, tmp_path / "half", 2)


def change_statistics(data: Path) -> None:
    file = data / "meta" / "stats.json"
    stats = json.loads(file.read_text())
    for name in ("observation.state", "action"):
        stats[name]["mean"][0] += 1
        stats[name]["max"][0] += 1
    file.write_text(json.dumps(stats))


def test_a_run_goes_on_with_its_own_statistics(half, log_lines):
    """Only how inputs would be normalised has changed, and the checkpoint knows how they were: bit by bit the same."""
    data, run, resumed = half
    change_statistics(data)
    log_lines.clear()
    assert main(["resume", str(resumed)]) == 0
    runs.assert_same(run, resumed, 4)
    told = [line for line in log_lines if "statistics have changed" in line]
    assert len(told) == 1 and "action.mean" in told[0]
    for name in (
        "policy_preprocessor_step_3_normalizer_processor",
        "policy_postprocessor_step_0_unnormalizer",
    ):
        (path,) = (run / "checkpoints/last/pretrained_model").glob(f"{name}*")
        assert path.read_bytes() == (resumed / "checkpoints/last/pretrained_model" / path.name).read_bytes()


def test_statistics_of_each_dataset_are_the_runs_own(lowdim, tiny_act, tmp_path):
    first, second = (shutil.copytree(lowdim, tmp_path / name) for name in ("one", "other"))
    flags = ["--steps=4", "--save_freq=2", "--dataset.stats=per_dataset"]
    run = runs.train(f"{first},{second}", tmp_path / "run", tiny_act, *flags)
    resumed = runs.cut_back(run, tmp_path / "half", 2)
    change_statistics(second)
    assert main(["resume", str(resumed)]) == 0
    runs.assert_same(run, resumed, 4)


def test_a_checkpoint_without_its_statistics_is_refused(half, capsys):
    """Not: inputs that are no longer normalised."""
    _, _, resumed = half
    checkpoint_folder = resumed / "checkpoints" / "000002"
    (file,) = (checkpoint_folder / "pretrained_model").glob("policy_preprocessor_step_*.safetensors")
    save_file({"other.mean": torch.zeros(2)}, file)
    (checkpoint_folder / checkpoint.MANIFEST).unlink()
    checkpoint._write_manifest(checkpoint_folder, 2, {})
    assert main(["resume", str(resumed)]) == 1
    assert "lacks statistics of" in capsys.readouterr().err


def test_written_statistics_leave_a_copy_and_every_run_resumes(half, log_lines):
    data, run, resumed = half
    change_statistics(data)
    earlier = (data / "meta" / "stats.json").read_text()
    assert main(["data", "stats", str(data), "--write"]) == 0
    assert (data / "meta" / "stats.json.bak-1").read_text() == earlier
    assert any("stats.json.bak-1" in line and "resume" in line for line in log_lines)
    assert main(["data", "stats", str(data), "--write"]) == 0  # the same again: nothing to keep
    assert not (data / "meta" / "stats.json.bak-2").exists()
    change_statistics(data)
    assert main(["data", "stats", str(data), "--write"]) == 0
    assert (data / "meta" / "stats.json.bak-1").read_text() == earlier  # never overwritten
    assert (data / "meta" / "stats.json.bak-2").is_file()
    assert main(["resume", str(resumed)]) == 0
    runs.assert_same(run, resumed, 4)


def test_table_of_the_same_size_with_another_value_is_refused_by_name(half, capsys):
    data, _, resumed = half
    file = next((data / "data").rglob("*.parquet"))
    before, status = file.read_bytes(), file.stat()
    content = bytearray(before)
    at = content.index(np.float32(pq.read_table(file)["action"][0].as_py()[0]).tobytes())
    content[at] ^= 1  # the last bit of an action
    file.write_bytes(content)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert main(["resume", str(resumed)]) == 1
    error = capsys.readouterr().err
    assert "dataset is not the one" in error and "changed: data/chunk-000/file-000.parquet)" in error
    file.write_bytes(before)
    assert main(["resume", str(resumed)]) == 0


def test_metadata_that_changes_the_meaning_is_refused_by_name(half, capsys):
    data, _, resumed = half
    file = data / "meta" / "info.json"
    info = json.loads(file.read_text())
    file.write_text(json.dumps({**info, "splits": {"train": "0:1"}, "total_frames": 1000}, indent=1))
    assert main(["resume", str(resumed), "--steps=3"]) == 0  # nothing that training reads
    file.write_text(json.dumps({**info, "fps": info["fps"] + 1}))
    assert main(["resume", str(resumed)]) == 1
    assert "changed: fps in meta/info.json)" in capsys.readouterr().err


def test_another_video_of_the_same_size_is_refused_by_name(dataset, tiny_act, tmp_path, capsys):
    data = shutil.copytree(dataset, tmp_path / "data")
    run = runs.train(data, tmp_path / "run", tiny_act, "--steps=1")
    video = next((data / "videos").rglob("*.mp4"))
    content = bytearray(video.read_bytes())
    content[len(content) // 2] ^= 1
    video.write_bytes(content)
    assert main(["resume", str(run), "--steps=2"]) == 1
    assert f"changed: {video.relative_to(data)})" in capsys.readouterr().err


def test_copy_of_the_dataset_is_the_same_dataset(half, tmp_path):
    """Files have other times and inodes, and are in another place."""
    data, run, resumed = half
    copy = shutil.copytree(data, tmp_path / "copy", copy_function=shutil.copyfile)
    shutil.rmtree(data)
    assert main(["resume", str(resumed), f"--dataset.root={copy}"]) == 0
    runs.assert_same(run, resumed, 4)


def edit_saved(run: Path, step: int, change: Callable[[dict[str, Any]], object]) -> None:
    """Change flexor.json of a checkpoint, as if it had been saved so."""
    saved = run / "checkpoints" / f"{step:06d}" / "training_state" / "flexor.json"
    state = json.loads(saved.read_text())
    change(state)
    saved.write_text(json.dumps(state))
    (saved.parents[1] / checkpoint.MANIFEST).unlink()
    checkpoint._write_manifest(saved.parents[1], step, {})


def test_run_from_before_contents_were_compared_goes_on(half, capsys):
    data, run, resumed = half
    edit_saved(resumed, 2, lambda state: state.pop("dataset_content"))
    (resumed / "data_files.json").unlink()
    file = next((data / "data").rglob("*.parquet"))
    content = file.read_bytes()
    pq.write_table(pq.read_table(file), file, compression="none")
    assert main(["resume", str(resumed)]) == 1  # by its size, as then
    assert "dataset is not the one" in capsys.readouterr().err
    file.write_bytes(content)
    assert main(["resume", str(resumed)]) == 0
    runs.assert_same(run, resumed, 4)
    saved = json.loads((resumed / "checkpoints/last/training_state/flexor.json").read_text())
    assert saved["dataset_content"]["tables"]  # from now on


def test_dataset_may_move(own_data, tmp_path):
    data, run = own_data
    moved = data.rename(tmp_path / "moved")
    assert main(["resume", str(run), "--steps=3", f"--dataset.root={moved}"]) == 0


def test_checkpoint_the_run_started_from_may_go(lowdim, tiny_act, tmp_path):
    first = runs.train(lowdim, tmp_path / "first", tiny_act, "--steps=1")
    fine_tuned = tmp_path / "second"
    settings = [f"--dataset.root={lowdim}", f"--policy.path={first}", "--batch_size=4", "--num_workers=0"]
    assert main(["train", *settings, f"--output_dir={fine_tuned}", "--steps=2"]) == 0
    shutil.rmtree(first)
    assert main(["resume", str(fine_tuned), "--steps=3"]) == 0


def test_folder_that_is_no_run(tmp_path, capsys):
    assert main(["resume", str(tmp_path)]) == 1
    assert "config.yaml" in capsys.readouterr().err


def test_run_without_a_checkpoint_says_how_to_start_again(lowdim, tiny_act, tmp_path, capsys):
    run = runs.train(lowdim, tmp_path / "run", tiny_act, "--steps=1", "--save_checkpoint=false")
    assert main(["resume", str(run)]) == 1
    assert f"flexor train --config {run / 'config.yaml'}" in capsys.readouterr().err
