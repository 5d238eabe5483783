"""Observations in memory that two processes share: one writes them, the other predicts from them."""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Mapping

import numpy as np

from flexor.serve.form import ObservationForm

ALIGNED = 64  # bytes


class SharedObservations:
    """Room for a number of observations. Images are [..., H, W, C] in memory, as robots send them."""

    def __init__(self, file: int, form: ObservationForm, count: int):
        self.steps, self.places = form.steps, {}
        self.images = {name for name, wanted in form.inputs.items() if wanted.image}
        at = 0
        for name, wanted in form.inputs.items():
            shape = (*wanted.shape[1:], wanted.shape[0]) if wanted.image else wanted.shape
            dtype = np.dtype(np.uint8 if wanted.image else np.float32)
            self.places[name] = (at, shape, dtype)
            size = math.prod(shape) * dtype.itemsize * len(self.steps or [0])
            at += math.ceil(size / ALIGNED) * ALIGNED
        self.size = at  # bytes of an observation
        os.ftruncate(file, max(count * self.size, 1))  # memory is taken when it is written to
        self.memory = mmap.mmap(file, max(count * self.size, 1))
        self.known: dict[tuple[int, bool], dict[str, np.ndarray]] = {}

    def write(self, number: int, observation: Mapping[str, np.ndarray], stacked: bool) -> None:
        places = self.at(number, stacked)
        for name, array in observation.items():
            np.copyto(places[name], array)

    def at(self, number: int, stacked: bool) -> dict[str, np.ndarray]:
        """The observation with this number, as `PolicyRequest.observation`. It is not copied."""
        if (number, stacked) in self.known:
            return self.known[number, stacked]
        found = self.known[number, stacked] = {}
        for name, (offset, shape, dtype) in self.places.items():
            whole = (len(self.steps or []), *shape) if stacked else shape
            array = np.ndarray(whole, dtype, self.memory, number * self.size + offset)
            found[name] = np.moveaxis(array, -1, -3) if name in self.images else array
        return found
