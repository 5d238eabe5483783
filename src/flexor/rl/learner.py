"""The learner: so many updates per transition, whatever the hardware's speed.

An update is a function of its number, the seed, and the transitions that were collected before it. So a run that was
killed repeats the updates after its newest checkpoint from the recorded transitions, bit by bit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flexor.config.rl import RLConfig
from flexor.core.batch import ACTION
from flexor.core.rng import Noise, NoiseSource
from flexor.policies.nn.camera import random_crop
from flexor.policies.pretrained import Pretrained
from flexor.policies.processing.pipeline import StepContext
from flexor.policies.sac.algorithm import SACAlgorithm, TransitionBatch
from flexor.policies.sac.policy import SAC
from flexor.rl.buffer import Bounds, ReplayBuffer

Figures = dict[str, Tensor]


class Learner:
    """The policy, the algorithm that trains it, and the buffer that it learns from."""

    def __init__(self, pretrained: Pretrained, buffer: ReplayBuffer, settings: RLConfig, seed: int):
        assert isinstance(pretrained.policy, SAC)
        self.policy, self.preprocessor = pretrained.policy, pretrained.preprocessor
        self.buffer, self.settings, self.seed = buffer, settings, seed
        self.device = next(self.policy.parameters()).device
        self.algorithm = SACAlgorithm(self.policy, settings).to(self.device)
        self.algorithm.make_optimizers()
        self.batches = int(self.algorithm.settings["utd_ratio"])
        self.sample_ids = torch.arange(settings.batch_size, device=self.device)
        self.updates, self.seconds = 0, 0.0
        self.compute: Callable[[Learner], Figures] = compute_eagerly

    @property
    def is_free(self) -> bool:
        """Whether it updates as often as it can, and waits for no steps."""
        return self.settings.updates == "max"

    def updates_due(self) -> int:
        """How many updates the transitions so far allow, which is how many there are to be in all.

        Those of discarded episodes don't count. So updates that were computed from them are not repeated, but the
        learner waits until as many steps were collected again.
        """
        each = self.settings.updates
        assert each != "max", "the learner does not wait for steps"
        learnable = self.buffer.transitions - self.buffer.discarded
        return max(0, learnable - self.settings.learning_starts + 1) * each

    def learn(self) -> Figures | None:
        """All updates that are due. What the last one measured; None if there was none."""
        figures = None
        while self.updates < self.updates_due():
            figures = self.update_once()
        return figures

    def learn_freely(self, more: bool) -> Figures | None:
        """One update, with rl.updates=max; none if there are `more` steps that are not in the buffer yet."""
        return None if more or not self.can_learn() else self.update_once()

    def can_learn(self) -> bool:
        """Whether there are enough transitions for updates."""
        return self.buffer.transitions - self.buffer.discarded >= self.settings.learning_starts

    def update_once(self) -> Figures:
        start = time.perf_counter()
        figures = self.compute(self)
        self.updates += 1
        self.seconds += time.perf_counter() - start
        return figures

    @torch.no_grad()
    def value(self, observation: Mapping[str, np.ndarray], action: np.ndarray) -> Tensor:
        """What the critics expect of an action: their mean, on the device."""
        tensors = {name: torch.from_numpy(value)[None].to(self.device) for name, value in observation.items()}
        continuous = self.policy.config.action.shape[0]
        actions = {ACTION: torch.from_numpy(action[:continuous].copy())[None].to(self.device)}
        state = self.preprocessor({**tensors, **actions}, StepContext(training=True))
        action_tensor = state.pop(ACTION)
        return self.algorithm.critic_ensemble(self.policy.encoder_critic(state), action_tensor).mean()

    def update(self, bounds: Bounds, noise: NoiseSource, number: int) -> Figures:
        """Update `number`, from transitions within `bounds`."""
        batches = [self._batch(bounds, noise, f"{index}/") for index in range(self.batches)]
        return self.algorithm.update(batches, noise, number)

    def _batch(self, bounds: Bounds, noise: NoiseSource, name: str) -> TransitionBatch:
        settings = self.settings
        rows = self.buffer.sample(settings.batch_size, settings.online_ratio, bounds, noise, name)
        before, after, step = self.buffer.gather(rows)
        step = {name: value.to(self.device) for name, value in step.items()}
        continuous = self.policy.config.action.shape[0]
        context = StepContext(training=True, noise=noise)
        actions = {ACTION: step["action"][:, :continuous]}
        state = self.preprocessor({**self._shifted(before, noise, f"{name}before/"), **actions}, context)
        next_state = self.preprocessor(self._shifted(after, noise, f"{name}after/"), context)
        action = torch.cat([state.pop(ACTION), step["action"][:, continuous:]], -1)
        has_gripper = self.policy.discrete_critic is not None
        return TransitionBatch(
            state,
            action,
            step["reward"],
            next_state,
            step["terminated"].float(),
            step["penalty"] if has_gripper else None,
        )

    def _shifted(self, observation: dict[str, Tensor], noise: NoiseSource, name: str) -> dict[str, Any]:
        """Each image is shifted by a few pixels (DrQ: Kostrikov et al. 2020, https://arxiv.org/abs/2004.13649)."""
        pixels = self.settings.image_shift
        shifted = {}
        for key in self.policy.config.images if pixels else ():
            images = observation[key][:, None]
            size = images.shape[-2], images.shape[-1]
            shifted[key] = random_crop(images, size, noise, f"{name}{key}", pixels)[:, 0].contiguous()
        return {**observation, **shifted}


def compute_eagerly(learner: Learner) -> Figures:
    """The next update, operation by operation."""
    noise = Noise(learner.seed, learner.updates, learner.sample_ids)
    return learner.update(learner.buffer.bounds(), noise, learner.updates)
