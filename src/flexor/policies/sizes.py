"""Limits on the sizes in a policy's settings, checked before a network is built from them.

Wrong sizes may come from an untrusted checkpoint or a typing mistake. A network of a million layers would take hours to
build and fail afterwards, because no file has its weights.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from flexor.core.errors import ConfigError, FlexorError
from flexor.core.foreign_files import MALFORMED
from flexor.policies.features import Kind

MAX_SIZE = 1 << 20
"""Of an integer that sizes a network: the largest vocabularies have a quarter of it."""
MAX_INPUT_VALUES = 1 << 28  # values of a feature: an image of 16,000 x 5,000 pixels
MAX_PARAMETERS = 10_000  # tensors; the largest policies have 2,000
MAX_LAYERS = 1_000
MAX_BUFFER_BYTES = (
    4 << 30
)  # bytes of masks, positions and codes, which are real before any weights are compared
DIMENSIONS = {Kind.VISUAL: 3, Kind.STATE: 1, Kind.ENV: 1, Kind.ACTION: 1}
SEQUENCE = 1 << 14
"""The longest that a network attends to: some have a real table of its square, before any weights are compared."""
SETTING_LIMITS = {
    **dict.fromkeys(
        ("horizon", "chunk_size", "action_chunk_size", "n_obs_steps", "n_action_steps"), SEQUENCE
    ),
    **dict.fromkeys(("n_action_pred_token", "prefix_length", "tokenizer_max_length"), SEQUENCE),
    **dict.fromkeys(("max_action_tokens", "max_decoding_steps", "diffusion_step_embed_dim"), SEQUENCE),
    **dict.fromkeys(("dim_model", "hidden_dim", "timestep_embed_dim", "gpt_hidden_dim"), 1 << 16),
    **dict.fromkeys(("vqvae_n_embed", "vqvae_embedding_dim"), 1 << 14),
    "gpt_block_size": 1 << 12,
    "image_size": 1 << 12,  # of a vision-language model
    **dict.fromkeys(("image_min_pixels", "image_max_pixels"), 1 << 24),
}
IMAGE_SIZES = ("_shape", "_resolution", "resize_imgs_with_padding")  # settings with a height and width
LENGTHS = ("optimizer_", "scheduler_")  # settings of the training, which are no sizes


def check_sizes(config: Any) -> None:
    """Refuse a policy's settings that would make it absurdly large."""
    for field in dataclasses.fields(config):
        if not field.name.startswith(LENGTHS):
            _check(f"policy.{field.name}", getattr(config, field.name))
    for name, feature in {**config.input_features, **config.output_features}.items():
        values = 1
        for size in feature.shape:
            values *= max(size, 0)
        dimensions = DIMENSIONS.get(feature.type, len(feature.shape))
        if not 0 < values <= MAX_INPUT_VALUES or len(feature.shape) != dimensions:
            raise ConfigError(
                f"The feature {name!r} has the shape {list(feature.shape)}, which can't be right."
            )


def _check(name: str, value: Any) -> None:
    if isinstance(value, bool):
        return
    setting = name.rpartition(".")[2]
    limit = SETTING_LIMITS.get(setting, MAX_LAYERS if "layer" in setting else MAX_SIZE)
    if isinstance(value, int) and abs(value) > limit:
        raise ConfigError(f"{name}={value} can't be right: no policy has more than {limit:,}.")
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        if len(value) > MAX_SIZE:
            raise ConfigError(f"{name} has {len(value):,} values, which can't be right.")
        for item in value:
            _check(name, item)
        is_image = name.endswith(IMAGE_SIZES) and all(isinstance(size, int) for size in value)
        if is_image and math.prod(value) > MAX_INPUT_VALUES:
            raise ConfigError(f"{name}={list(value)} can't be right: no image has that size.")


def check_model_sizes(source: str, described: Mapping[str, Any]) -> None:
    """Refuse the config.json of a pretrained model that a policy is to be built from."""
    for key, value in described.items():
        if isinstance(value, Mapping):
            check_model_sizes(f"{source}.{key}", value)
        else:
            _check(f"{source}.{key}", value)


@contextmanager
def building(kind: str) -> Iterator[None]:
    """A context in which a built-in policy is built from untrusted settings: failures are errors of the settings."""
    register, count = nn.Module.register_parameter, 0
    register_buffer, tables = nn.Module.register_buffer, 0

    def register_counted(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        nonlocal count
        count += 1
        if count > MAX_PARAMETERS:
            raise ConfigError(
                f"The settings of this {kind} policy make a network of more than {MAX_PARAMETERS:,} tensors, which "
                "can't be right. Check its numbers of layers and steps."
            )
        register(module, name, parameter)

    def register_counted_buffer(module: nn.Module, name: str, tensor: Any, persistent: bool = True) -> None:
        nonlocal tables
        tables += tensor.nbytes if tensor is not None and not tensor.is_meta else 0
        if tables > MAX_BUFFER_BYTES:
            raise ConfigError(
                f"The settings of this {kind} policy make tables of more than {MAX_BUFFER_BYTES >> 30} GB, which "
                "can't be right. Check its sizes."
            )
        register_buffer(module, name, tensor, persistent)

    nn.Module.register_parameter = register_counted  # type: ignore[method-assign, assignment]
    nn.Module.register_buffer = register_counted_buffer  # type: ignore[method-assign, assignment]
    try:
        yield
    except (FlexorError, torch.OutOfMemoryError):  # a GPU that is too small is not an error of the settings
        raise
    except (*MALFORMED, RuntimeError, AssertionError, MemoryError) as error:
        raise ConfigError(f"The settings of this {kind} policy make no network: {error!r}") from error
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
        nn.Module.register_buffer = register_buffer  # type: ignore[method-assign]
