"""AdamW with moments of 8 bits: the tables are bitsandbytes', and the kernel computes what torch computes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from flexor.kernels import adamw_8bit
from flexor.kernels.adam import factors
from flexor.kernels.adamw_8bit import BLOCK, dequantize, midpoints, quantize, table, update

CPU = torch.device("cpu")
SHAPES = [(64, 64), (5000,), (8, 32, 4, 5), (3, 1000), (1,), (4096,), *[(7, n) for n in range(1, 14)]]
SETTINGS = (0.9, 0.99, 1e-8)  # betas, eps


def test_the_tables():
    for signed in (True, False):
        values = table(signed, CPU)
        assert len(values) == 256 and (values.diff() > 0).all() and values[-1] == 1
        assert values[127 * signed] == 0
    smallest = [float(table(signed, CPU)[128 if signed else 1]) for signed in (True, False)]
    assert smallest == pytest.approx([0.55e-6, 0.325e-6])
    bitsandbytes = pytest.importorskip("bitsandbytes.functional")
    for signed in (True, False):
        assert torch.equal(table(signed, CPU), bitsandbytes.create_dynamic_map(signed=signed))


@pytest.mark.parametrize("signed", [True, False])
def test_the_nearest_value_of_the_table(signed):
    values = table(signed, CPU)
    torch.manual_seed(0)
    size = 10.0 ** torch.empty(20 * BLOCK + 33).uniform_(-8, 0)
    moments = size * (torch.randn_like(size).sign() if signed else 1)
    codes, scales = quantize(moments, signed)
    assert scales.tolist() == [float(block.abs().max()) for block in moments.split(BLOCK)]
    relative = moments / scales.repeat_interleave(BLOCK)[: len(moments)]
    error = (relative[:, None].double() - values[None].double()).abs()
    nearest, restored = error.argmin(1).int(), dequantize(codes, scales, signed)
    never_zero = (moments < 0) if signed else (moments > 0)
    moved = never_zero & (nearest == 127 * signed)
    assert moved.any() and torch.equal(codes.int(), nearest + moved.int() * (-1 if signed else 1))
    assert (restored[never_zero] != 0).all() and (restored * moments >= 0).all()
    zeros, none = quantize(torch.zeros(300), signed)
    assert not none.any() and not dequantize(zeros, none, signed).any()


class Tensors:
    """Weights, and moments that begin as zeros."""

    def __init__(self, dtype: torch.dtype, device: str, in_8_bits: bool):
        generator = torch.Generator().manual_seed(0)
        self.weights = [torch.randn(s, generator=generator).to(device, dtype) for s in SHAPES]
        for number in (2, 3):  # as convolutions have them
            self.weights[number] = channels_last(self.weights[number])
        kind = torch.uint8 if in_8_bits else torch.float32
        self.state = [[torch.zeros(s, dtype=kind, device=device) for s in SHAPES] for _ in range(2)]
        for _ in range(2):
            blocks = [torch.zeros(-(-w.numel() // BLOCK), device=device) for w in self.weights]
            self.state.append(blocks if in_8_bits else [])

    def all(self) -> list[Tensor]:
        return [*self.weights, *(tensor for tensors in self.state for tensor in tensors)]


def channels_last(weight: Tensor) -> Tensor:
    return weight.to(memory_format=torch.channels_last) if weight.dim() == 4 else weight


def step(number: int, tensors: Tensors, scale: float | None, skip: bool | None, compute) -> None:
    generator, weights = torch.Generator().manual_seed(number), tensors.weights
    device = weights[0].device
    sizes = [10.0 ** torch.randint(-2, 1, w.shape, generator=generator) for w in weights]
    gradients = [torch.randn(w.shape, generator=generator) * size for w, size in zip(weights, sizes)]
    gradients = [channels_last(g.to(device, w.dtype)) for g, w in zip(gradients, weights)]
    steps = [torch.tensor(1.0 + number, device=device)] * len(weights)
    rows = factors(steps, torch.tensor(1e-2, device=device), SETTINGS[:2], 0.1)
    scalars = [None if v is None else torch.tensor(float(v), device=device) for v in (scale, skip)]
    compute(weights, gradients, *tensors.state, rows, *scalars, *SETTINGS)


def compare(dtype: torch.dtype, device: str) -> None:
    """The kernel of the device, and torch: moments with the same bits, weights up to rounding."""
    kernel = torch.ops.flexor.adamw_8bit
    rounding = {torch.float32: 1e-6, torch.bfloat16: 2**-6, torch.float16: 2**-9}[dtype]
    for in_8_bits in (True, False):
        for scale in (None, 3.0) if device == "cuda" else (3.0,):
            ours, theirs = Tensors(dtype, device, in_8_bits), Tensors(dtype, device, in_8_bits)
            for number in range(2):
                step(number, ours, scale, None, kernel)
                step(number, theirs, scale, None, update)
            for left, right in zip(ours.weights, theirs.weights):
                torch.testing.assert_close(left, right, atol=3 * rounding, rtol=3 * rounding)
            for left, right in zip(ours.state[:2], theirs.state[:2]):
                together = [torch.cat([t.flatten() for t in side]) for side in (left, right)]
                if not in_8_bits:
                    torch.testing.assert_close(*together, atol=1e-6, rtol=1e-5)
                    continue
                differ = (together[0].int() - together[1].int()).abs()
                # a GPU rounds products and sums once: values between two neighbours may fall to the other one
                assert differ.max() <= (1 if device == "cuda" else 0) and differ.float().mean() < 1e-3
            before = [tensor.clone() for tensor in ours.all()]
            step(3, ours, scale, True, kernel)  # skipped
            assert all(torch.equal(left, right) for left, right in zip(before, ours.all()))
            step(3, ours, scale, False, kernel)
            assert not all(torch.equal(left, right) for left, right in zip(before, ours.all()))


def values_near_midpoints() -> Tensor:
    """Values between 0 and 1 that are hard to place: midpoints, their neighbours, zero and the smallest ones."""
    edges = torch.cat([midpoints(signed, CPU)[1:-1] for signed in (True, False)]).abs()
    near = [edges, edges.nextafter(torch.tensor(2.0)), edges.nextafter(torch.tensor(0.0))]
    decades = torch.tensor([10.0**-i for i in range(8)])
    near += [decades, decades.nextafter(torch.tensor(0.0)), decades.nextafter(torch.tensor(2.0)).clamp(max=1)]
    return torch.cat([*near, torch.tensor([0.0, 1e-30, 1e-7, 2e-7, 1.0]), torch.linspace(0, 1, 3000)])


def compare_places(device: str) -> None:
    """Every value is placed as torch places it, where the table has 2 values in a decade and where it has 128."""
    values, none = values_near_midpoints(), (0.0, 0.0, 1e-8)
    blocks = torch.nn.functional.pad(values, (0, -len(values) % (BLOCK - 1))).view(-1, BLOCK - 1)
    largest = torch.ones(len(blocks), 1)  # of each block, so that the others are relative to it
    for sign in (1, -1):
        gradient = torch.cat((sign * blocks, largest), 1).to(device).flatten()
        first, second = (torch.zeros(gradient.shape, dtype=torch.uint8, device=device) for _ in range(2))
        scales = [torch.zeros(len(blocks), device=device) for _ in range(2)]
        rows = torch.tensor([[0.0, 1.0, 1.0]], device=device)
        for roots in (gradient, gradient.abs().sqrt()):  # the second moment is the square
            lists = ([torch.zeros_like(roots)], [roots], [first], [second], *([s] for s in scales))
            torch.ops.flexor.adamw_8bit(*lists, rows, None, None, *none)
            assert torch.equal(first, quantize(roots, True)[0])
            assert torch.equal(second, quantize(roots * roots, False)[0])


def test_the_kernel_in_tritons_interpreter():
    """Without a GPU; of bfloat16, the interpreter rounds in another way."""
    pytest.importorskip("triton")
    code = "from test_adamw_8bit_kernel import *; compare(torch.float32, 'cpu'); compare_places('cpu')"
    paths = [str(Path(__file__).parent), *sys.path]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(paths)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, timeout=300)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_kernel_on_a_gpu(dtype):
    compare(dtype, "cuda")


@pytest.mark.gpu
def test_the_nearest_places_on_a_gpu():
    compare_places("cuda")


@pytest.mark.gpu
def test_a_large_tensor_has_a_launch_of_its_own():
    torch.manual_seed(0)
    weight, gradient = (torch.randn(3, 700_001, device="cuda") for _ in range(2))
    lists = [[torch.zeros(weight.shape, dtype=torch.uint8, device="cuda")] for _ in range(2)]
    lists += [[torch.zeros(-(-weight.numel() // BLOCK), device="cuda")] for _ in range(2)]
    rows = factors([torch.ones((), device="cuda")], 1e-2, SETTINGS[:2], 0.1)
    both = []
    for compute in (torch.ops.flexor.adamw_8bit, update):
        copies = [[t.clone() for t in tensors] for tensors in ([weight], *lists)]
        compute(copies[0], [gradient], *copies[1:], rows, None, None, *SETTINGS)
        both.append(copies)
    torch.testing.assert_close(both[0][0][0], both[1][0][0])
    assert (both[0][1][0] != both[1][1][0]).float().mean() < 1e-3


@pytest.mark.gpu
def test_the_layout_of_weights_does_not_change_the_values():
    """But for rounding: kernels of two layouts may round a product and a sum once, or each of them."""
    contiguous, permuted = (Tensors(torch.float32, "cuda", True) for _ in range(2))
    contiguous.weights = [weight.contiguous() for weight in contiguous.weights]
    for number in range(3):
        for tensors in (contiguous, permuted):
            step(number, tensors, None, None, laid_out)
    for left, right in zip(contiguous.weights, permuted.weights):
        torch.testing.assert_close(left, right, atol=3e-6, rtol=3e-6)
    for left, right in zip(contiguous.state[:2], permuted.state[:2]):
        differ = torch.cat([(a.int() - b.int()).abs().flatten() for a, b in zip(left, right)])
        assert differ.max() <= 1 and differ.float().mean() < 1e-3


def laid_out(weights: list[Tensor], gradients: list[Tensor], *more) -> None:
    gradients = [torch.empty_like(w).copy_(g) for w, g in zip(weights, gradients)]
    torch.ops.flexor.adamw_8bit(weights, gradients, *more)


def test_layouts_that_have_a_kernel():
    weight = torch.zeros(4, 3, 5, 5)
    assert adamw_8bit.has_known_layout(weight) and adamw_8bit.has_known_layout(channels_last(weight))
    assert adamw_8bit.has_known_layout(torch.zeros(4, 5, 3).mT)
    assert not adamw_8bit.has_known_layout(torch.zeros(4, 3).mT)
    assert not adamw_8bit.has_known_layout(weight.transpose(0, 1))
