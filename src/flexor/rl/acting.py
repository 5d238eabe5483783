"""The policy while it acts: random actions, with weights that can be replaced between two steps."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from flexor.core.batch import ACTION
from flexor.core.errors import FlexorError
from flexor.core.log import warn_once
from flexor.core.rng import Noise
from flexor.policies.pretrained import Pretrained
from flexor.policies.processing.pipeline import ACTING
from flexor.policies.sac.policy import SAC
from flexor.policies.weight_names import unique_parameters, unique_state


@dataclass(frozen=True)
class ActorWeights:
    """What a policy acts with after so many updates."""

    update: int
    tensors: dict[str, np.ndarray]
    """Those that are trained."""


class PublishedWeights:
    """Copies of a learner's weights, for those who act. The learner's thread makes them, any other may read them."""

    def __init__(self, policy: SAC, every_s: float):
        """`every_s`: seconds between two copies, at least."""
        self.policy, self.every_s = policy, every_s
        state, parameters = unique_state(policy), unique_parameters(policy)
        frozen = {name for name, parameter in parameters.items() if not parameter.requires_grad}
        self.constant = {name: tensor.cpu().numpy() for name, tensor in state.items() if name in frozen}
        self.trained = state.keys() - frozen
        self.due = 0.0
        self.newest = ActorWeights(-1, {})

    def publish(self, update: int) -> None:
        """Copy the weights after this update, if it is time. No update may run meanwhile."""
        now = time.monotonic()
        if update == self.newest.update or now < self.due:
            return
        state = unique_state(self.policy)
        # also on the CPU it must be a copy: the learner changes its weights in place
        tensors = {name: state[name].cpu().numpy().copy() for name in self.trained}
        self.due = now + self.every_s
        if all(np.isfinite(tensor).all() for tensor in tensors.values()):
            self.newest = ActorWeights(update, tensors)
        else:
            warn_once("weights that are not finite are not sent to actors: they act with the last good ones")


class ActingPolicy:
    """A policy that explores."""

    def __init__(self, pretrained: Pretrained, seed: int):
        assert isinstance(pretrained.policy, SAC)
        self.pretrained, self.policy, self.seed = pretrained, pretrained.policy, seed
        self.update = self.offered = 0  # of the weights that act, and of the newest ones that were offered
        self._lock = threading.Lock()
        self._next: tuple[int, dict[str, torch.Tensor]] | None = None

    @torch.no_grad()
    def action(self, observation: Mapping[str, np.ndarray], number: int, actor: int = 0) -> np.ndarray:
        """A random action [A] in the robot's units. `number`: of the transition, on which it depends."""
        self._take_weights()
        tensors = {name: torch.from_numpy(value)[None] for name, value in observation.items()}
        noise = Noise(self.seed, number, torch.full((1,), actor))
        batch = self.pretrained.preprocessor(tensors, ACTING)
        action = self.policy.explore(batch, noise)
        out: np.ndarray = self.pretrained.postprocessor({ACTION: action}, ACTING)[ACTION].float().numpy()[0]
        return out

    def offer(self, update: int, weights: Mapping[str, Any]) -> None:
        """New weights, from the next action on. They are checked and brought to the device in the caller's thread."""
        state = unique_state(self.policy)
        device = next(self.policy.parameters()).device
        tensors = {}
        for name, array in weights.items():
            expected = state.get(name)
            if expected is None or not isinstance(array, np.ndarray) or array.shape != tuple(expected.shape):
                raise FlexorError(
                    f"The learner sent weights of another policy: {name!r:.80}. Use one release on both."
                )
            tensor = torch.from_numpy(array.copy())
            if tensor.dtype != expected.dtype or not bool(torch.isfinite(tensor).all()):
                raise FlexorError(
                    f"The learner sent weights that can't be used: {name} is not finite numbers."
                )
            tensors[name] = tensor.to(device)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        with self._lock:
            earlier = {} if self._next is None else self._next[1]
            self._next = update, {**earlier, **tensors}
            self.offered = update

    def _take_weights(self) -> None:
        with self._lock:
            offered, self._next = self._next, None
        if offered is None:
            return
        self.update, tensors = offered
        state = self.policy.state_dict(keep_vars=True)
        for name, tensor in tensors.items():
            state[name].data = tensor  # no copy: it takes no time, however large the policy is
