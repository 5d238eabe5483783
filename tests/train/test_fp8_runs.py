"""Runs in fp8, computed by torch on a CPU: they learn as runs in bf16, resume to the same bits, and save the weights.

No other test can run them: a CPU is refused, which is suspended here.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from flexor.cli.main import main
from flexor.config import for_gpu
from flexor.policies import fp8
from flexor.policies.nn.siglip import SiglipSize
from flexor.policies.vlm import paligemma
from flexor.policies.vlm.paligemma import PaliGemmaSize, gemma
from support import runs, small_pi
from support.small_policies import small_flags

STEPS = 4
SIZE = gemma(width=32, depth=2, mlp_width=64, heads=2, head_dim=16)
VARIANTS = {"paligemma_variant": "gemma_32", "action_expert_variant": "gemma_32"}


@pytest.fixture(autouse=True)
def narrow_layers_on_a_cpu(monkeypatch) -> None:
    monkeypatch.setattr(for_gpu, "multiplies_in", lambda *_: True)
    monkeypatch.setattr(fp8, "LEAST_WIDTH", 10)
    monkeypatch.setattr(fp8, "LEAST_ROWS", 16)
    monkeypatch.setitem(paligemma.GEMMA, "gemma_32", SIZE)
    vision = SiglipSize(width=32, depth=2, mlp_width=48, heads=2)
    monkeypatch.setitem(paligemma.PALIGEMMA, "gemma_32", PaliGemmaSize(SIZE, vision, small_pi.VOCABULARY))


@pytest.fixture
def pi0(tmp_path) -> list[str]:
    (tmp_path / "models").mkdir()
    flags = [flag for flag in small_flags("pi0", tmp_path / "models") if "variant" not in flag]
    return [*flags, *(f"--policy.{name}={value}" for name, value in VARIANTS.items()), "--policy.device=cpu"]


@pytest.fixture
def products(monkeypatch) -> list[int]:
    """One number for each product in fp8."""
    counted: list[int] = []

    def product(*arguments, **settings):
        counted.append(1)
        return original(*arguments, **settings)

    original = fp8.product
    monkeypatch.setattr(fp8, "product", product)
    return counted


def train(data: Path, folder: Path, policy: list[str], precision: str, *more: str) -> Path:
    return runs.train(data, folder, policy, f"--steps={STEPS}", f"--precision={precision}", *more)


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in runs.metrics(run) if "loss" in line]


@pytest.mark.parametrize(
    "more", [[], ["--activation_checkpointing=true"], ["--lora.r=4"]], ids=["full", "recomputed", "adapters"]
)
def test_losses_follow_those_in_bf16(more, dataset, pi0, tmp_path, products):
    ours = train(dataset, tmp_path / "fp8", pi0, "fp8", *more)
    assert products
    products.clear()
    theirs = train(dataset, tmp_path / "bf16", pi0, "bf16", *more)
    assert not products
    first, second = losses(ours), losses(theirs)
    assert first != second and first == pytest.approx(second, rel=0.02)
    saved, plain = (
        load_file(run / f"checkpoints/{STEPS:06d}/pretrained_model/model.safetensors")
        for run in (ours, theirs)
    )
    assert {n: (t.shape, t.dtype) for n, t in saved.items()} == {
        n: (t.shape, t.dtype) for n, t in plain.items()
    }
    assert all(torch.allclose(saved[name].float(), plain[name].float(), atol=0.02) for name in saved)


def test_a_resumed_run_is_the_uninterrupted_one(dataset, pi0, tmp_path):
    uninterrupted = train(dataset, tmp_path / "run", pi0, "fp8", "--save_freq=2")
    cut = runs.cut_back(uninterrupted, tmp_path / "cut", 2)
    assert main(["resume", str(cut)]) == 0
    runs.assert_same(uninterrupted, cut, STEPS)
