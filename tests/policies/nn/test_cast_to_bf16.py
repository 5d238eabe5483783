"""Weights in bfloat16 for inference: those that autocast makes."""

import pytest
import torch
from torch import nn

from flexor.policies.nn.attention import Attention
from flexor.policies.nn.cast_to_bf16 import cast_to_bf16


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 16, 3), nn.LayerNorm(16)
        self.attention, self.linear = Attention(16, 2), nn.Linear(16, 4)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.conv(images).flatten(2).mT)
        return self.linear(self.attention(x, x, x))


def predicted(network: nn.Module, images: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode(), torch.autocast(images.device.type, torch.bfloat16):
        return network(images)


def test_they_are_those_of_autocast() -> None:
    network, images = Network(), torch.randn(2, 3, 8, 8)
    expected = predicted(network, images)
    cast_to_bf16(network)
    assert torch.equal(predicted(network, images), expected)
    wide = {name for name, weight in network.named_parameters() if weight.dtype == torch.float32}
    assert wide == {"norm.weight", "norm.bias"}


@pytest.mark.gpu
def test_on_a_gpu_images_are_channels_last() -> None:
    network, images = Network().cuda(), torch.randn(2, 3, 8, 8, device="cuda")
    expected = predicted(network, images)
    cast_to_bf16(network)
    assert network.conv.weight.is_contiguous(memory_format=torch.channels_last)
    assert network.conv(images.bfloat16()).is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(predicted(network, images), expected, rtol=0.05, atol=0.02)
