"""Shortcuts of a rehearsal: what they leave out must not be missed, and torch must be whole afterwards."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flexor.config.schema import EMAConfig, OptimizerConfig
from flexor.plan.trace import trace as tracing
from flexor.plan.trace.shortcuts import CachedResults
from flexor.plan.trace.trace import trace_step
from support.plans import H200, settings

aten = torch.ops.aten


class Straight(CachedResults):
    """Asks torch each time."""

    def call(self, function: Any, args: Any, kwargs: Any) -> Any:
        return function(*args, **kwargs), None


JOBS = {
    "act": {"ema": EMAConfig(enable=True), "gradient_accumulation_steps": 2},
    "diffusion": {"precision": "bf16"},
    "vqbet": {"optimizer": OptimizerConfig(type="sgd")},
    "tdmpc": {"precision": "bf16", "weights_dtype": "bf16", "policy": {"horizon": 2}},
}


@pytest.mark.parametrize("kind", JOBS)
def test_a_trace_is_the_same_if_torch_is_asked_each_time(kind, monkeypatch):
    config = settings(kind, **JOBS[kind])
    short = [trace_step(config, 3, H200) for _ in range(2)]  # the second finds everything known
    monkeypatch.setattr(tracing, "OPERATOR_CACHE", Straight())
    long = trace_step(config, 3, H200)
    for trace in short:
        assert trace.events == long.events and trace.category == long.category
        assert trace.ops == long.ops


class Twice(TorchDispatchMode):
    """Calls each operator as torch does, and twice through `CachedResults`: the second time from memory."""

    def __init__(self) -> None:
        super().__init__()
        self.repeats, self.different = CachedResults(), []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = [function(*args, **(kwargs or {}))]
        results += [self.repeats.call(function, args, kwargs or {})[0] for _ in range(2)]
        described = [_described(result, args) for result in results]
        if described[0] != described[1] or described[0] != described[2]:
            self.different.append((str(function), described))
        return results[0]


def _described(result: Any, args: Any) -> list:
    """All of a result: also what it shares with what was given."""
    inputs = {x.untyped_storage()._cdata: at for at, x in enumerate(args) if isinstance(x, torch.Tensor)}
    return [
        (x.shape, x.stride(), x.dtype, x.untyped_storage().nbytes(), inputs.get(x.untyped_storage()._cdata))
        for x in (result if isinstance(result, tuple | list) else [result])
        if isinstance(x, torch.Tensor)
    ]


def test_what_is_remembered_is_what_torch_would_say():
    with torch.device("meta"):
        integers, real, half = (
            torch.empty(4, 6, dtype=torch.int32),
            torch.empty(4, 6),
            torch.empty(6).bfloat16(),
        )
        turned = torch.empty(6, 4).t()
    with Twice() as twice:
        for number in (1, 1.0, True):  # equal, and another type each
            assert (integers + number).dtype == (torch.float32 if isinstance(number, float) else torch.int32)
        for other in (real, turned, half, real[::2].repeat(2, 1), real[0], real.to(torch.float64)):
            real + other, real * other, real < other, torch.maximum(real, other.to(real.dtype))
        (
            real.sum(),
            turned.sum(1),
            real.exp(),
            turned.exp(),
            real.view(6, 4),
            real.reshape(-1),
            turned.reshape(-1),
        )
        real.expand(2, 4, 6).clone(), torch.cat([real, turned]), real @ turned.t().t().t(), real.split(2)
        torch.nn.functional.layer_norm(real, (6,)), torch.native_dropout(real, 0.5, True), real.topk(2)
        real.add_(1), real.clamp_(0, 1), real.copy_(turned), real.t_(), integers.zero_(), real.uniform_()
    assert not twice.different


def test_what_shares_memory_is_never_remembered():
    repeats, x = CachedResults(), torch.empty(4, 6, device="meta")
    for _ in range(2):
        view = repeats.call(aten._unsafe_view.default, (x, [24]), {})[0]  # which says that its result is new
        assert view.untyped_storage()._cdata == x.untyped_storage()._cdata
    for _ in range(2):
        assert repeats.call(aten.add_.Tensor, (x, 1), {})[0] is x


def test_what_has_values_is_computed_each_time():
    """An optimizer counts its steps on the host."""
    repeats, x = CachedResults(), torch.ones(2)
    for number in (1, 2, 3):
        assert repeats.call(aten.add_.Tensor, (x, 1), {})[0].tolist() == [1 + number] * 2
        assert repeats.call(aten.mul.Tensor, (x, 2), {})[0].tolist() == [2 + 2 * number] * 2


def test_memory_of_what_is_known_is_bounded(monkeypatch):
    monkeypatch.setattr(CachedResults, "MOST", 3)
    repeats, x = CachedResults(), torch.empty(2, device="meta")
    for number in range(10):
        repeats.call(aten.add.Tensor, (x, number), {})
        assert len(repeats._calls) <= 3


# In a process of its own, as in that of the tests the compiler may be there already; one of it for each case.
AFTERWARDS = """
import importlib, inspect, os, sys, traceback, torch
import sympy, torch.distributed.fsdp  # the compiler imports them, in seconds: once for all cases
from torch.utils.checkpoint import checkpoint
from flexor.plan.trace.shortcuts import NoCompiler, without_compiler

def check(then):
    with without_compiler():
        assert isinstance(sys.modules["torch._dynamo"], NoCompiler)
        weight = torch.nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([weight])
        weight.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        told = torch.optim.Optimizer.zero_grad.__wrapped__
        assert told.__dynamo_disable is told
        torch.empty(3, device="meta").exp()
        checkpoint(torch.exp, weight, use_reentrant=False).sum().backward()
        inspect.getmodule(inspect.currentframe())  # looks at every module
        assert isinstance(sys.modules["torch._dynamo"], NoCompiler), "something asked for more"
        exec(then)
    assert "transformers" in then or bool(then) == ("torch._dynamo" in sys.modules)
    assert not hasattr(told, "__dynamo_disable"), "it would never be kept from being compiled"
    compiler = importlib.import_module("torch._dynamo")
    assert not isinstance(compiler, NoCompiler) and compiler.__file__
    if then:
        return
    calls = []
    def backend(graph, inputs):
        calls.append(graph)
        return graph.forward
    compiled = torch.compile(lambda x: (x * 2).sum(), backend=backend)
    assert compiled(torch.ones(3)) == 6 and len(calls) == 1
    optimizer.step()
    optimizer.zero_grad()
    assert told.__dynamo_disable is not told

for then in sys.argv[1:]:
    if os.fork() == 0:
        try:
            check(then)
        except BaseException:
            print(repr(then), traceback.format_exc(), file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    if os.wait()[1]:
        sys.exit(1)
"""


def test_the_compiler_is_itself_afterwards():
    cases = [
        "",  # not asked for
        "import torch._dynamo.config; assert torch._dynamo.config.cache_size_limit",  # asked for
        "assert torch._dynamo.config.cache_size_limit",
    ]
    if importlib.util.find_spec("transformers"):  # a policy may import a library when it is made
        cases.append("from transformers.models.clip.modeling_clip import CLIPTextModel")
    subprocess.run([sys.executable, "-c", AFTERWARDS, *cases], check=True)


def test_two_threads_trace_one_after_the_other():
    """A trace replaces functions of torch, for all threads."""
    alone = trace_step(settings(), 2, H200)
    with ThreadPoolExecutor(2) as pool:
        traces = list(pool.map(lambda _: trace_step(settings(), 2, H200), range(4)))
    assert all(len(trace.events) == len(alone.events) for trace in traces)
    assert "<locals>" not in torch.autocast.__qualname__
