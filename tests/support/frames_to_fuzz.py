"""Frames for fuzzing the decoder: noise, damaged frames, and well-formed ones with absurd contents."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import msgpack
import numpy as np

from flexor_client.jpeg import encode_jpeg
from flexor_client.wire import pack
from support.hostile_requests import jpeg_of_many_scans

NAMES = [
    "<f4",
    "<f8",
    "|u1",
    "|b1",
    "<i8",
    "|O",
    "|V3",
    "<c8",
    "<M8[s]",
    "|S7",
    "<U2",
    "f4",
    "4f4",
    "f4,i4",
    "<f99999999",
    "|S999999",
    ">U1",
    "{}",
    "float",
    "None",
]
GOOD = [
    pack(
        {
            "observation.images.top": np.arange(192, dtype=np.uint8).reshape(8, 8, 3),
            "observation.state": np.ones(7, np.float32),
            "prompt": "put the block on the disc",
            "flexor": {"id": 3, "previous": np.zeros((4, 2), np.float32), "delay": 1, "deadline_ms": 50.0},
        }
    ),
    pack(
        {
            "a": np.float32(1),
            "b": [1, [2, [3, {"c": b"\x00" * 40}]]],
            "jpeg": encode_jpeg(np.zeros((8, 8, 3), np.uint8)),
        }
    ),
]


FILES = [
    *(encode_jpeg(np.full((8, 8, 3), value, np.uint8)) for value in (0, 90)),
    *(jpeg_of_many_scans(8, 8, size) for size in (0, 800, 1200)),
]
REPLIES = [
    pack(
        {
            "server": "flexor",
            "version": "0.1.0",
            "protocol": 1,
            "policy": "act",
            "language": False,
            "actions": [4, 2],
            "action_steps": 3,
            "observation_steps": [-1, 0],
            "reply": "chunk",
            "continues_chunks": False,
            "action_range": {"low": [-1.0, 0.0], "high": [1.0, 0.0]},
            "inputs": {"observation.state": {"shape": [3], "image": False}},
            "limits": {"frame_bytes": 100_000, "sessions": 64, "requests_per_s": 200.0},
        }
    ),
    pack(
        {"actions": np.zeros((4, 2), np.float32), "server_timing": {"infer_ms": 1.5}, "flexor": {"step": 3}}
    ),
    pack({"expired": {"age_ms": 30.5, "deadline_ms": 20.0}, "server_timing": {}}),
]


def hostile_reply(rng: np.random.Generator) -> bytes:
    """What a broken server, or another program, might send to a robot."""
    make = (_noise, _structured, _announced, *[lambda rng: _damaged(rng, REPLIES)] * 5)[rng.integers(8)]
    return make(rng)


def hostile_frame(rng: np.random.Generator) -> bytes:
    """What a broken robot, or anybody, might send to a server."""
    make = (_noise, _damaged, _damaged, _structured, _structured, _announced, _changed, _changed)[
        rng.integers(8)
    ]
    return make(rng)


def hostile_file(rng: np.random.Generator) -> bytes:
    """A JPEG file that is damaged, or whose parts are repeated and mixed up."""
    if rng.random() < 0.5:
        return _damaged(rng, FILES)
    parts = FILES[rng.integers(len(FILES))].split(b"\xff")
    order = rng.integers(0, len(parts), rng.integers(1, 2 * len(parts)))
    return b"\xff".join([*parts[: rng.integers(1, len(parts))], *(parts[number] for number in order)])


def _changed(rng: np.random.Generator) -> bytes:
    """An observation in which something else stands in the place of a value, of an option or of one of a list."""
    message = msgpack.unpackb(GOOD[0])
    inside = [message, message["flexor"], message["observation.state"]][rng.integers(3)]
    name = [*inside][rng.integers(len(inside))]
    inside[name] = [
        _value(rng, 15),
        FILES[rng.integers(len(FILES))],
        [0.5] * 7,
        [FILES[0], FILES[1]],
        ["x" * int(rng.integers(60_000))] + [""] * int(rng.integers(4_900)),  # NumPy would make all as long
    ][rng.integers(5)]
    return msgpack.packb(message)


def _noise(rng: np.random.Generator) -> bytes:
    return rng.bytes(rng.integers(0, 200))


def _damaged(rng: np.random.Generator, good: Sequence[bytes] = GOOD) -> bytes:
    """A good frame with some bytes changed, left out or doubled."""
    frame = bytearray(good[rng.integers(len(good))])
    for _ in range(rng.integers(1, 6)):
        at = int(rng.integers(len(frame)))
        kind = rng.integers(4)
        if kind == 0:
            frame[at] = rng.integers(256)
        elif kind == 1:
            del frame[at : at + int(rng.integers(1, 30))]
        elif kind == 2:
            frame[at:at] = frame[at : at + int(rng.integers(1, 30))]
        else:
            frame[at:at] = rng.bytes(rng.integers(1, 5))
        if not frame:
            break
    return bytes(frame)


def _structured(rng: np.random.Generator) -> bytes:
    """Correct MessagePack with arrays that lie about themselves."""
    return msgpack.packb(_value(rng, 0))


def _value(rng: np.random.Generator, depth: int) -> Any:
    kind = rng.integers(9 if depth < 18 else 5)
    if kind == 0:
        return [None, True, -1, 2**64 - 1, 1e308, float("nan"), "x", b"\xff\xd8\xff"][rng.integers(8)]
    if kind in (1, 2):
        fields = {
            b"__ndarray__": True,
            b"data": rng.bytes(rng.integers(0, 65)),
            b"dtype": NAMES[rng.integers(len(NAMES))],
            b"shape": [
                int(rng.choice([0, 1, 2, 3, 4, 8, 16, -1, 2**31, 2**62])) for _ in range(rng.integers(0, 10))
            ],
        }
        if rng.random() < 0.3:
            fields.pop(list(fields)[rng.integers(1, 4)])
        return fields
    if kind == 3:
        return {b"__npgeneric__": True, b"data": _value(rng, 99), b"dtype": NAMES[rng.integers(len(NAMES))]}
    if kind == 4:
        return rng.bytes(rng.integers(0, 100))
    if kind < 7:
        return [_value(rng, depth + 1) for _ in range(rng.integers(0, 4))]
    return {["a", "", "flexor", b"data", b"__ndarray__"][rng.integers(5)]: _value(rng, depth + 1)}


def _announced(rng: np.random.Generator) -> bytes:
    """Headers that promise much, with little behind them, in each other."""
    parts = []
    for _ in range(rng.integers(1, 40)):
        size = int(rng.choice([0, 1, 2, 100, 4999, 65535]))
        large = int(rng.choice([1, 4999, 2**31, 2**32 - 1]))
        parts.append(
            [
                struct.pack(">BH", 0xDC, size),
                struct.pack(">BI", 0xDD, large),
                struct.pack(">BH", 0xDE, size),
                struct.pack(">BI", 0xDF, large),
                struct.pack(">BI", 0xC6, large),
                struct.pack(">BI", 0xDB, large),
                b"\x91",
                b"\xa1a",
            ][rng.integers(8)]
        )
    return b"".join(parts)
