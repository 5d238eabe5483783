"""The first convolution of images by squares of pixels is the convolution."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from flexor.evaluate.play import full_float32
from flexor.policies.nn.first_convolution import FirstConv2d, space_to_depth, space_to_depth_kernel


@given(height=st.integers(1, 12), width=st.integers(1, 12), padding=st.integers(0, 3), bias=st.booleans())
@settings(max_examples=40, deadline=None)
def test_squares_of_pixels(height, width, padding, bias):
    assume(2 * min(height, width) + 2 * padding >= 7)
    torch.manual_seed(0)
    convolution = FirstConv2d(3, 8, padding, bias).double()
    x = torch.randn(2, 3, 2 * height, 2 * width, dtype=torch.float64)
    expected = convolution(x)
    kernel = space_to_depth_kernel(convolution.weight, convolution.bias, padding)
    y = F.conv2d(space_to_depth(x, padding, bias), kernel)
    assert y.shape == expected.shape and torch.allclose(y, expected, atol=1e-12)
    weights = list(convolution.parameters())
    for gradient, other in zip(*(torch.autograd.grad(out.square().sum(), weights) for out in (expected, y))):
        assert torch.allclose(gradient, other, atol=1e-9)


@pytest.mark.gpu
@pytest.mark.parametrize("channels", [3, 1])
@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("size", [84, 85])
def test_on_a_gpu(channels, padding, size):
    torch.manual_seed(0)
    convolution = FirstConv2d(channels, 64, padding, bias=True).cuda().to(memory_format=torch.channels_last)
    x = torch.randn(4, channels, size, size, device="cuda")
    with full_float32():
        y = convolution(x)
        weights = list(convolution.parameters())
        gradients = torch.autograd.grad(y.square().mean(), weights)
        exact = F.conv2d(x.double(), weights[0].double(), weights[1].double(), 2, padding)
        expected = torch.autograd.grad(exact.square().mean(), weights)
    assert torch.allclose(y.double(), exact, atol=1e-5)
    for gradient, other in zip(gradients, expected):
        assert torch.allclose(gradient, other, atol=1e-5)
