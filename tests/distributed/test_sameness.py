"""The same run however many processes compute it: the same samples, the same noise, the same losses and weights."""

from pathlib import Path

import pytest

from support import ranks, runs
from support.small_policies import SMALL

pytestmark = pytest.mark.ranks

STEPS = 6  # more than an epoch, of 43 samples
# Sums in another order: float32 rounds differently, and some steps of Adam carry that on.
LOSS_TOLERANCE = 1e-5  # relative; seen: 6e-7
WEIGHT_TOLERANCE = 5e-5  # absolute, of weights of about 0.1 and steps of 1e-3; seen: 4e-6

WAYS = {
    "accumulation": (1, ["--batch_size=2", "--gradient_accumulation_steps=4"]),
    "ddp 4": (4, ["--batch_size=2"]),
    "ddp 2, accumulation": (2, ["--batch_size=2", "--gradient_accumulation_steps=2"]),
    "fsdp 4, accumulation": (
        4,
        ["--global_batch_size=8", "--batch_size=1", "--parallel.strategy=fsdp", "--activation_checkpointing"],
    ),
    "hsdp 2x2": (4, ["--batch_size=2", "--parallel.strategy=hsdp", "--parallel.dp_shard=2"]),
}


def flags(lowdim: Path, run: Path, tiny_act: list[str], *more: str) -> list[str]:
    # eps: some gradients are zero but for rounding (biases of attention's keys); Adam would make steps of that
    more = (f"--steps={STEPS}", "--save_freq=0", "--optimizer.eps=1e-5", *more)
    return ["train", *runs.flags(lowdim, run, tiny_act, *more)]


@pytest.fixture(scope="module")
def alone(lowdim, tiny_act, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    ranks.run(folder, 1, flags(lowdim, folder / "run", tiny_act, "--batch_size=8", "--policy.dropout=0"))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_any_number_of_processes_computes_the_same_run(way, alone, lowdim, tiny_act, tmp_path):
    count, more = WAYS[way]
    ranks.run(tmp_path, count, flags(lowdim, tmp_path / "run", tiny_act, "--policy.dropout=0", *more))
    assert ranks.computed(tmp_path) == ranks.computed(alone)
    assert len(ranks.computed(alone)) == STEPS
    losses, expected = ranks.losses(tmp_path / "run"), ranks.losses(alone / "run")
    assert losses == pytest.approx(expected, rel=LOSS_TOLERANCE)
    difference = ranks.apart(ranks.weights(tmp_path / "run", STEPS), ranks.weights(alone / "run", STEPS))
    assert difference < WEIGHT_TOLERANCE


@pytest.mark.slow
def test_shards_of_weights_that_lie_channels_last(lowdim, tmp_path):
    """FSDP cuts a weight's memory into pieces, and rank 0 sends it as it lies."""
    small = ["--policy.type=diffusion", *(f"--policy.{setting}" for setting in SMALL["diffusion"])]
    for run, count, more in (
        ("one", 1, ["--batch_size=4"]),
        ("two", 2, ["--batch_size=2", "--parallel.strategy=fsdp", "--channels_last=true"]),
    ):
        settings = runs.flags(lowdim, tmp_path / run, small, "--steps=4", *more)
        ranks.run(tmp_path / f"ranks of {run}", count, ["train", *settings])
    assert ranks.losses(tmp_path / "two") == pytest.approx(ranks.losses(tmp_path / "one"), rel=1e-4)
