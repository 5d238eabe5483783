"""The 8-bit optimizer: it learns what AdamW learns, resumes bitwise, and has bitsandbytes' state."""

import json
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from flexor.cli.main import main
from flexor.core.run_files import TRAINING_STATE
from flexor.train.checkpoint.tensors import OPTIMIZER
from flexor.train.engine.base import Engine, tensor_rates
from flexor.train.optim.adamw_8bit import SCALES, AdamW8bit
from support import ranks, runs

EIGHT = ["--optimizer.type=adamw_8bit", "--policy.dim_feedforward=512"]  # matrices that are large enough
SETTINGS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1}
TABLES = {"qmap1": True, "qmap2": False}


@pytest.mark.parametrize("more", [[], ["--lora.r=256", "--ema.enable", "--checkpoint.async=true"]])
def test_resumed_run_is_bitwise_the_uninterrupted_one(more, lowdim, tiny_act, tmp_path):
    uninterrupted = runs.train(
        lowdim, tmp_path / "whole", tiny_act, "--steps=6", "--save_freq=3", *EIGHT, *more
    )
    cut = runs.cut_back(uninterrupted, tmp_path / "cut", 3)
    assert main(["resume", str(cut)]) == 0
    runs.assert_same(uninterrupted, cut, 6)
    last = uninterrupted / "checkpoints" / "last"
    saved = load_file(last / TRAINING_STATE / OPTIMIZER)
    large = [name for name, tensor in saved.items() if name.endswith("/state1") and tensor.numel() >= 4096]
    assert large and {saved[name].dtype for name in large} == {torch.uint8}
    assert {saved[name.replace("state1", "step")].dtype for name in large} == {torch.int64}
    assert {name.rpartition("/")[2] for name in saved} == {"step", "state1", "state2", *SCALES}
    theirs = json.loads((last / "pretrained_model" / "train_config.json").read_text())
    assert theirs["optimizer"]["type"] == "adamw"


def test_it_learns_what_adamw_learns(lowdim, tiny_act, tmp_path):
    flags = ["--steps=30", "--save_freq=0", "--policy.dropout=0", EIGHT[1]]
    exact = runs.train(lowdim, tmp_path / "exact", tiny_act, *flags)
    lower = runs.train(lowdim, tmp_path / "lower", tiny_act, *flags, EIGHT[0])
    assert ranks.losses(lower)[-1] < 0.9 * ranks.losses(lower)[0]
    assert ranks.losses(lower)[-1] == pytest.approx(ranks.losses(exact)[-1], rel=0.1)


def network(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Moments of 8 bits, of 32, and of a convolution whose channels are last in memory."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(77, 100), nn.Conv2d(16, 32, 3), nn.Linear(64, 64, bias=False)).to(dtype)
    net[1].to(memory_format=torch.channels_last)
    return net


def steps(net: nn.Module, optimizer: torch.optim.Optimizer, count: int, seed: int = 1) -> Iterator[None]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        for p in net.parameters():
            p.grad = torch.empty_like(p).copy_(torch.randn(p.shape, generator=generator))
        optimizer.step()
        yield


def same(net: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(left, right) for left, right in zip(net.parameters(), other.parameters()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loaded_state_goes_on_bitwise(dtype):
    """Scales are float32 beside weights in bfloat16, and moments are those of the weights in any layout."""
    net = network(dtype)
    optimizer = AdamW8bit(net.parameters(), **SETTINGS)
    list(steps(net, optimizer, 3))
    other = network(dtype)
    other.load_state_dict(net.state_dict())
    other[1].to(memory_format=torch.contiguous_format)
    loaded = AdamW8bit(other.parameters(), **SETTINGS)
    loaded.load_state_dict(deepcopy(optimizer.state_dict()))
    for _ in zip(steps(net, optimizer, 3, seed=2), steps(other, loaded, 3, seed=2)):
        assert same(net, other)
    assert {s.dtype for state in loaded.state.values() for s in state.values()} == {
        torch.uint8,
        torch.float32,
    }


def test_small_parameters_are_updated_as_adamw_does_it():
    settings, torch_settings = SETTINGS, {**SETTINGS, "fused": True}
    nets = [nn.Linear(32, 100) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    ours = AdamW8bit(nets[0].parameters(), **settings)
    theirs = torch.optim.AdamW(nets[1].parameters(), **torch_settings)
    for _ in zip(steps(nets[0], ours, 10), steps(nets[1], theirs, 10)):
        for left, right in zip(nets[0].parameters(), nets[1].parameters()):
            torch.testing.assert_close(left, right, atol=1e-6, rtol=1e-5)


def test_overflows_are_skipped_and_gradients_divided():
    net, other = network(), network()
    optimizer, plain = AdamW8bit(net.parameters(), **SETTINGS), AdamW8bit(other.parameters(), **SETTINGS)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(0.5), torch.ones(())
    list(steps(net, optimizer, 1))
    assert same(net, other) and not any(state["step"] for state in optimizer.state.values())
    optimizer.found_inf = torch.zeros(())
    list(steps(net, optimizer, 1))
    for left, right in zip(net.parameters(), other.parameters()):
        right.grad = 2 * left.grad  # type: ignore[operator]
    plain.step()
    assert same(net, other)


def test_rates_are_tensors_only_while_it_steps():
    net, other = network(), network()
    optimizer, plain = (AdamW8bit(n.parameters(), **{**SETTINGS, "lr": 0.125}) for n in (net, other))
    run = steps(net, optimizer, 3)
    for _ in steps(other, plain, 3):
        with tensor_rates(optimizer, [torch.tensor(0.125)]):
            next(run)
    for left, right in zip(net.parameters(), other.parameters()):
        torch.testing.assert_close(left, right, atol=1e-6, rtol=1e-5)
    assert optimizer.state_dict()["param_groups"] == plain.state_dict()["param_groups"]


# With bitsandbytes


def compare_with_bitsandbytes(device: str, dtype: torch.dtype, close: float) -> None:
    """From the same state, a step is theirs up to rounding; a state that one saves, the other continues."""
    theirs_class = pytest.importorskip("bitsandbytes.optim").AdamW8bit
    nets = [network(dtype).to(device) for _ in range(2)]
    for net in nets:
        net[1].to(memory_format=torch.contiguous_format)  # theirs changes the layout of weights
    ours, theirs = AdamW8bit(nets[0].parameters(), **SETTINGS), theirs_class(nets[1].parameters(), **SETTINGS)
    list(steps(nets[0], ours, 5))
    for leader, follower in ((0, 1), (1, 0)) * 2:
        optimizers = ours, theirs
        nets[follower].load_state_dict(nets[leader].state_dict())
        saved = torch.optim.Optimizer.state_dict(optimizers[leader])
        if leader == 0:  # what our checkpoints do not have
            saved = ours.state_dict()
            for state in saved["state"].values():
                state["step"] = int(state["step"])
                if "absmax1" in state:
                    state |= {
                        name: theirs.name2qmap["dynamic" if s else "udynamic"] for name, s in TABLES.items()
                    }
        optimizers[follower].load_state_dict(deepcopy(saved))
        if leader == 0 and dtype != torch.float32:  # they round scales to the weights' type
            for left, right in zip(*(net.parameters() for net in nets)):
                theirs.state[right].update({k: v.clone() for k, v in ours.state[left].items() if k in SCALES})
        for _ in zip(steps(nets[0], ours, 1, seed=leader), steps(nets[1], theirs, 1, seed=leader)):
            for left, right in zip(nets[0].parameters(), nets[1].parameters()):
                torch.testing.assert_close(left, right, atol=close, rtol=close)
        for parameters in zip(*(net.parameters() for net in nets)):
            left, right = ours.state[parameters[0]], theirs.state[parameters[1]]
            assert int(left["step"]) == int(right["step"])
            for scale in (name for name in SCALES if name in left):
                torch.testing.assert_close(left[scale], right[scale].float(), rtol=1e-4, atol=0)


@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-5), (torch.bfloat16, 2**-7)])
def test_a_step_is_that_of_bitsandbytes(dtype, close):
    compare_with_bitsandbytes("cpu", dtype, close)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-5), (torch.bfloat16, 2**-7)])
def test_a_step_is_that_of_bitsandbytes_on_a_gpu(dtype, close):
    compare_with_bitsandbytes("cuda", dtype, close)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["no", "fp16"])
def test_a_step_makes_no_host_wait(precision):
    """So a CUDA graph can contain it; also where fp16 skips a step, and while rates are tensors."""
    device = torch.device("cuda", 0)
    net, engine = network().to(device), Engine(device, precision)
    optimizer = AdamW8bit(net.parameters(), **SETTINGS)
    engine.policy = net  # type: ignore[assignment]
    for number in range(4):
        engine.set_learning_rates(optimizer)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if number > 1 else "default")
        try:
            engine.backward(sum(p.square().sum() for p in net.parameters()))
            engine.clip_grad_norm(optimizer, 1.0)
            engine.step(optimizer)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert {int(state["step"]) for state in optimizer.state.values()} == {4}


@pytest.mark.slow
@pytest.mark.ranks
def test_it_is_not_shared_out(lowdim, tiny_act, tmp_path):
    flags = runs.flags(lowdim, tmp_path / "run", tiny_act, *EIGHT, "--parallel.strategy=fsdp", "--steps=1")
    started = ranks.Ranks(tmp_path / "1", 2, ["train", *flags])
    assert started.end() == [2, 2]
    assert "use --optimizer.type=adamw, or ddp" in started.errors()
