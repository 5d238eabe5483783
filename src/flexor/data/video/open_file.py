"""Opens videos and images that may come from anywhere: as files of the usual formats only, and not larger than is sane.

FFmpeg knows hundreds of formats and guesses by content. Some of them are lists of other files and addresses, which it
would open; a video does not need them.
"""

from __future__ import annotations

from typing import Any

import av
from av.container import InputContainer

CONTAINERS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts"
MOST_PIXELS = 1 << 28  # of an image: 16,000 x 16,000


def open_video(file: Any) -> InputContainer:
    """A video file, by its path or as a file object."""
    options = {"format_whitelist": CONTAINERS, "protocol_whitelist": "file", "max_pixels": str(MOST_PIXELS)}
    return av.open(file, "r", options=options)


def decode_one(name: str, data: bytes) -> av.VideoFrame:
    """The image that bytes are, by FFmpeg's decoder of this name."""
    context = av.CodecContext.create(name, "r")
    context.options = {"max_pixels": str(MOST_PIXELS)}
    frames = [*context.decode(av.Packet(data)), *context.decode(None)]  # type: ignore[attr-defined]
    if not frames:
        raise ValueError("decoding it gives no image")
    return frames[0]
