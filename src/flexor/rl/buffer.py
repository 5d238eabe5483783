"""The buffer that batches are drawn from: demonstrations, and a ring of what was collected.

Both are in the same tensors: first the records of the demonstrations, then the ring. Images are bytes. Which
transitions can be drawn depends only on the records so far, not on when they were added: so a run that reads its
records again draws the same batches.
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
Bounds = Tensor  # int64 [4]: the first and the end of collected transitions, then of interventions


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
        # row and number of each record that is a transition, and of those that are interventions
        self.collected, self.interventions = (_Numbers(capacity, device) for _ in range(2))
        self.count = 0  # records that were ever collected
        self.transitions = self.discarded = 0  # steps among them, and those of discarded episodes
        self.episode = 0  # the number of the record that began the newest episode

    def extend(self, records: np.ndarray) -> None:
        """Add collected records, in their order. An episode that was discarded can't be drawn any more."""
        for part in np.split(records, np.flatnonzero(records["discarded"]) + 1):
            for start in range(0, len(part), self.capacity):
                self._extend(part[start : start + self.capacity])
            if len(part) and part["discarded"][-1]:
                self.discarded += self.count - self.episode - 1
                for numbers in (self.collected, self.interventions):
                    numbers.forget_from(self.episode)

    def _extend(self, records: np.ndarray) -> None:
        first = self.count % self.capacity
        before_end = min(len(records), self.capacity - first)
        self._write(self.first_row + first, records[:before_end])
        self._write(self.first_row, records[before_end:])
        numbers = self.count + np.arange(len(records))
        steps = records["is_step"] != 0
        if not steps.all():
            self.episode = int(numbers[~steps][-1])
        self.transitions += int(steps.sum())
        self.collected.add(numbers[steps], self._rows(numbers[steps]))
        helped = steps & (records["intervention"] != 0)
        self.interventions.add(numbers[helped], self._rows(numbers[helped]))
        self.count += len(records)
        for each in (self.collected, self.interventions):
            each.forget_before(self.count - self.capacity + 1)  # the record before a step must be there, too

    def _rows(self, numbers: np.ndarray) -> np.ndarray:
        rows: np.ndarray = self.first_row + numbers % self.capacity
        return rows

    def _write(self, row: int, records: np.ndarray) -> None:
        if len(records):
            for name, tensor in self.tensors.items():
                values = torch.from_numpy(records[name].copy())
                tensor[row : row + len(records)].copy_(values)

    def bounds(self) -> Bounds:
        """What can be drawn now, in host memory."""
        parts = self.collected, self.interventions
        return torch.tensor([bound for part in parts for bound in (part.start, part.end)])

    def sample(
        self, count: int, online_ratio: float, bounds: Bounds, noise: NoiseSource, name: str
    ) -> Tensor:
        """Rows of `count` transitions. `noise` has so many samples. Each part is drawn evenly, with repetition.

        Without demonstrations and interventions, all are from what was collected.
        """
        online, demonstrations = round(count * online_ratio), len(self.demonstrations)
        places = noise.uniform(f"{name}sample", (count, 1))[:, 0].double().to(self.device)
        start, end, help_start, help_end = bounds.to(self.device)
        collected = start + (places * (end - start)).long()
        rows = self.collected.rows[collected % self.capacity]
        examples = demonstrations + help_end - help_start
        place = (places[online:] * examples).long()
        helped = self.interventions.rows[(help_start + (place - demonstrations).clamp(min=0)) % self.capacity]
        if demonstrations:
            demonstrated = self.demonstrations[place.clamp(max=demonstrations - 1)]
            helped = torch.where(place < demonstrations, demonstrated, helped)
        return torch.cat([rows[:online], torch.where(examples > 0, helped, rows[online:])])

    def gather(self, rows: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
        """Observations before the steps in these rows, observations after them, and what was done and received."""
        last = self.first_row + self.capacity - 1
        before = torch.where(rows == self.first_row, last, rows - 1)
        observed = self.names[len(FIELDS) :]
        return (
            {name: self.tensors[name][before] for name in observed},
            {name: self.tensors[name][rows] for name in observed},
            {name: self.tensors[name][rows] for name in FIELDS},
        )

    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


class _Numbers:
    """The rows of some of the records, in their order: the newest of them, as many as the ring has records."""

    def __init__(self, capacity: int, device: torch.device):
        self.capacity = capacity
        self.rows = torch.zeros(capacity, dtype=torch.int64, device=device)
        self.numbers = np.zeros(capacity, np.int64)  # of the records
        self.start = self.end = 0

    def add(self, numbers: np.ndarray, rows: np.ndarray) -> None:
        places = (self.end + np.arange(len(rows))) % self.capacity
        self.numbers[places] = numbers
        if len(rows):
            self.rows[torch.from_numpy(places).to(self.rows.device)] = torch.from_numpy(rows).to(
                self.rows.device
            )
        self.end += len(rows)
        self.start = max(self.start, self.end - self.capacity)

    def forget_from(self, number: int) -> None:
        """Take back those at the end, from the record with this number on."""
        while self.start < self.end and self.numbers[(self.end - 1) % self.capacity] >= number:
            self.end -= 1

    def forget_before(self, number: int) -> None:
        """The first that can still be drawn is that of a record with at least this number."""
        while self.start < self.end and self.numbers[self.start % self.capacity] < number:
            self.start += 1


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
