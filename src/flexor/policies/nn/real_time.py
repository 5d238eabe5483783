"""Real-time chunking (Black et al. 2025, https://arxiv.org/abs/2506.07339): a new chunk continues the one before it.

A robot does not stop while its policy predicts: it goes on executing the last chunk. So the first actions of the new
chunk are guided towards those of the last one: fully for as long as the prediction takes, then less and less. Every
integration step moves the denoised chunk towards them. As in LeRobot, the network's derivative is left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flexor.core.batch import Batch
from flexor.core.errors import ConfigError
from flexor.core.typed import from_plain

PREVIOUS = "previous_actions"  # [B, K, A]: of the last chunk, from now on, normalised
# [H] or [B, H]: how much they guide each action of the new chunk
GUIDANCE_WEIGHTS = "previous_actions_weights"


@dataclass(frozen=True)
class RealTimeSettings:
    """The settings `rtc_config` of a policy, under LeRobot's names."""

    enabled: bool = True
    """No effect: it is enabled where the last chunk is passed."""
    prefix_attention_schedule: Literal["ZEROS", "ONES", "LINEAR", "EXP"] = "LINEAR"
    """How weights fall after the actions that are executed during the prediction, to 0 at `execution_horizon`."""
    max_guidance_weight: float = 10.0
    """The strongest correction in one integration step."""
    execution_horizon: int = 10
    """Actions of the new chunk that are guided by the last one."""
    mode: Literal["guided", "trained"] = "guided"
    """How LeRobot continues a chunk. Flexor guides; `trained`, for policies that were trained for it, is refused."""
    debug: bool = False
    """No effect."""
    debug_maxlen: int = 100
    """No effect."""

    @classmethod
    def of(cls, config: dict[str, Any] | None) -> RealTimeSettings:
        settings = from_plain(cls, config or {}, "policy.rtc_config")
        if settings.mode != "guided":
            raise ConfigError(
                "policy.rtc_config.mode=trained is not supported: Flexor guides a new chunk while it is denoised. Set "
                "--policy.rtc_config.mode=guided."
            )
        if settings.max_guidance_weight <= 0 or settings.execution_horizon < 1:
            raise ConfigError(
                "policy.rtc_config: max_guidance_weight must be more than 0, and execution_horizon at least 1."
            )
        return settings

    def guidance_weights(self, chunk: int, remaining: int, delay: int) -> Tensor:
        """[chunk], from 1 to 0. `remaining`: actions of the last chunk; `delay`: how many of them will be executed."""
        end = min(self.execution_horizon, remaining, chunk)
        start = min(delay, end)
        number = torch.arange(chunk)
        if self.prefix_attention_schedule == "ZEROS":
            return (number < start).float()
        if self.prefix_attention_schedule == "ONES":
            return (number < end).float()
        falling = (1 - (number - start + 1) / (end - start + 1)).clamp(0, 1)
        if self.prefix_attention_schedule == "EXP":
            falling = falling * torch.expm1(falling) / (torch.e - 1)
        return torch.where(number < start, 1.0, falling)


class PrefixGuidance(NamedTuple):
    """Guides a new chunk towards the last one."""

    actions: Tensor  # of the last chunk, [B, H, A]
    weights: Tensor  # [H] or [B, H]
    max_weight: float

    def correct(self, velocity: Tensor, x: Tensor, time: float) -> Tensor:
        """The velocity at `time` (1: noise, 0: actions) that also leads towards the last chunk's actions."""
        denoised = x - time * velocity
        weight = self.max_weight
        if time < 1:
            weight = min(weight, time / (1 - time) * (time**2 + (1 - time) ** 2) / time**2)
        return velocity - weight * self.weights[..., None] * (self.actions - denoised)


def prefix_guidance(
    batch: Batch, config: dict[str, Any] | None, chunk: int, width: int
) -> PrefixGuidance | None:
    """The guidance of a chunk [B, chunk, width]; None without a last chunk. `config` is `rtc_config`."""
    if PREVIOUS not in batch:
        return None
    previous = batch[PREVIOUS][:, :chunk]
    padded = F.pad(previous, (0, width - previous.shape[2], 0, chunk - previous.shape[1]))
    settings = RealTimeSettings.of(config)
    return PrefixGuidance(padded, batch[GUIDANCE_WEIGHTS].to(padded), settings.max_guidance_weight)
