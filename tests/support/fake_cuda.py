"""Training steps on torch's own fake CUDA tensors, without a GPU: what `test_cuda_on_meta.py` compares a plan with.

Fake tensors have shapes, no memory, and the device that one says, and torch takes that device's branches in everything
that it computes with them. A build of torch without CUDA does not let autograd near them, because its engine looks for
the GPU's streams. So a process that imports this gives the engine streams that do nothing, and has to do so before the
first backward pass: it must be a process of its own.

    python -m support.fake_cuda     prints what each case does, and types under autocast, as JSON
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _foreach_utils as foreach
from torch.utils._python_dispatch import _disable_current_modes

from flexor.config.schema import EMAConfig, TrainConfig
from flexor.kernels import available
from flexor.plan.trace import rehearsal
from flexor.plan.trace.ops import NO_KERNEL, is_view, operator_name
from flexor.plan.trace.rehearsal import Rehearsal
from flexor.plan.trace.rehearsal import policy_on as planned_policy_on
from flexor.plan.trace.trace import OperationTracker
from support.plans import settings
from support.torch_functions import types

CUDA = torch.device("cuda", 0)
BATCH = 2

CASES: dict[str, Callable[[], TrainConfig]] = {
    "act bf16 recomputed": lambda: settings(
        "act", precision="bf16", activation_checkpointing=True, ema=EMAConfig(enable=True)
    ),
    "diffusion": lambda: settings("diffusion"),
    # small and short, of the same kinds of operations
    "vqbet fp16": lambda: settings("vqbet", policy={"gpt_n_layer": 1}, precision="fp16"),
    "tdmpc": lambda: settings("tdmpc", policy={"horizon": 2, "q_ensemble_size": 2}, steps=1),
}

Result = tuple[tuple[int, ...], str]  # shape, type


class Recorder(OperationTracker):
    """The planner's tracker, which also writes down what comes out of each operation that computes."""

    def __init__(self, device: str):
        super().__init__(device, scratch=False)
        self.calls: list[tuple[str, str, tuple[Result, ...]]] = []
        self.activation_bytes: list[int] = []
        """Bytes that live when each backward pass begins, and did not when the policy was built."""

    def _summed_in_place(self, left: Any, right: Any) -> bool:
        return False  # the same on both sides: the engine does not, while somebody watches

    def _record(self, function: Any, args: Sequence[Any], outs: list[Tensor]) -> None:
        super()._record(function, args, outs)
        name, here = operator_name(function), [x for x in outs if x.device.type == self.device]
        if here and not is_view(function) and name not in NO_KERNEL:
            results = tuple((tuple(x.shape), str(x.dtype).removeprefix("torch.")) for x in here)
            self.calls.append((self.phase, name, results))

    def live(self) -> int:
        sizes = {event.storage: event.nbytes for event in self.events if event.kind == "alloc"}
        return sum(sizes.values()) - sum(sizes[e.storage] for e in self.events if e.kind == "free")


class OnFakeCuda(Recorder):
    """What the engine of autograd must not know, and values that are not there."""

    def __init__(self) -> None:
        super().__init__("cuda")
        self.in_engine = False  # and not in a formula of a backward pass, which it called

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is torch.ops.aten._local_scalar_dense.default:
            return False if args[0].dtype == torch.bool else 0.0 if args[0].is_floating_point() else 0
        if self.in_engine and function is torch.ops.prim.device.default:
            return torch.device("meta")  # so that it looks for no stream
        if self.in_engine and function is torch.ops.aten._to_copy.default and "device" in (kwargs or {}):
            return args[0]  # which it takes for a tensor on the wrong device
        return super().__torch_dispatch__(function, types, args, kwargs)

    def run_backward(self, original: Callable) -> Callable:
        """The engine's run, which says when it calls a formula."""

        def enter(*_: Any) -> None:
            self.in_engine = False

        def leave(*_: Any) -> None:
            self.in_engine = True

        def run(outputs: Sequence[Tensor], *args: Any, **kwargs: Any) -> Any:
            for node in nodes_of(outputs):
                node.register_prehook(enter)
                node.register_hook(leave)
            leave()
            try:
                return original(outputs, *args, **kwargs)
            finally:
                enter()

        return run


def nodes_of(outputs: Sequence[Tensor]) -> set[Any]:
    waiting, visited = [output.grad_fn for output in outputs], set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in visited:
            visited.add(node)
            waiting += [following for following, _ in node.next_functions]
    return visited


def give_cuda_streams_that_do_nothing() -> None:
    """What a build with CUDA registers for its GPUs, and one without does not: the guard of devices."""

    class Guard(torch._C._acc.DeviceGuard):
        def type_(self) -> Any:
            return torch._C._autograd.DeviceType.PrivateUse1

    torch._C._acc.register_python_privateuseone_device_guard(Guard())
    library = next((Path(torch.__file__).parent / "lib").glob("libc10.*"))
    # a pointer for each type of device, in the order of c10::DeviceType: CUDA is 1, PrivateUse1 20
    guards = (ctypes.c_void_p * 21).in_dll(
        ctypes.CDLL(str(library)), "_ZN3c104impl26device_guard_impl_registryE"
    )
    guards[1] = guards[20]


@functools.cache
def mode() -> FakeTensorMode:
    """One for all cases: a table that is made once in a process belongs to it. Made on use: it imports the compiler."""
    return FakeTensorMode(allow_non_fake_inputs=True)


@contextlib.contextmanager
def fake_cuda(recorder: OnFakeCuda) -> Iterator[None]:
    """A rehearsal's device "cuda" is a fake one."""
    common = torch.cuda.amp.common
    run = recorder.run_backward(torch.autograd._engine_run_backward)
    with contextlib.ExitStack() as stack:
        for module, name, instead in (
            (common, "amp_definitely_not_available", lambda: False),
            (torch.cuda, "is_bf16_supported", lambda *_, **__: True),
            (torch.cuda, "set_device", lambda _: None),
            (torch.cuda, "Stream", lambda _: None),
            (foreach, "_foreach_supported_types", [Tensor, nn.Parameter, FakeTensor]),
            (torch.autograd, "_engine_run_backward", run),
            (rehearsal, "_values", lambda shape, dtype, _: torch.empty(shape, dtype=dtype)),
            (rehearsal, "policy_on", policy_on),
            (available, "can_compile", lambda _: True),
            (
                rehearsal.WatchedEngine,
                "captures",
                False,
            ),  # else learning rates are tensors, which a plan leaves out
            (Tensor, "pin_memory", lambda tensor: tensor),
        ):
            stack.enter_context(mock.patch.object(module, name, instead))
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        stack.enter_context(mode())
        yield


def policy_on(config: TrainConfig, device: torch.device) -> Any:
    """The planner's policy, with other tensors in its place: fake ones can't be moved."""
    with _disable_current_modes():
        policy = planned_policy_on(config)
    moved: dict[int, Tensor] = {}
    for module in policy.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = moved.setdefault(id(tensor), _like(tensor, device))
    return policy


def _like(tensor: Tensor, device: torch.device) -> Tensor:
    new = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new


def rehearse(config: TrainConfig, recorder: Recorder, device: torch.device) -> dict[str, Any]:
    """What the steps of a run do, and what the forward pass keeps for the backward one."""
    rehearsal.to_device(rehearsal.host_batch(config.policy, 1, device), device)  # tables that are made once
    with recorder:
        run = Rehearsal(config, BATCH, 1, recorder, device)
        recorder.calls.clear()
        built = recorder.live()
        backward = run.state.engine.backward

        def watched(loss: Tensor) -> None:
            recorder.activation_bytes.append(recorder.live() - built)
            backward(loss)

        run.state.engine.backward = watched  # type: ignore[method-assign]
        for number in run.steps_to_trace():
            run.step(number)
    return {"calls": recorder.calls, "kept": recorder.activation_bytes}


def main() -> None:
    give_cuda_streams_that_do_nothing()
    steps = {}
    for case, config in CASES.items():
        recorder = OnFakeCuda()
        with torch.random.fork_rng(devices=[]), fake_cuda(recorder):
            steps[case] = rehearse(config(), recorder, CUDA)
    with fake_cuda(OnFakeCuda()):
        json.dump({"steps": steps, "types": types(CUDA)}, sys.stdout)


if __name__ == "__main__":
    main()
