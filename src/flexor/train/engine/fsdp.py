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

    def __init__(self, *settings: Any, strategy: str = "fsdp"):
        super().__init__(*settings)
        self.strategy = strategy
        self.captures = not self.parallel.cpu_offload  # the host waits for each block
        self.replicated: list[str] = []  # names of the parameters that are not sharded
        if self.parallel.backend == "gloo" and self.device.type == "cuda":
            raise ConfigError(
                f"parallel.backend=gloo does not support a sharded model (parallel.strategy={strategy}) on GPUs: use "
                "--parallel.backend=nccl, or --parallel.strategy=ddp."
            )
        self.mesh = self._mesh()

    def _mesh(self) -> DeviceMesh:
        if self.strategy == "fsdp":
            return init_device_mesh(self.device.type, (self.world_size,), mesh_dim_names=("shard",))
        return init_device_mesh(self.device.type, self._mesh_sizes(), mesh_dim_names=("replicate", "shard"))

    def _mesh_sizes(self) -> tuple[int, int]:
        sizes = self.parallel.dp_replicate, self.parallel.dp_shard
        return hsdp_sizes(self.world_size, self.processes.local_world_size, *sizes)

    def _mixed_precision(self) -> MixedPrecisionPolicy:
        dtype = None if self.precision == "no" else DTYPES[self.precision]
        # autocast casts inputs where needed; targets stay float32
        return MixedPrecisionPolicy(dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)

    def build(self, make: Any, weights: Path | str | None) -> Policy:
        with parameters_without_memory():
            policy: Policy = make()
        make_contiguous(policy)
        self._shard(policy)
        device = torch.device("cpu") if self.parallel.cpu_offload else self.device
        # parameters have no memory yet; buffers already have their values, and are moved
        apply_keeping_ties(
            policy, lambda t: torch.empty_like(t, device=device) if t.is_meta else t.to(self.device)
        )
        for name in self.replicated:  # FSDP does not move them to the device
            parameter = policy.get_parameter(name)
            parameter.data = parameter.data.to(self.device)
        self._fill(policy, make, weights)
        return policy

    def _fill(self, policy: Policy, make: Any, weights: Path | str | None) -> None:
        """Load the weights, or take those that rank 0 creates; "later": a checkpoint has them."""
        if isinstance(weights, Path):
            load_weights(policy, weights)
        elif weights is None:
            self._broadcast_initial(policy, make)
        for method in ("loss", "predict", "encode_images"):
            register_fsdp_forward_method(policy, method)

    def _shard(self, policy: Policy) -> None:
        """Shard each block of the policy, then its remaining parameters."""
        settings: dict[str, Any] = {
            "mesh": self.mesh,
            "reshard_after_forward": self.parallel.reshard_after_forward,
            "mp_policy": self._mixed_precision(),
            "offload_policy": self._offload(),
        }
        scalars = [name for name, p in policy.named_parameters() if p.ndim == 0]
        if scalars:
            raise ConfigError(
                f"These parameters of the policy are scalars, which can't be sharded: {', '.join(scalars)}. Use "
                "--parallel.strategy=ddp."
            )
        sharding = sharding_of(policy)
        self.replicated = list(sharding.replicated)
        for unit in sharding.units:
            fully_shard(unit, **settings, ignored_params={*sharding.replicated.values()})

    def _offload(self) -> OffloadPolicy:
        if not self.parallel.cpu_offload:
            return OffloadPolicy()
        return CPUOffloadPolicy(pin_memory=self.device.type == "cuda")

    def _broadcast_initial(self, policy: Policy, make: Any) -> None:
        """Initial weights: rank 0 creates them in host memory, and each process takes its shard of each tensor."""
        source: dict[str, Tensor] = {}
        if self.processes.is_main:
            full: Policy = make()
            make_contiguous(full)
            full.load_backbone()
            source = unique_state(full)
        self.processes.barrier()  # downloading may take longer than a collective's timeout
        for name, sharded in unique_state(policy).items():
            if self.processes.is_main:
                tensor = source.pop(name).to(self.device)
            else:
                tensor = torch.empty(sharded.shape, dtype=sharded.dtype, device=self.device)
            dist.broadcast(tensor, 0)
            copy_part(sharded, tensor)

    def describe(self) -> str:
        parts = self.mesh.size(self.mesh.ndim - 1)
        copies = f", {self.mesh.size(0)} copies" if self.strategy == "hsdp" else ""
        offloaded = "; in host memory" if self.parallel.cpu_offload else ""
        return f"weights, gradients and optimizer state in {parts} shards{copies}, block by block{offloaded}"

    def prepare(self, policy: Policy, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        self.policy = self.model = policy
        unshard_once(policy)
        return optimizer

    @contextlib.contextmanager
    def accumulate(self, last: bool) -> Iterator[None]:
        assert isinstance(self.model, FSDPModule)
        self.model.set_requires_gradient_sync(last)
        yield
        if last:
            self._average_replicated()

    def backward(self, loss: Tensor) -> None:
        super().backward(loss * self.world_size)  # gradients are averaged

    @torch.no_grad()
    def _average_replicated(self) -> None:
        """Average the gradients of the parameters that are not sharded, in float32 as FSDP does all others."""
        parameters = [self.policy.get_parameter(name) for name in self.replicated]
        gradients = [p.grad for p in parameters if p.grad is not None]
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
        gradients = self.gradients()
        shards = [local(grad) for grad in gradients if is_sharded(grad)]
        replicated = [grad for grad in gradients if not is_sharded(grad)]
        squared = self._squared_norm(shards)
        dist.all_reduce(squared, group=self.mesh.get_group(self.mesh.ndim - 1))
        norm = (squared + self._squared_norm(replicated)).sqrt()
        factor = (limit / (norm + 1e-6)).clamp(max=1.0)  # as torch clips
        for grads in (shards, replicated):
            if limit > 0 and grads:
                torch._foreach_mul_(grads, factor.to(grads[0].device))
        return norm

    def _squared_norm(self, tensors: list[Tensor]) -> Tensor:
        return squared_norm(tensors).to(self.device) if tensors else torch.zeros((), device=self.device)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        with local_shards(optimizer):
            super().step(optimizer)
        optimizer.zero_grad(set_to_none=True)

    def _agree_on_overflow(self, optimizer: torch.optim.Optimizer) -> None:
        """A rank sees only its shard of the gradient. If any shard overflowed, all ranks skip the step."""
        for found_inf in self.scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values():
            dist.all_reduce(found_inf, op=dist.ReduceOp.MAX)


def squared_norm(tensors: list[Tensor]) -> Tensor:
    """The square of the norm of all of them, in float32: of bfloat16 gradients, too."""
    return torch.stack(list(torch._foreach_norm(tensors, 2, dtype=torch.float32))).square().sum()


@contextlib.contextmanager
@torch.no_grad()
def local_shards(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Inside, the optimizer's parameters, gradients and state are plain tensors: this rank's shards.

    The optimizer updates each element independently, so it needs no other rank. For distributed tensors, torch would
    first plan how to divide the work on each of them, which takes seconds in the first step.
    """
    groups, state = [group["params"] for group in optimizer.param_groups], optimizer.state
    shards = {p: nn.Parameter(local(p), p.requires_grad) for group in groups for p in group}
    for parameter, shard in shards.items():
        shard.grad = None if parameter.grad is None else local(parameter.grad)
    for group in optimizer.param_groups:
        group["params"] = [shards[p] for p in group["params"]]
    optimizer.state = defaultdict(dict)
    for parameter in state:
        optimizer.state[shards[parameter]] = {key: local(value) for key, value in state[parameter].items()}
    try:
        yield
    finally:
        for group, parameters in zip(optimizer.param_groups, groups):
            group["params"] = parameters
        for parameter, shard in shards.items():
            for key, value in optimizer.state.get(shard, {}).items():
                if local(state[parameter].get(key)) is not value:  # new: all others were changed in place
                    of_shape = isinstance(value, Tensor) and value.shape == shard.shape
                    state[parameter][key] = as_part(value, parameter) if of_shape else value
        optimizer.state = state


def unshard_once(policy: Policy) -> None:
    """Gather every block once: torch can't accumulate gradients while some block was never gathered.

    A policy may not use all of its blocks at first, or ever.
    """
    for block in policy.modules():
        if isinstance(block, FSDPModule):
            block.unshard()
            block.reshard()
