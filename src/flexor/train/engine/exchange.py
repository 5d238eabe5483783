"""The sum of the gradients of all ranks, bucket by bucket, while the backward pass computes the rest of them.

A bucket holds the gradients of some parameters, one after the other, and is exchanged in one all-reduce as soon as it
is full. Buckets follow the order in which the first backward pass computed the gradients, as rank 0 saw it. They are
always exchanged in this order, so eager steps and CUDA graphs compute the same sums. Afterwards gradients are views of
their buckets.

A CUDA graph can contain NCCL's all-reduce. Other backends exchange between two graphs: while one is captured, `outside`
is set, buckets are only filled, and the exchange is handed to it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import flexor.kernels.cast  # noqa: F401 (defines the operator)
from flexor.core.errors import FlexorError
from flexor.kernels.available import has_kernels
from flexor.monitor.step_times import StepTimes
from flexor.policies.base import Policy
from flexor.policies.weight_names import unique_state
from flexor.train.ranks.processes import Processes

BUCKET_BYTES = 25 << 20  # a larger gradient is a bucket of its own
ALIGNED = 16  # bytes: torch's kernels for several tensors are faster with aligned ones
LARGE = 1 << 16  # values of a gradient from which on it is worth a kernel launch of its own
MOST_NAMED = 5  # parameters in one message

Outside = Callable[[Callable[[], None]], None]


class Bucket:
    """The gradients of some parameters, which are exchanged together."""

    def __init__(self, parameters: list[nn.Parameter]):
        self.parameters = parameters
        self.offsets: list[int] = []
        self.size = 0  # values, with padding
        step = ALIGNED // parameters[0].element_size()
        for parameter in parameters:
            self.offsets.append(self.size)
            self.size += -(-parameter.numel() // step) * step
        self.missing = len(parameters)  # gradients that the backward pass has not computed yet
        self.values: Tensor | None = None
        self.work: Any = None

    def fill(self, gradients: list[Tensor | None]) -> None:
        """Copy the gradients, zeros for those that there are none of. The parameters' gradients become views of it."""
        first, parameter = gradients[0], self.parameters[0]
        if len(gradients) == 1 and first is not None and can_stay(first, parameter):
            self.values, parameter.grad = first.as_strided((first.numel(),), (1,)), first
            return
        self.values = torch.empty(self.size, dtype=parameter.dtype, device=parameter.device)
        views = [_view(self.values, offset, p) for offset, p in zip(self.offsets, self.parameters)]
        small: list[tuple[Tensor, Tensor]] = []
        for view, gradient in zip(views, gradients):
            if gradient is None:
                view.zero_()
            elif view.numel() < LARGE or view.dtype == gradient.dtype:
                small.append((view, gradient))
            elif view.stride() == gradient.stride() and _is_dense(gradient) and has_kernels(view.device):
                torch.ops.flexor.cast_into(view, gradient)
            else:
                view.copy_(gradient)
        if small:
            torch._foreach_copy_([view for view, _ in small], [gradient for _, gradient in small])
        for p, view in zip(self.parameters, views):
            p.grad = view


@dataclass
class BucketLayout:
    """How the gradients of one kind of step are exchanged."""

    buckets: list[Bucket]
    bucket_of: dict[nn.Parameter, Bucket]
    used: frozenset[int]
    """Numbers of the parameters that the loss reaches. All others have no gradient."""


class GradientExchange:
    """Sums the gradients of all ranks: `begin` before the last backward pass of a step, `finish` after it."""

    def __init__(
        self,
        policy: Policy,
        processes: Processes,
        leaf_of: Callable[[nn.Parameter], nn.Parameter],
        *,
        find_unused: bool,
        capturable: bool,
    ):
        """`leaf_of`: the tensor that the loss is computed with instead of a parameter, which gets the gradient.
        `find_unused`: the loss may reach other parameters in each step and on each rank.
        `capturable`: the backend's all-reduce can be part of a CUDA graph.
        """
        self.policy, self.processes, self.leaf_of = policy, processes, leaf_of
        self.find_unused, self.capturable = find_unused, capturable
        self.parameters = list(policy.parameters())
        self.outside: Outside | None = None
        self._layouts: dict[Hashable, BucketLayout] = {}  # by kind of step
        self._layout: BucketLayout | None = None
        self._ready: list[nn.Parameter] = []  # in the order of the backward pass
        self._next = 0  # bucket to exchange
        self._hooked: set[nn.Parameter] = set()
        self._begun = False

    def begin(self) -> None:
        """The next backward pass computes the last part of the gradients."""
        for parameter in self.parameters:
            leaf = self.leaf_of(parameter)
            if leaf.requires_grad and leaf not in self._hooked:
                self._hooked.add(leaf)
                leaf.register_post_accumulate_grad_hook(partial(self._has_gradient, parameter))
        self._layout, self._ready, self._next = self._layouts.get(self._kind()), [], 0
        for bucket in self._layout.buckets if self._layout else []:
            bucket.missing = len(bucket.parameters)
        self._begun = True

    def finish(self, times: StepTimes) -> None:
        """The gradients of all ranks are summed when this returns, or on a GPU when what is queued is done."""
        self._begun = False
        used = frozenset(i for i, p in enumerate(self.parameters) if self._gradient(p) is not None)
        everywhere = self._settle_layout(used)
        assert self._layout is not None
        with torch.no_grad():
            for bucket in self._layout.buckets[self._next :]:
                self._exchange(bucket)
        self._wait(self._layout.buckets, times)
        for bucket in self._layout.buckets:
            bucket.values = bucket.work = None
        for number, parameter in enumerate(self.parameters):
            if number not in everywhere:
                parameter.grad = None

    def _wait(self, buckets: list[Bucket], times: StepTimes) -> None:
        if self.outside is not None:
            self.outside(partial(_exchange_now, [b.values for b in buckets if b.values is not None]))
        elif self.capturable and torch.cuda.is_current_stream_capturing():
            with times.waits():
                for bucket in buckets:
                    bucket.work.wait()
            times.mark("backward")  # not before: a graph can't end while the exchange is under way
        else:
            times.mark("backward")
            for bucket in buckets:
                bucket.work.wait()
            times.mark("communication")

    # Hooks of the backward pass

    def _has_gradient(self, parameter: nn.Parameter, _: Tensor) -> None:
        if not self._begun:
            return
        self._ready.append(parameter)
        if self._layout is None:
            return
        self._layout.bucket_of[parameter].missing -= 1
        buckets = self._layout.buckets
        while self._next < len(buckets) and buckets[self._next].missing == 0:
            self._exchange(buckets[self._next])
            self._next += 1

    def _exchange(self, bucket: Bucket) -> None:
        bucket.fill([self._gradient(parameter) for parameter in bucket.parameters])
        for parameter in bucket.parameters:
            leaf = self.leaf_of(parameter)
            if leaf is not parameter:
                leaf.grad = None
        if self.outside is None:
            bucket.work = dist.all_reduce(bucket.values, async_op=True)

    def _gradient(self, parameter: nn.Parameter) -> Tensor | None:
        gradient = self.leaf_of(parameter).grad
        return parameter.grad if gradient is None else gradient

    # Which parameters are exchanged, and in which order

    def _kind(self) -> Hashable:
        """What steps have in common that reach the same parameters."""
        return self.policy.graph_key(), *(parameter.requires_grad for parameter in self.parameters)

    def _settle_layout(self, used: frozenset[int]) -> frozenset[int]:
        """Agree on the layout in the first step of a kind. Returns the parameters that the loss of any rank reaches."""
        search = self._searches
        if self._layout is not None and not search:
            self._check_used(used, self._layout.used)
            return self._layout.used
        ranks = self.processes.gather((self._order(used), used))
        everywhere = frozenset[int]().union(*(used for _, used in ranks))
        if self._layout is None:
            for _, other in ranks if not search else []:
                self._check_used(other, everywhere)
            order = [*ranks[0][0]]
            trained = [i for i, p in enumerate(self.parameters) if p.requires_grad]
            rest = trained if search else everywhere
            order += sorted({*rest} - {*order}, reverse=True)
            self._layout = _layout([self.parameters[number] for number in order], everywhere)
            self._layouts[self._kind()] = self._layout
        return everywhere

    @property
    def _searches(self) -> bool:
        """Whether steps of one kind may reach different parameters."""
        phases = not self.policy.config.uses_all_parameters
        return self.find_unused or (phases and self.policy.graph_key() is None)

    def _order(self, used: frozenset[int]) -> list[int]:
        """The numbers of the parameters with a gradient, in the order in which they got it."""
        number_of = {parameter: number for number, parameter in enumerate(self.parameters)}
        ready = dict.fromkeys(number_of[parameter] for parameter in self._ready)
        return [*ready, *sorted(used - ready.keys(), reverse=True)]

    def _check_used(self, used: frozenset[int], expected: frozenset[int]) -> None:
        if used == expected:
            return
        names = {parameter: name for name, parameter in self.policy.named_parameters()}
        listed = [names[self.parameters[number]] for number in sorted(used ^ expected)]
        more = f" and {len(listed) - MOST_NAMED} more" if len(listed) > MOST_NAMED else ""
        raise FlexorError(
            "The loss does not use the same parameters as on other ranks, or as in earlier steps. The difference: "
            f"{', '.join(listed[:MOST_NAMED])}{more}. Set --parallel.find_unused_parameters=true."
        )


def broadcast_weights(policy: Policy) -> None:
    """Parameters and buffers of rank 0, on all ranks."""
    for tensor in unique_state(policy).values():
        values = tensor.detach().contiguous()
        dist.broadcast(values, 0)
        if values.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(values)


def _exchange_now(buckets: list[Tensor]) -> None:
    for work in [dist.all_reduce(values, async_op=True) for values in buckets]:
        work.wait()


def _layout(parameters: list[nn.Parameter], used: frozenset[int]) -> BucketLayout:
    """Buckets in this order, each of one dtype."""
    buckets, filling = [], dict[torch.dtype, list[nn.Parameter]]()
    for parameter in parameters:
        group = filling.setdefault(parameter.dtype, [])
        if group and sum(p.nbytes for p in group) + parameter.nbytes > BUCKET_BYTES:
            buckets.append(Bucket(group))
            group = filling[parameter.dtype] = []
        group.append(parameter)
    buckets += [Bucket(group) for group in filling.values()]
    return BucketLayout(buckets, {p: bucket for bucket in buckets for p in bucket.parameters}, used)


def _is_dense(tensor: Tensor) -> bool:
    """Whether its values lie in memory without gaps, in any order of its dimensions."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return extent == tensor.numel()


def can_stay(gradient: Tensor, parameter: nn.Parameter) -> bool:
    """Whether a gradient can be exchanged where it is, as a bucket of its own."""
    return (
        gradient.dtype == parameter.dtype and gradient.stride() == parameter.stride() and _is_dense(gradient)
    )


def _view(values: Tensor, offset: int, parameter: nn.Parameter) -> Tensor:
    """Values of a bucket, in the memory layout of the parameter."""
    if _is_dense(parameter):
        return values.as_strided(parameter.shape, parameter.stride(), offset)
    return values[offset : offset + parameter.numel()].view(parameter.shape)
