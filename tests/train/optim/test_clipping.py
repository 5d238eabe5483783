"""On a GPU the fused optimizer clips as it reads the gradients: the same update as clipping them first."""

import pytest
import torch
from torch import nn

from flexor.train.engine.base import Engine, takes_scale
from flexor.train.optim.optimizers import CLASSES


def updated(device: str, kind: str, limit: float, pretend: bool) -> tuple[nn.Module, torch.Tensor]:
    """After three steps. With `pretend`, an engine of the CPU clips as on a GPU."""
    torch.manual_seed(0)
    network = nn.Linear(7, 5).to(device)
    unused = nn.Parameter(torch.ones(3, device=device))  # without a gradient
    network.register_parameter("unused", unused)
    optimizer = CLASSES[kind](network.parameters(), lr=0.1, fused=True)
    engine = Engine(torch.device(device), "no")
    engine.policy = network  # type: ignore[assignment]
    if pretend:
        engine.device = torch.device("meta")
    for _ in range(3):
        # no matrix product: a GPU rounds its factors
        loss = (network.weight * torch.randn(5, 7).to(device)).square().sum() + network.bias.square().sum()
        loss.backward()
        norm = engine.clip_grad_norm(optimizer, limit)
        engine.step(optimizer)
    return network, norm


@pytest.mark.parametrize("limit", [0.0, 0.5, 1e6])
@pytest.mark.parametrize("kind", CLASSES)
def test_the_same_update_as_clipping_first(kind, limit):
    first, norm = updated("cpu", kind, limit, False)
    inside, same = updated("cpu", kind, limit, True)
    torch.testing.assert_close(norm, same)
    for left, right in zip(first.parameters(), inside.parameters()):
        torch.testing.assert_close(left, right, atol=1e-6, rtol=1e-5)
    assert torch.equal(inside.unused, torch.ones(3))


@pytest.mark.gpu
@pytest.mark.parametrize("limit", [0.0, 0.5, 1e6])
@pytest.mark.parametrize("kind", CLASSES)
def test_the_same_update_on_a_gpu(kind, limit):
    on_gpu, norm = updated("cuda:0", kind, limit, False)
    here, same = updated("cpu", kind, limit, False)
    torch.testing.assert_close(norm.cpu(), same)
    for left, right in zip(on_gpu.parameters(), here.parameters()):
        torch.testing.assert_close(left.cpu(), right, atol=1e-5, rtol=1e-4)


def test_only_fused_optimizers_take_a_scale():
    weights = [nn.Parameter(torch.zeros(2))]
    for make in CLASSES.values():
        assert takes_scale(make(weights, lr=0.1, fused=True))
        assert not takes_scale(make(weights, lr=0.1))
