"""A policy's predictions for samples, with the same noise for each of them whatever its inputs are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from flexor.core.rng import Noise
from flexor.evaluate.open_loop.samples import Observation, Samples
from flexor.evaluate.play import full_float32
from flexor.policies.pretrained import Pretrained

BATCH = 32


class Predict(Protocol):
    def __call__(
        self,
        observation: Observation | None = None,
        task: Sequence[str] | None = None,
        places: np.ndarray | None = None,
    ) -> np.ndarray:
        """Actions [n, H, A], float64, for the samples at `places`, by default all.

        `observation` and `task` are of all samples. If one is not given, it is the recorded one.
        """
        ...


class ChunkPredictor:
    """Chunks for the observations of samples, in the robot's units."""

    def __init__(
        self,
        pretrained: Pretrained,
        samples: Samples,
        seed: int = 0,
        batch_size: int = BATCH,
    ):
        self.pretrained, self.samples, self.seed, self.batch_size = pretrained, samples, seed, batch_size

    def __call__(
        self,
        observation: Observation | None = None,
        task: Sequence[str] | None = None,
        places: np.ndarray | None = None,
    ) -> np.ndarray:
        observation = self.samples.observation if observation is None else observation
        task = self.samples.task if task is None else task
        places = np.arange(len(self.samples)) if places is None else places
        chunks = []
        with full_float32():
            for start in range(0, len(places), self.batch_size):
                part = places[start : start + self.batch_size]
                noise = Noise(self.seed, 0, torch.from_numpy(self.samples.rows[part]))
                inputs = {name: values[part] for name, values in observation.items()}
                chunks.append(self.pretrained.chunk(inputs, [task[place] for place in part], noise))
        return np.concatenate(chunks).astype(np.float64)
