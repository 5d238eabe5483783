"""The tasks of episodes: those of their rows, which training uses, and those that the metadata lists."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from flexor.core.log import warn_once, with_examples
from flexor.data.format.metadata import BrokenFile, Metadata, parquet_columns, read_parquet
from flexor.data.storage.source import Source

READERS = 8
MOST_REMOTE_TABLES = 1000
"""Tables that are downloaded to learn the tasks of episodes; with more, the metadata must do."""


def task_texts(numbers: Iterable[float], tasks: Sequence[str]) -> list[str]:
    """The texts of these task numbers, each once; a number without text has none."""
    counted = [int(number) for number in numbers if 0 <= number < len(tasks)]
    return list(dict.fromkeys(tasks[number] for number in counted if tasks[number]))


def disagree(rows: Sequence[str], listed: Sequence[str]) -> bool:
    """Whether rows have a task that the metadata does not list. It may list more, such as a judgement."""
    return bool(listed) and not {*rows} <= {*listed}


def episode_tasks(
    name: str, meta: Metadata, episodes: np.ndarray, lengths: np.ndarray, numbers: np.ndarray
) -> list[list[str]]:
    """The tasks of these episodes: as the metadata lists them, unless their rows [N] have another one."""
    parts = np.split(numbers, np.cumsum(lengths)[:-1])
    rows = [task_texts(np.unique(part).tolist(), meta.tasks) for part in parts]
    listed = [meta.episodes.tasks[i] for i in episodes]
    conflicts = [
        f"episode {episode}: {', '.join(map(repr, texts))} in its rows, {', '.join(map(repr, names))} in meta/"
        for episode, texts, names in zip(episodes.tolist(), rows, listed)
        if disagree(texts, names)
    ]
    if conflicts:
        summary = (
            f"{len(conflicts)} episodes have another task than the metadata lists; using that of the rows:"
        )
        warn_once("%s", with_examples(f"{name}: {summary}", conflicts))
    return _agreed(rows, listed)


def _agreed(rows: Sequence[list[str]], listed: Sequence[list[str]]) -> list[list[str]]:
    return [texts if disagree(texts, names) or not names else names for texts, names in zip(rows, listed)]


def tasks_to_select_by(source: Source, meta: Metadata) -> list[list[str]]:
    """The tasks of all episodes, read from their rows. A table that can't be read leaves those of the metadata."""
    files: dict[str, list[int]] = {}
    for episode, file in enumerate(meta.episodes.data_file):
        files.setdefault(file, []).append(episode)
    if source.kind != "disk" and len(files) > MOST_REMOTE_TABLES:
        return meta.episodes.tasks
    source.fetch(files)

    def read(file: str) -> dict[int, list[str]]:
        try:
            return _tasks_in(source, file, files[file], meta.tasks)
        except BrokenFile:
            return {}

    with ThreadPoolExecutor(READERS) as pool:
        read_tasks = {episode: texts for part in pool.map(read, files) for episode, texts in part.items()}
    listed = meta.episodes.tasks
    rows = [read_tasks.get(episode, listed[episode]) for episode in range(len(listed))]
    return _agreed(rows, listed)


def _tasks_in(source: Source, file: str, episodes: list[int], tasks: Sequence[str]) -> dict[int, list[str]]:
    present = parquet_columns(source, file)
    if "task_index" not in present:
        return {}
    names = [name for name in ("episode_index", "task_index") if name in present]
    table = read_parquet(source, file, names)
    column = table["task_index"].to_numpy()
    # without the column a file contains one episode, as in v2
    index = table["episode_index"].to_numpy() if len(names) == 2 else np.full(len(column), episodes[0])
    if column.dtype.kind not in "iuf" or index.dtype.kind not in "iuf":
        return {}
    pairs = np.unique(np.stack([index, column], axis=1), axis=0)  # few: an episode has one or two tasks
    used: dict[int, list[float]] = {episode: [] for episode in episodes}
    for episode, number in pairs.tolist():
        if episode in used:
            used[episode].append(number)
    return {episode: task_texts(numbers, tasks) for episode, numbers in used.items()}
