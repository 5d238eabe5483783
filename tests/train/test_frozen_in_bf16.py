"""A run that stores frozen weights in bfloat16 is the run that has them in float32, with less GPU memory."""

import gc
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flexor.cli.main import main
from flexor.config.schema import EMAConfig, ParallelConfig, TrainConfig
from flexor.plan.memory.memory import MemoryPlanner
from flexor.plan.speed.measure import MeasuredRun
from flexor.plan.trace.trace import trace_step
from flexor.policies.act.config import ACTConfig
from flexor.policies.adapters import LoraConfig
from flexor.policies.frozen_in_bf16 import store_frozen_in_bf16
from flexor.policies.nn.siglip import SiglipSize
from flexor.policies.pi0.config import Pi0Config
from flexor.policies.vlm import paligemma
from flexor.policies.vlm.paligemma import PaliGemmaSize
from flexor.train import build
from flexor.train.build import make_policy, may_store_frozen_in_bf16
from flexor.train.checkpoint.saver import HostCopy
from support import ranks, runs, small_pi
from support.plans import H200, Gpu, settings
from support.small_policies import small_flags

STEPS = 3
LORA = ["--lora.r=2"]
# the norm of all gradients is rounded otherwise if some are in bfloat16, which shows where they are limited by it
UNLIMITED = ["--optimizer.grad_clip_norm=1000"]
CASES = [
    ("pi0", LORA),
    ("pi0", ["--policy.train_expert_only=true"]),
    ("pi05", LORA),
    ("pi0_fast", LORA),
    ("smolvla", []),
    ("smolvla", LORA),
    ("xvla", ["--policy.freeze_vision_encoder=true", "--policy.freeze_language_encoder=true"]),
    ("xvla", LORA),
    ("groot", UNLIMITED),
    ("groot", [*LORA, *UNLIMITED]),
]
IDS = ["pi0 adapters", "pi0 expert", "pi05 adapters", "pi0_fast adapters", "smolvla", "smolvla adapters"]
IDS += ["xvla encoders", "xvla adapters", "groot", "groot adapters"]


def store_on_cpu() -> None:
    """Runs on a CPU do it too, from here on."""
    build.DEVICES = ("cpu", "cuda", "meta")


@pytest.fixture
def stored(monkeypatch) -> None:
    monkeypatch.setattr(build, "DEVICES", build.DEVICES)  # restored after the test
    store_on_cpu()


@pytest.fixture
def pi0(tmp_path) -> list[str]:
    (tmp_path / "models").mkdir()
    return [*small_flags("pi0", tmp_path / "models"), "--policy.device=cpu", *LORA]


def train(data: Path, folder: Path, policy: list[str], *more: str) -> Path:
    return runs.train(data, folder, policy, f"--steps={STEPS}", "--precision=bf16", *more)


@pytest.mark.parametrize(("name", "how"), CASES, ids=IDS)
def test_the_run_has_the_bits_of_one_in_float32(name, how, dataset, tmp_path, stored, monkeypatch):
    policy = [*small_flags(name, tmp_path / "models"), "--policy.device=cpu", *how]
    first = train(dataset, tmp_path / "first", policy)
    monkeypatch.setattr(build, "DEVICES", ())
    runs.assert_same(train(dataset, tmp_path / "second", policy), first, STEPS)


def test_adapters_of_a_trained_policy(dataset, pi0, tmp_path, stored, monkeypatch):
    """Its weights are exported as they were, or with the adapters added to their float32 values."""
    trained = train(dataset, tmp_path / "trained", pi0)
    tokenizer = [flag for flag in pi0 if "tokenizer_name" in flag]
    continued = [f"--policy.path={trained}", *tokenizer, *LORA, "--policy.device=cpu", "--lora.alpha=64"]
    first = train(dataset, tmp_path / "first", continued)
    monkeypatch.setattr(build, "DEVICES", ())
    runs.assert_same(train(dataset, tmp_path / "second", continued), first, STEPS)


def test_a_resumed_run_is_the_uninterrupted_one(dataset, pi0, tmp_path, stored, monkeypatch):
    uninterrupted = train(dataset, tmp_path / "whole", pi0, "--save_freq=1")
    cut = runs.cut_back(uninterrupted, tmp_path / "cut", 1)
    elsewhere = runs.cut_back(uninterrupted, tmp_path / "elsewhere", 1)
    assert main(["resume", str(cut)]) == 0
    runs.assert_same(uninterrupted, cut, STEPS)
    monkeypatch.setattr(build, "DEVICES", ())
    assert main(["resume", str(elsewhere)]) == 0
    runs.assert_same(uninterrupted, elsewhere, STEPS)


@pytest.mark.slow
@pytest.mark.ranks
def test_two_ranks_resume_and_only_the_first_has_float32_weights(dataset, pi0, tmp_path):
    flags = runs.flags(
        dataset, tmp_path / "run", pi0, f"--steps={STEPS}", "--precision=bf16", "--save_freq=1"
    )
    two = ranks.Ranks(tmp_path / "out", 2, ["train", *flags], then=dict.fromkeys(range(2), store_on_cpu))
    assert two.end() == [0, 0], two.errors()
    cut = runs.cut_back(tmp_path / "run", tmp_path / "cut", 1)
    again = ranks.Ranks(
        tmp_path / "again", 2, ["resume", str(cut)], then=dict.fromkeys(range(2), store_on_cpu)
    )
    assert again.end() == [0, 0], again.errors()
    runs.assert_same(tmp_path / "run", cut, STEPS)


def test_held_out_loss_and_episodes_in_between(dataset, pi0, tmp_path, stored):
    environment = ["--env.type=place", "--env.kwargs.image_size=32", "--env.max_steps=6", "--env_eval_freq=2"]
    run = train(
        dataset,
        tmp_path / "run",
        pi0,
        "--dataset.eval_split=0.25",
        "--eval_steps=2",
        *environment,
        "--eval.n_episodes=2",
    )
    assert [line["step"] for line in runs.metrics(run) if "held_out_loss" in line]
    assert [line["step"] for line in runs.metrics(run) if "eval_success_rate" in line]


def frozen_pi0(**more) -> TrainConfig:
    return settings("pi0", precision="bf16", lora=LoraConfig(r=2), **more)


BF16 = TrainConfig(policy=Pi0Config(), precision="bf16")


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (BF16, True),
        (replace(BF16, lora=LoraConfig(r=4)), True),
        (replace(BF16, precision="no"), False),
        (replace(BF16, weights_dtype="bf16"), False),
        (replace(BF16, ema=EMAConfig(enable=True)), False),
        (replace(BF16, parallel=ParallelConfig(strategy="fsdp")), False),
        (replace(BF16, policy=ACTConfig()), False),
    ],
)
def test_which_runs_do_it(config, expected):
    assert may_store_frozen_in_bf16(config) == expected


def test_what_is_stored_in_bf16():
    policy = make_policy(frozen_pi0())
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    store_frozen_in_bf16(policy, keep_float32=True)
    lower = {name for name, parameter in policy.named_parameters() if parameter.dtype == torch.bfloat16}
    assert lower == policy.float32_weights.keys()
    assert all(torch.equal(policy.float32_weights[name], before[name]) for name in lower)
    assert not any(policy.get_parameter(name).requires_grad for name in lower)
    float32 = {name.removesuffix(".weight").rpartition(".")[2] for name in before.keys() - lower}
    assert {"input_layernorm", "post_attention_layernorm", "position_embedding"} < float32
    assert not {"patch_embedding", "embed_tokens", "action_out_proj"} & float32


# Plans


def test_a_plan_has_them_in_bf16(monkeypatch):
    stored = trace_step(frozen_pi0(), 2, H200, 1)
    monkeypatch.setattr(build, "DEVICES", ())
    monkeypatch.setattr("flexor.plan.trace.rehearsal.DEVICES", ())
    plain = trace_step(frozen_pi0(), 2, H200, 1)
    assert stored.nbytes("weights") == plain.nbytes("weights") - sum(stored.float32_on_host) // 2
    assert stored.saved == plain.saved and not plain.float32_on_host


def test_a_plan_of_shards_has_them_in_float32():
    tiny = Gpu(memory=1 << 15)
    automatic, fsdp = (
        MemoryPlanner(frozen_pi0(parallel=ParallelConfig(strategy=strategy)), tiny, world_size=2)
        for strategy in ("auto", "fsdp")
    )
    assert automatic.at(2).parallelism.strategy == "fsdp"
    assert automatic.at(2).parts == fsdp.at(2).parts


@pytest.mark.gpu
def test_planned_memory_is_measured(monkeypatch):
    """With a network whose weights take more than all else."""
    wide = paligemma.gemma(width=512, depth=8, mlp_width=4096, heads=4, head_dim=64)
    size = PaliGemmaSize(wide, SiglipSize(width=64, depth=2, mlp_width=64, heads=2), small_pi.VOCABULARY)
    monkeypatch.setitem(paligemma.GEMMA, "gemma_wide", wide)
    monkeypatch.setitem(paligemma.PALIGEMMA, "gemma_wide", size)
    names = {"paligemma_variant": "gemma_wide", "action_expert_variant": "gemma_wide"}
    config = frozen_pi0(policy=names, step="graph")
    planned = MemoryPlanner(config, Gpu(compute_capability=torch.cuda.get_device_capability())).at(2)
    assert planned.parts["weights"] > planned.allocated // 2
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()  # those of earlier tests: the run makes its own
    before = torch.cuda.memory_allocated()
    with MeasuredRun(config, 2) as run:
        assert run.memory().allocated - before == pytest.approx(planned.allocated, rel=0.02)


@pytest.mark.gpu
def test_a_save_copies_only_what_changes(dataset, pi0, tmp_path, monkeypatch):
    copied: list[set[str]] = []
    copy = HostCopy.copy

    def noted(self, tensors):
        copies = copy(self, tensors)
        copied.append({*self.tensors})
        assert copies is None or copies.keys() == tensors.keys()
        return copies

    monkeypatch.setattr(HostCopy, "copy", noted)
    gpu = [flag for flag in pi0 if "device" not in flag]
    run = train(dataset, tmp_path / "run", gpu)
    assert copied and not any("patch_embedding.weight" in name for name in copied[0])
    weights = runs.tensors(run, STEPS)
    assert all(value.dtype == torch.float32 for name, value in weights.items() if "patch_embedding" in name)
