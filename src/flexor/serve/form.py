"""What a policy needs in an observation, and what the observations of its robots may be called."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flexor.core.errors import ConfigError
from flexor.core.typed import closest

if TYPE_CHECKING:  # a process that only reads requests does without torch
    from flexor.policies.base import PolicyConfig


@dataclass(frozen=True)
class Input:
    """One value of an observation."""

    shape: tuple[int, ...]
    """Of an image: (channels, height, width)."""
    image: bool
    name: str
    """The clients' name of it."""
    policy_name_too: bool
    """Whether the policy's own name is good too."""
    optional: bool = False
    """Whether an observation may lack it. If all cameras are optional, it must have one."""

    @property
    def bytes(self) -> int:
        """As an array: uint8 of an image, else float32."""
        return math.prod(self.shape) * (1 if self.image else 4)


@dataclass(frozen=True)
class ObservationForm:
    """What a policy needs in an observation."""

    inputs: dict[str, Input]
    """By the policy's own name."""
    steps: list[int] | None
    """For policies with a history: those that it sees, relative to now."""
    action_size: int
    horizon: int
    """Actions of a chunk."""

    @classmethod
    def of_policy(
        cls, config: PolicyConfig, names: Mapping[str, str], default_names: Mapping[str, str] | None = None
    ) -> ObservationForm:
        """`names`: {the policy's name of an input: the client's}. Where none is given, the one in `default_names`
        and the policy's own are both good."""
        for name in names:
            if name not in config.observed:
                raise ConfigError(
                    f"--map {name}=...: the policy has no such input. {closest(name, config.observed)}"
                )
        defaults = default_names or {}
        client_names = {name: names.get(name, defaults.get(name, name)) for name in config.observed}
        inputs = {
            name: Input(
                feature.shape,
                name in config.images,
                client_names[name],
                name not in names and name not in client_names.values(),
                config.can_act_without([name]),
            )
            for name, feature in config.observed.items()
        }
        deltas = config.observation_deltas
        steps = None if deltas is None else [step for step in deltas if step <= 0]
        return cls(inputs, steps, config.action.shape[0], len(config.action_deltas))

    @property
    def history_length(self) -> int:
        """How many values of an input a request can bring: one, or those of a history."""
        return len(self.steps or [0])

    @property
    def bytes(self) -> int:
        """Of everything that a request can bring, as arrays, with the chunk that the robot executes."""
        observed = self.history_length * sum(spec.bytes for spec in self.inputs.values())
        return observed + 4 * self.horizon * self.action_size

    @property
    def numbers(self) -> int:
        """Values of everything but images: a client may send them as a list."""
        shapes = [spec.shape for spec in self.inputs.values() if not spec.image]
        return self.history_length * sum(map(math.prod, shapes))
