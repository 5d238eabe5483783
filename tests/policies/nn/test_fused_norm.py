"""The kernels for normalisation, ReLU and pooling compute what torch computes, forward and backward."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flexor.kernels.available import can_compile
from flexor.plan.trace.cuda_on_meta import CudaOnMeta
from flexor.policies.nn import fused_norm
from flexor.policies.nn.batchnorm import BatchNorm2d
from flexor.policies.nn.camera import group_norm_of_16
from flexor.policies.nn.fused_norm import FrozenBatchNorm2d, norm_relu, norm_relu_pool
from flexor.policies.nn.resnet import ResNet

NORMS = {"frozen": FrozenBatchNorm2d, "batch": BatchNorm2d, "group": group_norm_of_16}
SHAPES = [(3, 32, 9, 7), (2, 64, 64, 50), (5, 48, 1, 1), (1, 512, 15, 20)]
WAYS = {
    "relu": {},
    "residual": {"residual": True},
    "no relu": {"relu": False},
    "residual, no relu": {"residual": True, "relu": False},
}


def made(kind: str, channels: int, device: str) -> nn.Module:
    norm = NORMS[kind](channels)
    for tensor in norm.state_dict().values():
        if tensor.is_floating_point():
            tensor.copy_(torch.rand(channels) + 0.5)
    norm.bias.data.sub_(1)
    return norm.to(device)


def plain(norm: nn.Module, x: Tensor, residual: Tensor | None, relu: bool) -> Tensor:
    x = norm(x) if residual is None else norm(x) + residual
    return F.relu(x) if relu else x


def maps(shape: tuple[int, ...], dtype: torch.dtype, spread: float = 2.0) -> Tensor:
    x = (torch.randn(shape) * spread + 3).cuda().to(dtype)
    return x.to(memory_format=torch.channels_last).requires_grad_()


def far(ours: Tensor | None, theirs: Tensor | None) -> float:
    assert ours is not None and theirs is not None
    ours, theirs = ours.detach().float(), theirs.detach().float()
    return float((ours - theirs).abs().max() / (theirs.abs().max() + 1e-6))


def kernels_used(monkeypatch) -> list[str]:
    used = []
    original = fused_norm._normalize
    monkeypatch.setattr(
        fused_norm, "_normalize", lambda *args, **more: used.append("yes") or original(*args, **more)
    )
    return used


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", NORMS)
def test_same_as_torch(kind, way, shape, dtype, monkeypatch):
    torch.manual_seed(0)
    used = kernels_used(monkeypatch)
    if shape[2:] == (1, 1) and kind == "batch":
        shape = (64, *shape[1:])  # over five values the result is mostly rounding
    relu = WAYS[way].get("relu", True)
    norm = made(kind, shape[1], "cuda")
    exact = copy.deepcopy(norm).double()
    x = maps(shape, dtype)
    residual = maps(shape, dtype) if "residual" in WAYS[way] else None
    wide = [t.detach().double().requires_grad_() if t is not None else None for t in (x, residual)]
    y = norm_relu(norm, x, residual, relu)
    assert used and y.is_contiguous(memory_format=torch.channels_last)
    theirs = plain(exact, wide[0], wide[1], relu)
    gradient = torch.randn_like(y)
    y.backward(gradient)
    theirs.backward(gradient.double())
    close = {torch.float32: 2e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
    assert far(y, theirs) < close
    assert far(x.grad, wide[0].grad) < close
    if residual is not None:
        assert far(residual.grad, wide[1].grad) < close
    if kind != "frozen":
        assert far(norm.weight.grad, exact.weight.grad) < close
        assert far(norm.bias.grad, exact.bias.grad) < close
    if kind == "batch":
        assert far(norm.running_mean, exact.running_mean) < 1e-5
        assert far(norm.running_var, exact.running_var) < 1e-5
        assert norm.num_batches_tracked == exact.num_batches_tracked


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(3, 32, 9, 7), (2, 64, 48, 81), (2, 16, 1, 2)], ids=str)
@pytest.mark.parametrize("kind", NORMS)
def test_pooling_is_the_same_as_torchs(kind, shape, dtype, monkeypatch):
    torch.manual_seed(0)
    used = kernels_used(monkeypatch)
    norm = made(kind, shape[1], "cuda")
    exact = copy.deepcopy(norm).double()
    # multiples of a quarter with one scale are exact in both types: no rounding decides which is the largest
    x = maps(shape, torch.float32, spread=1.0)
    x = (x.detach() * 4).round().div(4).to(dtype).requires_grad_()
    wide = x.detach().double().requires_grad_()
    y = norm_relu_pool(norm, x)
    assert used and y.is_contiguous(memory_format=torch.channels_last)
    theirs = F.max_pool2d(plain(exact, wide, None, True), 3, 2, 1)
    gradient = torch.randn_like(y)
    y.backward(gradient)
    theirs.backward(gradient.double())
    close = 2e-5 if dtype == torch.float32 else 1e-2
    assert far(y, theirs) < close
    assert far(x.grad, wide.grad) < close
    if kind != "frozen":
        assert far(norm.weight.grad, exact.weight.grad) < close
        assert far(norm.bias.grad, exact.bias.grad) < close


@pytest.mark.gpu
@pytest.mark.parametrize("kind", NORMS)
def test_compiled_it_is_the_same(kind):
    torch.manual_seed(0)
    norm = made(kind, 32, "cuda")
    compiled = copy.deepcopy(norm)
    x = maps((2, 32, 12, 10), torch.float32)
    same = x.detach().clone().requires_grad_()
    norm_relu_pool(norm, norm_relu(norm, x)).sum().backward()
    torch.compile(lambda x: norm_relu_pool(compiled, norm_relu(compiled, x)))(same).sum().backward()
    assert far(same.grad, x.grad) < 1e-5
    if kind != "frozen":
        assert far(compiled.weight.grad, norm.weight.grad) < 1e-5
    if kind == "batch":
        assert far(compiled.running_var, norm.running_var) < 1e-5


@pytest.mark.gpu
def test_values_far_from_zero_lose_no_variance():
    torch.manual_seed(0)
    norm = made("batch", 32, "cuda")
    exact = copy.deepcopy(norm).double()
    x = (1000 + torch.randn(4, 32, 40, 40)).cuda().to(memory_format=torch.channels_last)
    assert far(norm_relu(norm, x), plain(exact, x.double(), None, True)) < 1e-3
    assert far(norm.running_var, exact.running_var) < 1e-4


@pytest.mark.gpu
@pytest.mark.parametrize("pool", [False, True])
def test_nan_stays_visible(pool):
    x = torch.randn(2, 32, 8, 8).cuda().to(memory_format=torch.channels_last)
    x[1, 3, 4, 4] = float("nan")
    norm = made("frozen", 32, "cuda")
    assert (norm_relu_pool(norm, x) if pool else norm_relu(norm, x)).isnan().any()


@pytest.mark.gpu
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", NORMS)
def test_a_resnet_in_both_memory_layouts(kind, training, monkeypatch):
    torch.manual_seed(0)
    used = kernels_used(monkeypatch)
    network = ResNet("resnet18", NORMS[kind]).cuda().train(training)
    x = torch.randn(2, 3, 72, 100).cuda()
    with torch.no_grad():
        usual = network(x)
        assert not used
        last = network.to(memory_format=torch.channels_last)(x)
        assert len(used) == 20  # all norms of a ResNet-18
    assert far(last, usual) < 2e-2  # TF32 convolutions of another kind


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_a_plan_sees_the_shapes_of_the_kernels(name, kind):
    """On the meta device the operators return what they return on a GPU."""
    network = ResNet(name, NORMS[kind]).to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 64, 96)
    expected = network(x)
    with torch.device("meta"):
        planned = ResNet(name, NORMS[kind]).to(memory_format=torch.channels_last)
    with CudaOnMeta().active():
        y = planned(torch.empty(x.shape, device="meta"))
        assert y.shape == expected.shape
        y.sum().backward()
    for parameter in planned.parameters():
        assert parameter.grad is not None and parameter.grad.shape == parameter.shape


def test_without_a_compiler_for_the_kernels_one_warning_says_so(log_lines):
    cpu = torch.device("cpu")  # which Triton does not compile for
    can_compile.cache_clear()
    assert not can_compile(cpu) and not can_compile(cpu)
    assert len([line for line in log_lines if "Triton can't compile Flexor's kernels" in line]) == 1


@pytest.mark.gpu
def test_without_kernels_torchs_are_used(monkeypatch):
    x = maps((2, 32, 8, 8), torch.float32)
    norm = made("batch", 32, "cuda")
    expected = plain(copy.deepcopy(norm), x, None, True)
    monkeypatch.setattr(fused_norm, "has_kernels", lambda device: False)
    used = kernels_used(monkeypatch)
    assert far(norm_relu(norm, x), expected) < 1e-5 and not used
