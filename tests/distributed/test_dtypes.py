"""Shards of a policy whose trained weights have several dtypes: matrices in bfloat16, norms in float32."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from flexor.config.parse import load_config
from flexor.core.errors import ConfigError
from flexor.data.dataset import open_dataset
from flexor.policies import policy_class
from flexor.policies.base import Policy
from flexor.policies.fit import fit_to_dataset
from flexor.policies.meta_init import parameters_without_memory
from flexor.policies.pretrained import save_pretrained
from flexor.policies.weight_names import unique_state
from flexor.train.build import make_policy
from flexor.train.checkpoint import folder as checkpoint
from flexor.train.engine.shard_units import sharding_of
from support import ranks, runs
from support.small_policies import small_flags

FSDP = "--parallel.strategy=fsdp"
LOWER = {
    "pi0": ["--policy.dtype=bfloat16"],
    "pi05": ["--policy.dtype=bfloat16"],
    "pi0_fast": ["--policy.dtype=bfloat16"],
    "eo1": ["--policy.dtype=bfloat16"],
    "wall_x": ["--policy.dtype=bfloat16"],
    "pi0 in bf16": ["--policy.dtype=bfloat16", "--precision=bf16"],
    "smolvla": ["--weights_dtype=bf16", "--precision=bf16", "--policy.train_expert_only=false"],
    "xvla": ["--weights_dtype=bf16", "--precision=bf16"],
}
# The products of a step have 8 bits, and each process rounds those of its own samples. Seen: 0.004, as with ddp.
ROUNDING = 0.02


def flags(name: str, folder: Path) -> list[str]:
    return [*small_flags(name.split()[0], folder / "files"), *LOWER[name], "--policy.device=cpu"]


def policy_of(settings: list[str], dataset: Path) -> Policy:
    config = load_config([f"--dataset.root={dataset}", *settings])
    config = replace(config, policy=fit_to_dataset(config.policy, open_dataset(root=dataset)))
    torch.manual_seed(0)
    return make_policy(config)


@pytest.mark.parametrize("name", LOWER)
def test_units_have_one_dtype_each_and_every_parameter_is_in_one(name, dataset, tmp_path):
    policy = policy_of(flags(name, tmp_path), dataset)
    assert len({p.dtype for p in policy.parameters() if p.requires_grad}) == 2
    sharding = sharding_of(policy)
    assert sharding.units[-1] is policy and set(policy.shard_units()) < set(sharding.units)
    taken = {id(p) for p in sharding.replicated.values()}
    for unit in sharding.units:
        inside = [p for p in unit.parameters() if id(p) not in taken]
        taken |= {id(p) for p in inside}
        assert len({p.dtype for p in inside if p.requires_grad}) <= 1
    assert sharding.replicated or name == "eo1"  # whose float32 weights are all in linear layers
    assert taken == {id(p) for p in policy.parameters()}


@pytest.mark.parametrize("name", ["pi0", "pi05", "pi0_fast"])
def test_little_is_whole_at_full_size(name):
    """pi0.5 has 450 MB of float32 in its norms: they are sharded."""
    with parameters_without_memory():
        policy = policy_class(name)(policy_class(name).Config(dtype="bfloat16", load_vlm_weights=False))
    replicated = sharding_of(policy).replicated
    assert 0 < sum(p.nbytes for p in replicated.values()) < 10e6
    assert not any("dense.weight" in each for each in replicated)


def test_one_dtype_needs_nothing_apart(dataset, tmp_path):
    policy = policy_of([*small_flags("pi05", tmp_path), "--policy.device=cpu"], dataset)
    sharding = sharding_of(policy)
    assert sharding.units == [*policy.shard_units(), policy] and not sharding.replicated


def test_accelerate_does_not_shard_several_dtypes(dataset, tmp_path):
    """Its own FSDP would fail in the first step."""
    from flexor.train.engine.accelerate import AccelerateShardedEngine

    engine: Any = SimpleNamespace(world_size=2, strategy="fsdp")
    with pytest.raises(ConfigError, match=r"flexor train --gpus=2 --parallel\.strategy=fsdp"):
        AccelerateShardedEngine.prepare(engine, policy_of(flags("pi0", tmp_path), dataset), engine)


# runs


def start(name: str, dataset: Path, folder: Path) -> list[str]:
    """Flags of a run that starts from saved weights."""
    arguments = flags(name, folder)
    policy = policy_of(arguments, dataset)
    pipelines = policy.config.pipelines({}, "cpu")
    save_pretrained(folder / "base", policy.config, unique_state(policy), *pipelines)
    return [*arguments, f"--policy.path={folder / 'base'}", "--scheduler.type=constant"]


def run(dataset: Path, folder: Path, count: int, settings: list[str], *more: str) -> Path:
    arguments = runs.flags(dataset, folder / "run", settings, f"--batch_size={4 // count}", *more)
    ranks.run(folder, count, ["train", *arguments])
    return folder / "run"


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(
    "name", [name for name in LOWER if name != "pi0"]
)  # "pi0 in bf16" has the same weights
def test_a_step_of_shards_is_that_of_one_process(name, dataset, tmp_path):
    """Of plain gradients: Adam would make all steps alike."""
    settings = start(name, dataset, tmp_path)
    sgd = ["--steps=1", "--optimizer.type=sgd", "--optimizer.lr=4", "--optimizer.grad_clip_norm=0.5"]
    single = run(dataset, tmp_path / "one", 1, settings, *sgd)
    double = run(dataset, tmp_path / "two", 2, settings, *sgd, FSDP)
    assert ranks.losses(double) == pytest.approx(ranks.losses(single), rel=ROUNDING)
    norms = [runs.figures(folder)[0]["grad_norm"] for folder in (single, double)]
    assert norms[1] == pytest.approx(norms[0], rel=ROUNDING) and norms[0] > 0.5
    before = load_file(tmp_path / "base/model.safetensors")
    expected, actual = (ranks.everything(folder, 1) for folder in (single, double))
    moves, apart = [], []
    for weight in (name for name in actual if name.startswith("model.")):
        moves.append((expected[weight] - before[weight.removeprefix("model.")]).flatten())
        apart.append((actual[weight] - expected[weight]).flatten())
        if moves[-1].norm() > 0.1:  # by itself, too
            assert apart[-1].norm() < 0.1 * moves[-1].norm(), weight
    assert torch.cat(moves).norm() > 0.5 and torch.cat(apart).norm() < ROUNDING * torch.cat(moves).norm()


@pytest.mark.ranks
def test_several_dtypes_go_on_with_other_processes(dataset, tmp_path):
    """Bitwise with as many; with one, or from one, as far as bfloat16 is exact."""
    settings = [*start("pi05", dataset, tmp_path), "--optimizer.eps=1e-5", "--ema.enable"]
    lengths = ["--steps=2", "--save_freq=1"]
    uninterrupted = run(dataset, tmp_path / "two", 2, settings, *lengths, FSDP)
    cut, other = (runs.cut_back(uninterrupted, tmp_path / name, 1) for name in ("cut", "other"))
    ranks.run(tmp_path / "again", 2, ["resume", str(cut)])
    assert runs.figures(uninterrupted) == runs.figures(cut)
    first, again = ranks.everything(uninterrupted, 2), ranks.everything(cut, 2)
    assert [name for name in first if not torch.equal(first[name], again[name])] == []
    ranks.run(tmp_path / "fewer", 1, ["resume", str(other), "--parallel.strategy=ddp", "--batch_size=4"])
    assert ranks.losses(other) == pytest.approx(ranks.losses(uninterrupted), rel=ROUNDING)
    runs.cut_back(other, tmp_path / "back", 2)
    ranks.run(tmp_path / "more", 2, ["resume", str(tmp_path / "back"), "--steps=3", FSDP, "--batch_size=2"])
    assert len(ranks.losses(tmp_path / "back")) == 3
    exported = load_file(
        checkpoint.complete(tmp_path / "back/checkpoints")[3] / "pretrained_model/model.safetensors"
    )
    assert {tensor.dtype for tensor in exported.values()} == {torch.float32}  # an average
