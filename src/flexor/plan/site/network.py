"""Network traffic between a robot and the server that runs its policy.

The robot sends an observation, and the server answers with a chunk of actions. The robot executes some of them before
it sends the next observation. The average rate is therefore low; the transfer time of one observation matters more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

OVERHEAD = 1.06  # factor for TCP, IP, Ethernet and MessagePack
VGA, VGA_JPEG, GROWTH = 480 * 640, 128_000, 0.765
"""Bytes of an image of 480x640 as JPEG of quality 95 without subsampling, and the exponent of the number of pixels with
which they grow: 224x224 took 32,000 bytes."""


def jpeg_bytes(height: int, width: int) -> int:
    """Approximate bytes of a robot camera's image as JPEG of quality 95."""
    return round(VGA_JPEG * (height * width / VGA) ** GROWTH)


@dataclass(frozen=True)
class Exchange:
    """One observation and its answer, in bytes on the network."""

    raw: int
    """An observation with uncompressed images, uint8 RGB."""
    jpeg: int
    """With images as JPEG."""
    answer: int
    """A chunk of actions."""
    per_s: float
    """Exchanges per second."""

    def mbit_up(self, jpeg: bool) -> float:
        """Mbit/s from the robot to the server, on average."""
        return self.per_s * (self.jpeg if jpeg else self.raw) * 8 / 1e6

    @property
    def mbit_down(self) -> float:
        return self.per_s * self.answer * 8 / 1e6


def exchange(
    cameras: Sequence[tuple[int, int]],
    *,
    state: int,
    actions: int,
    horizon: int,
    executed: int,
    rate_hz: float,
) -> Exchange:
    """The exchange for cameras of (height, width), and a state and actions of this many float32 values.

    Of each chunk of `horizon` actions, `executed` are executed, at `rate_hz` actions per second.
    """
    assert 0 < executed <= horizon and rate_hz > 0
    raw = sum(height * width * 3 for height, width in cameras) + 4 * state
    jpeg = sum(jpeg_bytes(height, width) for height, width in cameras) + 4 * state
    raw, jpeg, answer = (round(size * OVERHEAD) for size in (raw, jpeg, horizon * actions * 4))
    return Exchange(raw, jpeg, answer, rate_hz / executed)
