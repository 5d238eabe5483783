"""The tensors of a checkpoint: whole tensors in files, or shards that several ranks wrote.

Both are read the same way: list the tensors, then each rank fills its own part. So a run can resume on another
number of processes, sharded or not, however it was saved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from flexor.core.errors import CheckpointError
from flexor.core.run_files import PRETRAINED, SHARDS, TRAINING_STATE, WEIGHTS
from flexor.core.shards import INDEX, SafeShards, ShardFiles, fill_from_shards
from flexor.core.tensors import described_in, fill
from flexor.core.torch_shards import TorchShards
from flexor.train.checkpoint.lerobot import optimizer_name

OPTIMIZER = "optimizer_state.safetensors"
RAW_MODEL = "raw_model.safetensors"
EMA_STATE = "ema_state.safetensors"


class SavedTensors(Protocol):
    """Tensors named model.NAME, ema.NAME and optimizer.PARAMETER.KEY. `described` returns them without memory."""

    def described(self) -> dict[str, Tensor]: ...
    def fill(self, tensors: Mapping[str, Tensor]) -> None: ...


def open_tensors(checkpoint: Path, parameters: Sequence[str] = ()) -> SavedTensors:
    """`parameters` are the names of the optimizer's parameters. LeRobot's format numbers its state in this order."""
    if (checkpoint / TRAINING_STATE / SHARDS).is_dir():
        return ShardedTensors(checkpoint / TRAINING_STATE / SHARDS)
    return WholeTensors(checkpoint, parameters)


class WholeTensors:
    """LeRobot's files, the raw weights if the exported ones differ, and the moving average (EMA) if there is one."""

    def __init__(self, checkpoint: Path, parameters: Sequence[str]):
        state, exported = checkpoint / TRAINING_STATE, checkpoint / PRETRAINED / WEIGHTS
        self.files = {"model": state / RAW_MODEL if (state / RAW_MODEL).is_file() else exported}
        if (state / EMA_STATE).is_file():
            self.files["ema"] = state / EMA_STATE
        self.files["optimizer"] = state / OPTIMIZER
        self.parameters = parameters

    def described(self) -> dict[str, Tensor]:
        return {
            f"{kind}.{self._from_lerobot(name) if kind == 'optimizer' else name}": tensor
            for kind, file in self.files.items()
            for name, tensor in described_in(file).items()
        }

    def _from_lerobot(self, name: str) -> str:
        _, number, key = name.split("/")
        return f"{self.parameters[int(number)]}.{key}"

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        numbers = {parameter: number for number, parameter in enumerate(self.parameters)}
        for kind, file in self.files.items():
            of_kind = {k: t for k, t in tensors.items() if k.startswith(f"{kind}.")}
            names = {key: key.removeprefix(f"{kind}.") for key in of_kind}
            if kind == "optimizer":
                names = {key: optimizer_name(name, numbers) for key, name in names.items()}
            fill(of_kind, file, names)


class ShardedTensors:
    """The shards that several ranks wrote."""

    def __init__(self, folder: Path):
        self.shards: ShardFiles
        try:
            self.shards = SafeShards(folder) if (folder / INDEX).is_file() else TorchShards(folder)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{folder} can't be read: {error}") from error

    def described(self) -> dict[str, Tensor]:
        return {
            name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            for name, tensor in self.shards.tensors.items()
        }

    def read(self, prefix: str) -> dict[str, Tensor]:
        """The whole tensors whose names start with `prefix`, by the rest of the name."""
        described = {k: t for k, t in self.described().items() if k.startswith(prefix)}
        tensors = {k: torch.empty_like(t, device="cpu") for k, t in described.items()}
        self.fill(tensors)
        return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        fill_from_shards(tensors, self.shards)
