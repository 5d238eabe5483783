"""The global batch, steps and learning rates of a run, settled for any number of processes."""

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexor.cli.main import main
from flexor.config.parse import load_config
from flexor.core.errors import ConfigError
from flexor.train.ranks.split import resolve_batch, resolve_lr_factor, split_batch
from support import runs

numbers = st.integers(1, 64)


def config(*flags: str):
    return load_config(["--dataset.root=somewhere", *flags])


@given(batch=numbers, accumulation=st.none() | numbers, first=numbers, second=numbers)
def test_a_run_that_goes_on_elsewhere_keeps_its_global_batch(batch, accumulation, first, second):
    settings = replace(config(f"--batch_size={batch}"), gradient_accumulation_steps=accumulation)
    split = split_batch(settings, first)
    settings = resolve_batch(settings, split, 100)
    assert split.global_batch == settings.global_batch_size == batch * (accumulation or 1) * first
    assert (split.batch_size, split.accumulation) == (batch, accumulation or 1)
    again = split_batch(settings, first)  # what config.yaml says is enough
    assert again == split
    if settings.global_batch_size % second:
        with pytest.raises(ConfigError, match="can't be split evenly"):
            split_batch(settings, second)
        return
    other = split_batch(settings, second)
    assert other.global_batch == split.global_batch and other.batch_size <= batch
    # in the fewest passes
    shares = [n for n in range(1, other.accumulation) if other.share % n == 0]
    assert all(other.share // n > batch for n in shares)


def test_what_contradicts_itself_is_refused_by_name():
    flags = ["--batch_size=8", "--global_batch_size=64", "--gradient_accumulation_steps=2"]
    with pytest.raises(
        ConfigError, match=r"global_batch_size=64 is not batch_size=8 x 1 .processes. x .*steps=2"
    ):
        split_batch(config(*flags), 1)
    assert split_batch(config(*flags), 4).accumulation == 2
    with pytest.raises(ConfigError, match="use 1, 2, 4, 8, 16 processes"):
        split_batch(config("--global_batch_size=16"), 3)


@pytest.mark.parametrize(("how", "factor"), [(None, 1), ("linear", 4), ("sqrt", 2)])
def test_learning_rates_are_scaled_when_asked_and_said(how, factor, log_lines):
    settings = config("--batch_size=8", *([f"--scale_lr={how}"] if how else []))
    settings = resolve_lr_factor(resolve_batch(settings, split_batch(settings, 4), 100))
    assert settings.lr_factor == factor
    assert any("multiplied by" in line for line in log_lines) == (how is not None)
    again = resolve_batch(settings, split_batch(settings, 1), 100)  # on one process: what was resolved stays
    assert resolve_lr_factor(again) == settings


def test_scaled_rates_reach_every_group(lowdim, tiny_act, tmp_path):
    more = ("--steps=1", "--gradient_accumulation_steps=4", "--scale_lr=linear")
    run = runs.train(lowdim, tmp_path / "run", tiny_act, *more)
    groups = json.loads((run / "checkpoints/last/training_state/optimizer_param_groups.json").read_text())
    assert [group["lr"] for group in groups] == [4e-3]  # of 1e-3
    assert main(["resume", str(run), "--steps=2"]) == 0
    assert runs.figures(run)[-1]["lr"] == pytest.approx(4e-3)


@given(samples=st.integers(1, 10_000), epochs=st.floats(0.01, 50), world=numbers)
def test_epochs_become_steps(samples, epochs, world):
    settings = config(f"--epochs={epochs}")
    split = split_batch(settings, world)
    trained = resolve_batch(settings, split, samples).steps * split.global_batch
    assert trained >= epochs * samples - 1e-6 * trained
    assert trained - split.global_batch < epochs * samples + 1e-6 * trained


def test_steps_and_epochs_are_one_question():
    with pytest.raises(ConfigError, match="give only one of them"):
        config("--steps=10", "--epochs=2")
    settings = config("--steps=10")
    assert resolve_batch(settings, split_batch(settings, 1), 100).steps == 10


def test_epochs_of_a_run(lowdim, tiny_act, tmp_path, capsys):
    run = runs.train(lowdim, tmp_path / "run", tiny_act, "--epochs=1.5")
    assert len(runs.figures(run)) == math.ceil(1.5 * 43 / 4)
    assert runs.figures(run)[-1]["step"] * 4 >= 1.5 * 43
