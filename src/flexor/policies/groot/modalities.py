"""How a GR00T's actions and states are scaled: by a dataset's range, or group by group by a base model's statistics.

A base model has statistics for each kind of robot. They are of groups, such as an arm's joints and a gripper, in the
order in which these make up the state and the action. Groups may be relative to the state at the start of the chunk;
then there are statistics for each of its steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexor.core.batch import ACTION, STATE
from flexor.core.errors import ConfigError

Ranges = Mapping[str, Any]
NAMES = {"xyz_rot6d": "xyz+rot6d", "xyz_rotvec": "xyz+rotvec"}


class Range(NamedTuple):
    """What is mapped to -1 and to 1: [D], or [H, D] for each step of a chunk."""

    low: Tensor
    high: Tensor

    def to(self, like: Tensor) -> Range:
        return Range(self.low.to(like), self.high.to(like))

    def rows(self, like: Tensor) -> Range:
        """For values [..., H, D]: those of the first steps."""
        return self if self.low.ndim == 1 else Range(self.low[: like.shape[-2]], self.high[: like.shape[-2]])

    def normalize(self, x: Tensor, clip: bool) -> Tensor:
        """A value that never changes becomes 0."""
        low, high = self.to(x).rows(x)
        span = high - low
        varies = span != 0
        scaled = torch.where(varies, 2 * (x - low) / torch.where(varies, span, 1.0) - 1, 0.0)
        return scaled.clamp(-1, 1) if clip else scaled

    def restore(self, x: Tensor, clip: bool) -> Tensor:
        low, high = self.to(x).rows(x)
        return ((x.clamp(-1, 1) if clip else x) + 1) * 0.5 * (high - low) + low


def dataset_range(stats: Mapping[str, Any], width: int) -> Range:
    """Of a feature, by the least and greatest values of a dataset."""
    low, high = (
        torch.as_tensor(stats.get(name, default)).float().flatten()[:width]
        for name, default in (("min", torch.zeros(width)), ("max", torch.ones(width)))
    )
    rest = width - len(low)
    return Range(torch.cat((low, low.new_zeros(rest))), torch.cat((high, high.new_ones(width - len(high)))))


class Group(NamedTuple):
    """Some neighbouring values of the action or the state."""

    key: str
    place: slice
    relative: bool = False
    kind: str = "non_eef"
    """eef: the pose of a hand."""
    format: str = "default"
    reference: str | None = None
    """The group of the state that it is relative to."""


@dataclass
class Modalities:
    """The groups of a kind of robot, with their statistics."""

    raw_stats: Mapping[str, Any]
    """modality -> group -> statistic -> values."""
    config: Mapping[str, Any]
    """modality -> modality_keys, action_configs, delta_indices."""
    use_percentiles: bool = False
    use_relative: bool = True
    states: list[Group] = field(init=False)
    actions: list[Group] = field(init=False)

    def __post_init__(self) -> None:
        try:
            self.states = self._groups("state")
            self.actions = self._groups("action")
        except (AttributeError, TypeError, KeyError, ValueError) as error:
            raise ConfigError(f"The base model's modalities can't be read: {error!r}") from error

    def _groups(self, modality: str) -> list[Group]:
        config = self.config.get(modality) or {}
        details = config.get("action_configs") or []
        groups, start = [], 0
        for number, key in enumerate(config.get("modality_keys") or []):
            width = width_of((self.raw_stats.get(modality) or {}).get(key) or {})
            detail = details[number] if number < len(details) else {}
            place = slice(start, start + width)
            if width:
                groups.append(
                    Group(
                        key,
                        place,
                        self.use_relative and _word(detail.get("rep")) == "relative",
                        _word(detail.get("type")),
                        _word(detail.get("format")),
                        detail.get("state_key") or key,
                    )
                )
            start += width
        return groups

    @property
    def steps(self) -> int | None:
        """Of a chunk."""
        return len((self.config.get("action") or {}).get("delta_indices") or []) or None

    @property
    def action_width(self) -> int:
        return self.actions[-1].place.stop if self.actions else 0

    @property
    def has_relative(self) -> bool:
        return any(group.relative for group in self.actions)

    def range_of(self, group: Group, modality: str) -> Range:
        source = "relative_action" if group.relative else modality
        percentiles = self.use_percentiles and not group.relative
        names = ("q01", "q99") if percentiles else ("min", "max")
        stats = (self.raw_stats.get(source) or {}).get(group.key) or {}
        if missing := [name for name in names if name not in stats]:
            raise ConfigError(
                f"The base model's statistics.json has no {' and '.join(missing)} of {source}.{group.key}."
            )
        low, high = (torch.tensor(stats[name], dtype=torch.float32) for name in names)
        return Range(low, high)

    def flat_range(self, modality: str) -> Range:
        """Of all groups side by side, [D]; of relative ones, the values of all steps."""
        ranges = [
            self.range_of(group, modality) for group in (self.states if modality == "state" else self.actions)
        ]
        return Range(*(torch.cat([each.flatten() for each in sides]) for sides in zip(*ranges)))

    def flat_statistics(self) -> dict[str, dict[str, Tensor]]:
        """As LeRobot saves them: the ranges as `min` and `max`."""
        flat = {}
        for name, modality, groups in ((STATE, "state", self.states), (ACTION, "action", self.actions)):
            if groups:
                low, high = self.flat_range(modality)
                flat[name] = {"min": low, "max": high}
        return flat

    def reference(self, state: Tensor, group: Group) -> Tensor:
        """What a relative group [B, H, D] is relative to: of the state [B, S], [B, 1, D]."""
        place = next((each.place for each in self.states if each.key == group.reference), None)
        if place is None or place.stop > state.shape[-1]:
            raise ConfigError(
                f"The action group {group.key!r} is relative to the state's {group.reference!r}, which is not in a "
                f"state of {state.shape[-1]} values."
            )
        return state[:, None, place]

    def as_relative(self, action: Tensor, state: Tensor) -> Tensor:
        """Actions [B, H, A] as the policy learns them."""
        parts = []
        for group in self.actions:
            part = action[..., group.place]
            if group.relative and group.kind != "non_eef":
                raise ConfigError(
                    f"The action group {group.key!r} is a relative pose of a hand: as LeRobot, Flexor predicts it but "
                    "does not train it. Choose another policy.embodiment_tag."
                )
            parts.append(part - self.reference(state, group) if group.relative else part)
        return torch.cat([*parts, action[..., self.action_width :]], -1)

    def as_absolute(self, action: Tensor, state: Tensor | None) -> Tensor:
        """Predicted actions [B, H, A] in the robot's units -> without what is relative."""
        parts = []
        for group in self.actions:
            part = action[..., group.place]
            if group.relative and state is None:
                raise ConfigError(f"Relative actions require {STATE}, but the observation has none.")
            if group.relative and state is not None:
                reference = self.reference(state.to(part), group)
                part = part + reference if group.kind == "non_eef" else _moved(part, reference, group)
            parts.append(part)
        return torch.cat(parts, -1)

    def normalize(self, action: Tensor, clip: bool) -> Tensor:
        """Actions [B, H, A], relative where they are learned so, group by group."""
        parts = [
            self.range_of(group, "action").normalize(action[..., group.place], clip) for group in self.actions
        ]
        return torch.cat(parts, -1)

    def restore(self, action: Tensor) -> Tensor:
        parts = [
            self.range_of(group, "action").restore(action[..., group.place], clip=True)
            for group in self.actions
        ]
        return torch.cat(parts, -1)


def width_of(stats: Mapping[str, Any]) -> int:
    """Values of a group."""
    for name in ("mean", "q01", "min", "max", "std"):
        values = stats.get(name)
        if values:
            return len(values[0]) if isinstance(values[0], list | tuple) else len(values)
    return 0


def _word(value: Any) -> str:
    text = str(value).lower()
    return NAMES.get(text, text)


def _moved(pose: Tensor, reference: Tensor, group: Group) -> Tensor:
    """Poses [B, H, 9] of a hand, relative to its pose now [B, 1, 9]: position, and two rows of a rotation."""
    if group.format != "xyz+rot6d" or pose.shape[-1] != 9:
        raise ConfigError(
            f"The action group {group.key!r} is a relative pose in the format {group.format!r}: only xyz+rot6d is "
            "supported."
        )
    rotation, now = _rotation(pose[..., 3:].double()), _rotation(reference[..., 3:].double())
    position = (now @ pose[..., :3, None].double())[..., 0] + reference[..., :3].double()
    return torch.cat((position, (now @ rotation)[..., :2, :].flatten(-2)), -1).to(pose.dtype)


def _rotation(rows: Tensor) -> Tensor:
    """Two rows [..., 6] -> rotation matrices [..., 3, 3]."""
    first, second = rows.unflatten(-1, (2, 3)).unbind(-2)
    x = first / first.norm(dim=-1, keepdim=True)
    rest = second - (x * second).sum(-1, keepdim=True) * x
    y = rest / rest.norm(dim=-1, keepdim=True)
    return torch.stack((x, y, torch.linalg.cross(x, y)), -2)
