"""Selects episodes: by lists such as 0,1,5:9 or @file, and by the text of their tasks."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np

from flexor.core.errors import ConfigError, DatasetError
from flexor.core.name_ranges import consecutive

SHOWN_TASKS = 10  # in an error message


def parse_episodes(text: str, where: str, count: int | None = None) -> list[int]:
    """Indices and half-open ranges, in the given order: "0, 5:8" is 0, 5, 6, 7. Enclosing brackets are allowed.

    ":8" are the first eight, and "5:" are all from 5 on: that takes the `count` of episodes. "@file" reads a JSON list
    from a file, as `flexor data check --good-episodes` writes it. `where` is the name of the setting, for messages.
    """
    if text.startswith("@"):
        return _read(text, where)
    episodes: list[int] = []
    for part in _parts(text):
        match = re.fullmatch(r"([0-9]+)?\s*(:)?\s*([0-9]+)?", part)
        if not match or not (match[1] or match[3]):
            raise _wrong(text, where, f"{part!r} is not an episode index")
        first = int(match[1] or 0)
        end = int(match[3]) if match[3] else first + 1
        if match[2] and not match[3]:
            if count is None:
                raise _wrong(text, where, f"the range {part} has no end, and here it needs one")
            if first >= count:
                raise _wrong(text, where, f"the range {part} is empty: there are {count} episodes")
            end = count
        if first >= end:
            raise _wrong(text, where, f"the range {part} is empty")
        episodes += range(first, end)
    return episodes


def episode_setting(text: str, where: str) -> list[int] | str:
    """The list as far as it is known without the dataset: as text, if a range in it has no end. Checks how it is
    written."""
    if text.startswith("@") or not any(part.endswith(":") for part in _parts(text)):
        return parse_episodes(text, where)
    parse_episodes(",".join(part.removesuffix(":") for part in _parts(text)), where)
    return str(text)


def _parts(text: str) -> list[str]:
    inside = text.strip()
    inside = inside[1:-1] if inside[:1] == "[" and inside[-1:] == "]" else inside
    return [part.strip() for part in inside.split(",")]


def _wrong(text: str, where: str, why: str) -> ConfigError:
    return ConfigError(f"{where}={text}: {why}. Give indices and ranges such as 0,1,5:9 or 10:, or @file.")


def write_episodes(episodes: Iterable[int]) -> str:
    """The text that `parse_episodes` reads; consecutive indices become ranges."""
    runs = consecutive(sorted(set(episodes)))
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}:{run[-1] + 1}" for run in runs)


def _read(text: str, where: str) -> list[int]:
    try:
        episodes = json.loads(Path(text[1:]).read_text(encoding="utf-8"))
        if not isinstance(episodes, list) or not all(type(e) is int and e >= 0 for e in episodes):
            raise ValueError("the file contains something else")
    except (OSError, ValueError) as error:
        problem = f"can't read a list of episodes such as [0, 1, 2] from this file ({error})."
        raise ConfigError(f"{where}={text}: {problem}") from error
    return episodes


def select_episodes(
    name: str,
    available: np.ndarray,
    tasks: Sequence[Sequence[str]],
    *,
    episodes: Sequence[int] | str | None = None,
    exclude: Sequence[int] | str | None = None,
    by_task: Sequence[str] | str | None = None,
) -> list[int]:
    """The requested ones of the `available` episodes, without the excluded ones, that have one of the tasks.

    `tasks` are those of each episode. `name` is the dataset's, for messages.
    """
    selected = available.tolist() if episodes is None else checked_episodes(episodes, available, name)
    if exclude:
        excluded = set(checked_episodes(exclude, available, name, "exclude_episodes"))
        remaining = [episode for episode in selected if episode not in excluded]
        if not remaining:
            raise DatasetError(
                f"{name}: --dataset.exclude_episodes excludes all of its {len(selected)} episodes"
            )
        selected = remaining
    return selected if by_task is None else _with_task(name, selected, by_task, tasks)


def checked_episodes(
    episodes: Sequence[int] | str, available: np.ndarray, name: str, setting: str = "episodes"
) -> list[int]:
    """The requested episodes, once each and in order; an episode that does not exist is an error."""
    if isinstance(episodes, str):
        episodes = parse_episodes(episodes, f"dataset.{setting}", int(available.max(initial=-1)) + 1)
    requested = sorted({int(episode) for episode in episodes})
    existing = set(available.tolist())
    missing = [episode for episode in requested if episode not in existing]
    if missing:
        valid = f"{available.min()} to {available.max()}" if len(available) else "none"
        if len(existing) and len(existing) != available.max() - available.min() + 1:
            valid = f"{sorted(existing)}"
        raise DatasetError(
            f"{name} has no episodes {_some(missing)}: valid episodes are {valid}. Correct --dataset.{setting}"
        )
    if not requested:
        raise DatasetError(
            f"{name}: the list of episodes is empty. Leave out --dataset.{setting} to read all"
        )
    return requested


def _some(episodes: list[int]) -> str:
    return str(episodes) if len(episodes) <= 20 else f"[{write_episodes(episodes)}]"


def _with_task(
    name: str, episodes: list[int], patterns: Sequence[str] | str, tasks: Sequence[Sequence[str]]
) -> list[int]:
    patterns = [patterns] if isinstance(patterns, str) else list(patterns)
    present = list(dict.fromkeys(task for episode in episodes for task in tasks[episode]))
    unmatched = [p for p in patterns if not any(_matches(task, p) for task in present)]
    if unmatched or not patterns:
        examples = ", ".join(map(repr, present[:SHOWN_TASKS])) or "none"
        and_more = f" and {len(present) - SHOWN_TASKS} more" if len(present) > SHOWN_TASKS else ""
        raise DatasetError(
            f"{name}: no task of its {len(episodes)} selected episodes matches --dataset.tasks={unmatched}. "
            f"Their tasks are {examples}{and_more}"
        )
    return [e for e in episodes if any(_matches(task, p) for task in tasks[e] for p in patterns)]


def _matches(task: str, pattern: str) -> bool:
    """A pattern with * or ? must match the whole text; any other is searched for in it. Case does not matter."""
    task, pattern = task.lower(), pattern.lower()
    return fnmatchcase(task, pattern) if {"*", "?"} & {*pattern} else pattern in task
