"""The tensors of a sharded run: a safetensors file of each rank, and an index in JSON that says which rows are where.

    training_state/sharded/
      index.json                  shape, dtype and pieces of every tensor
      rank-00000.safetensors      the pieces that rank 0 wrote, under the tensors' names
      rank-00001.safetensors      ...

A tensor is split along its first dimension. Nothing in these files is code, and no file is larger in memory than on
disk. Runs of Flexor before this format have torch's distributed checkpoint instead: see `torch_shards.py`.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from flexor.core.foreign_files import read_json_object
from flexor.core.paths import inside
from flexor.core.tensors import DTYPES, is_sharded, local, part

INDEX = "index.json"
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class ShardPiece:
    """Consecutive rows of a tensor in one file. A tensor without dimensions counts as one row."""

    start: int
    stop: int
    file: str


@dataclass(frozen=True)
class ShardedTensor:
    """A tensor that is stored in pieces, which together hold all of its rows."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[ShardPiece, ...]

    def __post_init__(self) -> None:
        pieces = sorted(self.pieces, key=lambda piece: piece.start)
        edges = [0, *(piece.stop for piece in pieces)]
        starts = [*(piece.start for piece in pieces), self.rows]
        if edges != starts or any(size < 0 for size in self.shape):
            raise ValueError(f"a tensor of shape {list(self.shape)} has rows {starts[:-1]} to {edges[1:]}")

    @property
    def rows(self) -> int:
        return self.shape[0] if self.shape else 1


# Writing


def shard_file(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def write_shard(tensors: Mapping[str, Tensor], folder: Path, rank: int) -> tuple[dict[str, Any], str]:
    """Write this rank's pieces; returns its part of the index, and the hash of its file.

    Tensors are written one by one, so that a rank without memory for a copy of all of them can save.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = shard_file(rank)
    written = {name: tensor for name, tensor in tensors.items() if _is_written_by(tensor, rank)}
    digest = _write_safetensors(folder / file, {name: local(tensor) for name, tensor in written.items()})
    return {name: _index_entry(tensor, file) for name, tensor in written.items()}, digest


def write_index(folder: Path, ranks: Iterable[Mapping[str, Any]]) -> None:
    """Write the index, of which each rank has described its part."""
    tensors: dict[str, Any] = {}
    for entries in ranks:
        for name, tensor in entries.items():
            tensors.setdefault(name, {**tensor, "pieces": []})["pieces"] += tensor["pieces"]
    (folder / INDEX).write_text(json.dumps({"format": 1, "tensors": tensors}))


def _is_written_by(tensor: Tensor, rank: int) -> bool:
    """Whether this rank writes its part: of several that have the same part, the first does."""
    if not is_sharded(tensor):
        return rank == 0
    mesh, rows = tensor.device_mesh, part(tensor)
    replicated = [i for i, placement in enumerate(tensor.placements) if not placement.is_shard()]
    first = all(mesh.get_local_rank(dimension) == 0 for dimension in replicated)
    return first and (rows.stop > rows.start or (tensor.shape[0] == 0 and rank == 0))


def _index_entry(tensor: Tensor, file: str) -> dict[str, Any]:
    rows = part(tensor) if tensor.ndim else slice(0, 1)
    piece = {"start": rows.start, "stop": rows.stop, "file": file}
    return {"shape": list(tensor.shape), "dtype": DTYPE_NAMES[tensor.dtype], "pieces": [piece]}


def _write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write the file, one tensor in host memory at a time; returns its hash."""
    ordered = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # so values are aligned
    header: dict[str, Any] = {}
    offset = 0
    for name in ordered:
        tensor = tensors[name]
        span = [offset, offset := offset + tensor.numel() * tensor.element_size()]
        header[name] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": span}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for block in (len(text).to_bytes(8, "little"), text):
            file.write(block)
            digest.update(block)
        for name in ordered:
            values = tensors[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            file.write(values.data)
            digest.update(values.data)
    return digest.hexdigest()


# Reading


class ShardFiles(Protocol):
    """The files of a sharded checkpoint, in this format or the old one."""

    @property
    def tensors(self) -> Mapping[str, ShardedTensor]: ...

    def read(self, name: str, piece: ShardPiece, start: int, stop: int) -> Tensor:
        """Rows start to stop of the piece, counted from its own first row; a tensor without dimensions whole."""


class SafeShards:
    """Shards in the format of this file. A damaged index raises a ValueError, a damaged shard an OSError."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.tensors = _read_index(folder)
        self._open: dict[str, Any] = {}

    def read(self, name: str, piece: ShardPiece, start: int, stop: int) -> Tensor:
        try:
            if piece.file not in self._open:
                self._open[piece.file] = safe_open(inside(self.folder, piece.file), "pt")
            file, has_rows = self._open[piece.file], bool(self.tensors[name].shape)
            values: Tensor = file.get_slice(name)[start:stop] if has_rows else file.get_tensor(name)
        except (SafetensorError, RuntimeError, TypeError, IndexError) as error:
            raise OSError(f"{piece.file} is damaged: {error}") from error
        return values


def _read_index(folder: Path) -> dict[str, ShardedTensor]:
    index = read_json_object(inside(folder, INDEX))
    try:
        tensors = {
            str(name): ShardedTensor(
                tuple(map(int, tensor["shape"])),
                DTYPES[tensor["dtype"]],
                tuple(ShardPiece(int(p["start"]), int(p["stop"]), str(p["file"])) for p in tensor["pieces"]),
            )
            for name, tensor in index["tensors"].items()
        }
    except (KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"{INDEX} is damaged: {error!r}") from error
    check_sizes(folder, tensors)
    return tensors


def check_sizes(folder: Path, tensors: Mapping[str, ShardedTensor]) -> None:
    """Refuse tensors that are larger than the files that should hold them: nobody has memory for what is invented."""
    files = {piece.file for tensor in tensors.values() for piece in tensor.pieces}
    stored = sum(path.stat().st_size for file in files if (path := inside(folder, file)).is_file())
    described = sum(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in tensors.values())
    if described > stored:
        raise ValueError(f"its tensors take {described} bytes, but the files have {stored}")


@torch.no_grad()
def fill_from_shards(tensors: Mapping[str, Tensor], shards: ShardFiles) -> None:
    """Fill this rank's part of each tensor; only the rows that it needs are read."""
    for name, target in tensors.items():
        stored = shards.tensors[name]
        if stored.shape != tuple(target.shape):
            raise ValueError(f"{name} is {list(target.shape)}, but {list(stored.shape)} in the checkpoint")
        rows, values = (part(target), local(target)) if stored.shape else (slice(0, 1), target)
        for piece in stored.pieces:
            start, stop = max(rows.start, piece.start), min(rows.stop, piece.stop)
            if start < stop:
                read = shards.read(name, piece, start - piece.start, stop - piece.start)
                slots = values[start - rows.start : stop - rows.start] if stored.shape else values
                if read.shape != slots.shape or read.dtype != stored.dtype:
                    raise OSError(f"{piece.file} has {name} of another shape or type than the index says")
                slots.copy_(read)
