"""Who takes over while a policy acts. A takeover is recorded, and learned from like a demonstration."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from flexor.core.errors import ConfigError
from flexor.rl.environment import Env
from flexor.sim.expert import expert_action
from flexor.sim.task import PlaceEnv


class Intervener(Protocol):
    def action(self, env: Env, step: int) -> np.ndarray | None:
        """The action instead of the policy's in this step of the episode; None: the policy acts."""


class NoIntervener:
    def action(self, env: Env, step: int) -> np.ndarray | None:
        return None


class ScriptedIntervener:
    """Helps in the built-in task as a patient person would: what is not done after 30 steps, it finishes.

    The better the policy, the less it helps.
    """

    FROM = 30  # steps; the expert needs 25

    def action(self, env: Env, step: int) -> np.ndarray | None:
        task = env.unwrapped
        assert isinstance(task, PlaceEnv)
        return expert_action(task.state) if step >= self.FROM else None


def make_intervener(kind: str, env: Env) -> Intervener:
    if kind == "none":
        return NoIntervener()
    if not isinstance(env.unwrapped, PlaceEnv):
        raise ConfigError(
            f"rl.intervener=scripted knows the built-in task only, not {env}: use --env.type=place."
        )
    return ScriptedIntervener()
