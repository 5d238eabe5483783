"""The sizes that one request may have, packed and decoded: derived from the policy's inputs.

These are the only limits on sizes, but for two that do not depend on the policy: on the form of a frame
(`flexor_client.wire.Limits`) and on what a compressed image costs (`flexor_client.jpeg`).
"""

from __future__ import annotations

from dataclasses import dataclass

from flexor.core.errors import FlexorError
from flexor.serve.form import ObservationForm
from flexor_client.wire import Limits

FRAME_FACTOR = 2  # a state may be in float64
FRAME_EXTRA = 8 * 2**20  # for what robots send and this policy has no use for, such as another camera
DECODED_FACTOR = 2  # a history of compressed images is decoded, then stacked
UNFINISHED_FRAMES = 8  # of all robots at one address, which send at the same time


class BadRequest(FlexorError):
    """A message that can't be answered; its text is for the client."""


@dataclass(frozen=True)
class RequestLimits:
    """The most that a request may take, in bytes."""

    frame: Limits
    decoded: int
    """Of all arrays and images that are made of one request."""
    unfinished: int
    """Of messages that are not complete yet, from all clients of one address."""

    @classmethod
    def of(cls, form: ObservationForm, frame_bytes: int | None = None) -> RequestLimits:
        """`frame_bytes`: what the user allows for a request."""
        max_frame_bytes = frame_bytes or FRAME_FACTOR * form.bytes + FRAME_EXTRA
        default = Limits()
        frame = Limits(frame_bytes=max_frame_bytes, items=default.items + form.numbers)
        return cls(frame, DECODED_FACTOR * form.bytes, UNFINISHED_FRAMES * max_frame_bytes)


class Budget:
    """The bytes that may still be allocated for one request."""

    def __init__(self, limits: RequestLimits):
        self.remaining = limits.decoded

    def take(self, name: str, size: int) -> None:
        """Called before so many bytes are allocated for an input."""
        self.remaining -= size
        if self.remaining < 0:
            raise BadRequest(f"{name}: the request would take more memory than the policy's inputs need.")
