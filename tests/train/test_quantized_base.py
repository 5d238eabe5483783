"""LoRA on a base in 8 or 4 bits: it trains, resumes to the same bits, and saves the original weights."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from flexor.cli.main import main
from flexor.config.schema import EMAConfig, ParallelConfig, validate_weights
from flexor.core.errors import ConfigError
from flexor.plan.memory.memory import MemoryPlanner
from flexor.plan.speed.measure import MeasuredRun
from flexor.policies.adapters import LoraConfig
from flexor.policies.nn.siglip import SiglipSize
from flexor.policies.quantized import QuantizedLinear
from flexor.policies.vlm import paligemma
from flexor.policies.vlm.paligemma import PaliGemmaSize, gemma
from support import runs, small_pi
from support.plans import Gpu, settings
from support.small_policies import small_flags

STEPS = 3
SIZE = gemma(width=64, depth=2, mlp_width=128, heads=2, head_dim=32)
VARIANTS = {"paligemma_variant": "gemma_64", "action_expert_variant": "gemma_64"}


@pytest.fixture(autouse=True)
def gemma_64(monkeypatch) -> None:
    """A decoder whose layers can be quantized."""
    monkeypatch.setitem(paligemma.GEMMA, "gemma_64", SIZE)
    vision = SiglipSize(width=64, depth=2, mlp_width=64, heads=2)
    monkeypatch.setitem(paligemma.PALIGEMMA, "gemma_64", PaliGemmaSize(SIZE, vision, small_pi.VOCABULARY))


@pytest.fixture
def pi0(tmp_path) -> list[str]:
    flags = [flag for flag in small_flags("pi0", tmp_path / "models") if "variant" not in flag]
    return [*flags, *(f"--policy.{name}={value}" for name, value in VARIANTS.items()), "--policy.device=cpu"]


def train(data: Path, folder: Path, policy: list[str], *more: str) -> Path:
    return runs.train(data, folder, policy, f"--steps={STEPS}", "--precision=bf16", "--lora.r=4", *more)


@pytest.mark.parametrize("base", ["8bit", "4bit"])
def test_what_is_saved_is_exact(base, dataset, pi0, tmp_path):
    """Frozen weights are those that the run began with; exported ones have the adapters added to them."""
    (tmp_path / "models").mkdir(exist_ok=True)
    start = runs.train(dataset, tmp_path / "start", pi0, "--steps=1")
    policy = [flag for flag in pi0 if "device" in flag or "tokenizer" in flag]
    path = start / "checkpoints/000001/pretrained_model"
    run = train(dataset, tmp_path / "run", [f"--policy.path={path}", *policy], f"--lora.base={base}")
    checkpoint = run / f"checkpoints/{STEPS:06d}"
    before, merged = (
        load_file(path / "model.safetensors"),
        load_file(checkpoint / "pretrained_model/model.safetensors"),
    )
    frozen = load_file(checkpoint / "training_state/raw_model.safetensors")
    names = [name for name in frozen if name.endswith("up_proj.weight")]
    assert len(names) == 2 * SIZE.depth and all(torch.equal(before[name], frozen[name]) for name in names)
    for name in names:
        layer = name.removesuffix("weight")
        added = (
            8.0 / 4 * frozen[f"{layer}lora_B"] @ frozen[f"{layer}lora_A"] if f"{layer}lora_B" in frozen else 0
        )
        assert torch.allclose(merged[name], before[name] + added, atol=1e-6)
    losses = [line["loss"] for line in runs.metrics(run)]
    plain = train(dataset, tmp_path / "plain", [f"--policy.path={path}", *policy])
    assert losses == pytest.approx([line["loss"] for line in runs.metrics(plain)], rel=0.1)


def test_a_resumed_run_is_the_uninterrupted_one(dataset, pi0, tmp_path):
    (tmp_path / "models").mkdir(exist_ok=True)
    uninterrupted = train(dataset, tmp_path / "run", pi0, "--lora.base=4bit", "--save_freq=1")
    cut = runs.cut_back(uninterrupted, tmp_path / "cut", 1)
    assert main(["resume", str(cut)]) == 0
    runs.assert_same(uninterrupted, cut, STEPS)


def config_with(base: str | None, **more):
    return settings("pi0", policy=VARIANTS, precision="bf16", lora=LoraConfig(r=4, base=base), **more)


def test_a_plan_knows_it():
    plans = {base: MemoryPlanner(config_with(base), Gpu()).at(2) for base in (None, "8bit", "4bit")}
    weights = {base: plan.parts["weights"] for base, plan in plans.items()}
    assert weights["4bit"] < weights["8bit"] < weights[None]


@pytest.mark.gpu
@pytest.mark.parametrize("base", ["8bit", "4bit"])
def test_planned_memory_is_measured(base):
    config = config_with(base, step="graph")
    gpu = Gpu(compute_capability=torch.cuda.get_device_capability())
    planned = MemoryPlanner(config, gpu).at(2)
    with MeasuredRun(config, 2) as run:
        layers = [m for m in run.run.policy.modules() if isinstance(m, QuantizedLinear)]
        assert layers and all(layer.weight.dtype in (torch.uint8, torch.int8) for layer in layers)
        weights = sum(parameter.nbytes for parameter in run.run.policy.parameters())
        assert weights == pytest.approx(
            planned.parts["weights"], rel=0.05
        )  # of which each takes 512 bytes more


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"ema": EMAConfig(enable=True)}, "ema.enable"),
        ({"compile": True}, "compile"),
        ({"parallel": ParallelConfig(strategy="fsdp")}, "parallel.strategy=fsdp"),
    ],
)
def test_what_does_not_work_with_it(more, reason):
    with pytest.raises(ConfigError, match=f"lora.base=4bit does not work with {reason}"):
        validate_weights(config_with("4bit", **more))


def test_a_policy_without_such_layers(dataset, tiny_act, tmp_path, capsys):
    arguments = runs.flags(dataset, tmp_path / "run", tiny_act, "--steps=1", "--lora.r=2", "--lora.base=4bit")
    assert main(["train", *arguments]) != 0
    assert "no blocks with frozen linear layers" in capsys.readouterr().err
