"""LoRA: a linear layer that stays as it is, and the product of two thin matrices beside it, which is trained.

An adapted layer keeps its place, its weight and its name. What is saved to act with has the product added to the
weight, so that nothing that loads a policy has to know of adapters.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flexor.core.errors import ConfigError
from flexor.core.rng import key_of
from flexor.core.tensors import copy_part
from flexor.core.typed import closest, setting

ALL_LINEAR = "all-linear"
M = TypeVar("M", bound=nn.Module)


@dataclass
class LoraConfig:
    r: int = setting(0, at_least=0)
    """Rank of the adapters; 0 trains the policy itself."""
    alpha: float = 8.0
    """What an adapter adds is multiplied by alpha / r."""
    dropout: float = 0.0
    """Dropout before an adapter."""
    target_modules: list[str] | str = ALL_LINEAR
    """Which linear layers are adapted: all-linear, a list of names or ends of names, or a regular expression."""
    full_training_modules: list[str] = field(default_factory=list)
    """Modules, by names or ends of names, that are trained whole."""

    def validate(self) -> None:
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"lora.dropout={self.dropout} must be at least 0 and less than 1.")
        given = [f.name for f in fields(self) if getattr(self, f.name) != getattr(LoraConfig(), f.name)]
        if given and not self.r:
            raise ConfigError(f"lora.{given[0]} has no effect without a rank: set --lora.r=16.")
        if isinstance(self.target_modules, str):
            try:
                re.compile(self.target_modules)
            except re.error as error:
                raise ConfigError(
                    f"lora.target_modules={self.target_modules} is no regular expression ({error}). "
                    "A list is written [one,another]."
                ) from error

    @property
    def scale(self) -> float:
        return self.alpha / self.r


class LoraLinear(nn.Linear):
    """A linear layer with an adapter. No layer is made as one: `adapt` turns a layer into it."""

    def adapt(self, config: LoraConfig, key: int) -> None:
        # float32 whatever the weight is: small steps would be lost in bfloat16
        device = self.weight.device
        self.lora_A = nn.Parameter(torch.empty(config.r, self.in_features, device=device))
        self.lora_B = nn.Parameter(torch.empty(self.out_features, config.r, device=device))
        self.scale, self.dropout, self.key = config.scale, config.dropout, key
        self.start()

    @torch.no_grad()
    def start(self) -> None:
        """Values that change nothing yet. The key decides, so each rank can fill its part on its own."""
        if self.lora_A.is_meta:
            return
        values = torch.empty(self.lora_A.shape)
        nn.init.kaiming_uniform_(values, math.sqrt(5), generator=torch.Generator().manual_seed(self.key))
        copy_part(self.lora_A, values)
        copy_part(self.lora_B, torch.zeros(self.lora_B.shape))

    def forward(self, x: Tensor) -> Tensor:
        dropped = F.dropout(x, self.dropout, self.training) if self.dropout else x
        return super().forward(x) + self.scale * F.linear(F.linear(dropped, self.lora_A), self.lora_B)


def add_adapters(policy: nn.Module, config: LoraConfig, seed: int) -> None:
    """Adapters, and the modules named, are all that is trained from here on. What a policy freezes stays frozen."""
    modules = dict(policy.named_modules())
    whole = {
        parameter
        for module in _named(modules, config.full_training_modules, "lora.full_training_modules").values()
        for parameter in module.parameters()
        if parameter.requires_grad
    }
    layers = {
        name: module
        for name, module in modules.items()
        # a subclass may read its weight itself, as torch's attention does
        if type(module) is nn.Linear and module.weight.requires_grad and module.weight not in whole
    }
    targets = _named(layers, config.target_modules, "lora.target_modules")
    policy.requires_grad_(False)
    for parameter in whole:
        parameter.requires_grad_(True)
    for name, layer in targets.items():
        layer.__class__ = LoraLinear  # in its place: it may be known under several names
        assert isinstance(layer, LoraLinear)
        layer.adapt(config, key_of("lora", seed, name) >> 1)  # torch's seeds have 63 bits


def _named(modules: Mapping[str, M], wanted: list[str] | str, setting: str) -> dict[str, M]:
    """Those of the modules that a setting names, as PEFT reads it."""
    patterns = {wanted: wanted} if isinstance(wanted, str) else {w: rf"(.*\.)?{re.escape(w)}" for w in wanted}
    if wanted == ALL_LINEAR:
        patterns = {wanted: ".*"}
    named: dict[str, M] = {}
    for text, pattern in patterns.items():
        found = {name: module for name, module in modules.items() if re.fullmatch(pattern, name)}
        if not found:
            raise ConfigError(
                f"{setting}={text}: there is nothing of that name to train. {closest(text, modules)}"
            )
        named |= found
    return named


def start_adapters(policy: nn.Module) -> None:
    for layer in policy.modules():
        if isinstance(layer, LoraLinear):
            layer.start()


def is_adapter(name: str) -> bool:
    return name.endswith((".lora_A", ".lora_B"))


def merged(weights: Mapping[str, Tensor], config: LoraConfig) -> dict[str, Tensor]:
    """Weights without adapters that compute the same."""
    plain = {name: tensor for name, tensor in weights.items() if not is_adapter(name)}
    for name, up in weights.items():
        if name.endswith(".lora_B"):
            layer = name.removesuffix(".lora_B")
            weight, down = plain[f"{layer}.weight"].cpu(), weights[f"{layer}.lora_A"].cpu()
            added = config.scale * (up.cpu().float() @ down.float())
            plain[f"{layer}.weight"] = (weight.float() + added).to(weight.dtype)
    return plain
