"""The actors of a run: each has a number in the records, and how far it is."""

from __future__ import annotations

import json

import numpy as np

from flexor.core.errors import CheckpointError, ConfigError
from flexor.core.foreign_files import MALFORMED, parse_json
from flexor.core.machine import flush_to_disk
from flexor.rl.records import RecordFile

ACTORS = "actors.json"
MOST_ACTORS = 2**16 - 1  # that a record can name


class Actors:
    """By the ids of their spools: an actor with a new spool counts as another one."""

    def __init__(self, file: RecordFile, read_at_once: int = 1024):
        self.path = file.folder / ACTORS
        self.entries = self._load()  # [{"id", "name"}, ...] of the actors 1, 2, ...
        self.numbers = {entry["id"]: number for number, entry in enumerate(self.entries, 1)}
        self.received: dict[int, int] = {}  # the last record of each
        self.in_episode: dict[int, bool] = {}  # whether a step can follow it
        self.steps = 0  # of all
        for start in range(0, file.count, read_at_once):
            records = file.read(start, min(read_at_once, file.count - start))
            for place in range(len(records)):
                self.add(records[place : place + 1])

    def _load(self) -> list[dict[str, str]]:
        if not self.path.exists():
            return []
        try:
            entries = [
                {"id": str(e["id"]), "name": str(e["name"])} for e in parse_json(self.path.read_bytes())
            ]
        except (OSError, *MALFORMED) as error:
            raise CheckpointError(
                f"{self.path} can't be read: {error!r}. Restore it from a copy of the run."
            ) from error
        return entries

    def enter(self, spool: str, name: str) -> int:
        """The number of the actor with this spool. A new one is on the disk before it is used."""
        if spool in self.numbers:
            return self.numbers[spool]
        if len(self.entries) >= MOST_ACTORS:
            raise ConfigError(f"This run had {MOST_ACTORS:,} actors already.")
        temporary = self.path.with_name(f".{ACTORS}")
        temporary.write_text(json.dumps([*self.entries, {"id": spool, "name": name}], indent=1))
        flush_to_disk(temporary)
        temporary.rename(self.path)
        self.entries.append({"id": spool, "name": name})
        self.numbers[spool] = len(self.entries)
        return len(self.entries)

    def fits(self, number: int, sequence: int, is_step: bool) -> bool:
        """Whether a record is to be added. It is left out if it was received before, and if its predecessor was not."""
        received = self.received.get(number, 0)
        if sequence <= received:
            return False
        if sequence > received + 1:
            self.in_episode[number] = False
        return not is_step or self.in_episode.get(number, False)

    def leave_out(self, number: int, sequence: int) -> None:
        self.received[number] = max(sequence, self.received.get(number, 0))

    def add(self, record: np.ndarray) -> None:
        """Note a record [1] that is in the file."""
        number = int(record["actor"][0])
        self.received[number] = int(record["sequence"][0])
        self.in_episode[number] = not (record["terminated"][0] or record["truncated"][0])
        self.steps += int(record["is_step"][0])
