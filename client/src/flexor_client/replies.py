"""What a server sends, checked before anybody uses it: a server may be broken, another program, or somebody else's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Callable

import numpy as np

from flexor_client.errors import WireError, printable
from flexor_client.wire import PROTOCOL, Limits, unpack

REPLY_BYTES = 4 * 2**20  # of any frame; a chunk of 100 actions of 32 numbers has 13,000
EXTRA_BYTES = 2**16  # of a result, besides its actions
LONGEST_CHUNK = LARGEST_ACTION = 10_000
LONGEST_HISTORY = 100  # steps
LONGEST_NAME = 200


def _is_count(value: Any, most: int) -> bool:
    return type(value) is int and 1 <= value <= most


def _is_size_of_chunk(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 2
        and _is_count(value[0], LONGEST_CHUNK)
        and _is_count(value[1], LARGEST_ACTION)
        and 8 * value[0] * value[1] + EXTRA_BYTES <= REPLY_BYTES
    )


def _is_history(value: Any) -> bool:
    return (
        isinstance(value, list)
        and 0 < len(value) <= LONGEST_HISTORY
        and all(type(step) is int and -LONGEST_HISTORY <= step <= 0 for step in value)
    )


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= LONGEST_NAME


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= LARGEST_ACTION and all(map(_is_name, value))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300


def _is_range(value: Any) -> bool:
    if not isinstance(value, dict) or value.keys() != {"low", "high"}:
        return False
    low, high = value["low"], value["high"]
    numbers = isinstance(low, list) and isinstance(high, list) and all(map(_is_number, low + high))
    return numbers and len(low) == len(high) and all(a <= b for a, b in zip(low, high))


def _are_limits(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_number, value.values()))


def _are_inputs(value: Any) -> bool:
    return isinstance(value, dict) and all(
        _is_name(name)
        and isinstance(about, dict)
        and isinstance(about.get("image"), bool)
        and isinstance(about.get("shape"), list)
        and all(_is_count(size, 2**20) for size in about["shape"])
        for name, about in value.items()
    )


# What this package uses of any server's metadata, and what users may use of Flexor's.
COMMON_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "actions": (_is_size_of_chunk, "the length of a chunk and the size of an action"),
    "action_steps": (lambda value: _is_count(value, LONGEST_CHUNK), "a number of actions"),
    "observation_steps": (_is_history, f"steps from -{LONGEST_HISTORY} to 0"),
    "reply": (lambda value: isinstance(value, str) and value in ("chunk", "action"), "chunk or action"),
    "continues_chunks": (lambda value: isinstance(value, bool), "true or false"),
    "action_range": (_is_range, "the lowest and highest number of each part of an action"),
    "action_names": (_are_names, "names"),
    "limits": (_are_limits, "numbers"),
}
FLEXOR_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "version": (_is_name, "text"),
    "policy": (_is_name, "text"),
    "language": (lambda value: isinstance(value, bool), "true or false"),
    "inputs": (_are_inputs, "names with a shape each"),
}
STABLE = ("actions", "action_steps", "observation_steps", "reply", "continues_chunks")


def read_metadata(frame: bytes) -> dict[str, Any]:
    """The metadata in a server's first frame; WireError if it can't be used."""
    metadata = read_message(frame, REPLY_BYTES)
    from_flexor = _is_from_flexor(metadata)
    version = metadata.get("protocol")
    if from_flexor and (type(version) is not int or version != PROTOCOL):
        raise WireError(
            f"the server speaks version {version!r:.40} of it, and this flexor-client version {PROTOCOL}: install the "
            "flexor-client of the server's release"
        )
    for name, (fits, form) in {**COMMON_FIELDS, **(FLEXOR_FIELDS if from_flexor else {})}.items():
        if name in metadata and not fits(metadata[name]):
            raise WireError(f"{name} in the server's metadata must be {form}")
    size, spans = metadata.get("actions"), metadata.get("action_range")
    if size is not None and spans is not None and len(spans["low"]) != size[1]:
        raise WireError(f"action_range in the server's metadata must be for {size[1]} parts")
    return metadata


def stable_fields(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """What must stay the same when a connection is made anew, while a robot is in an episode."""
    names = (*STABLE, "policy") if _is_from_flexor(metadata) else STABLE
    return {name: metadata.get(name) for name in names}


def _is_from_flexor(metadata: Mapping[str, Any]) -> bool:
    server = metadata.get("server")
    return isinstance(server, str) and server == "flexor"


def read_result(frame: bytes, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """A server's answer to an observation: `actions` that can be used, or `expired`; WireError if it can't be used."""
    size = metadata.get("actions")
    result = read_message(frame, REPLY_BYTES if size is None else 8 * size[0] * size[1] + EXTRA_BYTES)
    if "expired" in result:
        expired = result["expired"]
        if not isinstance(expired, dict) or not all(map(_is_number, expired.values())):
            raise WireError("expired must say how old the observation is and may be")
    elif "actions" in result:
        _check_actions(result["actions"], size)
    return result


def _check_actions(actions: Any, size: list[int] | None) -> None:
    if (
        not isinstance(actions, np.ndarray)
        or actions.dtype.kind != "f"
        or actions.ndim != 2
        or not actions.size
    ):
        raise WireError("actions must be a float array [H, A]")
    length, parts = actions.shape
    if size is not None and (length > size[0] or parts != size[1]):
        raise WireError(f"actions are {[length, parts]}, but the server announced {size}")
    if not np.isfinite(actions).all():
        raise WireError("actions are not finite: the policy's weights or its statistics are broken")


def read_message(frame: bytes, most: int) -> dict[str, Any]:
    message = _printable(unpack(frame, Limits(frame_bytes=most)))
    if not isinstance(message, dict):
        raise WireError(f"a {type(message).__name__} instead of a map")
    return message


def _printable(value: Any) -> Any:
    """The value with all its texts printable."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, list):
        return [_printable(item) for item in value]
    if isinstance(value, dict):
        return {_printable(name): _printable(item) for name, item in value.items()}
    return value
