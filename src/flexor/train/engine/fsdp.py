"""FSDP and HSDP: each process has a shard of every weight, of its gradient and of its optimizer state.

A device never holds the whole model: parameters are created without memory, each block is sharded, and every process
fills its own shard, from a file or from the weights that rank 0 created. Weights have the dtype that they have in one
process; gradients are reduced in float32. Under mixed precision, weights are gathered in the lower precision; autocast
would cast them to it anyway.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from flexor.core.errors import ConfigError
from flexor.core.tensors import as_part, copy_part, is_sharded, local, make_contiguous
from flexor.policies.base import Policy
from flexor.policies.meta_init import apply_keeping_ties, parameters_without_memory
from flexor.policies.pretrained import load_weights
from flexor.policies.weight_names import unique_state
from flexor.train.engine.base import DTYPES, Engine
from flexor.train.engine.shard_units import sharding_of
from flexor.train.ranks.split import hsdp_sizes


class ShardedEngine(Engine):
    """A shard of the model in each process (FSDP2), or in each process of a group (HSDP)."""

    sharded = True
    captures = False

    def __init__(self, *settings: Any, strategy: str = "fsdp"):
        super().__init__(*settings)
        self.strategy = strategy
        self.whole: list[str] = []  # names of parameters that every process has whole
        if self.parallel.backend == "gloo" and self.device.type == "cuda":
            raise ConfigError(
                f"parallel.backend=gloo does not support a sharded model (parallel.strategy={strategy}) on GPUs: use "
                "--parallel.backend=nccl, or --parallel.strategy=ddp."
            )
        self.mesh = self._mesh()

    def _mesh(self) -> DeviceMesh:
        if self.strategy == "fsdp":
            return init_device_mesh(self.device.type, (self.world_size,), mesh_dim_names=("shard",))
        replicate, shard = hsdp_sizes(
            self.world_size,
            self.processes.local_world_size,
            self.parallel.dp_replicate,
            self.parallel.dp_shard,
        )
        return init_device_mesh(self.device.type, (replicate, shard), mesh_dim_names=("replicate", "shard"))

    def build(self, make: Any, weights: Path | str | None) -> Policy:
        with parameters_without_memory():
            policy: Policy = make()
        make_contiguous(policy)
        self._shard(policy)
        parameters_at = torch.device("cpu") if self.parallel.cpu_offload else self.device
        # parameters have no memory yet; buffers already have their values, and are moved
        apply_keeping_ties(
            policy, lambda t: torch.empty_like(t, device=parameters_at) if t.is_meta else t.to(self.device)
        )
        for name in self.whole:  # nobody brings them to the device later
            parameter = policy.get_parameter(name)
            parameter.data = parameter.data.to(self.device)
        if isinstance(weights, Path):
            load_weights(policy, weights)
        elif weights is None:
            self._spread(policy, make)
        return policy

    def _shard(self, policy: Policy) -> None:
        """Shard each block of the policy, then its remaining parameters."""
        dtype = None if self.precision == "no" else DTYPES[self.precision]
        settings: dict[str, Any] = {
            "mesh": self.mesh,
            "reshard_after_forward": self.parallel.reshard_after_forward,
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=dtype,
                reduce_dtype=torch.float32,
                cast_forward_inputs=False,  # autocast casts where needed; targets stay float32
            ),
            "offload_policy": self._offload(),
        }
        scalars = [name for name, p in policy.named_parameters() if p.ndim == 0]
        if scalars:
            raise ConfigError(
                f"These parameters of the policy are scalars, which can't be sharded: {', '.join(scalars)}. Use "
                "--parallel.strategy=ddp."
            )
        sharding = sharding_of(policy)
        self.whole = list(sharding.whole)
        for unit in sharding.units:
            fully_shard(unit, **settings, ignored_params={*sharding.whole.values()})
        for method in ("loss", "predict"):
            register_fsdp_forward_method(policy, method)

    def _offload(self) -> OffloadPolicy:
        if not self.parallel.cpu_offload:
            return OffloadPolicy()
        return CPUOffloadPolicy(pin_memory=self.device.type == "cuda")

    def _spread(self, policy: Policy, make: Any) -> None:
        """Initial weights: rank 0 creates them in host memory, and each process takes its shard of each tensor."""
        source: dict[str, Tensor] = {}
        if self.processes.is_main:
            whole: Policy = make()
            make_contiguous(whole)
            whole.load_backbone()
            source = unique_state(whole)
        self.processes.barrier()  # downloading may take longer than a collective's timeout
        for name, own in unique_state(policy).items():
            if self.processes.is_main:
                tensor = source.pop(name).to(self.device)
            else:
                tensor = torch.empty(own.shape, dtype=own.dtype, device=self.device)
            dist.broadcast(tensor, 0)
            copy_part(own, tensor)

    def describe(self) -> str:
        parts = self.mesh.size(self.mesh.ndim - 1)
        copies = f", {self.mesh.size(0)} copies" if self.strategy == "hsdp" else ""
        where = "; kept in host memory" if self.parallel.cpu_offload else ""
        return f"weights, gradients and optimizer state in {parts} shards{copies}, block by block{where}"

    def prepare(self, policy: Policy, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        self.policy = self.model = policy
        gather_once(policy)
        return optimizer

    @contextlib.contextmanager
    def accumulate(self, last: bool) -> Iterator[None]:
        assert isinstance(self.model, FSDPModule)
        self.model.set_requires_gradient_sync(last)
        yield
        if last:
            self._average_whole()

    @torch.no_grad()
    def _average_whole(self) -> None:
        """Average the gradients of parameters that every process has whole, in float32 as FSDP does all others."""
        gradients = [
            grad for name in self.whole if (grad := self.policy.get_parameter(name).grad) is not None
        ]
        if not gradients:
            return
        flat = torch.cat([grad.flatten().float() for grad in gradients]).div_(self.world_size)
        dist.all_reduce(flat)
        for grad, mean in zip(gradients, flat.split([grad.numel() for grad in gradients])):
            grad.copy_(mean.view_as(grad))

    @torch.no_grad()
    def clip_grad_norm(self, optimizer: torch.optim.Optimizer, limit: float) -> Tensor:
        self.scaler.unscale_(optimizer)
        if self.scaler.is_enabled():
            self._agree_on_overflow(optimizer)
        gradients = [p.grad for p in self.policy.parameters() if p.grad is not None]
        shards = [local(grad) for grad in gradients if is_sharded(grad)]
        whole = [grad for grad in gradients if not is_sharded(grad)]
        squared = squared_norm(shards).to(self.device)
        dist.all_reduce(squared, group=self.mesh.get_group(self.mesh.ndim - 1))
        norm = (squared + squared_norm(whole).to(self.device)).sqrt()
        factor = (limit / (norm + 1e-6)).clamp(max=1.0)  # as torch clips
        for some in (shards, whole):
            if limit > 0 and some:
                torch._foreach_mul_(some, factor.to(some[0].device))
        return norm

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        with on_own_parts(optimizer):
            super().step(optimizer)
        optimizer.zero_grad(set_to_none=True)

    def _agree_on_overflow(self, optimizer: torch.optim.Optimizer) -> None:
        """A rank sees only its shard of the gradient. If any shard overflowed, all ranks skip the step."""
        for found in self.scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values():
            dist.all_reduce(found, op=dist.ReduceOp.MAX)


def squared_norm(tensors: list[Tensor]) -> Tensor:
    """The square of the norm of all of them, in float32: of bfloat16 gradients, too."""
    norms = torch._foreach_norm(tensors, 2, dtype=torch.float32) if tensors else [torch.zeros(())]
    return torch.stack(list(norms)).square().sum()


@contextlib.contextmanager
@torch.no_grad()
def on_own_parts(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Inside, the optimizer's parameters, gradients and state are plain tensors: this rank's shards.

    The optimizer updates each element independently, so it needs no other rank. For distributed tensors, torch would
    first plan how to divide the work on each of them, which takes seconds in the first step.
    """
    groups, state = [group["params"] for group in optimizer.param_groups], optimizer.state
    parts = {p: nn.Parameter(local(p), p.requires_grad) for group in groups for p in group}
    for whole, own in parts.items():
        own.grad = None if whole.grad is None else local(whole.grad)
    for group in optimizer.param_groups:
        group["params"] = [parts[p] for p in group["params"]]
    optimizer.state = defaultdict(dict)
    for whole in state:
        optimizer.state[parts[whole]] = {key: local(value) for key, value in state[whole].items()}
    try:
        yield
    finally:
        for group, wholes in zip(optimizer.param_groups, groups):
            group["params"] = wholes
        for whole, own in parts.items():
            for key, value in optimizer.state.get(own, {}).items():
                if local(state[whole].get(key)) is not value:  # new: all others were changed in place
                    of_shape = isinstance(value, Tensor) and value.shape == own.shape
                    state[whole][key] = as_part(value, whole) if of_shape else value
        optimizer.state = state


def gather_once(policy: Policy) -> None:
    """Gather every block once, for a policy that does not use all of its blocks at first.

    torch can't accumulate gradients while some block was never gathered.
    """
    if policy.config.uses_all_parameters:
        return
    for block in policy.modules():
        if isinstance(block, FSDPModule):
            block.unshard()
            block.reshard()
