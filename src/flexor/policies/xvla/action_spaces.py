"""What the numbers of an action mean, which decides the loss: positions, rotations, joints, grippers.

The network predicts actions of a fixed width. A robot's are padded with zeros to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class LossPart:
    """A part of the loss: `scale` times the mean error of some channels."""

    channels: tuple[int, ...]
    scale: float = 1.0
    binary: bool = False
    """Cross-entropy of a gripper that is open (1) or closed (0), not the squared error."""


@dataclass(frozen=True)
class ActionSpace:
    width: int
    """Channels that the network predicts."""
    parts: Mapping[str, Sequence[LossPart]]
    output: int
    """Channels that a robot gets, from the first on."""
    hidden: tuple[int, ...] = ()
    """Channels that the network sees neither in the state nor in noisy actions."""
    sigmoid: tuple[int, ...] = ()
    """Channels of which the network predicts the logit."""
    state_width: int | None = None
    """The only width of states that it supports; None: any that has the hidden channels."""


def _two_arms(gripper: LossPart) -> dict[str, Sequence[LossPart]]:
    """The pose of each arm is a position, then a rotation as two columns of its matrix, and then its gripper."""
    return {
        "position_loss": [LossPart((0, 1, 2), 500.0), LossPart((10, 11, 12), 500.0)],
        "rotate6D_loss": [LossPart((*range(3, 9),), 10.0), LossPart((*range(13, 19),), 10.0)],
        "gripper_loss": [gripper],
    }


def _joints(real: int) -> dict[str, Sequence[LossPart]]:
    return {"joints_loss": [LossPart((*range(real),))]}


ACTION_SPACES: Mapping[str, ActionSpace] = {
    "ee6d": ActionSpace(20, _two_arms(LossPart((9, 19), binary=True)), 20, hidden=(9, 19), sigmoid=(9, 19)),
    "joint": ActionSpace(
        14,
        {
            "joints_loss": [LossPart((*range(6), *range(7, 13)))],
            "gripper_loss": [LossPart((6, 13), 0.1, binary=True)],
        },
        output=14,
        hidden=(6, 13),
        sigmoid=(6, 13),
    ),
    "agibot_ee6d": ActionSpace(20, _two_arms(LossPart((9, 19), 10.0)), 20),
    "franka_joint7": ActionSpace(20, _joints(7), 7),
    "so101_bimanual": ActionSpace(
        20,
        {
            **_joints(12),
            "gripper_loss": [LossPart((5, 11))],
            "left_arm_loss": [LossPart((*range(6),))],
            "right_arm_loss": [LossPart((*range(6, 12),))],
        },
        output=12,
        hidden=(5, 11),
        sigmoid=(5, 11),  # although the loss compares what was no logit: so it is in LeRobot
        state_width=20,
    ),
}
AUTO = "auto"  # as many joints as the dataset has


def action_space(mode: str, width: int, real: int) -> ActionSpace:
    """`width` and `real`, the values of the robot's action, are only for `auto`."""
    return (
        ActionSpace(width, _joints(min(real, width)), min(real, width))
        if mode == AUTO
        else ACTION_SPACES[mode]
    )


class ActionLayout(nn.Module):
    """An action space on a device. It has no weights."""

    visible: Tensor
    state_visible: Tensor
    binary: Tensor
    is_logit: Tensor
    weights: Tensor

    def __init__(self, space: ActionSpace, state_width: int):
        super().__init__()
        self.space = space
        binary = [c for parts in space.parts.values() for part in parts if part.binary for c in part.channels]
        weights = torch.tensor([_channel_weights(parts, space.width) for parts in space.parts.values()])
        self.register_buffer("visible", ~_mask(space.hidden, space.width), persistent=False)
        self.register_buffer("state_visible", ~_mask(space.hidden, state_width), persistent=False)
        self.register_buffer("binary", _mask(binary, space.width), persistent=False)
        self.register_buffer("is_logit", _mask(space.sigmoid, space.width), persistent=False)
        self.register_buffer("weights", weights, persistent=False)

    def hide_state(self, state: Tensor) -> Tensor:
        """A state [B, S] as the network sees it."""
        return state * self.state_visible

    def hide_action(self, actions: Tensor) -> Tensor:
        """Noisy actions [B, H, width] as the network sees them."""
        return actions * self.visible

    def losses(self, predicted: Tensor, actions: Tensor, valid: Tensor | None = None) -> dict[str, Tensor]:
        """The parts of the loss, {name: [B]}, of predicted and real actions [B, H, width].

        `valid` [B, width] weighs the channels of each sample.
        """
        error = F.mse_loss(predicted, actions, reduction="none")
        if any(part.binary for parts in self.space.parts.values() for part in parts):
            entropy = F.binary_cross_entropy_with_logits(predicted, actions, reduction="none")
            error = torch.where(self.binary, entropy, error)
        by_channel = error.mean(1)  # [B, width]
        if valid is not None:
            by_channel = by_channel * valid
        return {
            name: (by_channel * weights).sum(1)
            for name, weights in zip(self.space.parts, self.weights, strict=True)
        }

    def output(self, predicted: Tensor) -> Tensor:
        """Predicted actions [B, H, width] as a robot gets them, [B, H, output]."""
        if self.space.sigmoid:
            predicted = torch.where(self.is_logit, predicted.sigmoid(), predicted)
        return predicted[..., : self.space.output]


def _mask(channels: Sequence[int], width: int) -> Tensor:
    """[width], true for these channels."""
    return torch.tensor([channel in channels for channel in range(width)], dtype=torch.bool)


def _channel_weights(parts: Sequence[LossPart], width: int) -> list[float]:
    """[width]: a part of the loss is the sum of the channels' mean errors times these."""
    weights = [0.0] * width
    for part in parts:
        for channel in part.channels:
            weights[channel] += part.scale / len(part.channels)
    return weights
