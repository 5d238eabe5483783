"""Recomputed blocks: less memory and the same results, dropout included, also in CUDA graphs."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from flexor.policies.nn.recompute import DROPOUT, recompute

BLOCKS = 3


class Block(nn.Module):
    def __init__(self, dropout: float):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64))
        self.dropout = dropout
        self.passes = 0

    def forward(self, x: Tensor) -> Tensor:
        """No product of matrices, which a GPU could sum in another order."""
        self.passes += 1
        for _ in range(2):
            x = nn.functional.dropout(torch.tanh(x * self.weight), self.dropout)
        return x


def network(dropouts: list[float], recomputed: bool, device: str) -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(*(Block(dropout) for dropout in dropouts)).to(device)
    for block in net if recomputed else ():
        recompute(block)
        recompute(block)  # has no effect
    return net


def gradients(net: nn.Module, x: Tensor, seed: int) -> list[Tensor]:
    torch.manual_seed(seed)
    DROPOUT.begin_pass()
    torch.rand(3, device=x.device)  # something else draws before the blocks
    net(nn.functional.dropout(x, 0.5)).square().sum().backward()
    computed = [parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None]
    net.zero_grad(set_to_none=True)
    return computed


@pytest.mark.parametrize("dropouts", [[0.5] * BLOCKS, [0.0, 0.5, 0.0], [0.0] * BLOCKS])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_same_gradients(dropouts, device):
    x = torch.randn(32, 64, device=device)
    plain, recomputed = (network(dropouts, which, device) for which in (False, True))
    for seed in (1, 2):
        for left, right in zip(gradients(plain, x, seed), gradients(recomputed, x, seed), strict=True):
            assert torch.equal(left, right)
    assert [block.passes for block in plain] == [2] * BLOCKS
    assert [block.passes for block in recomputed] == [4] * BLOCKS
    after = [torch.rand(2, device=device)]
    gradients(plain, x, 3)
    after.append(torch.rand(2, device=device))
    gradients(recomputed, x, 3)  # recomputing leaves no trace in the generator
    assert torch.equal(after[1], torch.rand(2, device=device))
    with torch.no_grad():
        recomputed(x)
    assert [block.passes for block in recomputed] == [7] * BLOCKS


def test_other_blocks_than_in_the_steps_before_are_an_error():
    net, x = network([0.0] * BLOCKS, True, "cpu"), torch.randn(2, 64)
    for count, named in ((BLOCKS - 1, "more blocks"), (BLOCKS + 1, "fewer blocks")):
        with pytest.raises(RuntimeError, match=named), DROPOUT.captured([None] * count):
            net(x)
    with DROPOUT.captured([None] * BLOCKS):
        net(x).sum().backward()
    assert DROPOUT.recomputing is None


def captured(net: nn.Module, x: Tensor, split: bool) -> Callable[[int], list[Tensor]]:
    """The same as `gradients`, replayed. `split`: the backward pass is a graph of its own, as `train.graph` has it."""
    device, side = torch.device("cuda", 0), torch.cuda.Stream()
    with torch.cuda.stream(side):
        gradients(net, x, 0)
    torch.cuda.synchronize()
    places = DROPOUT.places
    drawing = [torch.Generator(device) if after > before else None for before, after in places]
    graphs = [torch.cuda.CUDAGraph() for _ in range(1 + split)]
    pool = torch.cuda.graph_pool_handle()
    for graph in graphs:
        for generator in filter(None, drawing):
            graph.register_generator_state(generator)

    def forward() -> Tensor:
        torch.rand(3, device=x.device)
        return net(nn.functional.dropout(x, 0.5)).square().sum()

    with DROPOUT.captured(drawing):
        with torch.cuda.graph(graphs[0], pool, side):
            loss = forward()
            if not split:
                loss.backward()
        if split:
            with torch.cuda.graph(graphs[1], pool, side):
                loss.backward()

    def run(seed: int) -> list[Tensor]:
        torch.manual_seed(seed)
        for generator, (before, _) in zip(drawing, places):
            if generator is not None:
                generator.manual_seed(seed).set_offset(before)
        for graph in graphs:
            graph.replay()
        return [parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None]

    return run


@pytest.mark.gpu
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("dropouts", [[0.5] * BLOCKS, [0.0, 0.5, 0.0], [0.0] * BLOCKS])
def test_the_same_gradients_in_a_graph(dropouts, split):
    x = torch.randn(32, 64, device="cuda")
    plain, recomputed = (network(dropouts, which, "cuda") for which in (False, True))
    run = captured(recomputed, x, split)
    for seed in (1, 2, 1, 2**63 + 5):
        for left, right in zip(gradients(plain, x, seed), run(seed), strict=True):
            assert torch.equal(left, right)
    # afterwards torch draws from its own generator again
    torch.manual_seed(5)
    first = torch.rand(4, device="cuda")
    torch.manual_seed(5)
    assert torch.equal(first, torch.rand(4, device="cuda"))
