"""A checkpoint -> a predictor: on which device, in which precision, compiled or not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch

from flexor.config.parse import nest, parse_flags
from flexor.core.devices import find_device
from flexor.core.errors import ConfigError
from flexor.core.log import log
from flexor.policies.base import Policy, PolicyConfig
from flexor.policies.nn.cast_to_bf16 import cast_to_bf16
from flexor.policies.pretrained import Pretrained, find_folder, load_pretrained, read_config
from flexor.serve.predictor import Predictor
from flexor.serve.settings import ServeSettings
from flexor.train.compile import compile_blocks

Precision = Literal["float32", "tf32", "bfloat16"]


def open_predictor(
    checkpoint: str,
    settings: ServeSettings,
    *,
    device: str | None = None,
    dtype: Precision | None = None,
    compiled: bool = False,
    flags: Sequence[str] = (),
) -> Predictor:
    """Load a policy of Flexor or LeRobot. `flags`: its settings, as --policy.NAME=VALUE."""
    overrides = _overrides(flags)
    folder = find_folder(checkpoint)
    where = find_device(overrides.pop("device", None) or device)
    overrides |= weights_dtype(dtype, read_config(str(folder), overrides))
    pretrained = load_pretrained(str(folder), str(where), overrides)
    count = sum(p.numel() for p in pretrained.policy.parameters())
    log.info(
        "loaded %s: %s, %.1f M parameters, on %s", folder, pretrained.policy.config.type, count / 1e6, where
    )
    return predictor_of(pretrained, settings, dtype=dtype, compiled=compiled)


def weights_dtype(dtype: Precision | None, config: PolicyConfig) -> dict[str, str]:
    """The change of a policy's settings that this precision means, if the policy has one for the type of weights."""
    if dtype is None or not hasattr(config, "dtype"):
        return {}
    if dtype == "tf32":  # of products in float32
        return {"dtype": "float32"} if config.dtype is None else {}
    return {"dtype": dtype}


def predictor_of(
    pretrained: Pretrained, settings: ServeSettings, *, dtype: Precision | None, compiled: bool
) -> Predictor:
    """For a policy on its device."""
    where = next(pretrained.policy.parameters()).device
    if compiled:
        log.info("compiling; this can take a minute, and the port opens after it")
        compile_blocks(pretrained.policy, where)
    return Predictor(
        pretrained,
        reply=settings.reply,
        seed=settings.seed,
        autocast=compute_in(dtype, pretrained.policy),
        fixed_sizes=compiled or where.type == "cuda",
        max_batch=settings.max_batch,
    )


def compute_in(dtype: Precision | None, policy: Policy) -> torch.dtype | None:
    """From now on, predict in this precision. Returns the type for autocast, if it is needed."""
    settings_of_torch: tuple[Any, Any] = (torch.backends.cuda.matmul, torch.backends.cudnn)
    for part in settings_of_torch:
        part.allow_tf32 = dtype == "tf32"
    if dtype != "bfloat16" or not policy.needs_autocast:
        return None
    cast_to_bf16(policy)
    return torch.bfloat16


def _overrides(flags: Sequence[str]) -> dict[str, Any]:
    settings = parse_flags(flags)
    for name in settings:
        if not name.startswith("policy."):
            raise ConfigError(f"Unknown setting --{name}. Settings of the policy begin with --policy.")
    overrides: dict[str, Any] = nest(settings).get("policy", {})
    return overrides
