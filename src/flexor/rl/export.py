"""The records of a run as a LeRobot dataset: to look at, to repair, or as demonstrations of the next run."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from flexor.core.batch import ACTION, REWARD
from flexor.core.console import Progress
from flexor.core.errors import CheckpointError, ConfigError
from flexor.core.foreign_files import MALFORMED, read_json_object
from flexor.core.run_files import find_last
from flexor.data.format.writer import DatasetWriter
from flexor.rl.demonstrations import DONE, PENALTY, SUCCESS
from flexor.rl.records import SCHEMA, RecordFile, observed_names
from flexor.rl.run import RECORDS_FOLDER
from flexor.rl.sources import READ_AT_ONCE
from flexor.train.checkpoint.run_record import read_record

TRUNCATED, INTERVENTION = "next.truncated", "complementary_info.is_intervention"
COLUMNS = {  # feature of the dataset -> field of a record, and its type there
    REWARD: ("reward", "float32"),
    DONE: ("terminated", "bool"),
    TRUNCATED: ("truncated", "bool"),
    SUCCESS: ("success", "bool"),
    INTERVENTION: ("intervention", "bool"),
    PENALTY: ("penalty", "float32"),
}


def export_records(run: Path, output: Path, progress: Progress | None = None) -> Path:
    """Write the episodes of a run into the new folder `output`.

    An episode without a step is left out, and so is what a person has discarded.
    """
    folder = find_last(run) / RECORDS_FOLDER
    if not (folder / SCHEMA).is_file():
        raise ConfigError(
            f"{run} has no records ({RECORDS_FOLDER}/{SCHEMA}): name a run that learned while it acted."
        )
    file = RecordFile(folder, _layout(folder))
    described = read_record(run)
    task = str(described.get("task") or "no task was named")
    try:
        with DatasetWriter(output, float(described.get("fps") or 10.0), _features(file.layout)) as writer:
            for episode in _episodes(file):
                if episode["discarded"].any():
                    continue
                for frame in _frames(episode):
                    writer.add_frame(frame)
                if len(episode) > 1:
                    writer.save_episode(task)
                if progress is not None:
                    progress(writer.total_frames, file.count)
    finally:
        file.close()
    return output


def _layout(folder: Path) -> np.dtype[Any]:
    try:
        fields = read_json_object(folder / SCHEMA)["fields"]
        return np.dtype([(name, kind, *(tuple(shape) for shape in rest)) for name, kind, *rest in fields])
    except (OSError, *MALFORMED) as error:
        raise CheckpointError(f"{folder / SCHEMA} can't be read: {error!r}.") from error


def _features(layout: np.dtype[Any]) -> dict[str, dict[str, Any]]:
    features: dict[str, dict[str, Any]] = {}
    for name in observed_names(layout):
        shape = layout[name].shape
        if len(shape) == 3:
            size = shape[1], shape[2], shape[0]
            features[name] = {"dtype": "video", "shape": size, "names": ["height", "width", "channels"]}
        else:
            features[name] = {"dtype": "float32", "shape": shape, "names": None}
    features[ACTION] = {"dtype": "float32", "shape": layout[ACTION].shape, "names": None}
    scalars = {name: {"dtype": dtype, "shape": (1,), "names": None} for name, (_, dtype) in COLUMNS.items()}
    return {**features, **scalars}


def _episodes(file: RecordFile) -> Iterator[np.ndarray]:
    """The records of each episode, its first observation included. Actors may have taken turns."""
    pending: dict[int, list[np.ndarray]] = {}
    for start in range(0, file.count, READ_AT_ONCE):
        records = file.read(start, min(READ_AT_ONCE, file.count - start))
        for place, actor in enumerate(records["actor"].tolist()):
            if not records["is_step"][place] and actor in pending:
                yield np.concatenate(pending.pop(actor))
            pending.setdefault(actor, []).append(records[place : place + 1])
    for episode in pending.values():
        yield np.concatenate(episode)


def _frames(episode: np.ndarray) -> Iterator[dict[str, Any]]:
    """A frame has the observation before its action, where a record has the one after it."""
    for before, step in itertools.pairwise(episode):
        frame = {name: before[name] for name in observed_names(episode.dtype)}
        frame = {name: each.transpose(1, 2, 0) if each.ndim == 3 else each for name, each in frame.items()}
        outcome = {name: np.array([step[field]], dtype) for name, (field, dtype) in COLUMNS.items()}
        yield {**frame, ACTION: step[ACTION], **outcome}
