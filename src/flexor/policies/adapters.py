"""LoRA: the weight of a linear layer is frozen, and the product of two low-rank matrices is added to it and trained.

An adapted layer keeps its module, weight and name. Weights saved for inference have the product merged in, so that
a policy loads without adapters.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flexor.core.errors import ConfigError
from flexor.core.rng import key_of
from flexor.core.tensors import copy_part
from flexor.core.typed import closest, setting
from flexor.policies.weight_names import shared_parameters, tied_names

ALL_LINEAR = "all-linear"
M = TypeVar("M")


@dataclass(frozen=True)
class LoraConfig:
    r: int = setting(0, at_least=0)
    """Rank of the LoRA adapters; 0 trains the policy itself, without adapters."""
    alpha: float = 8.0
    """The output of an adapter is multiplied by alpha / r."""
    dropout: float = 0.0
    """Dropout on the input of an adapter."""
    target_modules: list[str] | str | None = None
    """Linear layers that get an adapter: all-linear, a list of names or name endings, or a regular expression. By
    default the policy decides, usually for all-linear."""
    full_training_modules: list[str] = field(default_factory=list)
    """Modules that are trained fully, without adapters: a list of names or name endings."""
    base: Literal["8bit", "4bit"] | None = None
    """Store the frozen weights of the policy's blocks in 8 or 4 bits, as QLoRA does. Checkpoints have the original
    weights. By default they are stored in bfloat16 where a run computes in bf16."""

    def validate(self) -> None:
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"lora.dropout={self.dropout} must be at least 0 and less than 1.")
        changed = [f.name for f in fields(self) if getattr(self, f.name) != getattr(LoraConfig(), f.name)]
        if changed and not self.r:
            raise ConfigError(f"lora.{changed[0]} has no effect without a rank: set --lora.r=16.")
        if isinstance(self.target_modules, str):
            try:
                re.compile(self.target_modules)
            except re.error as error:
                raise ConfigError(
                    f"lora.target_modules={self.target_modules} is not a regular expression ({error}). "
                    "Write a list as [one,another]."
                ) from error

    @property
    def scale(self) -> float:
        return self.alpha / self.r

    @property
    def base_bits(self) -> int | None:
        return None if self.base is None else {"8bit": 8, "4bit": 4}[self.base]


class LoraLinear(nn.Linear):
    """A linear layer with an adapter. Not constructed: an existing layer gets this class, then `adapt` is called."""

    def adapt(self, config: LoraConfig, key: int) -> None:
        # float32 whatever the weight's dtype: in bfloat16, small updates would round to zero
        device = self.weight.device
        self.lora_A = nn.Parameter(torch.empty(config.r, self.in_features, device=device))
        self.lora_B = nn.Parameter(torch.empty(self.out_features, config.r, device=device))
        self.scale, self.dropout, self.key = config.scale, config.dropout, key
        self.init_adapter()

    @torch.no_grad()
    def init_adapter(self) -> None:
        """Set initial values, which add zero. They depend only on the key, so each rank can fill its own shard."""
        if self.lora_A.is_meta:
            return
        values = torch.empty(self.lora_A.shape, device="cpu")  # also where another device is the default
        nn.init.kaiming_uniform_(values, math.sqrt(5), generator=torch.Generator().manual_seed(self.key))
        copy_part(self.lora_A, values)
        copy_part(self.lora_B, torch.zeros(self.lora_B.shape, device="cpu"))

    def forward(self, x: Tensor) -> Tensor:
        dropped = F.dropout(x, self.dropout, self.training) if self.dropout else x
        return super().forward(x) + self.scale * F.linear(F.linear(dropped, self.lora_A), self.lora_B)


def add_adapters(
    policy: nn.Module, config: LoraConfig, seed: int, default: list[str] | str = ALL_LINEAR
) -> None:
    """Train only adapters and the modules of full_training_modules. Frozen weights stay frozen.

    `default`: the layers that get an adapter if the settings name none.
    """
    modules = dict(policy.named_modules())
    fully_trained = modules_named(modules, config.full_training_modules, "lora.full_training_modules")
    _refuse_alias(policy, fully_trained)
    trained = {
        parameter
        for module in fully_trained.values()
        for parameter in module.parameters()
        if parameter.requires_grad
    }
    shared = shared_parameters(policy)
    layers = {
        name: module
        for name, module in modules.items()
        # no subclasses: their weight may be read directly, as torch's attention does
        if type(module) is nn.Linear and module.weight.requires_grad and module.weight not in trained | shared
    }
    requested = default if config.target_modules is None else config.target_modules
    if isinstance(requested, list):
        _refuse_tied(modules, requested, shared)
    targets = modules_named(layers, requested, "lora.target_modules")
    policy.requires_grad_(False)
    for parameter in trained:
        parameter.requires_grad_(True)
    for name, layer in targets.items():
        layer.__class__ = LoraLinear  # in place: several modules may share it
        assert isinstance(layer, LoraLinear)
        layer.adapt(config, key_of("lora", seed, name) >> 1)  # torch's seeds have 63 bits


def _refuse_tied(
    modules: Mapping[str, nn.Module], requested: list[str], shared: Collection[nn.Parameter]
) -> None:
    """Refuse to adapt a layer whose weight another one has too: merging the adapter would change both."""
    tied = {name: module for name, module in modules.items() if getattr(module, "weight", None) in shared}
    for name in requested:
        if any(re.fullmatch(rf"(.*\.)?{re.escape(name)}", each) for each in tied):
            raise ConfigError(
                f"lora.target_modules={name}: another module has the same weight, so it can't have an adapter. "
                "Leave it out, or train it fully with --lora.full_training_modules."
            )


def _refuse_alias(policy: nn.Module, fully_trained: Collection[str]) -> None:
    """Refuse modules that have a tied weight, but not under the name that files have."""
    inside = tuple(f"{module}." for module in fully_trained)
    for alias, name in tied_names(policy).items():
        if alias.startswith(inside) and not name.startswith(inside):
            raise ConfigError(
                f"lora.full_training_modules: {alias} is the same weight as {name}, under which it is saved: name the "
                f"module {name.rpartition('.')[0]}."
            )


def modules_named(modules: Mapping[str, M], requested: list[str] | str, setting: str) -> dict[str, M]:
    """The modules that a setting names, with PEFT's rules."""
    patterns = (
        {requested: requested}
        if isinstance(requested, str)
        else {w: rf"(.*\.)?{re.escape(w)}" for w in requested}
    )
    if requested == ALL_LINEAR:
        patterns = {requested: ".*"}
    named: dict[str, M] = {}
    for text, pattern in patterns.items():
        matches = {name: module for name, module in modules.items() if re.fullmatch(pattern, name)}
        if not matches:
            raise ConfigError(
                f"{setting}={text}: the policy has no trainable module of that name. {closest(text, modules)}"
            )
        named |= matches
    return named


def init_adapters(policy: nn.Module) -> None:
    for layer in policy.modules():
        if isinstance(layer, LoraLinear):
            layer.init_adapter()


def is_adapter(name: str) -> bool:
    return name.endswith((".lora_A", ".lora_B"))


def merged(weights: Mapping[str, Tensor], config: LoraConfig) -> dict[str, Tensor]:
    """Weights with the adapters merged in, which compute the same."""
    plain = {name: tensor for name, tensor in weights.items() if not is_adapter(name)}
    for name, up in weights.items():
        if name.endswith(".lora_B"):
            layer = name.removesuffix(".lora_B")
            weight, down = plain[f"{layer}.weight"].cpu(), weights[f"{layer}.lora_A"].cpu()
            added = config.scale * (up.cpu().float() @ down.float())
            plain[f"{layer}.weight"] = (weight.float() + added).to(weight.dtype)
    return plain
