"""Weights in bfloat16: what is kept in it and what is not, the same run after a resume, and what is saved."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from flexor.cli.main import main
from flexor.config.parse import load_config
from flexor.config.schema import EMAConfig
from flexor.core.errors import ConfigError
from flexor.core.run_files import PRETRAINED, TRAINING_STATE, WEIGHTS
from flexor.policies.pretrained import load_pretrained
from flexor.sim.record import record_dataset
from flexor.train.build import make_policy
from flexor.train.checkpoint.tensors import EMA_STATE, OPTIMIZER
from flexor.train.optim.ema import EMA
from support import ranks, runs
from support.plans import settings

LOWER = ["--precision=bf16", "--weights_dtype=bf16"]
STEPS = 6


def dtypes(tensors: dict[str, torch.Tensor]) -> dict[str, set[torch.dtype]]:
    """Of matrices, and of all else."""
    return {
        "matrices": {t.dtype for t in tensors.values() if t.ndim > 1},
        "rest": {t.dtype for t in tensors.values() if t.ndim <= 1},
    }


@pytest.mark.parametrize("more", [[], ["--ema.enable", "--gradient_accumulation_steps=2"]])
def test_resumed_run_is_bitwise_the_uninterrupted_one(more, lowdim, tiny_act, tmp_path):
    flags = [f"--steps={STEPS}", "--save_freq=3", "--dataset.eval_split=0.25", *LOWER, *more]
    uninterrupted = runs.train(lowdim, tmp_path / "whole", tiny_act, *flags)
    cut = runs.cut_back(uninterrupted, tmp_path / "cut", 3)
    assert main(["resume", str(cut)]) == 0
    runs.assert_same(uninterrupted, cut, STEPS)
    last = uninterrupted / "checkpoints" / "last"
    state = load_file(last / TRAINING_STATE / OPTIMIZER)
    assert dtypes(state) == {"matrices": {torch.bfloat16}, "rest": {torch.float32}}
    exported = load_file(last / PRETRAINED / WEIGHTS)
    if more:
        assert {t.dtype for t in load_file(last / TRAINING_STATE / EMA_STATE).values()} == {torch.float32}
        assert {t.dtype for t in exported.values()} == {torch.float32}
    else:
        parameters = dict(load_pretrained(str(uninterrupted)).policy.named_parameters())
        assert dtypes({k: v for k, v in exported.items() if k in parameters})["matrices"] == {torch.bfloat16}


def test_it_learns_what_float32_learns(lowdim, tiny_act, tmp_path):
    """A policy that is saved in bfloat16 is float32 again where it is loaded."""
    flags = ["--steps=30", "--save_freq=0", "--policy.dropout=0", "--policy.use_vae=false"]
    exact = runs.train(lowdim, tmp_path / "exact", tiny_act, *flags)
    lower = runs.train(lowdim, tmp_path / "lower", tiny_act, *flags, *LOWER)
    first, last = (ranks.losses(lower)[i] for i in (0, -1))
    assert last < 0.9 * first
    assert last == pytest.approx(ranks.losses(exact)[-1], rel=0.1)
    loaded = load_pretrained(str(lower)).policy
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}


def test_the_average_moves_although_each_step_is_too_small_for_bfloat16():
    net = nn.Linear(1, 1, bias=False).bfloat16()
    nn.init.ones_(net.weight)
    ema = EMA(net, EMAConfig().decay_at)
    ema.updates = 100_000
    nn.init.constant_(net.weight, 1.0078125)  # the next number in bfloat16
    ema.begin_step()
    ema.update(net)
    assert ema.average["weight"].item() == pytest.approx(1.0000078, abs=1e-7)


@pytest.mark.parametrize("kind", ["diffusion", "vqbet"])
def test_buffers_and_vectors_stay_exact(kind):
    policy = make_policy(settings(kind, weights_dtype="bf16", precision="bf16"))
    parameters = dict(policy.named_parameters())
    assert dtypes(parameters) == {"matrices": {torch.bfloat16}, "rest": {torch.float32}}
    assert torch.bfloat16 not in {buffer.dtype for buffer in policy.buffers()}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--weights_dtype=bf16", "--precision=no"], "Set --precision=bf16"),
        (["--weights_dtype=bf16", "--precision=fp16"], "precision=fp16"),
        ([*LOWER, "--policy.type=tdmpc"], "updates some of its weights itself"),
    ],
)
def test_what_can_not_be_is_refused(flags, message, lowdim):
    with pytest.raises(ConfigError, match=message):
        load_config([f"--dataset.root={lowdim}", *flags])


def test_evaluation_acts_with_such_weights(tiny_act, tmp_path):
    data = record_dataset(tmp_path / "places", episodes=2, obs_type="environment_state_agent_pos")
    env = [
        "--env.type=place",
        "--env.kwargs={obs_type: environment_state_agent_pos}",
        "--env.max_steps=3",
        "--env_eval_freq=1",
    ]
    run = runs.train(data, tmp_path / "run", tiny_act, "--steps=1", "--eval.n_episodes=1", *env, *LOWER)
    assert any("eval_success_rate" in line for line in runs.metrics(run))


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("strategy", "more"),
    [
        ("ddp", []),
        ("fsdp", ["--ema.enable", "--gradient_accumulation_steps=2", "--activation_checkpointing"]),
        ("hsdp --parallel.dp_shard=2 --parallel.cpu_offload=true", []),
        ("fsdp", ["--lora.r=2"]),
        ("ddp", ["--lora.r=2", "--ema.enable"]),
    ],
)
def test_many_processes_train_alike(strategy, more, lowdim, tiny_act, tmp_path):
    def command(run: Path, size: int, *flags: str) -> list[str]:
        common = [f"--steps={STEPS}", "--policy.dropout=0", f"--batch_size={size}", *LOWER, *more, *flags]
        return ["train", *runs.flags(lowdim, run, tiny_act, *common)]

    ranks.run(tmp_path / "1", 1, command(tmp_path / "alone", 4))
    shared = f"--parallel.strategy={strategy}".split()
    ranks.run(tmp_path / "2", 2, command(tmp_path / "many", 2, *shared))
    assert ranks.losses(tmp_path / "many") == pytest.approx(ranks.losses(tmp_path / "alone"), rel=2e-2)
