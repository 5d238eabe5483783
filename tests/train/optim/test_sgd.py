"""SGD with a momentum that exists before the first step: the values are those of torch's."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from flexor.train.engine.base import Engine, takes_tensor_rates, tensor_rates
from flexor.train.optim.optimizers import CLASSES
from flexor.train.optim.sgd import SGD

SETTINGS = {"lr": 0.125, "momentum": 0.9, "dampening": 0.0, "weight_decay": 0.01}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(33, 8), nn.Linear(8, 5))


def steps(net: nn.Module, optimizer: torch.optim.Optimizer, count: int = 3) -> Iterator[None]:
    """Random gradients, and a step with them."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        for parameter in net.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
        yield


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_steps_are_those_of_torch(fused, momentum):
    nets, settings = (network(), network()), {**SETTINGS, "momentum": momentum}
    ours = SGD(nets[0].parameters(), **settings, fused=fused)
    theirs = torch.optim.SGD(nets[1].parameters(), **settings, fused=fused)
    for _ in zip(steps(nets[0], ours), steps(nets[1], theirs)):
        for left, right in zip(nets[0].parameters(), nets[1].parameters()):
            assert torch.equal(left, right)
    states = ours.state_dict()["state"], theirs.state_dict()["state"]
    assert states[0].keys() == states[1].keys()
    for left, right in zip(states[0].values(), states[1].values()):
        assert torch.equal(left["momentum_buffer"], right["momentum_buffer"])


def test_a_first_step_that_overflows_leaves_no_trace():
    net, other = network(), network()
    optimizer, plain = SGD(net.parameters(), **SETTINGS, fused=True), SGD(other.parameters(), **SETTINGS)
    before = [parameter.detach().clone() for parameter in net.parameters()]
    optimizer.grad_scale, optimizer.found_inf = torch.ones(()), torch.ones(())
    list(steps(net, optimizer, 1))
    assert all(torch.equal(left, right) for left, right in zip(before, net.parameters()))
    optimizer.found_inf = torch.zeros(())
    for _ in zip(steps(net, optimizer), steps(other, plain)):
        for left, right in zip(net.parameters(), other.parameters()):
            torch.testing.assert_close(left, right)


def test_a_parameter_may_get_its_first_gradient_later():
    net, other = network(), network()
    late = other[1].weight
    optimizer = SGD(net.parameters(), **SETTINGS, fused=True)
    early = torch.optim.SGD([p for p in other.parameters() if p is not late], **SETTINGS, fused=True)
    later = torch.optim.SGD([late], **SETTINGS, fused=True)
    for number in range(3):
        for parameter in (*net.parameters(), *other.parameters()):
            parameter.grad = torch.full_like(parameter, 1 + number)
        if number == 0:
            net[1].weight.grad = late.grad = None
        for each in (optimizer, early, later):
            each.step()
        for left, right in zip(net.parameters(), other.parameters()):
            assert torch.equal(left, right)


@pytest.mark.parametrize("kind", CLASSES)
def test_rates_are_tensors_only_while_the_optimizer_steps(kind):
    """What is saved is numbers, and SGD gets no setting that is not its own."""
    net, other = network(), network()
    optimizer, same = (CLASSES[kind](n.parameters(), lr=0.125, fused=True) for n in (net, other))
    assert takes_tensor_rates(optimizer) and not takes_tensor_rates(torch.optim.SGD(net.parameters()))
    saved = [dict(group) for group in optimizer.param_groups]
    run = steps(net, optimizer)
    for _ in steps(other, same):
        with tensor_rates(optimizer, [torch.tensor(0.125)]):
            # on a CPU torch allows no capturable Adam
            optimizer.param_groups[0] |= {"capturable": False} if "capturable" in saved[0] else {}
            next(run)
    for left, right in zip(net.parameters(), other.parameters()):
        assert torch.equal(left, right)
    assert [dict(group) for group in optimizer.param_groups] == saved
    assert isinstance(optimizer.state_dict()["param_groups"][0]["lr"], float)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["no", "fp16"])
def test_a_captured_step_reads_the_rate_and_skips_overflows(precision):
    """Replayed steps with changing rates, one of which overflows, against eager ones."""
    device, rates, weights = torch.device("cuda", 0), (0.1, 0.2, 0.05, 0.1), []
    for captured in (False, True):
        net, engine = network().to(device), Engine(device, precision)
        optimizer = SGD(net.parameters(), **SETTINGS, fused=True)
        engine.policy = net  # type: ignore[assignment]
        scale = torch.ones((), device=device)

        def step(net=net, engine=engine, optimizer=optimizer, scale=scale) -> None:
            engine.backward(sum((scale * parameter).square().sum() for parameter in net.parameters()))
            engine.clip_grad_norm(optimizer, 1.0)
            engine.step(optimizer)

        side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        side.wait_stream(torch.cuda.current_stream())
        for number, rate in enumerate((0.1, 0.1, 0.1, *rates)):
            optimizer.param_groups[0]["lr"] = rate
            engine.set_learning_rates(optimizer)
            scale.fill_(1e30 if number == 5 and precision == "fp16" else 1.0)
            torch.cuda.synchronize()
            if number == 3 and captured:
                with torch.cuda.graph(graph, stream=side):
                    step()
            if number >= 3 and captured:
                graph.replay()
            else:
                with torch.cuda.stream(side):
                    step()
            torch.cuda.synchronize()
        weights.append([parameter.detach().clone() for parameter in net.parameters()])
    assert all(torch.equal(left, right) and left.isfinite().all() for left, right in zip(*weights))
