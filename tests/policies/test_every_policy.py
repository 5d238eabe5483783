"""What every policy promises: a run of it can be resumed bitwise, and is the same run on any number of processes."""

from pathlib import Path
from typing import NamedTuple

import pytest

from flexor.cli.main import main
from flexor.policies import POLICIES
from support import ranks, runs
from support.small_policies import WITH_CAMERAS, small_flags

STEPS = 4
PHASES = ("vqbet", "tdmpc")  # train something else in later steps


class Small(NamedTuple):
    """A policy small enough for seconds, and what it is trained on."""

    data: Path
    flags: list[str]
    steps: int


@pytest.fixture(
    scope="module", params=[name for name in POLICIES if name != "act"]
)  # tests/train is about ACT
def small(request, lowdim, dataset, tmp_path_factory) -> Small:
    name = request.param
    flags = ["--policy.device=cpu", *small_flags(name, tmp_path_factory.mktemp("models"))]
    return Small(dataset if name in WITH_CAMERAS else lowdim, flags, STEPS if name in PHASES else STEPS // 2)


def test_resumed_run_is_bitwise_the_uninterrupted_one(small, tmp_path):
    more = [f"--steps={STEPS}", "--save_freq=2", "--gradient_accumulation_steps=2", "--ema.enable"]
    if small.data.name != "place":  # a CPU takes a minute for one picture in bfloat16
        more.append("--precision=bf16")
    uninterrupted = runs.train(small.data, tmp_path / "whole", small.flags, *more)
    cut = runs.cut_back(uninterrupted, tmp_path / "cut", 2)
    assert main(["resume", str(cut), "--num_workers=2"]) == 0
    runs.assert_same(uninterrupted, cut, STEPS)


WAYS = {
    "ddp, accumulation": (2, ["--batch_size=1", "--gradient_accumulation_steps=2"]),
    "fsdp, accumulation, recomputed": (
        2,
        [
            "--batch_size=1",
            "--gradient_accumulation_steps=2",
            "--parallel.strategy=fsdp",
            "--activation_checkpointing",
        ],
    ),
}


@pytest.fixture(scope="module")
def alone(small, tmp_path_factory) -> Path:
    return train(small, tmp_path_factory.mktemp("alone"), 1, "--batch_size=4")


def train(small: Small, folder: Path, processes: int, *more: str) -> Path:
    common = [f"--steps={small.steps}", "--save_freq=0", "--optimizer.eps=1e-4", *more]
    run = folder / "run"
    ranks.run(folder, processes, ["train", *runs.flags(small.data, run, small.flags, *common)])
    return run


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("way", WAYS)
def test_any_number_of_processes_computes_the_same_run(way, small, alone, tmp_path):
    processes, more = WAYS[way]
    many = train(small, tmp_path, processes, *more)
    assert ranks.losses(many) == pytest.approx(ranks.losses(alone), rel=1e-5)
    assert ranks.apart(ranks.weights(many, small.steps), ranks.weights(alone, small.steps)) < 5e-5
