"""What a policy is measured on to estimate the speed of a machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Calibration(NamedTuple):
    """What `flexor plan --calibrate` trains a policy on to measure a machine."""

    cameras: int = 2
    height: int = 480
    width: int = 640
    settings: Mapping[str, Any] = {}
    """Of the policy. A large one has few layers: many take as long each."""
    narrow: Mapping[str, Any] = {}
    """Settings of a smaller network with the same operations, to measure the host time of each operation."""
