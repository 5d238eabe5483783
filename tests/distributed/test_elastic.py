"""Going on: bitwise on the same processes, and the same run on any other number of them, sharded or not."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_sameness import LOSS_TOLERANCE, WEIGHT_TOLERANCE

from flexor.cli.main import main
from flexor.policies.pretrained import load_pretrained
from flexor.train.checkpoint import folder as checkpoint
from support import ranks, runs, trouble

pytestmark = pytest.mark.ranks

FSDP, HSDP, DDP = (f"--parallel.strategy={name}" for name in ("fsdp", "hsdp", "ddp"))
SHARE2 = "--parallel.dp_shard=2"


def train(dataset: Path, folder: Path, tiny: list[str], *more: str) -> list[str]:
    """eps: as in test_sameness."""
    return ["train", *runs.flags(dataset, folder / "run", tiny, "--optimizer.eps=1e-5", *more)]


# R0: the same processes

SAME = {
    "ddp 2, ema, async, deterministic": (
        2,
        [DDP, "--ema.enable", "--checkpoint.async=true", "--deterministic"],
    ),
    "fsdp 2, bf16, ema, accumulation": (
        2,
        [FSDP, "--precision=bf16", "--ema.enable", "--global_batch_size=8", "--batch_size=2"],
    ),
    "fsdp 2, fp16, async, in the host's memory": (
        2,
        [
            *(FSDP, "--precision=fp16", "--checkpoint.async=true"),
            *("--parallel.cpu_offload=true", "--activation_checkpointing"),
        ],
    ),
    "hsdp 2x2, cosine": (4, [HSDP, SHARE2, "--scheduler.type=cosine", "--deterministic"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", SAME)
def test_same_processes_go_on_bitwise(way, lowdim, tiny_act, tmp_path):
    count, more = SAME[way]
    uninterrupted, cut = tmp_path / "run", tmp_path / "cut"
    ranks.run(tmp_path / "1", count, train(lowdim, tmp_path, tiny_act, "--steps=4", "--save_freq=2", *more))
    runs.cut_back(uninterrupted, cut, 2)
    ranks.run(tmp_path / "2", count, ["resume", str(cut)])
    assert runs.figures(uninterrupted) == runs.figures(cut)
    assert len(runs.figures(cut)) == 4
    first, second = ranks.everything(uninterrupted, 4), ranks.everything(cut, 4)
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []
    assert runs.state(uninterrupted, 4) == runs.state(cut, 4)
    folders = [run / "checkpoints" / "000004" / "training_state" for run in (uninterrupted, cut)]
    states = [load_file(folder / "rng_state_ranks.safetensors") for folder in folders]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


# R1: other processes

STEPS, LEG = 8, 2
ELASTIC = [
    f"--steps={STEPS}",
    f"--save_freq={LEG}",
    "--policy.dropout=0",
    "--ema.enable",
    "--optimizer.lr=3e-4",
]
CHAIN = [(2, [FSDP]), (1, [DDP]), (4, [HSDP, SHARE2]), (2, [DDP])]


@pytest.fixture(scope="module")
def alone(lowdim, tiny_act, tmp_path_factory) -> Path:
    """The same run in one process, from its start to its end."""
    folder = tmp_path_factory.mktemp("alone")
    ranks.run(folder, 1, train(lowdim, folder, tiny_act, *ELASTIC, "--batch_size=8"))
    return folder


@pytest.mark.slow
def test_augmented_images_are_the_same_on_any_number_of_processes(dataset, tiny_act, tmp_path):
    more = [
        "--steps=3",
        "--save_freq=1",
        "--policy.dropout=0",
        "--policy.use_vae=false",
        "--global_batch_size=4",
    ]
    more += ["--dataset.image_transforms.enable=true", "--dataset.image_transforms.random_order=true"]
    ranks.run(tmp_path / "1", 1, train(dataset, tmp_path / "one", tiny_act, *more))
    run = tmp_path / "two" / "run"
    ranks.run(tmp_path / "2", 2, train(dataset, tmp_path / "two", tiny_act, *more, DDP))
    assert ranks.losses(run) == pytest.approx(ranks.losses(tmp_path / "one/run"), rel=20 * LOSS_TOLERANCE)
    cut = runs.cut_back(run, tmp_path / "cut", 1)
    ranks.run(tmp_path / "3", 1, ["resume", str(cut)])
    assert ranks.losses(cut) == pytest.approx(ranks.losses(run), rel=20 * LOSS_TOLERANCE)


@pytest.mark.slow
def test_any_other_processes_go_on_with_the_same_run(alone, lowdim, tiny_act, tmp_path):
    (count, way), *rest = CHAIN
    run = tmp_path / "run"
    begin = train(lowdim, tmp_path, tiny_act, *ELASTIC, *way, f"--batch_size={8 // count}")
    trouble.interrupted(tmp_path / "0", count, begin, run, LEG, LEG + 2)
    for i, (count, way) in enumerate(rest[:-1], 1):
        resume = ["resume", str(run), *way, "--batch_size=8"]
        trouble.interrupted(tmp_path / str(i), count, resume, run, LEG + LEG * i, LEG + 2)
    count, way = rest[-1]
    ranks.run(tmp_path / "last", count, ["resume", str(run), *way, "--batch_size=8"])

    parts = [tmp_path / str(i) for i in range(len(rest))]
    assert ranks.computed(*parts, tmp_path / "last") == ranks.computed(alone)
    assert ranks.losses(run) == pytest.approx(ranks.losses(alone / "run"), rel=20 * LOSS_TOLERANCE)
    actual, expected = (ranks.weights(r, STEPS) for r in (run, alone / "run"))
    assert ranks.apart(actual, expected) < 20 * WEIGHT_TOLERANCE  # more steps than test_sameness, and chaos
    strategies = [
        json.loads(f.read_text())["strategy"] for f in sorted(run.glob("checkpoints/*/*/flexor.json"))
    ]
    assert len(set(strategies)) >= 3, strategies


@pytest.mark.slow
def test_streamed_pictures_go_on_elsewhere(dataset, tiny_act, tmp_path):
    """Two sharded ranks, one process, two ranks: videos are read by other ranks, and every sample is the same."""
    more = [
        "--steps=6",
        "--save_freq=2",
        "--policy.dropout=0",
        "--dataset.cache.tier=stream",
        "--dataset.order.pool=5",
    ]
    alone, run = tmp_path / "alone", tmp_path / "run"
    ranks.run(alone, 1, train(dataset, alone, tiny_act, *more, "--batch_size=4"))
    begin = train(dataset, tmp_path, tiny_act, *more, FSDP, "--batch_size=2")
    trouble.interrupted(tmp_path / "0", 2, begin, run, 2, 3)
    trouble.interrupted(tmp_path / "1", 1, ["resume", str(run), DDP, "--batch_size=4"], run, 4, 3)
    ranks.run(tmp_path / "last", 2, ["resume", str(run), DDP])
    parts = (tmp_path / "0", tmp_path / "1", tmp_path / "last")
    assert ranks.computed(*parts) == ranks.computed(alone)
    assert ranks.losses(run) == pytest.approx(ranks.losses(alone / "run"), rel=1e-3)


# Sharded checkpoints


@pytest.fixture(scope="module")
def sharded(lowdim, tiny_act, tmp_path_factory) -> Path:
    """A sharded run with a moving average whose first checkpoint has no weights gathered."""
    folder = tmp_path_factory.mktemp("sharded")
    more = [
        "--steps=4",
        "--save_freq=2",
        FSDP,
        "--ema.enable",
        "--checkpoint.export=false",
        "--num_workers=0",
    ]
    ranks.run(folder, 2, train(lowdim, folder, tiny_act, *more))
    return folder / "run"


def test_each_rank_writes_its_part(sharded):
    shards = sorted((sharded / "checkpoints/000004/training_state/sharded").glob("rank-*"))
    assert [path.name for path in shards] == ["rank-00000.safetensors", "rank-00001.safetensors"]
    small, large = sorted(path.stat().st_size for path in shards)
    assert small > 0.7 * large  # halves but for what does not divide


def test_weights_are_exported_when_asked(sharded, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(sharded, run, symlinks=True)
    early, late = (run / "checkpoints" / step for step in ("000002", "000004"))
    assert not (early / "pretrained_model/model.safetensors").exists()
    assert main(["eval", str(early), "--env.type=place"]) == 1
    assert f"flexor export {early}" in capsys.readouterr().err

    gathered = load_file(late / "pretrained_model/model.safetensors")
    (late / "pretrained_model/model.safetensors").unlink()
    manifest = late / "training_state/manifest.json"
    listed = json.loads(manifest.read_text())
    del listed["files"]["pretrained_model/model.safetensors"]
    manifest.write_text(json.dumps(listed))
    assert main(["export", str(run), "--output", str(tmp_path / "policy")]) == 0
    exported = load_file(tmp_path / "policy/model.safetensors")
    assert gathered.keys() == exported.keys()
    assert all(torch.equal(gathered[name], exported[name]) for name in gathered)
    load_pretrained(str(tmp_path / "policy"))

    assert main(["export", str(early), "--json"]) == 0
    load_pretrained(str(early))
    checkpoint.verify(early)
    assert main(["export", str(run), "--output", str(tmp_path / "policy")]) == 2
    assert main(["export", str(tmp_path)]) == 1


def test_export_of_a_run_that_is_not_sharded(lowdim, tiny_act, tmp_path):
    run = runs.train(lowdim, tmp_path / "run", tiny_act, "--steps=1")
    assert main(["export", str(run), "--output", str(tmp_path / "policy")]) == 0
    load_pretrained(str(tmp_path / "policy"))


def test_a_damaged_shard_is_named(sharded, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(sharded, run, symlinks=True)
    shard = run / "checkpoints/000004/training_state/sharded/rank-00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1000])
    assert main(["resume", str(run), "--steps=5"]) == 1
    assert (
        "training_state/sharded/rank-00001.safetensors has changed since it was saved"
        in capsys.readouterr().err
    )


MEASURED = [
    *("--env.type=place", "--env_eval_freq=2", "--eval.n_episodes=3", "--env.max_steps=12"),
    *("--env.kwargs={image_size: 32}", "--dataset.eval_split=0.25", "--eval_steps=2"),
    *("--steps=2", "--save_freq=0", "--policy.dropout=0", "--ema.enable"),
]


@pytest.fixture(scope="module")
def measured_alone(dataset, tiny_act, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("measured")
    ranks.run(folder, 1, train(dataset, folder, tiny_act, *MEASURED, "--batch_size=4"))
    return folder / "run"


@pytest.mark.slow
@pytest.mark.parametrize("way", [DDP, FSDP])
def test_evaluation_and_held_out_loss_on_many_processes(way, measured_alone, dataset, tiny_act, tmp_path):
    """What the weights are worth does not depend on who measures it."""
    ranks.run(tmp_path, 2, train(dataset, tmp_path, tiny_act, *MEASURED, way, "--batch_size=2"))
    both = (measured_alone, tmp_path / "run")
    metrics = [{k: v for line in runs.metrics(run) for k, v in line.items()} for run in both]
    assert metrics[0]["held_out_loss"] == pytest.approx(metrics[1]["held_out_loss"], rel=1e-4)
    evaluated = [{k: v for k, v in figures.items() if k.startswith("eval_")} for figures in metrics]
    assert len(evaluated[0]) > 3 and evaluated[0] == pytest.approx(evaluated[1], rel=1e-3)
