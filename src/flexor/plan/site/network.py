"""What goes over the network between a robot and the server that its policy runs on.

The robot sends an observation, the server answers with a chunk of actions, of which the robot executes some before it
asks again. So the mean rate is small; what counts is how long one observation takes on its way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

OVERHEAD = 1.06  # of TCP, IP, Ethernet and MessagePack on top of what is sent
VGA, VGA_JPEG, GROWTH = 480 * 640, 128_000, 0.765
"""A picture of 480x640 as JPEG of quality 95 without subsampling, and the power of the number of pixels by which that
grows: 224x224 took 32,000 bytes."""


def jpeg_bytes(height: int, width: int) -> int:
    """About what a picture of a robot's camera takes as JPEG of quality 95."""
    return round(VGA_JPEG * (height * width / VGA) ** GROWTH)


@dataclass(frozen=True)
class Exchange:
    """One question and its answer, in bytes on the wire."""

    raw: int
    """An observation with pictures as they are, uint8 RGB."""
    jpeg: int
    """With pictures as JPEG."""
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
    """For cameras of (height, width), a state and actions of so many float32, a chunk of `horizon` actions of which
    `executed` are, at `rate_hz` actions a second. `history`: observations that are sent each time."""
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
    """Of the network, both ways."""
    inference: float
    download: float

    @property
    def total(self) -> float:
        return self.upload + self.latency + self.inference + self.download

    def steps(self, rate_hz: float) -> float:
        """Actions that the robot needs meanwhile."""
        return self.total * rate_hz


def delay(
    one: Exchange, *, up_mbit: float, down_mbit: float, round_trip_s: float, inference_s: float, jpeg: bool
) -> Delay:
    """How old an observation is when the robot acts on it."""
    sent = one.jpeg if jpeg else one.raw
    return Delay(sent * 8e-6 / up_mbit, round_trip_s, inference_s, one.answer * 8e-6 / down_mbit)


def mbit_for(one: Exchange, within_s: float, jpeg: bool) -> float:
    """Mbit/s that bring an observation to the server in so many seconds."""
    return (one.jpeg if jpeg else one.raw) * 8e-6 / within_s
