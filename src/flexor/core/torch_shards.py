"""Reads the shards of earlier runs: torch's distributed checkpoint, whose index is a pickle.

A pickle can run any code when it is loaded. This one is loaded by an unpickler that knows only the classes and
instructions that such an index has, all of which are plain data. So are the tensors in the shards: torch's own
unpickler of weights runs no code either, but a hundred bytes keep it busy for years.
"""

from __future__ import annotations

import dataclasses
import io
import pickle  # nosec B403: only through the class below
import pickletools
import zipfile
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from flexor.core.paths import inside
from flexor.core.shards import ShardedTensor, ShardPiece, check_sizes

TORCH_INDEX = ".metadata"
LARGEST_INDEX = 256 << 20
METADATA = "torch.distributed.checkpoint.metadata"
METADATA_CLASSES = (
    "Metadata MetadataIndex TensorStorageMetadata TensorProperties ChunkStorageMetadata StorageMeta"
)
CLASSES = {
    **dict.fromkeys((*METADATA_CLASSES.split(), "_MEM_FORMAT_ENCODING"), METADATA),
    "_StorageInfo": "torch.distributed.checkpoint.filesystem",
    "Size": "torch",
    "_get_layout": "torch.serialization",  # the name of a layout -> torch.strided
}
STORAGES = {  # torch's names of a tensor's values
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}
PATHS = {"pathlib", "pathlib._local"}  # where the checkpoint was written; not used
OPCODES = """
PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINUNICODE SHORT_BINUNICODE EMPTY_TUPLE TUPLE
TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST APPEND APPENDS EMPTY_DICT SETITEM SETITEMS MEMOIZE BINPUT LONG_BINPUT BINGET LONG_BINGET
GLOBAL STACK_GLOBAL NEWOBJ REDUCE BUILD
""".split()  # noqa: SIM905  (a list would take a line for each)
CODES = {code.name: ord(code.code) for code in pickletools.opcodes}
PythonUnpickler: Any = pickle._Unpickler
"""The one that is written in Python: to the one in C, fifteen bytes can say to take gigabytes."""


class _Unpickler(PythonUnpickler):
    dispatch: ClassVar = {CODES[name]: PythonUnpickler.dispatch[CODES[name]] for name in OPCODES}

    def find_class(self, module: str, name: str) -> Any:
        if CLASSES.get(name) == module:
            return super().find_class(module, name)
        if (module, name) == ("collections", "OrderedDict"):
            return dict  # its items come later
        if module in PATHS and name in ("PosixPath", "Path", "PurePosixPath"):
            return lambda *_: None
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise ValueError(
            f"{TORCH_INDEX} asks for {module}.{name}, which no checkpoint needs: it is not loaded"
        )

    def load_build(self) -> None:
        """A state is that of an object: set on a class, it would change torch itself."""
        if not _is_object(self.stack[-2]):
            raise ValueError(f"{TORCH_INDEX} changes a {type(self.stack[-2]).__name__}")
        super().load_build()

    def load_binget(self) -> None:
        super().load_binget()
        self._check_repeated()

    def load_long_binget(self) -> None:
        super().load_long_binget()
        self._check_repeated()

    def _check_repeated(self) -> None:
        """Numbers, names and classes may be repeated. Repeated lists of lists would stand for billions of values."""
        value = self.stack[-1]
        if isinstance(value, list | dict) or type(value) is tuple or _is_object(value):
            raise ValueError(f"{TORCH_INDEX} repeats a {type(value).__name__}")

    for method in (load_build, load_binget, load_long_binget):
        dispatch[CODES[method.__name__.removeprefix("load_").upper()]] = method


def _is_object(value: Any) -> bool:
    """Whether it is an object of one of the classes above, which are dataclasses."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


class TorchShards:
    """Shards in torch's format. Whatever is damaged or strange in them raises a ValueError or an OSError."""

    def __init__(self, folder: Path):
        self.folder = folder
        try:
            self._read_index(_unpickled(inside(folder, TORCH_INDEX)))
        except (ValueError, OSError):
            raise
        except Exception as error:  # a pickle can ask for anything
            raise ValueError(f"{TORCH_INDEX} is damaged: {error!r}") from error

    def _read_index(self, metadata: Any) -> None:
        from torch.distributed.checkpoint.filesystem import _StorageInfo
        from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

        if not isinstance(metadata, Metadata):
            raise ValueError(f"{TORCH_INDEX} holds no index of shards")
        stored: dict[tuple[str, int], Any] = {}
        for index, info in metadata.storage_data.items():
            if not isinstance(info, _StorageInfo) or getattr(info, "transform_descriptors", None):
                raise ValueError(f"{index.fqn} is stored in a way that Flexor never used")
            stored[str(index.fqn), int((index.offset or (0,))[0])] = info
        self._places: dict[tuple[str, int], tuple[str, int, int]] = {}
        self.tensors: dict[str, ShardedTensor] = {}
        for name, tensor in metadata.state_dict_metadata.items():
            if not isinstance(tensor, TensorStorageMetadata):
                raise ValueError(f"{name} is not a tensor")
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
            raise OSError(f"{file} is shorter than {TORCH_INDEX} says")
        with path.open("rb") as stream:
            stream.seek(offset)
            data = io.BytesIO(stream.read(length))
        try:
            values = _read_tensor(data, self.tensors[name].dtype)
        except Exception as error:  # whatever was put there
            raise OSError(f"{file} is damaged: {(str(error) or repr(error)).splitlines()[0]}") from error
        return values[start:stop] if values.ndim else values


def _unpickled(path: Path) -> Any:
    if path.stat().st_size > LARGEST_INDEX:
        raise ValueError(f"{TORCH_INDEX} is larger than {LARGEST_INDEX >> 20} MB")
    return _Unpickler(io.BytesIO(path.read_bytes())).load()


class _TensorUnpickler(_Unpickler):
    """Of a tensor that torch saved alone: where its values are in the file."""

    dispatch: ClassVar = {**_Unpickler.dispatch, CODES["BINPERSID"]: PythonUnpickler.load_binpersid}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return lambda storage, offset, size, stride, *_: (storage, offset, size, stride)
        if module == "torch" and name in STORAGES:
            return STORAGES[name]
        return super().find_class(module, name)

    def persistent_load(self, storage: Any) -> Any:
        return storage


def _read_tensor(stream: io.BytesIO, dtype: torch.dtype) -> Tensor:
    """A tensor in the format of `torch.save`: an archive with a pickle that describes it, and its values as bytes."""
    with zipfile.ZipFile(stream) as archive:
        files = {entry.filename.partition("/")[2]: entry for entry in archive.infolist()}
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in files.values()):
            raise ValueError("it is compressed")  # to a thousandth of what it takes in memory
        described = _TensorUnpickler(io.BytesIO(archive.read(files["data.pkl"]))).load()
        (_, saved_dtype, key, *_), offset, size, stride = described
        values = archive.read(files[f"data/{key}"])
    if saved_dtype != dtype:
        raise ValueError(f"it holds {saved_dtype}, not {dtype}")
    flat = torch.frombuffer(bytearray(values), dtype=dtype) if values else torch.empty(0, dtype=dtype)
    return flat.as_strided(size, stride, offset)
