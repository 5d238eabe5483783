"""The tensors of a checkpoint, wherever they lie: one file of whole ones, or shards that many ranks wrote.

Both are read the same way: ask what there is, then have each rank fill its part. So a run may go on on another
number of processes, sharded or not, whichever way it was saved.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from flexor.core.run_files import PRETRAINED, SHARDS, TRAINING_STATE, WEIGHTS
from flexor.core.tensors import described_in, fill

OPTIMIZER = "optimizer_state.safetensors"
RAW_MODEL = "raw_model.safetensors"
EMA_STATE = "ema_state.safetensors"


class SavedTensors(Protocol):
    """Tensors named model.NAME, ema.NAME and optimizer.PARAMETER.KEY. Those described are without memory."""

    def described(self) -> dict[str, Tensor]: ...
    def fill(self, tensors: Mapping[str, Tensor]) -> None: ...


def open_tensors(checkpoint: Path, parameters: Sequence[str] = ()) -> SavedTensors:
    """`parameters` are the names of the optimizer's, by which LeRobot's format numbers them."""
    if (checkpoint / TRAINING_STATE / SHARDS).is_dir():
        return ShardedTensors(checkpoint / TRAINING_STATE / SHARDS)
    return WholeTensors(checkpoint, parameters)


class WholeTensors:
    """LeRobot's files; the raw weights too if what is exported is not they, and the moving average if there is one."""

    def __init__(self, checkpoint: Path, parameters: Sequence[str]):
        state, exported = checkpoint / TRAINING_STATE, checkpoint / PRETRAINED / WEIGHTS
        self.files = {"model": state / RAW_MODEL if (state / RAW_MODEL).is_file() else exported}
        if (state / EMA_STATE).is_file():
            self.files["ema"] = state / EMA_STATE
        self.files["optimizer"] = state / OPTIMIZER
        self.parameters = parameters
        self.numbers = {name: str(i) for i, name in enumerate(parameters)}

    def described(self) -> dict[str, Tensor]:
        return {
            f"{kind}.{self._own_name(kind, name)}": tensor
            for kind, file in self.files.items()
            for name, tensor in described_in(file).items()
        }

    def _own_name(self, kind: str, name: str) -> str:
        if kind != "optimizer":
            return name
        _, number, key = name.split("/")
        return f"{self.parameters[int(number)]}.{key}"

    def _name_there(self, kind: str, name: str) -> str:
        if kind != "optimizer":
            return name
        parameter, _, key = name.rpartition(".")
        return f"state/{self.numbers[parameter]}/{key}"

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        for kind, file in self.files.items():
            wanted = {k: t for k, t in tensors.items() if k.startswith(f"{kind}.")}
            names = {key: self._name_there(kind, key.removeprefix(f"{kind}.")) for key in wanted}
            fill(wanted, file, names)


class ShardedTensors:
    """torch's distributed checkpoint."""

    def __init__(self, folder: Path):
        self.folder = folder

    def described(self) -> dict[str, Tensor]:
        import torch.distributed.checkpoint as dcp

        metadata: Mapping[str, Any] = dcp.FileSystemReader(self.folder).read_metadata().state_dict_metadata
        return {
            name: torch.empty(tensor.size, dtype=tensor.properties.dtype, device="meta")
            for name, tensor in metadata.items()
        }

    def read(self, prefix: str) -> dict[str, Tensor]:
        """Whole tensors, by what follows `prefix` in their names."""
        described = {k: t for k, t in self.described().items() if k.startswith(prefix)}
        tensors = {k: torch.empty_like(t, device="cpu") for k, t in described.items()}
        self.fill(tensors)
        return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        import torch.distributed.checkpoint as dcp

        with failures_as_oserror(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # we know
            # every rank reads what it needs: there is nothing to agree on
            dcp.load(dict(tensors), storage_reader=dcp.FileSystemReader(self.folder), no_dist=True)


@contextmanager
def failures_as_oserror() -> Iterator[None]:
    """torch reports what went wrong on any rank by an exception that is not even an `Exception`."""
    from torch.distributed.checkpoint import CheckpointException

    try:
        yield
    except CheckpointException as error:
        causes = {f"rank {rank}: {cause[0]!r}" for rank, cause in error.failures.items()}
        raise OSError("; ".join(sorted(causes))) from error
