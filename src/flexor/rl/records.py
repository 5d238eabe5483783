"""What is recorded of each step: one record of fixed size, in memory and in the run's file.

A record holds what was done and the observation that followed. So the observation before a step is in the record
before it, and the one after it in its own: both are right at the end of an episode, whatever ended it. An episode
begins with a record that has an observation only.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from flexor.core.errors import CheckpointError
from flexor.core.foreign_files import MALFORMED, read_json_object
from flexor.core.log import log
from flexor.core.machine import flush_to_disk
from flexor.policies.features import Kind, PolicyFeature

SCHEMA, RECORDS = "schema.json", "records.bin"
FORMAT = 2
CHECKED_AT_ONCE = 256  # records, when a file is read
OUTCOME: list[tuple[str, str]] = [
    ("is_step", "u1"),  # 0: the first observation of an episode
    ("terminated", "u1"),
    ("truncated", "u1"),
    ("intervention", "u1"),
    ("success", "u1"),
    ("discarded", "u1"),  # of the last step of an episode that is not learned from
    ("reward", "<f4"),
    ("penalty", "<f4"),
    ("update", "<u4"),  # of the learner, whose weights acted
    ("actor", "<u2"),  # who acted: 0 is the run's own process, others are in actors.json
    ("sequence", "<u4"),  # of this actor's records, from 1 on; 0 of the run's own
]


def record_type(observed: Mapping[str, PolicyFeature], actions: int) -> np.dtype[Any]:
    """The layout of a record for these observations and this number of actions."""
    kinds = {Kind.VISUAL: "u1"}
    fields: list[Any] = [*OUTCOME, ("action", "<f4", (actions,))]
    fields += [(name, kinds.get(each.type, "<f4"), each.shape) for name, each in observed.items()]
    return np.dtype([*fields, ("checksum", "<u4")])


def first_record(layout: np.dtype[Any], observation: Mapping[str, np.ndarray]) -> np.ndarray:
    """The record that begins an episode: [1]."""
    record = np.zeros(1, layout)
    for name in observed_names(layout):
        record[name][0] = observation[name]
    return record


def step_record(
    layout: np.dtype[Any], observation: Mapping[str, np.ndarray], action: np.ndarray, **outcome: float
) -> np.ndarray:
    """The record of a step: the observation that followed it, the action and the outcome."""
    record = first_record(layout, observation)
    record["is_step"], record["action"][0] = 1, action
    for name, value in outcome.items():
        record[name] = value
    return record


def observed_names(layout: np.dtype[Any]) -> list[str]:
    """The names of the observations in a record."""
    assert layout.names is not None
    outcome = {name for name, _ in OUTCOME}
    return [name for name in layout.names if name not in outcome | {"action", "checksum"}]


class RecordFile:
    """The records of a run, in the order in which they were made. Each is in the file as soon as it was appended.

    A process that is killed while it appends leaves an incomplete record at the end, which the next one removes.
    """

    def __init__(self, folder: Path, layout: np.dtype[Any]):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.layout = folder, layout
        self._check_schema()
        self.path = folder / RECORDS
        self.file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        self.count = self._remove_incomplete()

    def _check_schema(self) -> None:
        described = {"format": FORMAT, "fields": json.loads(json.dumps(self.layout.descr))}
        path = self.folder / SCHEMA
        if not path.exists():
            temporary = path.with_name(f".{path.name}")
            temporary.write_text(json.dumps(described, indent=1))
            flush_to_disk(temporary)
            temporary.rename(path)
            return
        try:
            saved = read_json_object(path)
        except (OSError, *MALFORMED) as error:
            raise CheckpointError(
                f"{path} can't be read: {error!r}. Restore it from a copy of the run."
            ) from error
        if saved != described:
            raise CheckpointError(
                f"{self.folder} has records of other observations or actions than this run's. Start a new run in "
                "another folder."
            )

    def _remove_incomplete(self) -> int:
        """The number of complete records. What follows the last of them is cut off."""
        size = os.fstat(self.file).st_size
        count = size // self.layout.itemsize
        complete = count
        for start in range(0, count, CHECKED_AT_ONCE):
            records = self.read(start, min(CHECKED_AT_ONCE, count - start))
            bad = np.flatnonzero(records["checksum"] != _checksums(records))
            if len(bad):
                complete = start + int(bad[0])
                break
        if size != complete * self.layout.itemsize:
            lost = count - complete
            log.warning(
                "%s ends with %d bytes that are not a complete record (after %d records): they are cut off",
                *(self.path, size - complete * self.layout.itemsize, max(lost - 1, 0)),
            )
            os.ftruncate(self.file, complete * self.layout.itemsize)
        return complete

    def append(self, record: np.ndarray) -> None:
        """Write one record [1] in a single call."""
        record["checksum"] = _checksums(record)
        data = record.tobytes()
        if (written := os.write(self.file, data)) != len(data):
            os.ftruncate(self.file, self.count * self.layout.itemsize)
            raise OSError(28, f"only {written} of {len(data)} bytes of a record were written", str(self.path))
        self.count += 1

    def read(self, start: int, count: int) -> np.ndarray:
        """A part of the records."""
        data = os.pread(self.file, count * self.layout.itemsize, start * self.layout.itemsize)
        return np.frombuffer(data, self.layout).copy()

    def flush(self) -> None:
        """Have the disk store what was written, so that it outlives a loss of power."""
        os.fsync(self.file)

    def close(self) -> None:
        os.close(self.file)


def _checksums(records: np.ndarray) -> np.ndarray:
    """Of each record, without its last field."""
    assert records.dtype.itemsize > 4
    return np.array([zlib.crc32(each.tobytes()[:-4]) for each in records], np.uint32)
