"""The kernels for group normalisation and Mish of sequences compute what torch computes, forward and backward."""

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from flexor.kernels import norm_mish as module
from flexor.kernels.norm_mish import norm_mish, plain
from flexor.plan.trace.cuda_on_meta import CudaOnMeta
from flexor.policies.diffusion.unet import ConditionalUnet1d, Conv1d, ConvTranspose1d

# batch, channels, steps; groups
SHAPES = [((2, 512, 16), 8), ((3, 48, 5), 4), ((2, 8, 1), 8), ((1, 128, 200), 2)]
LAYOUTS = ["contiguous", "channels last"]
WAYS: dict[str, tuple[int, bool]] = {  # columns of film per channel, residual
    "alone": (0, False),
    "shift": (1, False),
    "scale and shift": (2, False),
    "residual": (0, True),
    "all": (2, True),
}
CLOSE = {torch.float32: 2e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def values(shape: tuple[int, ...], dtype: torch.dtype, layout: str, device: str) -> Tensor:
    x = (torch.randn(shape) * 2 + 3).to(device, dtype)
    if layout == "channels last":
        x = x.mT.contiguous().mT
    return x.requires_grad_()


def made(groups: int, channels: int, device: str) -> nn.GroupNorm:
    norm = nn.GroupNorm(groups, channels)
    norm.weight.data = torch.rand(channels) * 2
    norm.bias.data = torch.randn(channels) * 3
    return norm.to(device)


def far(ours: Tensor | None, theirs: Tensor | None, least: float = 1e-6) -> float:
    """The largest error, relative to the largest value, or to `least` if that is larger."""
    assert ours is not None and theirs is not None and ours.shape == theirs.shape
    ours, theirs = ours.detach().double(), theirs.detach().double()
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=least))


def spread(ours: Tensor, theirs: Tensor) -> float:
    """Root mean square of the error, relative to that of the values."""
    return float((ours.detach().double() - theirs.detach()).norm() / theirs.detach().norm())


def wide(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.detach().double().requires_grad_()


@pytest.fixture
def used(monkeypatch) -> list[bool]:
    """Grows by one for each call of the kernels."""
    calls: list[bool] = []
    apply = module._NormMish.apply
    monkeypatch.setattr(module._NormMish, "apply", lambda *args: calls.append(True) or apply(*args))
    return calls


def compare(shape: tuple[int, ...], groups: int, way: str, layout: str, dtype: torch.dtype, device: str):
    torch.manual_seed(0)
    film_columns, with_residual = WAYS[way]
    norm = made(groups, shape[1], device)
    exact = copy.deepcopy(norm).double()
    x = values(shape, dtype, layout, device)
    film = values((shape[0], film_columns * shape[1]), dtype, "contiguous", device) if film_columns else None
    # in the other layout: of a convolution that computed differently
    other = next(each for each in LAYOUTS if each != layout)
    residual = values(shape, dtype, other, device) if with_residual else None
    exact_x, exact_film, exact_residual = wide(x), wide(film), wide(residual)
    y = norm_mish(norm, x, film, residual)
    theirs = plain(exact, exact_x, exact_film, exact_residual)
    gradient = torch.randn(shape).to(device, dtype)
    y.backward(gradient)
    theirs.backward(gradient.double())
    assert y.dtype == dtype and far(y, theirs) < CLOSE[dtype]
    pairs = [(x, exact_x), (film, exact_film), (residual, exact_residual)]
    pairs += [(norm.weight, exact.weight), (norm.bias, exact.bias)]
    # in a group of one value the gradient of x is 0, as a difference of large terms
    least = norm.eps**-0.5 if shape[1] * shape[2] == groups else 1e-6
    for ours, exactly in pairs:
        if ours is not None:
            assert far(ours.grad, exactly.grad, least if ours is x else 1e-6) < CLOSE[dtype]
    return x, y


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("shape", "groups"), SHAPES, ids=str)
def test_same_as_torch(shape, groups, way, layout, dtype, used):
    x, y = compare(shape, groups, way, layout, dtype, "cuda")
    assert used and y.stride() == x.stride()


@pytest.mark.parametrize("way", WAYS)
def test_without_the_kernels(way, used):
    compare((3, 48, 5), 4, way, "contiguous", torch.float32, "cpu")
    assert not used


@pytest.mark.gpu
def test_a_group_too_large_for_a_program_runs_without_the_kernels(used):
    compare((1, 64, 4096), 2, "all", "contiguous", torch.float32, "cuda")
    assert not used


@pytest.mark.gpu
def test_extreme_values():
    """Far from zero no variance is lost; Mish and its slope stay right where an exponential overflows or vanishes."""
    norm = made(2, 32, "cuda")
    norm.weight.data *= 30  # of Mish's input: from -150 to 150
    exact = copy.deepcopy(norm).double()
    x = values((4, 32, 16), torch.float32, "channels last", "cuda")
    x.data += 300
    exact_x = wide(x)
    ours, theirs = norm_mish(norm, x), plain(exact, exact_x, None, None)
    assert far(ours, theirs) < 1e-3 and theirs.abs().max() > 60
    ours.sum().backward()
    theirs.sum().backward()
    assert far(x.grad, exact_x.grad) < 1e-2
    assert norm_mish(norm, torch.full_like(x, torch.nan)).isnan().all()


@pytest.mark.gpu
def test_the_same_bits_every_time(used):
    results = [compare((64, 512, 16), 8, "all", "channels last", torch.bfloat16, "cuda") for _ in range(2)]
    (x, y), (x_again, y_again) = results
    assert torch.equal(y, y_again) and torch.equal(x.grad, x_again.grad)


def small_unet(film_scale: bool) -> ConditionalUnet1d:
    torch.manual_seed(0)
    network = ConditionalUnet1d(6, 10, (32, 64, 128), 5, 8, 16, film_scale)
    for name, parameter in network.named_parameters():
        if "block.1" in name:
            parameter.data = parameter.data + 0.3 * torch.randn(parameter.shape)
    return network


def to_channels_last(network: nn.Module) -> nn.Module:
    for part in network.modules():
        if isinstance(part, nn.Conv1d | nn.ConvTranspose1d):
            part.weight.data = part.weight.data.mT.contiguous().mT
    return network


def run_unet(network: nn.Module, device: str, dtype: torch.dtype | None = None) -> Tensor:
    torch.manual_seed(1)
    inputs = torch.randn(4, 16, 6), torch.rand(4) * 100, torch.randn(4, 10)
    with torch.autocast(device, dtype or torch.bfloat16, enabled=dtype is not None):
        y = network(*(each.to(device, next(network.parameters()).dtype) for each in inputs))
    y.float().square().sum().backward()
    return y


@pytest.fixture
def without_tf32() -> Iterator[None]:
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before


@pytest.mark.gpu
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("film_scale", [False, True])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_a_unet_is_that_of_float64(dtype, film_scale, last, used, monkeypatch, without_tf32):
    """Under autocast the kernels are no less exact than torch's."""
    exact, ours, theirs = (small_unet(film_scale).cuda() for _ in range(3))
    expected = run_unet(exact.double(), "cuda")
    y = run_unet(to_channels_last(ours) if last else ours, "cuda", dtype)
    assert len(used) == 2 * len(ours.blocks()) + 1
    used.clear()
    monkeypatch.setattr(module, "has_kernels", lambda device: False)
    torchs = run_unet(theirs, "cuda", dtype)
    assert not used
    errors = [[spread(far_off, expected)] for far_off in (y, torchs)]  # of the output, then of each gradient
    for network, far_off in zip((ours, theirs), errors):
        far_off += [spread(a.grad, b.grad) for a, b in zip(network.parameters(), exact.parameters())]
    mine, usual = (sum(far_off) / len(far_off) for far_off in errors)
    assert mine < max(1.3 * usual, 1e-5) and max(errors[0]) < max(3 * max(errors[1]), 1e-4)


@pytest.mark.parametrize("last", [False, True])
def test_a_plan_sees_the_shapes_of_the_kernels(last, used):
    """On the meta device the operators return what they return on a GPU."""
    network = small_unet(True)
    expected = run_unet(network, "cpu")
    blocks = len(network.blocks())
    planned = small_unet(True).to("meta")
    inputs = [torch.empty(shape, device="meta") for shape in ((4, 16, 6), (4,), (4, 10))]
    with CudaOnMeta().active():
        y = (to_channels_last(planned) if last else planned)(*inputs)
        y.sum().backward()
    assert y.shape == expected.shape and len(used) == 2 * blocks + 1
    for mine, real in zip(planned.parameters(), network.parameters()):
        assert mine.grad is not None and mine.grad.shape == real.grad.shape


@pytest.mark.parametrize(
    "layer",
    [Conv1d(6, 8, 3, 2, 1), Conv1d(6, 8, 5, padding=2), Conv1d(6, 8, 1), ConvTranspose1d(6, 8, 4, 2, 1)],
)
def test_a_convolution_as_a_flat_image(layer, monkeypatch):
    """With the weights and the input in channels-last format, the result has it too, and nothing else changes."""
    x = torch.randn(2, 5, 6).mT.requires_grad_()
    expected = layer(x)
    expected.square().sum().backward()
    gradients = [x.grad, layer.weight.grad, layer.bias.grad]
    x.grad = layer.weight.grad = layer.bias.grad = None
    to_channels_last(layer)
    monkeypatch.setattr("flexor.policies.diffusion.unet.flat_image", lambda *_: True)
    y = layer(x)
    y.square().sum().backward()
    torch.testing.assert_close(y, expected)
    assert y.mT.is_contiguous()
    for ours, theirs in zip([x.grad, layer.weight.grad, layer.bias.grad], gradients):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
