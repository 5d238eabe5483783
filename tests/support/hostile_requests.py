"""Requests that are small to send and would be large or slow to answer: texts for numbers, images that never end."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import msgpack
import numpy as np
from PIL import Image

from flexor_client.jpeg import encode_jpeg
from flexor_client.wire import pack

MEGABYTE = 2**20


def jpeg_of_many_scans(height: int, width: int, size: int = MEGABYTE) -> bytes:
    """A progressive file of about this size, whose last scan is repeated: each goes over the whole image."""
    file = io.BytesIO()
    Image.new("RGB", (width, height), (90, 120, 30)).save(file, "JPEG", progressive=True)
    data = file.getvalue().removesuffix(b"\xff\xd9")
    scan = data[data.rindex(b"\xff\xda") :]
    return data + scan * ((size - len(data)) // len(scan)) + b"\xff\xd9"


def jpeg_that_claims(height: int, width: int) -> bytes:
    """A small file that says it has this size."""
    data = encode_jpeg(np.zeros((8, 8, 3), np.uint8))
    frame = data.index(b"\xff\xc0")
    return data[: frame + 5] + struct.pack(">HH", height, width) + data[frame + 9 :]


def jpeg_of_many_parts(size: int = MEGABYTE) -> bytes:
    """A file with an endless header."""
    return b"\xff\xd8" + b"\xff\xe1\x00\x02" * (size // 4) + encode_jpeg(np.zeros((8, 8, 3), np.uint8))[2:]


def jpeg_after_noise(size: int = MEGABYTE) -> bytes:
    """A file with bytes in its header that belong to nothing."""
    return b"\xff\xd8\xff\xdb\x00\x02" + b"\x00" * size + encode_jpeg(np.zeros((8, 8, 3), np.uint8))[2:]


def png(height: int, width: int, pixels: bytes) -> bytes:
    def chunk(name: bytes, content: bytes) -> bytes:
        return (
            struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def zeros(count: int) -> bytes:
    """So many zeros, compressed. They are never all in memory."""
    compressor = zlib.compressobj(9)
    parts = [compressor.compress(bytes(MEGABYTE)) for _ in range(count // MEGABYTE)]
    return b"".join([*parts, compressor.flush()])


def other_files(height: int, width: int) -> dict[str, bytes]:
    """Files that an image library would open, in other formats, some of them with more inside than they have bytes."""
    files = {
        "png, huge": png(2**31 - 1, 2**31 - 1, zlib.compress(b"")),
        "png, inflates": png(height, width, zeros(200 * MEGABYTE)),
    }
    for kind in ("GIF", "TIFF", "BMP", "WEBP", "PPM", "ICO"):
        file = io.BytesIO()
        Image.new("RGB", (width, height)).save(file, kind)
        files[kind.lower()] = file.getvalue()
    return files


def growing_states(parts: int) -> dict[str, Any]:
    """Values for a state of so many numbers, as they are in MessagePack, that become large."""

    def array(dtype: str, *shape: int) -> dict[bytes, Any]:
        data = bytes(np.dtype(dtype).itemsize * int(np.prod(shape)))
        return {b"__ndarray__": True, b"data": data, b"dtype": dtype, b"shape": list(shape)}

    return {
        "one long text, and many empty ones": ["x" * 100_000] + [""] * 4_899,
        "one text that is not too long, and many empty ones": ["x" * 60_000] + [""] * 4_899,
        "one long text of bytes": [b"x" * 4 * MEGABYTE] + [b""] * (parts - 1),
        "bytes that become floats": array("|u1", 8 * MEGABYTE // parts, parts),
        "small numbers and one that is large": [array("<f8", 4096)] + [array("|u1", 4096)] * 400,
        "an array in an array's place": [array("|u1", MEGABYTE)] * parts,
        "a text array": {**array("<f4", 1), b"dtype": "<U999999"},
        "an empty array of huge size": array("<f8", 0, 2**30, 2**30),
    }


def hostile_requests(camera: str, state: str, height: int, width: int, parts: int) -> dict[str, bytes]:
    """Frames by what they try, for a policy with one camera and a state."""
    image, numbers = np.zeros((height, width, 3), np.uint8), np.zeros(parts, np.float32)
    files = {
        "a jpeg of many scans": jpeg_of_many_scans(height, width),
        "a jpeg of huge size": jpeg_that_claims(65_535, 65_535),
        "a jpeg of many parts": jpeg_of_many_parts(),
        "a jpeg after noise": jpeg_after_noise(),
        **other_files(height, width),
    }
    options = {
        "a long chunk": {"previous": np.zeros((500_000, 2), np.float16)},
        "a long name of an option": {"\x01" * 60_000: 1},
        "a long dtype": {"previous": {b"__ndarray__": True, b"dtype": "\x01" * 60_000}},
    }
    plain = msgpack.unpackb(pack({camera: image, state: numbers}))
    return {
        **{name: msgpack.packb({**plain, state: value}) for name, value in growing_states(parts).items()},
        **{name: pack({camera: data, state: numbers}) for name, data in files.items()},
        **{name: pack({camera: image, state: numbers, "flexor": value}) for name, value in options.items()},
        "many files": pack({camera: [files["a jpeg of many scans"]] * 5, state: numbers}),
        "a text that grows": msgpack.packb({**plain, "prompt": "x" * 4 * MEGABYTE + "\U0001f916"}),
        "many long names": msgpack.packb({f"{n:04}" * 400: n for n in range(2000)}),
    }
