"""Reads TIFF images of floating-point numbers, which FFmpeg does not decode: float depth maps in a dataset's tables."""

from __future__ import annotations

import io

import numpy as np

BITS, FORMAT = 258, 339  # tags: bits per sample, and their kind
FLOAT = 3
MAX_PIXELS = 1 << 28


def float_tiff(data: bytes) -> np.ndarray | None:
    """The pixels of an uncompressed TIFF with one float32 per pixel, [H, W]; None if it is another TIFF.

    Raise a ValueError if it is damaged.
    """
    from PIL import TiffImagePlugin

    try:
        with TiffImagePlugin.TiffImageFile(io.BytesIO(data)) as image:
            tags, (width, height) = image.tag_v2, image.size
            if tags.get(FORMAT, (1,))[0] != FLOAT:
                return None
            if image.mode != "F" or tags.get(BITS) != (32,) or image.info.get("compression") != "raw":
                raise ValueError("not one uncompressed 32-bit number per pixel")
            if not 0 < width * height < MAX_PIXELS or len(data) < 4 * width * height:
                raise ValueError(f"{height}x{width}, but the file has {len(data)} bytes")
            order = "<f4" if data[:2] == b"II" else ">f4"
            # strips of whole rows, one below the other; read here, because Pillow takes four times as long
            strips = [(box[3] - box[1], at) for _, box, at, _ in image.tile if box and box[::2] == (0, width)]
            if sum(rows for rows, _ in strips) != height:
                raise ValueError("it has tiles, or lacks rows")
            parts = [np.frombuffer(data, order, rows * width, at) for rows, at in strips]
            return np.concatenate(parts).astype("<f4", copy=False).reshape(height, width)
    except Exception as error:  # Pillow raises many types for damaged files
        raise ValueError(f"the TIFF is damaged ({error})") from error
