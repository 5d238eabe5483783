"""Layers in fp8: which they are, how far from exact, what they keep for the backward pass."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flexor.core.errors import ConfigError
from flexor.kernels.fp8 import E4M3
from flexor.plan.trace.rehearsal import policy_on
from flexor.policies import fp8
from flexor.policies.adapters import LoraConfig, LoraLinear
from flexor.policies.fp8 import Fp8Linear, Fp8LoraLinear, compute_in_fp8
from support.plans import settings

# Relative to the norm: of numbers with 3 and 2 bits after the point, rounded independently.
OUTPUT_ERROR, GRADIENT_ERROR = 0.045, 0.07
FAR = 0.6  # of it, at least: nothing was computed in bf16


def layer_of(bias: bool = True, dtype: torch.dtype = torch.float32, rank: int = 0) -> nn.Linear:
    layer: nn.Linear = nn.Linear(96, 160, bias=bias, dtype=dtype)
    if rank:
        layer.__class__ = LoraLinear
        layer.requires_grad_(False)
        layer.adapt(LoraConfig(r=rank), 3)
        nn.init.normal_(layer.lora_B, std=0.1)
    return layer


def in_fp8(layer: nn.Linear) -> nn.Linear:
    layer = copy.deepcopy(layer)
    layer.__class__ = Fp8LoraLinear if isinstance(layer, LoraLinear) else Fp8Linear
    return layer


def computed(layer: nn.Linear, x: Tensor, recompute: bool = False) -> dict[str, Tensor]:
    """Output and gradients under autocast."""
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = checkpoint(layer, x, use_reentrant=False) if recompute else layer(x)
    torch.manual_seed(3)
    y.backward(torch.randn(y.shape).to(y))
    assert x.grad is not None
    gradients = {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
    return {"output": y.detach(), "input": x.grad, **gradients}


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("inputs", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("bias", "rank"), [(True, 0), (False, 0), (True, 4)])
def test_a_layer_is_close_to_the_exact_one(weights, inputs, bias, rank):
    """Its output and gradients have the types of the layer in bf16."""
    torch.manual_seed(0)
    layer = layer_of(bias, weights, rank)
    x = torch.randn(5, 67, 96).to(inputs)  # no multiple of 16 rows
    ours, lower = computed(in_fp8(layer), x), computed(copy.deepcopy(layer), x)
    exact = layer.double()
    x = x.double().requires_grad_()
    y = exact(x)
    exact.zero_grad()
    torch.manual_seed(3)
    y.backward(torch.randn(y.shape).bfloat16().double())
    theirs = {"output": y.detach(), "input": x.grad}
    theirs |= {name: p.grad for name, p in exact.named_parameters() if p.grad is not None}
    assert ours.keys() == theirs.keys() == lower.keys()
    for name, value in ours.items():
        assert (value.dtype, value.shape) == (lower[name].dtype, lower[name].shape), name
        error = float((value - theirs[name]).norm() / theirs[name].norm())
        limit = OUTPUT_ERROR if name == "output" else GRADIENT_ERROR
        least = 0 if name == "bias" or "lora" in name or rank else FAR * limit
        assert least <= error < limit, (name, error)


@pytest.mark.parametrize("rank", [0, 4])
def test_recomputing_does_not_change_the_bits(rank):
    torch.manual_seed(0)
    x, layer = torch.randn(300, 96), in_fp8(layer_of(rank=rank))
    plain, again = computed(copy.deepcopy(layer), x), computed(layer, x, recompute=True)
    assert all(torch.equal(plain[name], again[name]) for name in plain)


def kept_for_backward(*layers: nn.Module) -> dict[tuple[int, ...], torch.dtype]:
    """Shapes and types of what the layers keep of an input [300, 96], besides parameters."""
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter):
            kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    x = torch.randn(300, 96, requires_grad=True) * 1.0  # as between two layers
    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with hooks, torch.autocast("cpu", torch.bfloat16):
        outs = [layer(x) for layer in layers]
    assert len(outs) == len(layers)
    return {tuple(t.shape): t.dtype for t in kept.values() if t.numel() > 1000}


def test_only_the_transposed_input_is_kept_and_only_once():
    layers = [in_fp8(layer_of()) for _ in range(3)]
    assert kept_for_backward(*layers) == {(96, 304): E4M3}
    for layer in layers:
        layer.weight.requires_grad_(False)
    assert kept_for_backward(*layers) == {}


@pytest.fixture
def casts(monkeypatch) -> list[tuple[int, ...]]:
    """The shapes of what was cast."""
    shapes: list[tuple[int, ...]] = []

    def counted(x: Tensor, *arguments, **settings):
        shapes.append(tuple(x.shape))
        return original(x, *arguments, **settings)

    original = fp8.cast
    monkeypatch.setattr(fp8, "cast", counted)
    return shapes


def test_layers_share_their_input_until_it_changes(casts):
    first, second = (in_fp8(layer_of(bias=False)) for _ in range(2))
    with torch.autocast("cpu", torch.bfloat16):
        x = torch.randn(300, 96, requires_grad=True) * 1.0
        before = first(x)
        second(x)
        assert casts.count((300, 96)) == 1
        with torch.no_grad():
            x.mul_(2)
        assert torch.equal(2 * before, first(x))
        assert casts.count((300, 96)) == 2
        batch = torch.randn(300, 96)  # a graph reads it again, with other values
        first(batch), first(batch)
        assert casts.count((300, 96)) == 4


def test_a_cast_input_is_forgotten_with_the_input():
    layer, x = in_fp8(layer_of()), torch.randn(300, 96, requires_grad=True) * 1.0
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x)
    assert fp8.LATEST.matrix is not None
    del x
    assert fp8.LATEST.matrix is None
    out.sum().backward()


@pytest.mark.parametrize("why", ["evaluated", "float32", "few rows"])
def test_elsewhere_a_layer_is_as_before(why, casts):
    torch.manual_seed(0)
    layer, x = layer_of(), torch.randn(8 if why == "few rows" else 300, 96)
    ours = in_fp8(layer).train(why != "evaluated")
    with torch.autocast("cpu", torch.bfloat16, enabled=why != "float32"):
        assert torch.equal(ours(x), layer(x))
    assert not casts


def in_fp8_of(kind: str, **policy_settings) -> set[str]:
    policy = policy_on(settings(kind, policy=policy_settings))
    compute_in_fp8(policy)
    return {name for name, module in policy.named_modules() if isinstance(module, Fp8Linear)}


def test_wide_layers_of_the_blocks_are_chosen():
    """Of pi0 as it is published; nothing but the blocks' layers."""
    names = in_fp8_of("pi0", paligemma_variant="gemma_2b", action_expert_variant="gemma_300m")
    ends = {name.rpartition("layers.")[2].partition(".")[2] for name in names}
    projections = {f"self_attn.{name}_proj" for name in ("q", "k", "v", "o", "out")}
    assert ends == projections | {
        f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj", "fc1", "fc2")
    }
    assert len(names) == 27 * 6 + 18 * 7 + 18 * 7
    assert not any("head" in name or "norm" in name or "embed" in name for name in names)


PUBLISHED_ACT = {"dim_model": 512, "n_heads": 8, "dim_feedforward": 3200}


@pytest.mark.parametrize(("kind", "size"), [("act", PUBLISHED_ACT), ("diffusion", {}), ("vqbet", {})])
def test_small_policies_are_refused(kind, size):
    with pytest.raises(ConfigError, match=f"policy.type={kind} has no linear layers .*--precision=bf16"):
        in_fp8_of(kind, **size)


def test_odd_widths_stay_in_bf16(monkeypatch):
    monkeypatch.setattr(fp8, "LEAST_WIDTH", 10)
    block = nn.Sequential(nn.Linear(32, 40), nn.Linear(40, 32), nn.Linear(32, 48))
    assert fp8._wide_layers(block) == [block[2]]
