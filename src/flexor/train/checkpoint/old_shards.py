"""Reads the shards of earlier runs: torch's distributed checkpoint, whose index is a pickle.

A pickle can run any code when it is loaded. This one is loaded by an unpickler that knows only the classes that such
an index has, all of which are plain data. The tensors in the shards are loaded with `weights_only`.
"""

from __future__ import annotations

import io
import pickle  # nosec B403: only through the class below
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flexor.core.paths import inside
from flexor.train.checkpoint.shards import ShardedTensor, ShardPiece, check_sizes

OLD_INDEX = ".metadata"
LARGEST_INDEX = 256 << 20
METADATA = "torch.distributed.checkpoint.metadata"
CLASSES = {
    **dict.fromkeys(
        ("Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata", "MetadataIndex"),
        METADATA,
    ),
    **dict.fromkeys(("StorageMeta", "_MEM_FORMAT_ENCODING"), METADATA),
    "_StorageInfo": "torch.distributed.checkpoint.filesystem",
    "Size": "torch",
    "_get_layout": "torch.serialization",  # the name of a layout -> torch.strided
    "OrderedDict": "collections",
}
PATHS = {"pathlib", "pathlib._local"}  # where the checkpoint was written; not used


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if CLASSES.get(name) == module:
            return super().find_class(module, name)
        if module in PATHS and name in ("PosixPath", "Path", "PurePosixPath"):
            return lambda *_: None
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise ValueError(f"{OLD_INDEX} asks for {module}.{name}, which no checkpoint needs: it is not loaded")


class OldShards:
    """Shards in torch's format. Whatever is damaged or strange in them raises a ValueError or an OSError."""

    def __init__(self, folder: Path):
        self.folder = folder
        try:
            self._read_index(_unpickled(inside(folder, OLD_INDEX)))
        except (ValueError, OSError):
            raise
        except Exception as error:  # a pickle can ask for anything
            raise ValueError(f"{OLD_INDEX} is damaged: {error!r}") from error

    def _read_index(self, metadata: Any) -> None:
        from torch.distributed.checkpoint.filesystem import _StorageInfo
        from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

        if not isinstance(metadata, Metadata):
            raise ValueError(f"{OLD_INDEX} holds no index of shards")
        stored: dict[tuple[str, int], Any] = {}
        for index, info in metadata.storage_data.items():
            if not isinstance(info, _StorageInfo) or getattr(info, "transform_descriptors", None):
                raise ValueError(f"{index.fqn} is stored in a way that Flexor never did")
            stored[str(index.fqn), int((index.offset or (0,))[0])] = info
        self._places: dict[tuple[str, int], tuple[str, int, int]] = {}
        self.tensors: dict[str, ShardedTensor] = {}
        for name, tensor in metadata.state_dict_metadata.items():
            if not isinstance(tensor, TensorStorageMetadata):
                raise ValueError(f"{name} is no tensor")
            pieces = []
            for chunk in tensor.chunks:
                start, rows = (int(chunk.offsets[0]), int(chunk.sizes[0])) if chunk.sizes else (0, 1)
                if tuple(chunk.sizes[1:]) != tuple(tensor.size[1:]):
                    raise ValueError(f"{name} is split along another dimension than the first")
                info = stored[name, start]
                pieces.append(ShardPiece(start, start + rows, str(info.relative_path)))
                self._places[name, start] = str(info.relative_path), int(info.offset), int(info.length)
            shape = tuple(map(int, tensor.size))
            self.tensors[name] = ShardedTensor(shape, tensor.properties.dtype, tuple(pieces))
        check_sizes(self.folder, self.tensors)

    def read(self, name: str, piece: ShardPiece, start: int, stop: int) -> Tensor:
        file, offset, length = self._places[name, piece.start]
        path = inside(self.folder, file)
        if offset < 0 or not 0 <= length <= path.stat().st_size:
            raise OSError(f"{file} is shorter than {OLD_INDEX} says")
        with path.open("rb") as stream:
            stream.seek(offset)
            data = io.BytesIO(stream.read(length))
        try:
            values: Tensor = torch.load(data, map_location="cpu", weights_only=True)
        except Exception as error:  # torch raises many types
            raise OSError(f"{file} is damaged: {str(error).splitlines()[0]}") from error
        if not isinstance(values, Tensor):
            raise OSError(f"{file} holds something else than {name}")
        return values[start:stop] if values.ndim else values


def _unpickled(path: Path) -> Any:
    if path.stat().st_size > LARGEST_INDEX:
        raise ValueError(f"{OLD_INDEX} is larger than {LARGEST_INDEX >> 20} MB")
    with path.open("rb") as file:
        return _Unpickler(file).load()
