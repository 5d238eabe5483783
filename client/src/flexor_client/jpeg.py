"""JPEG files of images: made on a robot, and decoded by a server that does not know who made them.

What a file costs to decode is known from its header before it is decoded. Bytes alone say nothing: in a progressive
file, ten bytes are a scan, and every scan goes over the whole image.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any

import numpy as np

from flexor_client.errors import WireError

START = b"\xff\xd8\xff"
SCANS = 16
"""Scans of a file. Encoders write 1, or about 10 in a progressive file."""
SEGMENTS = 64
"""Parts of a header. Cameras write about 10."""
FILE_BYTES_PER_PIXEL, EXTRA_FILE_BYTES = 6, 2**16
"""The most that a file may have: twice its pixels, and what tables and a camera's notes take."""

# Kinds of files by their frame header: baseline, extended and progressive, with Huffman codes. No camera and no
# encoder on a robot writes the other ones.
FRAMES = (0xC0, 0xC1, 0xC2)
OTHER_FRAMES = (0xC3, 0xC5, 0xC6, 0xC7, 0xC9, 0xCA, 0xCB, 0xCD, 0xCE, 0xCF)
SCAN, TABLES = 0xDA, (0xC4, 0xDB, 0xDD)  # Huffman, quantisation, restart interval
COLOURS = (0xE0, 0xEE)  # the notes (of JFIF and Adobe) that say how colours are coded


@dataclass(frozen=True, eq=False)
class JpegFile:
    """A file whose header was checked. It can be decoded at a known cost."""

    height: int
    width: int
    data: bytes
    """Without the notes that a decoder of images has no use for, such as those of a camera."""

    def decode(self) -> np.ndarray:
        """The RGB image uint8 [H, W, 3]. Other threads can run meanwhile."""
        from PIL.JpegImagePlugin import JpegImageFile

        try:
            with JpegImageFile(io.BytesIO(self.data)) as file:
                if file.size != (self.width, self.height):
                    raise WireError(f"its size is {file.size}, not {(self.width, self.height)}")
                return np.asarray(file.convert("RGB"))
        except Exception as error:  # pillow raises many types for damaged files
            raise WireError(f"The JPEG file can't be read: {error}") from error


def is_jpeg(value: Any) -> bool:
    return isinstance(value, bytes) and value.startswith(START)


def open_jpeg(data: bytes) -> JpegFile:
    """The size of a JPEG file, without decoding it; WireError if it is none, or would take long to decode."""
    if not is_jpeg(data):
        raise WireError("The bytes are not a JPEG file: one begins with FF D8 FF.")
    parts, size, at = [data[:2]], None, 2
    for _ in range(SEGMENTS):
        marker, end = _segment(data, at)
        if marker in FRAMES:
            if size is not None:
                raise _damaged("it has two frames")
            size = _size(data[at + 4 : end])
        elif marker == SCAN:
            break
        if marker in FRAMES or marker in TABLES or marker in COLOURS:
            parts.append(data[at:end])
        at = end
    else:
        raise WireError(f"The header of the JPEG file has more than {SEGMENTS} parts.")
    if size is None:
        raise _damaged("its first scan comes before its size")
    height, width = size
    if len(data) > FILE_BYTES_PER_PIXEL * height * width + EXTRA_FILE_BYTES:
        raise WireError(f"The JPEG file has {len(data):,} bytes, too many for {height} x {width} pixels.")
    # In the data of a scan, FF is never followed by a marker's byte: there are no more scans than this.
    scans = data.count(bytes((0xFF, SCAN)), at)
    if scans > SCANS:
        raise WireError(
            f"The JPEG file has {scans:,} scans; at most {SCANS} are allowed. Send a file that is not progressive."
        )
    parts.append(data[at:])
    return JpegFile(height, width, b"".join(parts))


def _segment(data: bytes, at: int) -> tuple[int, int]:
    """Of the part of the header at a position: its marker, and where it ends."""
    if at + 4 > len(data):
        raise _damaged("it ends in its header")
    marker, end = data[at + 1], at + 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    if data[at] != 0xFF or marker < 0xC0 or 0xD0 <= marker <= 0xD9 or end < at + 4 or end > len(data):
        raise _damaged("there is no part of a header where one is expected")
    if marker in OTHER_FRAMES:
        raise WireError(
            "The JPEG file is of a kind that is not accepted: only baseline and progressive ones are."
        )
    return marker, end


def _size(frame: bytes) -> tuple[int, int]:
    """Height and width, from a frame header."""
    if len(frame) < 6 or len(frame) != 6 + 3 * frame[5]:
        raise _damaged("its frame has a wrong length")
    height, width = int.from_bytes(frame[1:3], "big"), int.from_bytes(frame[3:5], "big")
    if frame[0] != 8 or frame[5] not in (1, 3) or not height or not width:
        raise WireError("The JPEG file must be grey or in colour, with 8 bits per channel and a size.")
    return height, width


def _damaged(reason: str) -> WireError:
    return WireError(f"The JPEG file can't be read: {reason}.")


def encode_jpeg(image: np.ndarray, quality: int = 90) -> bytes:
    """A uint8 image [H, W, C] or [C, H, W], with 1 or 3 channels, as a JPEG file."""
    from PIL import Image

    image = np.asarray(image)
    if image.dtype != np.uint8 or image.ndim != 3:
        raise WireError(f"An image must be uint8 [H, W, C], not {image.dtype} {list(image.shape)}.")
    if image.shape[2] not in (1, 3) and image.shape[0] in (1, 3):
        image = image.transpose(1, 2, 0)
    if image.shape[2] not in (1, 3) or not image.size:
        raise WireError(f"An image must have pixels, with 1 or 3 channels, not {list(image.shape)}.")
    file = io.BytesIO()
    plane = np.ascontiguousarray(image if image.shape[2] == 3 else image[:, :, 0])
    try:
        Image.fromarray(plane).save(file, "JPEG", quality=quality)
    except (OSError, ValueError) as error:  # JPEG knows no sizes above 65,500
        raise WireError(f"An image of {list(image.shape)} can't be compressed: {error}") from error
    return file.getvalue()
