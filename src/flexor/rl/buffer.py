"""The buffer that batches are drawn from: demonstrations, and a ring of what was collected.

Both are in the same tensors: first the records of the demonstrations, then the ring. Images are bytes. Actors may take
turns in the ring, so each step knows the row of the observation before it. Which transitions can be drawn depends only
on the records so far, not on when they were added: so a run that reads its records again draws the same batches.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flexor.core.rng import NoiseSource
from flexor.rl.records import observed_names

FIELDS = ("action", "reward", "penalty", "terminated")
Bounds = Tensor  # int64 [2]: how many collected transitions and how many interventions can be drawn


class ReplayBuffer:
    """Records as tensors on a device, or in a file."""

    def __init__(
        self,
        layout: np.dtype[Any],
        capacity: int,
        demonstrations: np.ndarray,
        device: torch.device,
        file: Path | None = None,
    ):
        """`capacity`: records of the ring. `file`: a folder for the tensors, instead of memory."""
        self.layout, self.capacity, self.device = layout, capacity, device
        self.first_row = len(demonstrations)  # of the ring
        self.names = [*FIELDS, *observed_names(layout)]
        rows = self.first_row + capacity
        self.tensors = {name: _allocate(layout[name], rows, name, device, file) for name in self.names}
        self._write(0, demonstrations)
        steps = np.flatnonzero(demonstrations["is_step"])
        self.demonstrations = torch.from_numpy(steps).to(device)  # rows
        self.previous = torch.arange(rows, device=device) - 1  # row of the observation before each step
        # of each place in the ring: the place of the same actor's record before it, and of its step after it
        self.before: np.ndarray = np.zeros(capacity, np.int64)
        self.following: np.ndarray = np.full(capacity, -1)
        self.newest: dict[int, int] = {}  # the number of each actor's last record
        self.episodes: dict[int, list[int]] = {}  # the numbers of the steps of each actor's newest episode
        self.collected, self.interventions = (_Drawable(capacity, self.first_row, device) for _ in range(2))
        self.count = self.transitions = 0  # records, and steps among them, that were ever collected
        self.discarded = 0  # steps of discarded episodes

    def extend(self, records: np.ndarray) -> None:
        """Add collected records, in their order. An episode that was discarded can't be drawn any more."""
        for start in range(0, len(records), self.capacity):
            self._extend(records[start : start + self.capacity])

    def _extend(self, records: np.ndarray) -> None:
        first = self.count % self.capacity
        before_end = min(len(records), self.capacity - first)
        self._write(self.first_row + first, records[:before_end])
        self._write(self.first_row, records[before_end:])
        fields = (records[name].tolist() for name in ("actor", "is_step", "intervention", "discarded"))
        for actor, is_step, helped, discarded in zip(*fields):
            self._count(actor, bool(is_step), bool(helped))
            if discarded:
                self._discard(actor)
        for drawable in (self.collected, self.interventions):
            drawable.update()
        places: np.ndarray = (first + np.arange(len(records))) % self.capacity
        rows, before = (
            torch.from_numpy(self.first_row + each).to(self.device) for each in (places, self.before[places])
        )
        self.previous[rows] = before

    def _count(self, actor: int, is_step: bool, helped: bool) -> None:
        """Note the next record. What it overwrites can't be drawn any more, nor can the step after that."""
        place = self.count % self.capacity
        for gone in (place, int(self.following[place])):
            self.collected.remove(gone)
            self.interventions.remove(gone)
        self.following[place] = -1
        before = self.newest.get(actor)
        if is_step and before is not None and self.count - before < self.capacity:
            self.before[place] = before % self.capacity
            self.following[self.before[place]] = place
            self.collected.add(place)
            if helped:
                self.interventions.add(place)
        episode = self.episodes.setdefault(actor, [])
        if is_step:
            episode.append(self.count)
        else:
            episode.clear()
        self.newest[actor] = self.count
        self.count += 1
        self.transitions += is_step

    def _discard(self, actor: int) -> None:
        """No step of this actor's newest episode can be drawn any more."""
        episode = self.episodes[actor]
        self.discarded += len(episode)
        for number in episode:
            if number >= self.count - self.capacity:
                self.collected.remove(number % self.capacity)
                self.interventions.remove(number % self.capacity)

    def _write(self, row: int, records: np.ndarray) -> None:
        if len(records):
            for name, tensor in self.tensors.items():
                values = torch.from_numpy(records[name].copy())
                tensor[row : row + len(records)].copy_(values)

    def bounds(self) -> Bounds:
        """What can be drawn now, in host memory."""
        return torch.tensor([self.collected.count, self.interventions.count])

    def sample(
        self, count: int, online_ratio: float, bounds: Bounds, noise: NoiseSource, name: str
    ) -> Tensor:
        """Rows of `count` transitions. `noise` has so many samples. Each part is drawn evenly, with repetition.

        Without demonstrations and interventions, all are from what was collected.
        """
        online, demonstrations = round(count * online_ratio), len(self.demonstrations)
        places = noise.uniform(f"{name}sample", (count, 1))[:, 0].double().to(self.device)
        collected, helped = bounds.to(self.device)
        rows = self.collected.rows[(places * collected).long()]
        examples = demonstrations + helped
        place = (places[online:] * examples).long()
        example = self.interventions.rows[(place - demonstrations).clamp(min=0)]
        if demonstrations:
            demonstrated = self.demonstrations[place.clamp(max=demonstrations - 1)]
            example = torch.where(place < demonstrations, demonstrated, example)
        return torch.cat([rows[:online], torch.where(examples > 0, example, rows[online:])])

    def gather(self, rows: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
        """Observations before the steps in these rows, observations after them, and what was done and received."""
        before = self.previous[rows]
        observed = self.names[len(FIELDS) :]
        return (
            {name: self.tensors[name][before] for name in observed},
            {name: self.tensors[name][rows] for name in observed},
            {name: self.tensors[name][rows] for name in FIELDS},
        )

    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


class _Drawable:
    """Rows that can be drawn, without gaps and in no order: a row that is removed is replaced by the last one."""

    def __init__(self, capacity: int, first_row: int, device: torch.device):
        self.first_row = first_row
        self.rows = torch.zeros(capacity, dtype=torch.int64, device=device)  # the first `count` of them
        self.places: np.ndarray = np.zeros(
            capacity, np.int64
        )  # the same as places in the ring, in host memory
        self.index: np.ndarray = np.full(capacity, -1)  # of each place in the ring, where it is in `places`
        self.count = 0
        self.changed: set[int] = set()

    def add(self, place: int) -> None:
        self._put(place, self.count)
        self.count += 1

    def remove(self, place: int) -> None:
        """Nothing happens if it is not there; -1 never is."""
        index = int(self.index[place]) if place >= 0 else -1
        if index < 0:
            return
        self.count -= 1
        self._put(int(self.places[self.count]), index)
        self.index[place] = -1

    def _put(self, place: int, index: int) -> None:
        self.places[index], self.index[place] = place, index
        self.changed.add(index)

    def update(self) -> None:
        """Copy what was changed to the device."""
        if not self.changed:
            return
        indices = np.array(sorted(self.changed))
        self.changed.clear()
        rows = torch.from_numpy(self.first_row + self.places[indices])
        self.rows[torch.from_numpy(indices).to(self.rows.device)] = rows.to(self.rows.device)


def _allocate(
    field: np.dtype[Any], rows: int, name: str, device: torch.device, folder: Path | None
) -> Tensor:
    dtype = torch.uint8 if field.base == np.uint8 else torch.float32
    shape = rows, *field.shape
    if folder is None:
        return torch.zeros(shape, dtype=dtype, device=device)
    folder.mkdir(parents=True, exist_ok=True)
    size = int(np.prod(shape))
    return torch.from_file(str(folder / name), shared=True, size=size, dtype=dtype).view(shape)
