"""Observations in memory that two processes share: one writes them, the other predicts from them."""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Mapping

import numpy as np

from flexor.serve.form import ObservationForm

ALIGNMENT = 64  # bytes


class SharedObservations:
    """Room for a number of observations. Images are [..., H, W, C] in memory, as robots send them."""

    def __init__(self, file: int, form: ObservationForm, count: int):
        self.steps, self.places = form.steps, {}
        self.images = {name for name, spec in form.inputs.items() if spec.image}
        offset = 0
        for name, spec in form.inputs.items():
            shape = (*spec.shape[1:], spec.shape[0]) if spec.image else spec.shape
            dtype = np.dtype(np.uint8 if spec.image else np.float32)
            self.places[name] = (offset, shape, dtype)
            size = math.prod(shape) * dtype.itemsize * len(self.steps or [0])
            offset += math.ceil(size / ALIGNMENT) * ALIGNMENT
        self.size = offset  # bytes of an observation
        os.ftruncate(file, max(count * self.size, 1))  # memory is taken when it is written to
        self.memory = mmap.mmap(file, max(count * self.size, 1))
        self.views: dict[tuple[int, bool], dict[str, np.ndarray]] = {}

    def write(self, number: int, observation: Mapping[str, np.ndarray], stacked: bool) -> None:
        places = self.view(number, stacked)
        for name, array in observation.items():
            np.copyto(places[name], array)

    def view(self, number: int, stacked: bool) -> dict[str, np.ndarray]:
        """The observation with this number, as `PolicyRequest.observation`. It is not copied."""
        if (number, stacked) in self.views:
            return self.views[number, stacked]
        arrays = self.views[number, stacked] = {}
        for name, (offset, shape, dtype) in self.places.items():
            full_shape = (len(self.steps or []), *shape) if stacked else shape
            array = np.ndarray(full_shape, dtype, self.memory, number * self.size + offset)
            arrays[name] = np.moveaxis(array, -1, -3) if name in self.images else array
        return arrays
