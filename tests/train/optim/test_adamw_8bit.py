"""The 8-bit optimizer, where bitsandbytes is installed; its absence is named where it is not."""

import importlib.util
import json

import pytest
import torch
from safetensors.torch import load_file

from flexor.cli.main import main
from flexor.core.run_files import TRAINING_STATE
from flexor.train.checkpoint.tensors import OPTIMIZER
from support import ranks, runs

INSTALLED = importlib.util.find_spec("bitsandbytes") is not None
EIGHT = ["--optimizer.type=adamw_8bit", "--policy.dim_feedforward=512"]  # matrices that are large enough
installed = pytest.mark.skipif(not INSTALLED, reason="bitsandbytes is not installed")


@installed
@pytest.mark.parametrize("more", [[], ["--lora.r=256", "--ema.enable", "--checkpoint.async=true"]])
def test_resumed_run_is_bitwise_the_uninterrupted_one(more, lowdim, tiny_act, tmp_path):
    uninterrupted = runs.train(
        lowdim, tmp_path / "whole", tiny_act, "--steps=6", "--save_freq=3", *EIGHT, *more
    )
    cut = runs.cut_back(uninterrupted, tmp_path / "cut", 3)
    assert main(["resume", str(cut)]) == 0
    runs.assert_same(uninterrupted, cut, 6)
    last = uninterrupted / "checkpoints" / "last"
    saved = load_file(last / TRAINING_STATE / OPTIMIZER)
    large = [name for name, tensor in saved.items() if name.endswith("/state1") and tensor.numel() >= 4096]
    assert large and {saved[name].dtype for name in large} == {torch.uint8}
    assert not any("qmap" in name for name in saved)
    theirs = json.loads((last / "pretrained_model" / "train_config.json").read_text())
    assert theirs["optimizer"]["type"] == "adamw"


@installed
def test_it_learns_what_adamw_learns(lowdim, tiny_act, tmp_path):
    flags = ["--steps=30", "--save_freq=0", "--policy.dropout=0", EIGHT[1]]
    exact = runs.train(lowdim, tmp_path / "exact", tiny_act, *flags)
    lower = runs.train(lowdim, tmp_path / "lower", tiny_act, *flags, EIGHT[0])
    assert ranks.losses(lower)[-1] < 0.9 * ranks.losses(lower)[0]
    assert ranks.losses(lower)[-1] == pytest.approx(ranks.losses(exact)[-1], rel=0.1)


@pytest.mark.skipif(INSTALLED, reason="bitsandbytes is installed")
def test_its_absence_is_named(lowdim, tiny_act, tmp_path, capsys):
    flags = runs.flags(lowdim, tmp_path / "run", tiny_act, *EIGHT, "--steps=1")
    assert main(["train", *flags]) == 2
    assert "pip install 'flexor[8bit]'" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.ranks
def test_it_is_not_shared_out(lowdim, tiny_act, tmp_path):
    flags = runs.flags(lowdim, tmp_path / "run", tiny_act, *EIGHT, "--parallel.strategy=fsdp", "--steps=1")
    started = ranks.Ranks(tmp_path / "1", 2, ["train", *flags])
    assert started.end() == [2, 2]
    assert "use --optimizer.type=adamw, or ddp" in started.errors()
