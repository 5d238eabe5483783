"""A policy that acts: observations in, one action per environment out.

Used by evaluation and serving alike. It keeps what a policy itself does not: the last observations, the rest
of the last predicted chunk, or the running average of overlapping chunks.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import torch
from torch import Tensor

from flexor.core.batch import ACTION, MEMORY, Batch
from flexor.core.errors import FlexorError
from flexor.core.rng import Noise
from flexor.policies.pretrained import Pretrained


class TemporalEnsembler:
    """The average of all chunks that speak of the current step, older ones weighted exp(-c i), i = 0 oldest.

    (Algorithm 2 of the ACT paper.) Kept as running sums, so a step costs one addition.
    """

    def __init__(self, coefficient: float, chunk_size: int):
        self.weights = torch.exp(-coefficient * torch.arange(chunk_size))
        self.reset()

    def reset(self) -> None:
        self.sums: Tensor | None = None  # [B, H, A]
        self.counts = torch.zeros(len(self.weights), dtype=torch.long)  # chunks that speak of step h

    def __call__(self, chunk: Tensor) -> Tensor:
        """A new chunk [B, H, A] -> the action [B, A] for now."""
        if self.sums is None:
            self.sums = torch.zeros_like(chunk)
        weights = self.weights[self.counts].to(chunk)[:, None]
        totals = self.weights.cumsum(0)[self.counts].to(chunk)[:, None]
        self.sums = self.sums + weights * chunk
        action = self.sums[:, 0] / totals[0]
        # one step on: what was about step h + 1 is about step h, and the last step is not spoken of yet
        self.sums = torch.cat((self.sums[:, 1:], torch.zeros_like(self.sums[:, :1])), 1)
        self.counts = torch.cat((self.counts[1:] + 1, torch.zeros(1, dtype=torch.long)))
        return action


class History:
    """The last observations, stacked along time as in training: [B, ...] -> [B, T, ...].

    Before an episode's first observation there is none: the first stands for it, as it does in a sample that
    begins before its episode. A policy may be trained on observations to come; when acting, nobody has seen those.
    """

    def __init__(self, deltas: list[int] | None):
        self.deltas = None if deltas is None else [step for step in deltas if step <= 0]
        self.seen: deque[dict[str, np.ndarray]] = deque(maxlen=1 - min(self.deltas or [0]))

    def reset(self) -> None:
        self.seen.clear()

    def add(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """What the policy is shown at this step; asked or not, it has to be told of every one."""
        self.seen.append(batch)
        if self.deltas is None:
            return batch
        shown = [self.seen[max(0, len(self.seen) - 1 + step)] for step in self.deltas]
        return {name: np.stack([moment[name] for moment in shown], 1) for name in batch}


class PolicyActor:
    """Plays several environments in lock-step, asking the policy when its chunk is used up."""

    def __init__(self, pretrained: Pretrained, seed: int = 0):
        self.policy = pretrained.policy
        self.preprocessor = pretrained.preprocessor
        self.postprocessor = pretrained.postprocessor
        self.seed = seed
        config = self.policy.config
        coefficient = getattr(config, "temporal_ensemble_coeff", None)
        chunk = len(config.action_deltas)
        self.ensembler = None if coefficient is None else TemporalEnsembler(coefficient, chunk)
        self.history = History(config.observation_deltas)
        self.reset(0)

    def attach(self, envs: list[object], seeds: list[int]) -> None:
        """Key the policy's noise by episode, so that it does not depend on what runs beside it."""
        self.episodes = torch.tensor(seeds)

    def reset(self, num_envs: int) -> None:
        self.queue: list[Tensor] = []  # actions [B, A] still to be played
        self.steps = 0
        if len(getattr(self, "episodes", ())) != num_envs:
            self.episodes = torch.arange(num_envs)
        self.history.reset()
        self.memory: Batch = {}
        if self.ensembler:
            self.ensembler.reset()

    def act(self, batch: dict[str, np.ndarray], task: list[str]) -> np.ndarray:
        """Actions [B, A] for observations [B, ...], in the robot's units."""
        self._check(batch)
        shown = self.history.add(batch)
        if self.ensembler:
            action = self.ensembler(self.predict(shown, task))
        else:
            if not self.queue:
                chunk = self.predict(shown, task)[:, : self.policy.config.action_steps]
                self.queue = list(chunk.unbind(1))
            action = self.queue.pop(0)
        self.steps += 1
        return self.postprocessor({ACTION: action})[ACTION].float().numpy()

    @torch.inference_mode()
    def predict(self, batch: dict[str, np.ndarray], task: list[str]) -> Tensor:
        """A normalised chunk [B, H, A] for observations [B, (T,) ...]."""
        return self.policy.predict(*self.prepare(batch, task))

    def prepare(self, batch: dict[str, np.ndarray], task: list[str]) -> tuple[Batch, Noise]:
        """What the policy gets for these observations."""
        tensors: Batch = {key: torch.from_numpy(np.ascontiguousarray(v)) for key, v in batch.items()}
        prepared = {**self.preprocessor({**tensors, "task": task}), MEMORY: self.memory}
        device = next(self.policy.parameters()).device
        self.policy.eval()
        return prepared, Noise(self.seed, self.steps, self.episodes.to(device))

    def _check(self, batch: dict[str, np.ndarray]) -> None:
        """The environment must show what the policy was trained on."""
        for name, feature in self.policy.config.observed.items():
            if name not in batch:
                raise FlexorError(
                    f"The policy needs {name}, which the environment does not give (it gives {sorted(batch)})."
                )
            shape = tuple(batch[name].shape[1:])
            if shape != feature.shape:
                raise FlexorError(
                    f"{name} is {list(shape)} in the environment, but the policy was trained on "
                    f"{list(feature.shape)}: set the environment's size with --env.kwargs."
                )
