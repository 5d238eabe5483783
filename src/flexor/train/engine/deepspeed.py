"""DeepSpeed's ZeRO 1 and 2 under Accelerate: each process has the whole model and a shard of the optimizer state.

DeepSpeed stores the optimizer state in flat pieces that do not end where parameters end. For a checkpoint the state is
gathered by parameter, so that a run can resume with any other engine and any number of processes. That takes some time
and host memory, but needs no format of its own. Weights and reductions are float32, as in all engines; autocast
handles bf16.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flexor.config.accelerate_flags import deepspeed_settings
from flexor.core.errors import ConfigError
from flexor.core.tensors import make_contiguous
from flexor.policies.base import Policy
from flexor.train.engine.accelerate import AccelerateEngine
from flexor.train.engine.base import DTYPES, Engine

try:
    with contextlib.redirect_stdout(sys.stderr):  # keep standard output for the run
        import deepspeed
    import transformers.integrations  # noqa: F401  Accelerate does not start DeepSpeed without it
    from accelerate.utils import DeepSpeedPlugin
except ImportError as error:
    raise ConfigError(
        f"The Accelerate config says distributed_type: DEEPSPEED, but {error}: pip install 'flexor[deepspeed]'."
    ) from error


class DeepSpeedEngine(AccelerateEngine):
    """The whole model in each process, and a shard of the optimizer state."""

    def __init__(self, *settings: Any):
        with contextlib.redirect_stdout(sys.stderr):
            super().__init__(*settings)
        if self.precision == "fp16":
            raise ConfigError("precision=fp16 is not supported with DeepSpeed: use bf16.")

    def _options(self) -> dict[str, Any]:
        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        # functions that DeepSpeed calls
        warnings.filterwarnings("ignore", "`torch.distributed.* is deprecated", FutureWarning)
        # These settings have been read by now. The loop accumulates, so DeepSpeed's own batch sizes do not matter.
        os.environ.pop("ACCELERATE_CONFIG_DS_FIELDS", None)
        zero = {k: v for k, v in deepspeed_settings()["zero_optimization"].items() if v != "auto"}
        self.strategy = f"zero {zero['stage']}"
        settings = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
        plugin = DeepSpeedPlugin(hf_ds_config=settings | {"zero_optimization": zero}, zero3_init_flag=False)
        return {"deepspeed_plugin": plugin, "mixed_precision": "no", "cpu": False}

    def prepare(self, policy: Policy, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        make_contiguous(policy)
        groups = [{**group, "params": list(group["params"])} for group in optimizer.param_groups]
        if self.precision != "no":
            cast = torch.autocast(self.device.type, DTYPES[self.precision])
            policy.forward = cast(policy.forward)  # type: ignore[method-assign]
        super().prepare(policy, optimizer)
        self.wrapped: Any = self.model  # DeepSpeed's engine
        return ZeroOptimizer(groups, self.wrapped)

    def autocast(self) -> AbstractContextManager[object]:
        """In training, `prepare` has put autocast inside: DeepSpeed disables it around its own forward pass."""
        return contextlib.nullcontext() if self.policy.training else Engine.autocast(self)

    @contextlib.contextmanager
    def accumulate(self, last: bool) -> Iterator[None]:
        self.wrapped.set_gradient_accumulation_boundary(last)
        yield

    def backward(self, loss: Tensor) -> None:
        self.wrapped.backward(loss * self.world_size)

    def clip_grad_norm(self, optimizer: torch.optim.Optimizer, limit: float) -> Tensor:
        """DeepSpeed clips and updates in one call, so the optimizer steps here."""
        self.wrapped.optimizer.clip_grad = limit
        optimizer.step()
        norm = float(self.wrapped.get_global_grad_norm())
        return torch.tensor(norm if norm >= 0 else float("nan"), device=self.device)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        pass

    def describe(self) -> str:
        return f"{super().describe()} and DeepSpeed {deepspeed.__version__}; the optimizer state is sharded"


class ZeroOptimizer(torch.optim.Optimizer):
    """The optimizer as it was before DeepSpeed sharded it, for schedules and checkpoints."""

    def __init__(self, groups: list[dict[str, Any]], engine: Any):
        super().__init__(groups, {})
        self.engine, self.zero = engine, engine.optimizer

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for theirs, ours in zip(self.zero.optimizer.param_groups, self.param_groups):
            theirs["lr"] = ours["lr"]
        self.engine.step()

    def state_dict(self) -> dict[str, Any]:
        """The whole state, gathered from all ranks. All ranks must call this."""
        numbered: dict[int, dict[str, Tensor]] = {}
        for number, (parameter, flat) in enumerate(self._parameters()):
            pieces = self.zero.optimizer.state.get(flat, {})
            numbered[number] = {
                key: _gather(parameter, piece) if piece.ndim else piece.detach().to("cpu", copy=True)
                for key, piece in pieces.items()
                if piece is not None
            }
        return {**super().state_dict(), "state": {i: state for i, state in numbered.items() if state}}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Each rank loads its piece. The policy already has its weights; DeepSpeed's copy of them is refreshed."""
        for groups in (self.param_groups, self.zero.optimizer.param_groups):
            for group, loaded in zip(groups, saved["param_groups"]):
                group.update({key: value for key, value in loaded.items() if key != "params"})
        for number, (parameter, flat) in enumerate(self._parameters()):
            pieces = self.zero.optimizer.state[flat]
            for key, value in saved["state"].get(number, {}).items():
                if value.ndim:
                    _scatter(parameter, pieces.setdefault(key, torch.zeros_like(flat)), value)
                else:
                    pieces[key] = value.to(flat.device, torch.float32)
        self.zero.refresh_fp32_params()

    def _parameters(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Each parameter, in order, and the flat piece of its group that this rank updates."""
        for group, flat in zip(self.param_groups, self.zero.single_partition_of_fp32_groups):
            for parameter in group["params"]:
                yield parameter, flat


def _gather(parameter: Any, piece: Tensor) -> Tensor:
    """The state of a parameter, gathered from all ranks."""
    full = torch.zeros(parameter.numel(), dtype=piece.dtype, device=piece.device)
    if (fragments := _fragments(parameter, full, piece)) is not None:
        fragments[0].copy_(fragments[1])
    dist.all_reduce(full)
    return full.reshape(parameter.shape).cpu()


def _scatter(parameter: Any, piece: Tensor, full: Tensor) -> None:
    """Copy this rank's part of a parameter's state into its piece."""
    if (fragments := _fragments(parameter, full.flatten(), piece)) is not None:
        fragments[1].copy_(fragments[0])


def _fragments(parameter: Any, full: Tensor, piece: Tensor) -> tuple[Tensor, Tensor] | None:
    """What this rank has of a parameter: in the parameter's flat state, and in the piece of its group."""
    if (mapping := parameter._hp_mapping) is None:
        return None
    lp, hp = mapping.lp_fragment_address, mapping.hp_fragment_address
    return full.narrow(0, lp.start, lp.numel), piece.narrow(0, hp.start, hp.numel)
