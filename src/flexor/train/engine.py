"""Where the model runs and how gradients are made: precision, scaling, clipping, device.

The loop is written against this class and nothing else, so that the same loop runs on a CPU, a GPU
and, with other engines of this shape, on many.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from flexor.errors import ConfigError
from flexor.rng import seed_everything

DTYPES = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def pick_device(wanted: str | None) -> torch.device:
    """The device asked for, if it is there; else the best there is."""
    if wanted is None:
        if torch.cuda.is_available():
            return torch.device("cuda", 0)
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(wanted)
    except RuntimeError as error:
        raise ConfigError(
            f"policy.device={wanted!r} is not a device: use cpu, cuda, cuda:N or mps."
        ) from error
    count = torch.cuda.device_count() if device.type == "cuda" else 1
    missing = (device.type == "cuda" and (device.index or 0) >= count) or (
        device.type == "mps" and not torch.backends.mps.is_available()
    )
    if missing:
        raise ConfigError(
            f"policy.device={wanted!r} is not there (`flexor doctor` says why); "
            "leave it out to use what there is, or set --policy.device=cpu."
        )
    return device


class Engine:
    """One process, one device."""

    rank = 0
    world_size = 1

    def __init__(self, device: torch.device, precision: str = "no", deterministic: bool = False):
        self.device = device
        self.precision = precision
        self.scaler = torch.amp.GradScaler(device.type, enabled=precision == "fp16")
        if deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else torch refuses to multiply
            torch.use_deterministic_algorithms(True, warn_only=False)
            torch.backends.cudnn.benchmark = False
        elif device.type == "cuda":
            torch.backends.cudnn.benchmark = True
            torch.backends.cuda.matmul.allow_tf32 = True

    def autocast(self) -> AbstractContextManager[object]:
        if self.precision == "no":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, DTYPES[self.precision])

    @contextlib.contextmanager
    def forward(self, seed: int, step: int, micro: int) -> Iterator[None]:
        """One forward pass: its precision, and dropout that depends on the step alone."""
        seed_everything("dropout", seed, step, micro, self.rank)
        with self.autocast():
            yield

    @contextlib.contextmanager
    def own_stream(self) -> Iterator[None]:
        """Compute on a stream of its own: CUDA's default one is the GPU's video decoder's, which would wait."""
        before = torch.cuda.current_stream(self.device)
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(before)
        with torch.cuda.stream(stream):
            yield
        before.wait_stream(stream)

    def backward(self, loss: Tensor) -> None:
        self.scaler.scale(loss).backward()

    def clip_grad_norm(self, model: nn.Module, optimizer: torch.optim.Optimizer, limit: float) -> Tensor:
        """The gradient's norm before clipping; `limit` 0 measures without clipping."""
        self.scaler.unscale_(optimizer)
        return nn.utils.clip_grad_norm_(model.parameters(), limit if limit > 0 else float("inf"))

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        self.scaler.step(optimizer)
        self.scaler.update()
        optimizer.zero_grad(set_to_none=True)
