"""Parses lists of episodes such as 0,1,5:9 or @file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

from flexor.core.errors import ConfigError


def parse_episodes(text: str, where: str) -> list[int]:
    """Indices and half-open ranges, in the given order: "0, 5:8" is 0, 5, 6, 7. Enclosing brackets are allowed.

    "@file" reads a JSON list from a file, as `flexor data check --good-episodes` writes it. `where` is the name
    of the setting, for messages.
    """
    if text.startswith("@"):
        return _read(text, where)
    episodes: list[int] = []
    inside = text.strip()
    inside = inside[1:-1] if inside[:1] == "[" and inside[-1:] == "]" else inside
    for part in inside.split(","):
        match = re.fullmatch(r"\s*([0-9]+)\s*(?::\s*([0-9]+)\s*)?", part)
        first, end = (int(match[1]), int(match[2] or int(match[1]) + 1)) if match else (0, 0)
        if first >= end:
            why = (
                f"the range {part.strip()} is empty" if match else f"{part.strip()!r} is not an episode index"
            )
            raise ConfigError(f"{where}={text}: {why}. Give indices and ranges such as 0,1,5:9, or @file.")
        episodes += range(first, end)
    return episodes


def write_episodes(episodes: Iterable[int]) -> str:
    """The text that `parse_episodes` reads; consecutive indices become ranges."""
    runs: list[list[int]] = []
    for episode in sorted(set(episodes)):
        if runs and episode == runs[-1][1]:
            runs[-1][1] += 1
        else:
            runs.append([episode, episode + 1])
    return ",".join(str(first) if end == first + 1 else f"{first}:{end}" for first, end in runs)


def _read(text: str, where: str) -> list[int]:
    try:
        episodes = json.loads(Path(text[1:]).read_text(encoding="utf-8"))
        if not isinstance(episodes, list) or not all(type(e) is int and e >= 0 for e in episodes):
            raise ValueError("the file contains something else")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{where}={text}: can't read a list of episodes such as [0, 1, 2] from this file ({error})."
        ) from error
    return episodes
