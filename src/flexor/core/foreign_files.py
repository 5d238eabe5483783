"""Text files from strangers become objects here: within limits, and without running anything that they contain.

A dataset, a checkpoint or a run may come from anywhere. Every function here raises a ValueError for a file that is
malformed, too large, or nested so deeply that a parser would crash. Tensors are read from safetensors files, which
hold no code (`core/tensors.py`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

MALFORMED = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError)
"""What Python raises when the objects in a file are not of the form that the reader expects."""
LARGEST_DOCUMENT = 32 << 20
"""Bytes of a JSON or YAML document, or of one line of JSON lines. The largest real ones have a few megabytes."""
LARGEST_LINES = 4 << 30
"""Bytes of a file of JSON lines: a dataset of 100,000 episodes with their statistics has half a gigabyte."""
DEEPEST = 100
"""Levels of a YAML document. libyaml crashes at some ten thousands."""
MOST_VALUES = 1_000_000
"""Values of a YAML document, with what its aliases repeat: nine lines of aliases can stand for a billion values."""

MOST_DIGITS = 300
"""Of an integer: a longer one can't become a float."""


def read_text(path: Path, most: int = LARGEST_DOCUMENT) -> str:
    """The text of a file of at most this many bytes."""
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size > most:
            raise ValueError(f"the file is larger than {most >> 20} MB: no valid file is that large")
        return file.read().decode("utf-8")


def parse_json(text: str | bytes) -> Any:
    if len(text) > LARGEST_DOCUMENT:
        raise ValueError(f"it is larger than {LARGEST_DOCUMENT >> 20} MB: no valid file is that large")
    try:
        text = text.decode("utf-8") if isinstance(text, bytes) else text
        value = json.loads(text, parse_int=_parse_int)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()  # half of a surrogate pair is in no valid text
        return value
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _parse_int(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"a number has more than {MOST_DIGITS} digits")
    return int(digits)


def read_json(path: Path) -> Any:
    return parse_json(read_text(path))


def read_json_object(path: Path) -> dict[str, Any]:
    """A file that must hold a JSON object: {...}."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise ValueError(f"the file contains a {type(value).__name__}, not a JSON object")
    return value


def read_json_lines(path: Path) -> Iterator[Any]:
    """The value in each line that is not empty. A line that is no JSON raises an error with its number."""
    if path.stat().st_size > LARGEST_LINES:
        raise ValueError(f"the file is larger than {LARGEST_LINES >> 30} GB: no valid file is that large")
    with path.open("rb") as file:
        for number in range(1, 1 << 62):
            line = file.readline(LARGEST_DOCUMENT + 1)
            if not line:
                return
            try:
                text = line.decode("utf-8").strip()
                if text:
                    yield parse_json(text)
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from None


QuickLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's is ten times as fast


def read_yaml(path: Path) -> Any:
    return parse_yaml(read_text(path))


def parse_yaml(text: str, loader: type = QuickLoader) -> Any:
    """The document, by a loader of PyYAML that only makes plain objects."""
    try:
        _check_yaml(text)
        return yaml.load(text, loader)  # noqa: S506  (see above)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None


def _check_yaml(text: str) -> None:
    """Refuse what would crash or fill the memory. This reads the document as a stream of events, which is safe."""
    if len(text) > LARGEST_DOCUMENT:
        raise ValueError(f"it is larger than {LARGEST_DOCUMENT >> 20} MB: no valid file is that large")
    total, depth = 0, 0
    sizes: dict[str, int] = {}  # of anchors: how many values an alias repeats
    unfinished: list[
        tuple[str | None, int]
    ] = []  # anchors of open collections, and the totals where they began
    for event in yaml.parse(text, QuickLoader):
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in sizes:
                raise ValueError(f"the alias {event.anchor!r} contains itself or stands for nothing")
            total += sizes[event.anchor]
        elif isinstance(event, yaml.CollectionStartEvent):
            unfinished.append((event.anchor, total))
            total, depth = total + 1, depth + 1
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, begin = unfinished.pop()
            depth -= 1
            if anchor:
                sizes[anchor] = total - begin
        elif isinstance(event, yaml.ScalarEvent):
            total += 1
            if event.anchor:
                sizes[event.anchor] = 1
        if depth > DEEPEST:
            raise ValueError("it is nested too deeply")
        if total > MOST_VALUES:
            raise ValueError(f"it has more than {MOST_VALUES:,} values")
