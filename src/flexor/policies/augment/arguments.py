"""The arguments of an image transform, read one by one, with errors that name them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from flexor.core.errors import ConfigError
from flexor.core.typed import closest

WHERE = "dataset.image_transforms.tfs"

Range = tuple[float, float]


class Arguments:
    """The `kwargs` of one transform. Arguments that remain are errors."""

    def __init__(self, name: str, kind: str, kwargs: Mapping[str, Any]):
        self.where, self.kind, self.remaining = f"{WHERE}.{name}.kwargs", kind, dict(kwargs)
        self.supported: list[str] = []

    def take(self, key: str, default: Any = None) -> Any:
        self.supported.append(key)
        return self.remaining.pop(key, default)

    def fail(self, key: str, value: Any, expected: str) -> ConfigError:
        return ConfigError(f"{self.where}.{key}={value!r} is not valid for {self.kind}: expected {expected}.")

    def number(self, key: str, value: Any, low: float = -math.inf, high: float = math.inf) -> float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not is_number or not low <= value <= high:
            raise self.fail(key, value, f"a number{_limits(low, high)}")
        return float(value)

    def span(
        self, key: str, default: Any, around: Callable[[float], Range], low: float, high: float = math.inf
    ) -> Range | None:
        """[low, high], or one number, of which `around` makes a range; None if it is not given."""
        value = self.take(key, default)
        if value is None:
            return None
        if not isinstance(value, list | tuple):
            return around(self.number(key, value, 0.0 if low < 0 else low))
        return self.pair(key, value, low, high)

    def pair(self, key: str, value: Any, low: float = -math.inf, high: float = math.inf) -> Range:
        if not isinstance(value, list | tuple) or len(value) != 2:
            raise self.fail(key, value, "[low, high]")
        first, second = (self.number(key, part, low, high) for part in value)
        if first > second:
            raise self.fail(key, list(value), "the lower value first")
        return first, second

    def choice(self, key: str, default: Any, *allowed: Any) -> Any:
        value = self.take(key, default)
        if value not in allowed:
            raise self.fail(key, value, " or ".join(str(each) for each in allowed))
        return value

    def done(self) -> None:
        for key, value in self.remaining.items():
            valid = [f"{self.where}.{name}" for name in self.supported]
            hint = closest(f"{self.where}.{key}", valid) if valid else f"{self.kind} takes no arguments."
            raise ConfigError(f"Unknown setting {self.where}.{key}={value!r}. {hint}")


def _limits(low: float, high: float) -> str:
    lower, upper = (f"{limit:g}" if math.isfinite(limit) else "" for limit in (low, high))
    if lower and upper:
        return f" from {lower} to {upper}"
    return f" of at least {lower}" if lower else f" of at most {upper}" if upper else ""
