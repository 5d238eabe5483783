"""Where the model runs and how gradients are computed: device, precision, ranks, scaling, clipping.

The loop uses only this interface, so that the same loop runs on a CPU, on one GPU and on many. In this engine every
process has the whole model; if there are several, they sum their gradients (DDP, `exchange.py`). The other engines are
in `fsdp.py`, `accelerate.py` and `deepspeed.py`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flexor.config.schema import ParallelConfig
from flexor.core.devices import find_device
from flexor.core.errors import ConfigError
from flexor.core.rng import seed_everything
from flexor.monitor.step_times import StepTimes
from flexor.policies.base import Policy
from flexor.policies.frozen_in_bf16 import store_frozen_in_bf16
from flexor.policies.meta_init import with_memory
from flexor.policies.pretrained import load_weights
from flexor.policies.quantized import quantize_base
from flexor.train.engine.exchange import GradientExchange, broadcast_weights
from flexor.train.optim.adamw_8bit import AdamW8bit
from flexor.train.optim.bf16_copies import Bf16Copies
from flexor.train.optim.sgd import SGD
from flexor.train.ranks.processes import Processes

T = TypeVar("T")
# Of autocast. fp8 is a matter of some layers (`policies/fp8.py`).
DTYPES = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}


def pick_device(name: str | None, processes: Processes) -> torch.device:
    """The device of this name, by default the fastest available one. Each process of a host gets its own GPU."""
    device = find_device(name)
    if processes.world_size == 1:
        return device
    if name is not None and (torch.device(name).index is not None or device.type == "mps"):
        raise ConfigError(
            f"policy.device={name!r} is one device, but there are {processes.world_size} processes: leave it out, "
            "and choose GPUs with CUDA_VISIBLE_DEVICES."
        )
    if device.type == "cuda":
        return torch.device("cuda", _local_gpu(processes))
    return torch.device("cpu")


def _local_gpu(processes: Processes) -> int:
    count = torch.cuda.device_count()
    if count == 1:
        return 0  # also if the launcher makes one GPU visible to each process
    if processes.local_world_size > count:
        raise ConfigError(
            f"{processes.local_world_size} processes run on {processes.host}, where {count} GPUs are visible: start "
            "one process per GPU, or train on the CPU with --policy.device=cpu."
        )
    return processes.local_rank


def lowest_capability(processes: Processes, device: torch.device) -> tuple[int, int] | None:
    """CUDA compute capability of the oldest GPU of the run; None if a process has no NVIDIA GPU."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    lowest = min(processes.gather(capability or (0, 0)))
    return lowest if lowest > (0, 0) else None


def check_devices(processes: Processes, device: torch.device, backend: str) -> None:
    """Refuse two ranks on one GPU: they would hang, or fail with an obscure error."""
    if device.type != "cuda" or backend == "gloo":
        return
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    gpus = processes.gather((processes.host, uuid))
    sharing = [rank for rank, gpu in enumerate(gpus) if gpus.count(gpu) > 1]
    if sharing:
        raise ConfigError(
            f"Ranks {', '.join(map(str, sharing))} share a GPU (rank {processes.rank} is on {device} of "
            f"{processes.host}): start one process per GPU. Under srun, make one GPU visible to each task "
            "(--gpus-per-task=1), or all GPUs to all tasks."
        )


class Engine:
    """The whole model in each process."""

    strategy = "one process"
    sharded = False
    captures = True  # whether it can capture a step in a CUDA graph

    def __init__(
        self,
        device: torch.device,
        precision: str = "no",
        deterministic: bool = False,
        processes: Processes | None = None,
        parallel: ParallelConfig | None = None,
    ):
        self.device = device
        self.precision = precision
        self.deterministic = deterministic
        self.processes = processes or Processes()
        self.parallel = parallel or ParallelConfig()
        self.rank, self.world_size = self.processes.rank, self.processes.world_size
        if self.world_size > 1:
            self.strategy = "ddp"
        self.learning_rates: list[Tensor] | None = None
        self.frozen_in_bf16 = False  # whether frozen weights are stored in bfloat16
        self.base_bits: int | None = None  # of frozen linear layers, if they are quantized
        self.copies: Bf16Copies | None = None  # of the weights, where the step computes with copies
        self.exchange: GradientExchange | None = None  # with other ranks
        self.scaler = torch.amp.GradScaler(device.type, enabled=precision == "fp16")
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # required by torch
            torch.use_deterministic_algorithms(True, warn_only=False)
        elif device.type == "cuda":
            torch.backends.cuda.matmul.allow_tf32 = True
        # cuDNN's benchmark mode gains little over its default choice, and uses gigabytes of workspace: Diffusion Policy
        # at batch 8 peaked at 42 GB instead of 9 on an H200, and was 2 % faster.
        torch.backends.cudnn.benchmark = False

    def build(self, make: Any, weights: Path | str | None) -> Policy:
        """The policy on its device. `make` creates it with random weights, or with none if they are loaded next.

        `weights`: a folder to load them from; None: a new policy; "later": a checkpoint loads them afterwards.
        """
        policy: Policy = make()
        if weights is None:
            with self.processes.main_first():  # one process per host downloads
                policy.load_backbone()
        if self.base_bits:
            quantize_base(policy, self.base_bits)
        if self.frozen_in_bf16:
            store_frozen_in_bf16(policy, keep_float32=self.processes.is_main)
        with_memory(policy, self.device)
        if isinstance(weights, Path):
            load_weights(policy, weights)
        return policy

    def prepare(self, policy: Policy, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Prepare for training: from here on `model` computes the losses. Returns the optimizer to save."""
        self.policy = policy
        self.model: nn.Module = policy
        if self.processes.joined:
            broadcast_weights(policy)
            self.exchange = GradientExchange(
                policy,
                self.processes,
                self._leaf_of,
                find_unused=self.parallel.find_unused_parameters,
                capturable=self.device.type == "cuda" and self.parallel.backend != "gloo",
            )
        return optimizer

    def _leaf_of(self, parameter: nn.Parameter) -> nn.Parameter:
        """The tensor that the loss is computed with, which gets the gradient."""
        return self.copies.of(parameter) if self.copies else parameter

    def autocast(self) -> AbstractContextManager[object]:
        if self.precision == "no":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, DTYPES[self.precision])

    def seed_dropout(self, seed: int, step: int, first: int) -> None:
        """Before a forward pass: dropout depends on the step and the place in the global batch."""
        seed_everything("dropout", seed, step, first)

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """One forward pass, in its precision."""
        with self.autocast(), self.copies.in_use() if self.copies else contextlib.nullcontext():
            yield

    @contextlib.contextmanager
    def accumulate(self, last: bool) -> Iterator[None]:
        """One forward and backward pass. Ranks exchange gradients in the last one of a step only."""
        if last and self.exchange:
            self.exchange.begin()
        yield

    @contextlib.contextmanager
    def side_stream(self) -> Iterator[None]:
        """Compute on another CUDA stream than the default: the GPU's video decoder uses that one, and would wait."""
        before = torch.cuda.current_stream(self.device)
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(before)
        with torch.cuda.stream(stream):
            yield
        before.wait_stream(stream)

    def backward(self, loss: Tensor) -> None:
        """`loss` is this rank's part of a sum over all ranks."""
        self.scaler.scale(loss).backward()

    def finish_backward(self, times: StepTimes) -> None:
        """After the last backward pass of a step: the gradients are those of all ranks."""
        if self.exchange:
            self.exchange.finish(times)
        else:
            times.mark("backward")

    def clip_grad_norm(self, optimizer: torch.optim.Optimizer, limit: float) -> Tensor:
        """The gradient's norm before clipping, over all ranks; `limit` 0 measures without clipping."""
        self.scaler.unscale_(optimizer)
        on_gpu = self.device.type in ("cuda", "meta")
        if self.copies:
            norm = norm_in_float32(self.gradients())
        elif on_gpu and not self.scaler.is_enabled() and takes_scale(optimizer):
            norm = nn.utils.get_total_norm(self.gradients())
        else:
            return nn.utils.clip_grad_norm_(self.policy.parameters(), limit if limit > 0 else float("inf"))
        if limit > 0:  # the optimizer divides by it as it reads the gradients: a pass less over all of them
            optimizer.grad_scale = ((norm.float() + 1e-6) / limit).clamp(min=1.0)  # type: ignore[attr-defined]
        return norm

    def gradients(self) -> list[Tensor]:
        """Those of the policy's parameters that have one, in their order."""
        parameters = list(self.policy.parameters())
        leaves = [p if p.grad is not None else self._leaf_of(p) for p in parameters]
        return [leaf.grad for leaf in leaves if leaf.grad is not None]

    def set_learning_rates(self, optimizer: torch.optim.Optimizer) -> None:
        """Before a step: the rates of the schedule. On a GPU they are tensors, so that a CUDA graph can read them."""
        if self.device.type != "cuda" or not self.captures or not takes_tensor_rates(optimizer):
            return
        if self.learning_rates is None:
            self.learning_rates = [torch.zeros((), device=self.device) for _ in optimizer.param_groups]
        for tensor, group in zip(self.learning_rates, optimizer.param_groups):
            tensor.fill_(group["lr"])

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        with tensor_rates(optimizer, self.learning_rates):
            if self.copies:
                self.copies.step(optimizer)
            else:
                self.scaler.step(optimizer)
        optimizer.grad_scale = None  # type: ignore[attr-defined]
        self.scaler.update()
        self.zero_grad(optimizer)

    def zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad(set_to_none=True)
        if self.copies:
            self.copies.zero_grad()

    def describe(self) -> str:
        """What each rank has."""
        return "each process has the whole model"

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all ranks, in place; on a GPU it is queued like any other work."""
        if self.world_size > 1:
            dist.all_reduce(values)
        return values

    def gather(self, value: T) -> list[T]:
        """The values of all ranks."""
        return self.processes.gather(value)

    @property
    def exchanges_in_backward(self) -> bool:
        """Whether ranks exchange gradients in the backward pass only, and wait for each other at its end."""
        return self.exchange is not None


def norm_in_float32(gradients: list[Tensor]) -> Tensor:
    """The norm of all gradients. torch would round those of bfloat16 gradients."""
    norms: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
        same = [number for number, gradient in enumerate(gradients) if gradient.dtype == dtype]
        norms |= zip(same, torch._foreach_norm([gradients[i] for i in same], 2.0, dtype=torch.float32))
    return torch.linalg.vector_norm(torch.stack([norms[number] for number in range(len(gradients))]), 2.0)


def takes_tensor_rates(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it reads learning rates from the GPU, as a CUDA graph needs it."""
    in_one_kernel = isinstance(optimizer, SGD | AdamW8bit) and takes_scale(optimizer)
    return in_one_kernel or all("capturable" in group for group in optimizer.param_groups)


def takes_scale(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is one of torch's fused ones, which divide gradients by `grad_scale`."""
    return getattr(optimizer, "_step_supports_amp_scaling", False)


@contextlib.contextmanager
def tensor_rates(optimizer: torch.optim.Optimizer, rates: list[Tensor] | None) -> Iterator[None]:
    """Inside, learning rates are tensors of the GPU. Outside, and in what is saved, they are numbers."""
    if rates is None:
        yield
        return
    saved = [
        {k: v for k, v in group.items() if k in ("lr", "capturable")} for group in optimizer.param_groups
    ]
    for group, rate in zip(optimizer.param_groups, rates):
        group["lr"] = rate
        if "capturable" in group:  # of Adam and AdamW
            group["capturable"] = True
    try:
        yield
    finally:
        for group, numbers in zip(optimizer.param_groups, saved):
            group.update(numbers)
