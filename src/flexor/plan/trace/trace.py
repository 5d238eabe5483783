"""Record one training step of the real policy, without data and without a GPU.

The step is the trainer's own (`train.step.optimizer_step`), with the policy, its optimizer and its moving average on
the meta device, so a plan always follows the code. The trace contains every allocation and release of memory, and every
operation with its costs. `allocator.replay` computes peak memory from the first, `time.py` the step time from the
second.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from flexor.config.for_gpu import settle_for_gpu
from flexor.config.schema import TrainConfig
from flexor.core.errors import ConfigError, FlexorError
from flexor.data.frames.features import FeatureFormat
from flexor.plan.trace.cuda_on_meta import Card, CudaOnMeta
from flexor.plan.trace.events import Category, Event, EventKind, ReadyGradient, Trace
from flexor.plan.trace.layouts import with_layout
from flexor.plan.trace.ops import OVER_ROWS, Op, Phase, describe, is_view, operator_name, tensors_in
from flexor.plan.trace.shortcuts import CachedResults, without_compiler
from flexor.plan.trace.workspaces import cublas_workspace, scratch
from flexor.policies import POLICIES, policy_class
from flexor.policies.base import PolicyConfig
from flexor.policies.external import described
from flexor.train.engine.exchange import can_stay

aten = torch.ops.aten

CATEGORY_OF_PHASE: dict[Phase, Category] = {
    "load": "batch",
    "batch": "batch",
    "forward": "activations",
    "backward": "activations",
    "optimizer": "optimizer",
    "ema": "ema",
}


class OperationTracker(TorchDispatchMode):
    """Records every operation on one device: its cost, and which memory is allocated and freed."""

    def __init__(self, device: str = "meta", capability: tuple[int, int] | None = None, scratch: bool = True):
        super().__init__()
        self.device, self.capability, self.scratch = device, capability, scratch
        self.events: list[Event] = []
        self.ops: list[Op] = []
        self.category: dict[int, Category] = {}
        self.ready: list[ReadyGradient] = []
        self.phase: Phase = "build"
        self.module = ""
        self._ids: dict[int, int] = {}  # storage -> its number, until it is freed
        self._watched: dict[int, weakref.ref] = {}
        self._cublas_threads: set[str] = set()  # that have a workspace
        self._unshared = _references_of_an_unshared_gradient()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.phase == "host":
            return function(*args, **kwargs)
        with torch._C.DisableTorchFunction():  # the shapes that are read here are no calls of the policy
            return self._watch(function, args, kwargs)

    def _watch(self, function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run an operator, and record it."""
        if self.device == "meta" and is_view(function):  # it allocates nothing
            if args[0].is_meta:
                self.ops.append(Op(operator_name(function), "view", self.phase, module=self.module))
            return function(*args, **kwargs)
        if function is aten.add.Tensor and self._summed_in_place(*args[:2]):
            self._record(aten.add_.Tensor, args, [args[0]])
            return args[0]
        cached = None
        if function in WITHOUT_META:
            out = WITHOUT_META[function](*args)
        elif self.device != "meta":
            out = function(*args, **kwargs)
        else:
            out, cached = OPERATOR_CACHE.call(function, args, kwargs)
            out = with_layout(function, args, out)
        outs = list(tensors_in(out))
        if cached is not None and cached.op is not None and self.scratch:  # cached costs include workspaces
            self._add(cached.op.repeated(self.phase, self.module), outs)
            return out
        op = self._record(function, [*args, *kwargs.values()], outs)
        if cached is not None and self.scratch:
            cached.op = op
        return out

    def _record(self, function: Any, args: Sequence[Any], outs: list[Tensor]) -> Op | None:
        outs = [x for x in outs if x.device.type == self.device]
        ins = [x for x in tensors_in(args) if x.device.type == self.device]
        if (not outs and not ins) or operator_name(function) == "device":
            return None
        op = describe(function, args, ins, outs, self.phase)
        op.module = self.module
        if op.kind != "view" and self.scratch:
            op.scratch = scratch(op, args, outs)
        self._add(op, [] if is_view(function) else outs)
        return op

    def _add(self, op: Op, outs: list[Tensor]) -> None:
        self.ops.append(op)
        if op.kind == "matmul":
            self._cublas_workspace()
        for out in reversed(outs) if op.name == "native_dropout" else outs:  # its mask is allocated first
            self.track(out)
        if op.scratch or op.detail == OVER_ROWS:  # the latter may need workspace memory with more rows
            self._event("scratch", 0, op.scratch)

    def _event(self, kind: EventKind, storage: int, nbytes: int) -> None:
        self.events.append(Event(kind, storage, nbytes, len(self.ops) - 1))

    # Memory.

    def track(self, tensor: Tensor) -> None:
        """Track the memory of a tensor from now on, unless it is tracked already."""
        storage = tensor.untyped_storage()
        if storage._cdata in self._ids:
            return
        number = self._new(storage.nbytes(), CATEGORY_OF_PHASE.get(self.phase, "other"))
        self._ids[storage._cdata] = number
        self._watched[number] = weakref.ref(storage, functools.partial(self._freed, storage._cdata, number))

    def _new(self, nbytes: int, category: Category) -> int:
        number = len(self.category) + 1
        self.category[number] = category
        self._event("alloc", number, nbytes)
        return number

    def _freed(self, storage: int, number: int, _: Any) -> None:
        if self._ids.get(storage) == number:
            del self._ids[storage]
        self._watched.pop(number, None)
        self._event("free", number, 0)

    def number(self, tensor: Tensor) -> int | None:
        """The number of the storage that holds a tensor; None if it is not tracked."""
        return self._ids.get(tensor.untyped_storage()._cdata)

    def name(self, tensors: Iterable[Tensor], category: Category) -> None:
        """Set the category of the memory of these tensors."""
        for tensor in tensors:
            number = self.number(tensor)
            if number is not None:
                self.category[number] = category

    def gradient_ready(self, weight: nn.Parameter, unit: int, leaf: Tensor) -> None:
        """The backward pass has computed the gradient of a weight, or of the copy that it computes with."""
        gradient = leaf.grad
        assert gradient is not None
        ready = ReadyGradient(
            len(self.ops) - 1,
            gradient.nbytes,
            gradient.dtype,
            weight.nbytes,
            weight.dtype,
            can_stay(gradient, weight),
            self.number(gradient),
            unit,
        )
        self.ready.append(ready)

    def _cublas_workspace(self) -> None:
        """cuBLAS allocates a workspace at the first matrix product of each of the two threads, and keeps it."""
        thread = "backward" if self.phase == "backward" else "forward"
        if thread not in self._cublas_threads and self.scratch and self.phase != "build":
            self._cublas_threads.add(thread)
            self._new(cublas_workspace(self.capability), "workspaces")

    def _summed_in_place(self, left: Any, right: Any) -> bool:
        """Whether the autograd engine would add a gradient in place: it does if nothing else refers to the sum.

        Under a dispatch mode it does not, so that is corrected here.
        """
        if torch.is_grad_enabled() or torch._C._current_graph_task_id() == -1:
            return False
        if not isinstance(right, Tensor) or left.shape != right.shape or left.dtype != right.dtype:
            return False
        tensors, storages = self._unshared
        return left._use_count() <= tensors and _storage_references(left) <= storages

    @contextmanager
    def modules(self, policy: nn.Module) -> Iterator[None]:
        """Track which module of the policy computes."""
        names = {module: name for name, module in policy.named_modules()}
        outer: list[str] = []

        def enter(module: nn.Module, _: Any) -> None:
            outer.append(self.module)
            self.module = names.get(module, self.module)

        def leave(module: nn.Module, _: Any, __: Any) -> None:
            self.module = outer.pop() if outer else ""

        hooks = (
            nn.modules.module.register_module_forward_pre_hook(enter),
            nn.modules.module.register_module_forward_hook(leave, always_call=True),
        )
        try:
            yield
        finally:
            self.module = ""
            for hook in hooks:
                hook.remove()


# In-place operators that torch does not implement on the meta device.
WITHOUT_META: dict[Any, Any] = {
    aten._fused_sgd_.default: lambda *_: None,
    aten._fused_sgd_.tensor_lr: lambda *_: None,
    aten._amp_update_scale_.default: lambda scale, *_: scale,
}
OPERATOR_CACHE = CachedResults()


def _storage_references(tensor: Tensor) -> int:
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


@functools.cache
def _references_of_an_unshared_gradient() -> tuple[int, int]:
    """Reference counts in a dispatch mode of a gradient that only the engine refers to. torch versions differ."""
    counts: list[tuple[int, int]] = []

    class Probe(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function is aten.add.Tensor and not torch.is_grad_enabled():
                counts.append((args[0]._use_count(), _storage_references(args[0])))
            return function(*args, **(kwargs or {}))

    x = torch.ones(4, 4, device="meta", requires_grad=True)
    with Probe():
        y = x.exp()
        ((y * 3).sum() + (y * 2).sum() + (y * 4).sum()).backward()
    return max(counts, default=(4, 2))


def _make_tables(policy: PolicyConfig) -> None:
    """Make the colour conversion tables. A process makes them once and keeps them, so no step should count them."""
    from flexor.plan.trace.rehearsal import loaded_batch

    with OperationTracker("meta"):
        loaded_batch(policy, 1)


@without_compiler()
def trace_loading(
    config: TrainConfig, batch_size: int, accumulation: int, features: Mapping[str, FeatureFormat]
) -> list[Event]:
    """How the batches of a step are copied to the GPU; the number of pieces depends on their size."""
    from flexor.plan.trace.rehearsal import loaded_batch

    _make_tables(config.policy)
    with (tracker := OperationTracker("meta")):
        tracker.phase = "load"
        batches = [loaded_batch(config.policy, batch_size, features) for _ in range(accumulation)]
        events = list(tracker.events)
    del batches
    return events


@contextmanager
def _explained(kind: str) -> Iterator[None]:
    """Explain an error of a user's own policy in a plan. Errors of built-in policies are bugs and are raised."""
    try:
        yield
    except FlexorError:
        raise
    except Exception as error:
        if kind in POLICIES:
            raise
        reason = described(error, inspect.getsourcefile(policy_class(kind)))
        raise ConfigError(
            f"policy.type={kind} can't be planned: {reason}. A plan runs the policy without data: conditions on "
            "tensor values are false, and values read from tensors are zero."
        ) from error


@without_compiler()
def trace_step(config: TrainConfig, batch_size: int, gpu: Card, accumulation: int | None = None) -> Trace:
    """Trace one optimizer step of a run on a GPU, with this many samples in each forward pass.

    The policy's features must be filled in, as `policies.fit.fit_to_dataset` does. `accumulation`: forward passes per
    step (default: from the settings). What several processes exchange is not in it.
    """
    from flexor.plan.trace.rehearsal import Rehearsal

    config = settle_for_gpu(config, gpu.compute_capability)
    _make_tables(config.policy)
    tracker = OperationTracker("meta", gpu.compute_capability)
    cuda = CudaOnMeta(gpu.compute_capability)
    cuda.on_cast = lambda copy: tracker.name([copy], "casts")
    accumulation = accumulation or config.gradient_accumulation_steps or 1
    with _explained(config.policy.type), torch.random.fork_rng(devices=[]), tracker, cuda.active():
        rehearsal = Rehearsal(config, batch_size, accumulation, tracker)
        built = len(tracker.events)
        cuda.sync_points.clear()
        with tracker.modules(rehearsal.policy):
            steps = [rehearsal.step(number) for number in rehearsal.steps_to_trace()]
    policy = rehearsal.policy
    trained = [p for p in policy.parameters() if p.requires_grad]
    return Trace(
        events=tracker.events[: steps[-1].end],
        ops=tracker.ops,
        category=tracker.category,
        built=built,
        steps=steps,
        batch_size=batch_size,
        accumulation=accumulation,
        passes=rehearsal.passes,
        parameters=sum(p.numel() for p in policy.parameters()),
        trained=sum(p.numel() for p in trained),
        units=rehearsal.units(),
        gradients=sum(p.nbytes for p in trained),
        inputs=rehearsal.inputs,
        saved=rehearsal.saved(),
        float32_on_host=tuple(weight.nbytes for weight in policy.float32_weights.values()),
        attention=dict(cuda.attention),
        sync_points=cuda.sync_points,
        features=rehearsal.features,
    )
