"""Matrices in fp8: scaled so that nothing overflows, rounded once, and the kernels' bits are those of torch."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from flexor.kernels.fp8 import E4M3, E5M2, cast, largest_magnitudes, padded, parts_of, product, scale_of

LARGEST_NUMBER = {E4M3: 448.0, E5M2: 57344.0}
both_types = pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)


@both_types
def test_the_scale_is_the_largest_power_of_two_that_does_not_overflow(dtype):
    for largest in (448.0, 448.1, 447.9, 1.0, 1.75, 1.7500001, 1.999, 2.0, 3e-5, 1e30, 57344.0, 57345.0):
        scale, inverse = scale_of(torch.tensor(largest), dtype)
        assert math.frexp(float(scale))[0] == 0.5 and scale * inverse == 1
        assert torch.tensor(largest) * scale <= LARGEST_NUMBER[dtype] < torch.tensor(largest) * scale * 2


@both_types
def test_no_scale_is_infinite_or_zero(dtype):
    tiny, largest = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
    for magnitude in (0.0, 1e-45, tiny, largest):
        scale, inverse = scale_of(torch.tensor(magnitude), dtype)
        assert scale.isfinite() and inverse.isfinite() and scale > 0 and inverse > 0


@both_types
def test_each_value_is_rounded_once(dtype):
    x = torch.randn(70, 48) * torch.logspace(-3, 3, 48)
    matrix = cast(x, largest_magnitudes(x), dtype)
    step = 2.0 ** -(4 if dtype == E4M3 else 3)  # half of the distance of two mantissas, relative to the value
    error = (matrix.straight.float() * matrix.inverse_scale - x).abs()
    smallest = 2.0 ** (-10 if dtype == E4M3 else -17) * matrix.inverse_scale
    assert (error <= torch.maximum(step * x.abs(), smallest)).all()
    assert torch.equal(matrix.transposed[:, :70].float(), matrix.straight.T.float())
    assert matrix.transposed.shape == (48, 80) and not matrix.transposed[:, 70:].float().any()


def test_only_what_is_needed_is_made():
    x = torch.randn(32, 16)
    assert not cast(x, largest_magnitudes(x), E4M3, straight=False).straight.numel()
    assert not cast(x, largest_magnitudes(x), E4M3, transposed=False).transposed.numel()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_stays_so(bad):
    x = torch.randn(16, 16)
    x[3, 5] = bad
    matrix = cast(x, largest_magnitudes(x), E4M3)
    out = product(
        matrix.straight, matrix.straight, (matrix.inverse_scale,) * 2, torch.float32, exact_sums=True
    )
    assert out[3].isnan().all()


@pytest.mark.parametrize(("left", "right"), [(E4M3, E4M3), (E5M2, E4M3)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products_are_those_of_torch(left, right, dtype):
    a, b = (torch.randn(rows, 64) for rows in (17, 32))
    a, b = cast(a, largest_magnitudes(a), left), cast(b, largest_magnitudes(b), right)
    scales, bias = (a.inverse_scale, b.inverse_scale), torch.randn(32).to(dtype)
    ours = product(a.straight, b.straight, scales, dtype, bias, exact_sums=True)
    theirs = (a.straight.double() @ b.straight.double().T) * scales[0] * scales[1] + bias
    torch.testing.assert_close(ours, theirs.to(dtype))
    planned = product(*(t.straight.to("meta") for t in (a, b)), scales, dtype, bias, exact_sums=True)
    assert (planned.shape, planned.dtype) == (ours.shape, ours.dtype)


def test_a_plan_has_the_shapes_of_the_kernels():
    x = torch.empty(70, 48, device="meta", dtype=torch.bfloat16)
    maxima = largest_magnitudes(x)
    assert maxima.shape == (parts_of(x),)
    planned = cast(x, maxima, E5M2)
    assert (planned.straight.shape, planned.transposed.shape) == ((70, 48), (48, padded(70)))
    assert planned.transposed.dtype == E5M2 and not cast(x, maxima, E4M3, straight=False).straight.numel()


SHAPES = [(1, 16), (300, 176), (129, 64)]


def kernels(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    maxima = torch.ops.flexor.fp8_maxima(x)
    assert maxima.shape == (parts_of(x),)
    return torch.ops.flexor.fp8_cast(x, maxima, dtype, True, True)


def compare(device: str, source: torch.dtype, rounded: bool = True) -> None:
    """The kernels against torch, bit by bit. Without `rounded`, no value has to be rounded."""
    torch.manual_seed(0)
    for shape in SHAPES:
        for power in (0, -12, 12):
            x = torch.randn(shape) * torch.randn(shape).exp()
            if not rounded:
                x = x.sign() * torch.randint(4, 8, shape) * 2.0 ** torch.randint(-6, 1, shape)
            x = (x * 2.0**power).to(source)
            x[0, 0] = x[-1, -1] = 0
            for dtype in (E4M3, E5M2):
                ours = kernels(x.to(device), dtype)
                for our, their in zip(ours, cast(x, largest_magnitudes(x), dtype), strict=True):
                    assert torch.equal(our.cpu().float(), their.float()), (shape, power, dtype)
    zeros = torch.zeros(16, 16, dtype=source, device=device)
    assert not kernels(zeros, E4M3)[0].float().any()
    zeros[2, 3] = math.inf
    assert kernels(zeros, E4M3)[2].isnan()  # with which every product is multiplied


def test_the_kernels_in_tritons_interpreter():
    """Without a GPU. The interpreter does not round to fp8 as a GPU does."""
    pytest.importorskip("triton")
    code = (
        "from test_fp8_kernels import *; [compare('cpu', t, False) for t in (torch.float32, torch.bfloat16)]"
    )
    paths = [str(Path(__file__).parent), *sys.path]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(paths)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, timeout=300)


@pytest.mark.gpu
@pytest.mark.parametrize("source", [torch.bfloat16, torch.float32], ids=str)
def test_the_kernels_on_a_gpu(source):
    if torch.cuda.get_device_capability() < ((8, 9) if source == torch.bfloat16 else (9, 0)):
        pytest.skip("this GPU does not compute in fp8, or rounds float32 to float16 first")
    compare("cuda", source)


@pytest.mark.gpu
@pytest.mark.parametrize("exact_sums", [False, True])
@pytest.mark.parametrize("left", [E4M3, E5M2], ids=str)
def test_products_on_a_gpu(left, exact_sums):
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU does not compute in fp8")
    torch.manual_seed(0)
    a, b = (torch.randn(rows, 4096) for rows in (333, 512))
    a, b = cast(a, largest_magnitudes(a), left), cast(b, largest_magnitudes(b), E4M3)
    scales = a.inverse_scale, b.inverse_scale
    theirs = product(a.straight, b.straight, scales, torch.float32, exact_sums=True)
    on_gpu = [t.cuda() for t in (a.straight, b.straight)]
    scales = tuple(scale.cuda() for scale in scales)
    ours = product(*on_gpu, scales, torch.bfloat16, exact_sums=exact_sums).cpu().float()
    assert (ours - theirs).abs().max() < 1e-2 * theirs.abs().max()
