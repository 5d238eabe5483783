"""What server and robot say to each other: openpi's protocol, and what Flexor adds to it.

A WebSocket without compression, path `/`. If the server has a key, the header `Authorization: Api-Key KEY` is required.
The server begins with one binary frame, its metadata. Then the client sends a binary frame with an observation and
gets one binary frame with the result, in turn. An error is a text frame. After it the server closes the connection with
code 1011, except where the reply says otherwise (see `expired`).

**Frames** are MessagePack. An array is a map with bytes as keys: `b"__ndarray__": True, b"data": bytes,
b"dtype": "<f4", b"shape": [2, 3]`, in C order. A NumPy scalar is `b"__npgeneric__": True, b"data": 1.5,
b"dtype": "<f4"`. `pack` writes them and `unpack` reads them. `unpack` trusts nobody: arrays and scalars are numbers
(kinds b i u f) and nothing else, what a frame holds is counted before objects are made of it (`Limits`), and nothing
but plain values is built.

**Metadata** (a map; openpi's clients ignore it):

- `server` ("flexor"), `version`, `protocol` (1)
- `policy`: its type. `inputs`: {name: {"shape": [...], "image": bool}}, names as the client must send them (with
  --map they are the client's own names), images as [C, H, W]. `language`: whether it reads `prompt`
- `actions`: [H, A] of a chunk. `action_steps`: how many of them were meant to be executed. `observation_steps`: for
  policies with a history, the steps that they see relative to now, such as [-1, 0]; else absent
- `reply`: "chunk" or "action": see below. `continues_chunks`: whether the policy continues `previous` itself; if it
  doesn't, the server blends
- `action_range`: {"low": [A], "high": [A]}, the range of each part of an action in the training data, in the robot's
  units; absent where the policy's statistics do not tell. Players refuse what is far outside of it
- `limits`: {"frame_bytes", "sessions", "requests_per_s"}. A client that asks more often is answered later

**Observation**: a map of names to values. A name with slashes is either one key or a path of nested maps:
"images/top" finds {"images/top": x} as well as {"images": {"top": x}}. `prompt` (or `task`) is the task in words. An
image is a uint8 array [H, W, C] or [C, H, W], or a JPEG file as bytes (MessagePack's `bin`; it begins with FF D8 FF):
`encode_jpeg` makes one. A state is a vector, as an array or a list. For a policy with a history, every value may
be a list or an array of several: those of `observation_steps`, oldest first; without that, the server keeps the last
observations that it was sent.

The key `flexor` (all of it optional; openpi's clients don't send it) is a map:

- `id`: a number or a short text, returned with the reply
- `session`: a short text that names one of several robots on this connection; by default all is one robot. A
  connection that ends takes its sessions with it
- `reset`: True: this observation is the first of an episode. Queue, history, ensembling and memory are emptied
- `episode`: its number (default 0). The policy's noise depends on it. A new number is also a reset
- `step`: the number of the robot's step in its episode, on which the policy's noise depends, too. By default the server
  assumes that `action_steps` actions of each chunk were executed before the next request
- `reply`: "chunk": `actions` is the whole chunk [H, A], beginning with the action for this observation (the default).
  "action": the server keeps the chunk, and `actions` is the one action for this observation, [1, A]. Then every step of
  the robot must be sent. It is the default for policies with temporal ensembling
- `previous`: for real-time chunking, with "chunk": float array [K, A], the actions of the last chunk that are not
  executed yet when this observation was taken. `delay`: how many of them will be executed by the time the reply
  arrives. The new chunk's entry i is for the same moment as entry i of `previous`; its first `delay` are (nearly)
  equal to it, so a robot uses the new chunk from entry `delay` on
- `deadline_ms`: how old the observation may be when its answer is ready to be sent. `age_ms`: how old it was when it
  was sent (default 0). One that is or will be too old is not predicted: see `expired`. The answer comes by then,
  whatever other clients ask for

**Result**, a map:

- `actions`: float32 [H, A] (or [1, A]), in the robot's units
- `server_timing`: {"infer_ms", "decode_ms", "queue_ms", "model_ms", "encode_ms" (of the reply before), "prev_total_ms"
  (from the second reply on)}. `policy_timing`: {"infer_ms"}
- `flexor`, only if the observation had it: {"id" (if given), "step", "episode", "batch" (requests that were predicted
  together), "delay" (if given)}
- `expired`, instead of `actions`: {"age_ms", "deadline_ms"}: the observation was too old, or would have been. The
  connection stays open and the session is as before, except that a history may have this observation

A text frame means that the observation could not be used; it says what is wrong with it.

**A learner** (`flexor train --rl.serve.port=...`) speaks another protocol on the same connections: metadata with
`learner` (1), then messages of an actor, each with one answer.

- `hello`: {"protocol", "actor": its name, "id": 32 hexadecimal digits of its spool, "weights": whether the policy acts
  at the actor's, "environment"}. `environment`: {"shapes": {"observation.state": [3], "observation.images.top":
  [C, H, W]}, "low": [A], "high": [A] of actions, "ranges": {name: [low, high]} of observations, where known, "fps",
  "task"}. The answer is {"starting": True}, then hello is to be sent again; or {"received": the last record of this id,
  "policy": its settings, "seed", "actor": its number, "max_lag"}
- `records`: a list, and `first`, the number of the first of them. A record: {"is_step", "terminated", "truncated",
  "intervention", "success", "discarded": booleans, "reward", "penalty": numbers, "update": the updates of the weights
  that acted, "action": [A], "observation": {name: value}}; values as above. The first record of an episode has
  `is_step` false and an observation only; the others have the observation after their step. The answer: {"received",
  "behind": steps that are not learned from yet, "update": that of the newest weights, "finished": whether the run is
  over, "action": [A] for the last observation, if the policy is with the learner and the episode goes on}. What is
  `received` is in the learner's file. A record with a number that it has is left out; after a gap, so is the rest of
  the episode
- `status`: True. The same answer, without an action
- `weights`: the updates of those that the actor has, or -1. The answer: {"update", "weights": {name: array}}, those
  that have changed
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np

from flexor_client.errors import WireError

PROTOCOL = LEARNER_PROTOCOL = 1
OPTIONS = "flexor"  # the key of Flexor's own fields, in observations and results
# Numbers of the kinds b i u f, in the sizes that every machine has.
DTYPE = re.compile(r"[<>|=]?(?:b1|[iu][1248]|f[248])\Z")


@dataclass(frozen=True)
class Limits:
    """The most that a frame may hold."""

    frame_bytes: int = 32 * 2**20
    """Bytes of a frame."""
    items: int = 5_000
    """Values in it, those inside of lists and maps included."""
    text_bytes: int = 2**16
    """Bytes of all its texts together, names included. In memory a text can be four times as large."""
    depth: int = 16
    """Lists and maps inside of each other."""
    dimensions: int = 8
    """Dimensions of an array."""


DEFAULT_LIMITS = Limits()


def pack(message: Any) -> bytes:
    """A message as MessagePack, with NumPy arrays and scalars as openpi writes them."""
    try:
        packed: bytes = msgpack.packb(message, default=_pack_numpy)
    except WireError:
        raise
    except (TypeError, ValueError, OverflowError) as error:  # msgpack has several, such as for large integers
        raise WireError(f"The message can't be sent: {error}") from error
    return packed


def _pack_numpy(value: Any) -> dict[bytes, Any]:
    if not isinstance(value, (np.ndarray, np.generic)):
        raise WireError(
            f"A {type(value).__name__} can't be sent: only numbers, text, bytes, lists, maps, arrays."
        )
    if not DTYPE.match(value.dtype.str):
        raise WireError(f"An array of {value.dtype} can't be sent: only booleans, integers and floats.")
    if isinstance(value, np.generic):
        return {b"__npgeneric__": True, b"data": value.item(), b"dtype": value.dtype.str}
    return {
        b"__ndarray__": True,
        b"data": value.data if value.flags.c_contiguous and value.size else value.tobytes(),
        b"dtype": value.dtype.str,
        b"shape": list(value.shape),
    }


def unpack(frame: bytes, limits: Limits = DEFAULT_LIMITS) -> Any:
    """The message in a frame; WireError if it is not one, or exceeds the limits. Arrays are read-only."""
    if len(frame) > limits.frame_bytes:
        raise WireError(f"The frame has {len(frame):,} bytes; at most {limits.frame_bytes:,} are allowed.")
    _measure(frame, limits)
    try:
        return msgpack.unpackb(
            frame, object_hook=lambda fields: unpack_numpy(fields, limits), strict_map_key=True, max_ext_len=0
        )
    except WireError:
        raise
    except Exception as error:  # msgpack has several types, not all of them with a common base
        raise WireError(f"The frame is not MessagePack: {type(error).__name__}: {error}") from error


def unpack_numpy(fields: dict[Any, Any], limits: Limits = DEFAULT_LIMITS) -> Any:
    """The array or scalar that a map stands for; else the map itself."""
    if b"__ndarray__" in fields:
        return _array(fields, limits)
    if b"__npgeneric__" in fields:
        return _scalar(fields)
    return fields


def _array(fields: dict[Any, Any], limits: Limits) -> np.ndarray:
    dtype, data, shape = _dtype(fields), fields.get(b"data"), fields.get(b"shape")
    if not isinstance(data, bytes):
        raise WireError(f"The data of an array must be bytes, not {type(data).__name__}.")
    if not isinstance(shape, list) or len(shape) > limits.dimensions:
        raise WireError(f"The shape of an array must be a list of at most {limits.dimensions} sizes.")
    size = dtype.itemsize
    for length in shape:
        if type(length) is not int or not 0 <= length < 2**40:
            raise WireError(f"The shape of an array has {_short(length)} where a size is expected.")
        size *= length
    if size != len(data):
        raise WireError(f"An array {shape} of {dtype} has {size:,} bytes, but {len(data):,} were sent.")
    array = np.frombuffer(data, dtype).reshape(shape) if data else np.zeros(shape, dtype)
    array.flags.writeable = False
    return array


def _scalar(fields: dict[Any, Any]) -> Any:
    dtype, value = _dtype(fields), fields.get(b"data")
    if not isinstance(value, (bool, int, float)):
        raise WireError(f"The data of a NumPy scalar must be a number, not {type(value).__name__}.")
    try:
        with np.errstate(all="ignore"):
            return dtype.type(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise WireError(f"{value!r:.40} is not a value of {dtype}: {error}") from error


def _dtype(fields: dict[Any, Any]) -> np.dtype:
    name = fields.get(b"dtype")
    if not isinstance(name, str) or not DTYPE.match(name):
        raise WireError(
            f"The dtype {_short(name)} is not allowed: only booleans, integers and floats (kinds b i u f). Send text "
            "as text, not as an array."
        )
    return np.dtype(name)


def _short(value: Any) -> str:
    """A value in a message. The repr() of a long one would be several times as long before it is cut."""
    if isinstance(value, (str, bytes)):
        return repr(value[:40])
    return type(value).__name__ if isinstance(value, (list, dict, np.ndarray)) else f"{value!r:.40}"


# Of every first byte: how many bytes of header follow, and what they are the length of.
_FIXED, _BYTES, _TEXT, _LIST, _MAP = range(5)
_LENGTHS = {
    **{0xC4 + i: (1 << i, _BYTES) for i in range(3)},  # bin
    **{0xD9 + i: (1 << i, _TEXT) for i in range(3)},  # str
    0xDC: (2, _LIST),
    0xDD: (4, _LIST),
    0xDE: (2, _MAP),
    0xDF: (4, _MAP),
}
_NUMBERS = {0xCA: 4, 0xCB: 8, **{0xCC + i: 1 << i for i in range(4)}, **{0xD0 + i: 1 << i for i in range(4)}}


def _header(frame: bytes, at: int) -> tuple[int, int, int]:
    """Of the value at a position: its kind, its length, and where its content begins."""
    first = frame[at]
    if first < 0x80 or first >= 0xE0 or first in (0xC0, 0xC2, 0xC3):
        return _FIXED, 0, at + 1
    if first < 0x90:
        return _MAP, first & 0x0F, at + 1
    if first < 0xA0:
        return _LIST, first & 0x0F, at + 1
    if first < 0xC0:
        return _TEXT, first & 0x1F, at + 1
    if first in _NUMBERS:
        return _BYTES, _NUMBERS[first], at + 1
    if first not in _LENGTHS:
        raise WireError("The frame holds an extension type of MessagePack, which is not allowed.")
    width, kind = _LENGTHS[first]
    return kind, int.from_bytes(frame[at + 1 : at + 1 + width], "big"), at + 1 + width


def _measure(frame: bytes, limits: Limits) -> None:
    """Refuse a frame with too many values or texts, too deep, or that ends early, before anything is made of it.

    A list of a billion values is announced in five bytes, and a decoder may reserve the memory for it.
    """
    at, items, text, end = 0, 0, 0, len(frame)
    open_ends = [1]  # of the lists and maps around this position: how many values are still to come
    while open_ends:
        if not open_ends[-1]:
            open_ends.pop()
            continue
        open_ends[-1] -= 1
        if at >= end:
            raise WireError("The frame ends too early.")
        kind, length, at = _header(frame, at)
        items += 1
        if kind in (_BYTES, _TEXT):
            at += length
            text += length if kind == _TEXT else 0
        elif kind != _FIXED and length:
            open_ends.append(length if kind == _LIST else 2 * length)
        if at > end:
            raise WireError("The frame ends too early.")
        if items > limits.items or open_ends[-1] > limits.items:
            raise WireError(f"The frame holds more than {limits.items:,} values.")
        if text > limits.text_bytes:
            raise WireError(f"The frame holds more than {limits.text_bytes:,} bytes of text.")
        if len(open_ends) > limits.depth + 1:
            raise WireError(f"Lists and maps are nested more than {limits.depth} deep.")
    if at != end:
        raise WireError("Something follows the message in the frame.")
