"""Real-time chunking (Black et al. 2025, https://arxiv.org/abs/2506.07339): a new chunk continues the one before it.

A robot does not stop while its policy predicts: it executes more of the last chunk meanwhile. So the first actions of
the new chunk are drawn to those of the last one, fully for as long as the prediction takes, then less and less. Every
integration step moves the chunk that it is heading for towards them. As in LeRobot, the network's derivative is left
out.
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
PULL = "previous_actions_pull"  # [H] or [B, H]: how much each action of the new chunk is drawn to them


@dataclass(frozen=True)
class RealTimeSettings:
    """The settings `rtc_config` of a policy, under LeRobot's names."""

    enabled: bool = True
    """Part of LeRobot's settings, without effect: whoever gives the last chunk asks for it."""
    prefix_attention_schedule: Literal["ZEROS", "ONES", "LINEAR", "EXP"] = "LINEAR"
    """How the pull falls after the actions that are executed during the prediction, to 0 at `execution_horizon`."""
    max_guidance_weight: float = 10.0
    """The strongest correction in one integration step."""
    execution_horizon: int = 10
    """Actions of the new chunk that are drawn to the last one."""
    debug: bool = False
    """Part of LeRobot's settings, without effect."""
    debug_maxlen: int = 100
    """Likewise."""

    @classmethod
    def of(cls, given: dict[str, Any] | None) -> RealTimeSettings:
        settings = from_plain(cls, given or {}, "policy.rtc_config")
        if settings.max_guidance_weight <= 0 or settings.execution_horizon < 1:
            raise ConfigError(
                "policy.rtc_config: max_guidance_weight must be more than 0, and execution_horizon at least 1."
            )
        return settings

    def pull(self, chunk: int, left: int, delay: int) -> Tensor:
        """[chunk], from 1 to 0. `left`: actions that are left of the last chunk; `delay`: that will be executed."""
        end = min(self.execution_horizon, left, chunk)
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


class Held(NamedTuple):
    """What a new chunk is drawn to."""

    actions: Tensor  # [B, H, A]
    pull: Tensor  # [H] or [B, H]
    most: float  # max_guidance_weight

    def correct(self, velocity: Tensor, x: Tensor, time: float) -> Tensor:
        """The velocity at `time` (1: noise, 0: actions) that also leads towards what is held."""
        ahead = x - time * velocity  # the chunk that x is heading for
        weight = self.most
        if time < 1:
            weight = min(weight, time / (1 - time) * (time**2 + (1 - time) ** 2) / time**2)
        return velocity - weight * self.pull[..., None] * (self.actions - ahead)


def held_in(batch: Batch, settings: dict[str, Any] | None, chunk: int, width: int) -> Held | None:
    """What a chunk of [B, chunk, width] is drawn to; None if there is no last chunk."""
    if PREVIOUS not in batch:
        return None
    previous = batch[PREVIOUS][:, :chunk]
    padded = F.pad(previous, (0, width - previous.shape[2], 0, chunk - previous.shape[1]))
    return Held(padded, batch[PULL].to(padded), RealTimeSettings.of(settings).max_guidance_weight)
