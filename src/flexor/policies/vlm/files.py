"""The files of a pretrained vision-language model, in a local folder or a Hub repository."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from torch import Tensor

from flexor.core.errors import ConfigError
from flexor.core.foreign_files import read_json_object
from flexor.core.model_files import is_repo_id
from flexor.core.name_ranges import listed
from flexor.core.paths import inside, safe_name
from flexor.core.tensors import described_in, fill
from flexor.policies.hf_transformers import located

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def find_file(name: str, file: str) -> Path:
    """A file of the model, downloaded if it is in a Hub repository."""
    name = located(name)
    if Path(name).is_dir():
        path = inside(Path(name), file)
        if not path.is_file():
            raise ConfigError(f"policy.vlm_model_name={name}: there is no {file} in this folder.")
        return path
    if not is_repo_id(name):
        raise ConfigError(
            f"policy.vlm_model_name={name}: there is no such folder, and it is not the name of a Hub repository "
            "(user/name)."
        )
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(name, file))
    except Exception as error:  # the client raises many types; all mean the same to the user
        message = (str(error).strip().splitlines() or [repr(error)])[0]
        raise ConfigError(
            f"policy.vlm_model_name={name} is neither a local folder nor a Hub repository that {file} can be "
            f"downloaded from: {message}"
        ) from error


def load_vlm(name: str, tensors: Mapping[str, Tensor]) -> None:
    """Fill tensors, named as in the model's files. Other tensors in the files are not read."""
    by_file: dict[Path, list[str]] = defaultdict(list)
    for tensor, file in _files_of(name, tensors).items():
        by_file[file].append(tensor)
    for file, names in by_file.items():
        try:
            described = described_in(file)
            mismatched = [
                tensor
                for tensor in names
                if tensor not in described or described[tensor].shape != tensors[tensor].shape
            ]
            if mismatched:
                raise ConfigError(f"{file} does not fit its config.json: {listed(mismatched)}.")
            fill({tensor: tensors[tensor] for tensor in names}, file)
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"Can't read the weights in {file}: {error}") from error


def _files_of(name: str, tensors: Mapping[str, Tensor]) -> dict[str, Path]:
    """The file of each tensor: one for all, or as the index of several says."""
    try:
        return dict.fromkeys(tensors, find_file(name, WEIGHTS))
    except ConfigError as absent:
        try:
            file = find_file(name, INDEX)
        except ConfigError:
            raise absent from None
    index = _weight_map(file)
    missing = [tensor for tensor in tensors if tensor not in index]
    if missing:
        raise ConfigError(f"policy.vlm_model_name={name}: its {INDEX} does not name {listed(missing)}.")
    return {tensor: find_file(name, index[tensor]) for tensor in tensors}


def _weight_map(file: Path) -> dict[str, str]:
    """The name of the file that holds each tensor, from an index."""
    try:
        return {tensor: safe_name(name) for tensor, name in read_json_object(file)["weight_map"].items()}
    except (ValueError, KeyError, AttributeError) as error:
        raise ConfigError(f"{file} does not say which file holds which weights: {error!r}") from error
