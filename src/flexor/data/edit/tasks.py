"""Other tasks for episodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from flexor.core.errors import ConfigError
from flexor.data.edit.source import Part


def retasked(
    parts: Sequence[Part], renames: Sequence[str], settings: Sequence[str]
) -> tuple[list[Part], list[str]]:
    """The episodes with their new tasks, and a line for each change. Tasks that are set replace renamed ones."""
    if not renames and not settings:
        raise ConfigError('Give --rename "OLD=NEW" or --set EPISODES="TASK".')
    tasks = list(dict.fromkeys(task for part in parts for task in _tasks(part)))
    new_text, lines = {}, []
    for text in renames:
        old, new = _rename(text, tasks)
        if old in new_text:
            raise ConfigError(f"--rename: {old!r} is renamed twice.")
        new_text[old] = new
        count = sum(old in _tasks(part) for part in parts)
        lines.append(f"{count} episode{'s' if count > 1 else ''}: {old!r} becomes {new!r}")
    texts = [new_text.get(task, task) for task in parts[0].texts]
    task_of: dict[int, str] = {}
    for text in settings:
        listed, equals, task = text.partition("=")
        task = task.strip()
        if not equals or not task:
            raise ConfigError(f'--set {text}: give EPISODES="TASK", such as 0:5="pick up the cube".')
        episodes = parts[0].source.parse(listed, "--set")
        task_of |= dict.fromkeys(episodes, task)
        lines.append(f"{len(episodes)} episode{'s' if len(episodes) > 1 else ''}: the task is {task!r}")
    return [replace(p, texts=texts, task=task_of.get(p.plan.episode.index)) for p in parts], lines


def _tasks(part: Part) -> set[str]:
    return {*part.listed_tasks(), *part.task_texts()}


def _rename(text: str, tasks: Sequence[str]) -> tuple[str, str]:
    """The old and the new text. Both may contain an equals sign: the old one is that of a task."""
    places = [i for i, letter in enumerate(text) if letter == "="]
    pairs = [(text[:i], text[i + 1 :].strip()) for i in places if text[:i] in tasks]
    pairs = pairs or [(text[:i].strip(), text[i + 1 :].strip()) for i in places if text[:i].strip() in tasks]
    if not places:
        raise ConfigError(f'--rename {text}: give "OLD=NEW".')
    if not pairs:
        shortened = ", ".join(map(repr, tasks[:10])) + (
            f" and {len(tasks) - 10} more" if len(tasks) > 10 else ""
        )
        raise ConfigError(f"--rename {text}: no episode has this task. The tasks are {shortened}.")
    if not pairs[0][1]:
        raise ConfigError(f"--rename {text}: the new text is empty.")
    return pairs[0]


def used_tasks(parts: Sequence[Part]) -> list[str]:
    """The tasks that episodes still have, in their earlier order."""
    used = {task for part in parts for task in _tasks(part)}
    new = [part.task for part in parts if part.task is not None]
    return [task for task in dict.fromkeys([*parts[0].texts, *new]) if task in used]
