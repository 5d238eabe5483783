"""Engines on Hugging Face Accelerate, for runs that `accelerate launch` started.

An `Accelerator` wraps the model, scales and clips gradients, and holds back gradient synchronisation while they
accumulate. The loader and the checkpoints are those of any other run, so a run can resume without Accelerate, or with
it. FSDP is always FSDP 2, whichever version the config asks for. If its settings name no classes to wrap, the
policy's blocks are sharded.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from flexor.core.errors import ConfigError
from flexor.policies.base import Policy
from flexor.policies.meta_init import apply_keeping_ties, parameters_without_memory
from flexor.train.engine.base import Engine
from flexor.train.engine.fsdp import ShardedEngine, unshard_once
from flexor.train.engine.shard_units import shared_between

try:
    import accelerate
    from accelerate.state import PartialState
    from accelerate.utils import (
        DistributedType,
        FullyShardedDataParallelPlugin,
        GradientAccumulationPlugin,
        ParallelismConfig,
    )
except ImportError as error:
    raise ConfigError(
        f"`accelerate launch` started this run, but its Python can't import Accelerate ({error}): "
        "pip install 'flexor[accelerate]'."
    ) from error

BY_ACCELERATE = f"; by Accelerate {accelerate.__version__}"


class AccelerateEngine(Engine):
    """What engines on Accelerate share. Where each process has the whole model, Flexor's own engine trains."""

    captures = False

    def __init__(self, *settings: Any):
        super().__init__(*settings)
        if self.precision == "fp16" and self.device.type == "cpu":
            raise ConfigError("precision=fp16: Accelerate supports it on GPUs only; use bf16.")
        os.environ["ACCELERATE_TORCH_DEVICE"] = str(self.device)  # otherwise Accelerate picks its own
        options: dict[str, Any] = {
            "device_placement": False,
            "mixed_precision": self.precision,
            "cpu": self.device.type == "cpu",
            # the loop accumulates, and its losses are already divided by the global batch
            "gradient_accumulation_plugin": GradientAccumulationPlugin(num_steps=1),
        }
        self.accelerator = accelerate.Accelerator(**options | self._options())
        self.scaler = self.accelerator.scaler or torch.amp.GradScaler(self.device.type, enabled=False)

    def _options(self) -> dict[str, Any]:
        """Options for Accelerate besides those of every run."""
        raise NotImplementedError

    def prepare(self, policy: Policy, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        self.policy = policy
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*deprecated.*")  # torch functions that Accelerate calls
            self.model, self.optimizer = self.accelerator.prepare(policy, optimizer)
        return optimizer

    def autocast(self) -> AbstractContextManager[object]:
        return self.accelerator.autocast()

    @contextlib.contextmanager
    def accumulate(self, last: bool) -> Iterator[None]:
        with contextlib.nullcontext() if last else self.accelerator.no_sync(self.model):
            yield

    def backward(self, loss: Tensor) -> None:
        self.accelerator.backward(loss * self.world_size)

    def clip_grad_norm(self, optimizer: torch.optim.Optimizer, limit: float) -> Tensor:
        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), limit if limit > 0 else float("inf"))
        assert norm is not None  # it is None only for a model that Accelerate did not prepare
        return norm

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def describe(self) -> str:
        return f"{super().describe()}{BY_ACCELERATE}"


class AccelerateShardedEngine(ShardedEngine, AccelerateEngine):
    """A shard of the model in each process (FSDP2), or in each process of a group (HSDP)."""

    accumulate, backward = AccelerateEngine.accumulate, AccelerateEngine.backward

    def __init__(self, *settings: Any):
        super().__init__(*settings)
        self.strategy = "hsdp" if self.mesh.ndim > 1 else "fsdp"

    def _options(self) -> dict[str, Any]:
        if self.device.type == "cpu":
            # Accelerate shards on GPUs only, but torch also on CPUs; this allows tests without GPUs
            PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
        self.wrap = os.environ.get("FSDP_AUTO_WRAP_POLICY", "TRANSFORMER_BASED_WRAP").upper()
        self.plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            reshard_after_forward=self.parallel.reshard_after_forward,
            cpu_offload=self._offload(),
            auto_wrap_policy="NO_WRAP" if self.wrap == "NO_WRAP" else "TRANSFORMER_BASED_WRAP",
            mixed_precision_policy=self._mixed_precision(),
            activation_checkpointing=False,  # the policy does it; Accelerate's redraws dropout
            cpu_ram_efficient_loading=False,  # we load each rank's shard
            backward_prefetch="NO_PREFETCH",  # FSDP 1 only
            state_dict_type="SHARDED_STATE_DICT",
        )
        parallelism = None
        if self.world_size > 1:
            replicate, shard = (
                self._mesh_sizes() if self.parallel.strategy == "hsdp" else (1, self.world_size)
            )
            parallelism = ParallelismConfig(dp_replicate_size=replicate, dp_shard_size=shard)
        return {"fsdp_plugin": self.plugin, "parallelism_config": parallelism}

    def _mesh(self) -> DeviceMesh:
        return self.accelerator.torch_device_mesh or super()._mesh()

    def describe(self) -> str:
        return f"{super().describe()}{BY_ACCELERATE}"

    def build(self, make: Any, weights: Path | str | None) -> Policy:
        """A policy without weights yet: Accelerate shards the model later, together with its optimizer.

        Accelerate tells parameters apart by their memory addresses, so they get memory, which stays unused.
        """
        with parameters_without_memory():
            policy: Policy = make()
        apply_keeping_ties(policy, lambda t: torch.empty_like(t, device="cpu") if t.is_meta else t)
        self._make, self._weights = make, weights
        return policy

    def prepare(self, policy: Policy, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        if len({p.dtype for p in policy.parameters() if p.requires_grad}) > 1:
            raise ConfigError(
                "weights_dtype=bf16 or policy.dtype=bfloat16: Accelerate can't shard trained weights of several "
                f"dtypes. Use `flexor train --gpus={self.world_size} --parallel.strategy={self.strategy}` or "
                "torchrun instead, train adapters (--lora.r=16), or use ddp."
            )
        if shared := shared_between(policy, [*policy.shard_units(), policy]):
            raise ConfigError(
                f"Accelerate can't shard a weight that two blocks share ({', '.join(shared)}). Leave one of the blocks "
                "out of the policy's shard_units(), or use ddp."
            )
        self._name_units(policy)
        AccelerateEngine.prepare(self, policy, optimizer)
        self._fill(policy, self._make, self._weights)
        unshard_once(policy)
        return optimizer

    def _name_units(self, policy: Policy) -> None:
        """Set the classes that Accelerate shards one by one: the policy's blocks, unless its config names others."""
        blocks = policy.shard_units()
        if self.wrap == "SIZE_BASED_WRAP":
            least = int(os.environ["FSDP_MIN_NUM_PARAMS"])
            blocks = [block for block in blocks if sum(p.numel() for p in block.parameters()) >= least]
        classes = sorted({type(block).__name__ for block in blocks})
        policy._no_split_modules = classes  # type: ignore[assignment]
        named = self.plugin.transformer_cls_names_to_wrap or []
        missing = set(named) - {type(module).__name__ for module in policy.modules()}
        if missing:
            raise ConfigError(
                f"The Accelerate config says fsdp_transformer_layer_cls_to_wrap: {','.join(named)}, but the policy "
                f"has no {', '.join(sorted(missing))}. Leave it out to shard the policy's own blocks "
                f"({', '.join(classes)})."
            )
