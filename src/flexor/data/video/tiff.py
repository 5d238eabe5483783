"""Reads TIFF images of floating-point numbers, which FFmpeg does not decode: float depth maps in a dataset's tables."""

from __future__ import annotations

import struct

import numpy as np

WIDTH, HEIGHT, BITS, COMPRESSION, OFFSETS, SAMPLES, SIZES, FORMAT = 256, 257, 258, 259, 273, 277, 279, 339
SIZES_OF = {1: "B", 3: "H", 4: "I"}  # types of whole numbers: byte, short, long
FLOAT = 3
MOST_PIXELS = 1 << 28


def float_tiff(data: bytes) -> np.ndarray | None:
    """The pixels of an uncompressed TIFF with one float32 per pixel, [H, W]; None if it is another TIFF.

    A damaged one raises a ValueError.
    """
    try:
        tags = _tags(data)
    except struct.error as error:
        raise ValueError(f"the TIFF is damaged ({error})") from error
    if tags.get(FORMAT, [1])[0] != FLOAT:
        return None
    if tags.get(BITS, [1])[0] != 32 or tags.get(COMPRESSION, [1])[0] != 1 or tags.get(SAMPLES, [1])[0] != 1:
        raise ValueError("the TIFF is not one uncompressed 32-bit number per pixel")
    try:
        height, width = tags[HEIGHT][0], tags[WIDTH][0]
        strips = [data[at : at + size] for at, size in zip(tags[OFFSETS], tags[SIZES])]
    except (KeyError, IndexError) as error:
        raise ValueError(f"the TIFF lacks the tag {error}") from error
    content = b"".join(strips)
    if not 0 < height * width < MOST_PIXELS or len(content) < 4 * height * width:
        raise ValueError(f"the TIFF is {height}x{width}, but has {len(content)} bytes of pixels")
    order = "<f4" if data[:2] == b"II" else ">f4"
    return np.frombuffer(content, order, height * width).reshape(height, width).astype("<f4")


def _tags(data: bytes) -> dict[int, list[int]]:
    """The tags of the first image that are whole numbers."""
    order = "<" if data[:2] == b"II" else ">"
    (at,) = struct.unpack_from(f"{order}I", data, 4)
    (count,) = struct.unpack_from(f"{order}H", data, at)
    tags = {}
    for number in range(count):
        entry = at + 2 + 12 * number
        tag, kind, values = struct.unpack_from(f"{order}HHI", data, entry)
        if kind not in SIZES_OF or values > len(data):
            continue
        form = f"{order}{values}{SIZES_OF[kind]}"
        place = entry + 8
        if struct.calcsize(form) > 4:
            (place,) = struct.unpack_from(f"{order}I", data, place)
        tags[tag] = list(struct.unpack_from(form, data, place))
    return tags
