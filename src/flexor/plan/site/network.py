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
    history: int = 1,
) -> Exchange:
    """The exchange for cameras of (height, width), and a state and actions of this many float32 values.

    Of each chunk of `horizon` actions, `executed` are executed, at `rate_hz` actions per second. `history`:
    observations per request.
    """
    assert 0 < executed <= horizon and rate_hz > 0
    numbers = state * 4 * history
    raw = history * sum(height * width * 3 for height, width in cameras) + numbers
    jpeg = history * sum(jpeg_bytes(height, width) for height, width in cameras) + numbers
    return Exchange(
        raw=round(raw * OVERHEAD),
        jpeg=round(jpeg * OVERHEAD),
        answer=round(horizon * actions * 4 * OVERHEAD),
        per_s=rate_hz / executed,
    )


@dataclass(frozen=True)
class Delay:
    """From an observation to the first action of its chunk, in seconds."""

    upload: float
    latency: float
    """Network latency, both ways."""
    inference: float
    download: float

    @property
    def total(self) -> float:
        return self.upload + self.latency + self.inference + self.download

    def steps(self, rate_hz: float) -> float:
        """Actions that the robot needs during this time."""
        return self.total * rate_hz


def delay(
    one: Exchange, *, up_mbit: float, down_mbit: float, round_trip_s: float, inference_s: float, jpeg: bool
) -> Delay:
    """How old an observation is when the robot acts on it."""
    sent = one.jpeg if jpeg else one.raw
    return Delay(sent * 8e-6 / up_mbit, round_trip_s, inference_s, one.answer * 8e-6 / down_mbit)
