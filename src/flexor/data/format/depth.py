"""Depth maps as LeRobot 0.6 stores them.

In videos, a pixel is a code of 12 bits: position 0 is `low`, position 4095 is `high`, and between them the logarithm
of the depth (plus a shift) is linear. In the tables, images have the camera's own values: integers in millimetres or
floating point in metres. `unit` is the one of these values and of the dataset's statistics; a dataset may not say it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

CODES = 4096
UNITS = ("mm", "m")
MM = 1000.0  # per metre


@dataclass(frozen=True)
class DepthScale:
    """What the values of a depth map mean."""

    low: float = 0.01
    """Depth of code 0, in metres."""
    high: float = 10.0
    """Depth of code 4095, in metres."""
    shift: float = 3.5
    """Added before the logarithm, in metres."""
    use_log: bool = True
    unit: str | None = None
    """Unit of images in the tables and of the statistics, m or mm; None if the dataset does not say."""
    output: str = "mm"
    """Unit of what is read."""

    def fault(self) -> str | None:
        """Why depths can't be computed from codes."""
        numbers = (self.low, self.high, self.shift)
        if not all(math.isfinite(number) for number in numbers) or self.low >= self.high:
            return f"depth_min={self.low} is not less than depth_max={self.high}"
        if self.use_log and self.low + self.shift <= 0:
            return f"depth_min + shift = {self.low + self.shift:g} has no logarithm"
        if self.unit not in (None, *UNITS):
            return f"depth_unit is {self.unit!r}, not m or mm"
        return None

    def reading(self, output: str) -> DepthScale:
        return replace(self, output=output)

    @property
    def factor(self) -> float:
        """From the stored unit to the one that is read."""
        if self.unit is None or self.unit == self.output:
            return 1.0
        return MM if self.output == "mm" else 1 / MM


def depth_scale(info: Mapping[str, Any]) -> DepthScale | None:
    """The scale in the `info` of a feature, or None if it is not a depth map. Malformed numbers raise a ValueError."""
    if not (info.get("is_depth_map") or info.get("video.is_depth_map")):
        return None
    names = {"depth_min": "low", "depth_max": "high", "shift": "shift"}
    declared = {name: info.get(f"video.{key}") for key, name in names.items()}
    numbers: dict[str, Any] = {name: float(value) for name, value in declared.items() if value is not None}
    use_log = True if info.get("video.use_log") is None else bool(info["video.use_log"])
    unit = None if info.get("depth_unit") is None else str(info["depth_unit"])
    return DepthScale(**numbers, use_log=use_log, unit=unit)


@lru_cache(maxsize=64)
def depths_of_codes(scale: DepthScale) -> np.ndarray:
    """The depth of every code, float32 [4096], in the unit that is read; millimetres are whole, as in LeRobot."""
    import torch  # not needed to decode

    first, last = scale.low, scale.high
    if scale.use_log:
        first, last = (math.log(depth + scale.shift) for depth in (first, last))
    # In float32 and in this order, so that rounding gives LeRobot's millimetres.
    depths = torch.arange(CODES, dtype=torch.float32).mul_((last - first) / (CODES - 1)).add_(first)
    if scale.use_log:
        depths.exp_().sub_(scale.shift)
    depths.clamp_(scale.low, scale.high)
    if scale.output == "mm":
        depths.mul_(MM).round_().clamp_(0, 65_535)
    table = depths.numpy()
    table.flags.writeable = False
    return table


def in_output_unit(values: np.ndarray, scale: DepthScale) -> np.ndarray:
    """Values of an image in the tables, any number type -> float32 in the unit that is read."""
    depths = values.astype(np.float32)
    if scale.factor > 1:
        depths *= np.float32(MM)
    elif scale.factor < 1:
        depths /= np.float32(MM)
    return depths
