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
MOST_SCANS = 100
"""Scans of a JPEG, each of which goes over the whole image. Encoders write 1, or about 10 in a progressive one."""
TEXTS = (b"iCCP", b"zTXt", b"iTXt")
"""Parts of a PNG with compressed text: half a megabyte becomes half a gigabyte, and no pixel depends on it."""


def open_video(file: Any) -> InputContainer:
    """A video file, by its path or as a file object."""
    options = {"format_whitelist": CONTAINERS, "protocol_whitelist": "file", "max_pixels": str(MOST_PIXELS)}
    return av.open(file, "r", options=options)


def decode_one(name: str, data: bytes) -> av.VideoFrame:
    """The image that bytes are, by FFmpeg's decoder of this name. A ValueError if it would take long to decode."""
    if name == "mjpeg" and (scans := data.count(b"\xff\xda")) > MOST_SCANS:
        raise ValueError(f"it has {scans} scans, and no camera or encoder writes more than {MOST_SCANS}")
    data = _without_texts(data) if name == "png" else data
    context = av.CodecContext.create(name, "r")
    context.options = {"max_pixels": str(MOST_PIXELS)}
    frames = [*context.decode(av.Packet(data)), *context.decode(None)]  # type: ignore[attr-defined]
    if not frames:
        raise ValueError("decoding it gives no image")
    return frames[0]


def _without_texts(png: bytes) -> bytes:
    """The file without the parts that are compressed text. A part is a length, a kind, the content and a checksum."""
    chunks, offset = [png[:8]], 8
    while offset < len(png):
        end = offset + 12 + int.from_bytes(png[offset : offset + 4], "big")
        if png[offset + 4 : offset + 8] not in TEXTS:
            chunks.append(png[offset:end])
        offset = end
    return png if sum(map(len, chunks)) == len(png) else b"".join(chunks)
