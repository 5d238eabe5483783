"""Weights in safetensors files: in one, or in several with an index that says which file has which tensor.

Or in torch's distributed checkpoint, which LeRobot writes with checkpoint_format=dcp.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from flexor.core.errors import CheckpointError, FlexorError
from flexor.core.foreign_files import MALFORMED, read_json_object
from flexor.core.model_files import ModelFiles
from flexor.core.name_ranges import listed
from flexor.core.paths import inside, safe_name
from flexor.core.run_files import SPLIT_WEIGHTS, TORCH_SHARDS, WEIGHTS
from flexor.core.shards import fill_from_shards
from flexor.core.tensors import described_in, fill
from flexor.core.torch_shards import TORCH_INDEX, TorchShards

PREFIX = "model."  # of the weights in a distributed checkpoint


class WeightFiles:
    """The weights in a folder: `model.safetensors`, the files in `model.safetensors.index.json`, or shards of torch."""

    def __init__(self, folder: Path, error: type[FlexorError] = CheckpointError):
        self.folder, self.error = folder, error
        self.file = inside(folder, WEIGHTS)
        self.index: dict[str, str] | None = None
        """Of several files: the file of each tensor."""
        self.shards: TorchShards | None = None
        if not self.file.is_file() and inside(folder, SPLIT_WEIGHTS).is_file():
            self.file = inside(folder, SPLIT_WEIGHTS)
            self.index = self._read_index()
        elif not self.file.is_file() and inside(folder, f"{TORCH_SHARDS}/{TORCH_INDEX}").is_file():
            self.file = inside(folder, TORCH_SHARDS)
            with self._readable(self.file):
                self.shards = TorchShards(self.file)

    def __str__(self) -> str:
        return str(self.file)

    def _read_index(self) -> dict[str, str]:
        try:
            weight_map = read_json_object(self.file)["weight_map"]
            return {str(tensor): safe_name(file) for tensor, file in weight_map.items()}
        except (*MALFORMED, OSError) as error:
            raise self.error(f"{self.file} does not say which file holds which weights: {error!r}") from error

    def names_of_files(self, tensors: Iterable[str]) -> set[str]:
        """The names of the files that have these tensors."""
        index = self.index
        return {WEIGHTS} if index is None else {index[name] for name in tensors if name in index}

    def described(self) -> dict[str, Tensor]:
        """All tensors, without memory."""
        if self.shards is not None:
            return {
                name.removeprefix(PREFIX): torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
                for name, tensor in self.shards.tensors.items()
            }
        if self.index is None:
            with self._readable(self.file):
                return described_in(self.file)
        described: dict[str, Tensor] = {}
        for file in sorted({*self.index.values()}):
            with self._readable(path := inside(self.folder, file)):
                described |= {n: t for n, t in described_in(path).items() if self.index.get(n) == file}
        if missing := self.index.keys() - described.keys():
            raise self.error(f"{self.file}: the files that it names do not have {listed(missing)}.")
        return described

    def fill(self, tensors: Mapping[str, Tensor], names: Mapping[str, str] | None = None) -> None:
        """Fill this rank's part of each tensor; only that part is read. `names`: those in the files, if they differ."""
        names = names or {name: name for name in tensors}
        if self.shards is not None:
            with self._readable(self.file):
                fill_from_shards(
                    {PREFIX + names[name]: tensor for name, tensor in tensors.items()}, self.shards
                )
            return
        by_file: dict[Path, list[str]] = defaultdict(list)
        for name in tensors:
            by_file[self._file_of(names[name])].append(name)
        for file, members in by_file.items():
            with self._readable(file):
                fill({name: tensors[name] for name in members}, file, names)

    def read(self, name: str) -> Tensor:
        """One tensor."""
        if self.shards is not None:
            described = self.described()[name]
            self.fill({name: (values := torch.empty_like(described, device="cpu"))})
            return values
        with self._readable(file := self._file_of(name)), safe_open(file, "pt") as source:
            tensor: Tensor = source.get_tensor(name)
        return tensor

    def _file_of(self, name: str) -> Path:
        return self.file if self.index is None else inside(self.folder, self.index[name])

    @contextmanager
    def _readable(self, file: Path) -> Iterator[None]:
        try:
            yield
        except (
            OSError,
            ValueError,
            SafetensorError,
            KeyError,
        ) as error:  # KeyError: a type that Flexor does not know
            raise self.error(f"Can't read the weights in {file}: {error}") from error


def load_tensors(files: ModelFiles, tensors: Mapping[str, Tensor]) -> None:
    """Fill tensors by their names in a pretrained model's files. Files with none of them are not downloaded."""
    folder = files.folder([WEIGHTS, SPLIT_WEIGHTS])
    weights = WeightFiles(folder, files.error)
    if weights.index is None and not weights.file.is_file():
        raise files.error(f"{files.label}: there is no {WEIGHTS} in {folder}.{files.advice}")
    if weights.index is not None:
        if missing := [name for name in tensors if name not in weights.index]:
            raise files.error(f"{weights} does not name {listed(missing)}.")
        needed = sorted(weights.names_of_files(tensors))
        files.folder(needed)
        weights.index = {name: file for name, file in weights.index.items() if file in needed}
    described = weights.described()
    shapes = {name: tensor.shape for name, tensor in described.items()}
    if mismatched := [name for name, tensor in tensors.items() if shapes.get(name) != tensor.shape]:
        raise files.error(f"{weights} does not fit its config.json: {listed(mismatched)}.")
    weights.fill(tensors)
