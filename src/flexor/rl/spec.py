"""What a policy observes and does where it acts: told by an environment here, or by an actor on the network."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import gymnasium
import numpy as np

from flexor.core.batch import ENV_STATE, STATE
from flexor.core.errors import ConfigError
from flexor.policies.features import Kind, PolicyFeature

DEFAULT_FPS = 10.0  # of an environment that does not say
NAME = re.compile(r"observation(\.\w{1,60}){1,3}\Z", re.ASCII)
LARGEST_OBSERVATION = 16 * 2**20  # bytes
MOST_FEATURES = 64
LONGEST_TASK = 4096
MOST_FPS = 1e4

Limits = list[float]


@dataclass(frozen=True)
class EnvironmentSpec:
    """Observations, and the limits of actions."""

    shapes: dict[str, list[int]]
    """Of each observation; of an image [C, H, W]."""
    low: Limits
    high: Limits
    ranges: dict[str, tuple[Limits, Limits]]
    """Of observations, where they are known and finite."""
    fps: float
    task: str

    @property
    def features(self) -> dict[str, PolicyFeature]:
        """What a policy can observe of it."""
        kinds = {STATE: Kind.STATE, ENV_STATE: Kind.ENV}
        features = {}
        for name, shape in self.shapes.items():
            kind = Kind.VISUAL if len(shape) == 3 else kinds.get(name)
            if kind is not None:
                features[name] = PolicyFeature(kind, tuple(shape))
        return features

    @property
    def action_limits(self) -> tuple[np.ndarray, np.ndarray]:
        return np.array(self.low, np.float32), np.array(self.high, np.float32)

    def plain(self) -> dict[str, Any]:
        """As numbers, texts, lists and maps, for a file or the network."""
        return asdict(self)

    @classmethod
    def read(cls, plain: Any) -> EnvironmentSpec:
        """What `plain` described; ConfigError if it can't be that. Nobody knows who wrote it."""
        if not isinstance(plain, Mapping) or plain.keys() != cls.__dataclass_fields__.keys():
            raise ConfigError(f"An environment is described by {', '.join(cls.__dataclass_fields__)}.")
        shapes, ranges, task, fps = (plain[name] for name in ("shapes", "ranges", "task", "fps"))
        if not isinstance(shapes, dict) or not 0 < len(shapes) <= MOST_FEATURES:
            raise ConfigError(f"shapes must be a map of 1 to {MOST_FEATURES} observations.")
        if not all(map(_is_shape, shapes.items())):
            raise ConfigError("shapes must be names such as observation.state, each with a list of sizes.")
        if (
            sum(math.prod(shape) * (1 if len(shape) == 3 else 4) for shape in shapes.values())
            > LARGEST_OBSERVATION
        ):
            raise ConfigError(f"An observation may have at most {LARGEST_OBSERVATION:,} bytes.")
        if not isinstance(task, str) or len(task) > LONGEST_TASK:
            raise ConfigError(f"task must be text of at most {LONGEST_TASK} characters.")
        if not isinstance(fps, int | float) or isinstance(fps, bool) or not 0 < fps <= MOST_FPS:
            raise ConfigError("fps must be a number of steps per second.")
        low, high = _limits((plain["low"], plain["high"]), "low and high")
        if not isinstance(ranges, dict) or not ranges.keys() <= shapes.keys():
            raise ConfigError("ranges must be a map of observations.")
        read = {name: _limits(pair, f"ranges of {name}") for name, pair in ranges.items()}
        if any([len(pair[0])] != shapes[name] for name, pair in read.items()):
            raise ConfigError(
                "ranges must have a lowest and a highest value of each number of an observation."
            )
        return cls(shapes, low, high, read, float(fps), task)


def _is_shape(named: tuple[Any, Any]) -> bool:
    name, shape = named
    sizes = isinstance(shape, list) and len(shape) in (1, 3)
    return (
        isinstance(name, str)
        and NAME.match(name) is not None
        and sizes
        and all(type(size) is int and 0 < size < 2**16 for size in shape)
    )


def _limits(pair: Any, name: str) -> tuple[Limits, Limits]:
    fits = isinstance(pair, list | tuple) and len(pair) == 2
    if not fits or not all(isinstance(each, list) and 0 < len(each) < 2**12 for each in pair):
        raise ConfigError(f"{name} must be two lists of numbers.")
    numbers = all(isinstance(x, int | float) and abs(x) < 1e30 for each in pair for x in each)
    if not numbers or len(pair[0]) != len(pair[1]) or not all(a <= b for a, b in zip(*pair)):
        raise ConfigError(f"{name} must be finite numbers, the lowest and the highest of each.")
    low, high = ([float(x) for x in each] for each in pair)
    return low, high


def observation_range(env: gymnasium.Env[Any, Any], name: str) -> tuple[Limits, Limits] | None:
    """The range that an environment declares for an observation, if it is finite."""
    space, key = env.observation_space, name.removeprefix("observation.")
    if isinstance(space, gymnasium.spaces.Dict):
        inner = space.spaces.get("agent_pos" if key == "state" and "agent_pos" in space.spaces else key)
    else:
        inner = space if name == STATE else None
    if not isinstance(inner, gymnasium.spaces.Box):
        return None
    low, high = inner.low.astype(np.float32).reshape(-1), inner.high.astype(np.float32).reshape(-1)
    return (low.tolist(), high.tolist()) if np.isfinite(low).all() and np.isfinite(high).all() else None
