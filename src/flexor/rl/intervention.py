"""Who takes over while a policy acts. A takeover is recorded, and learned from like a demonstration."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from flexor.config.rl import RLConfig
from flexor.core.errors import ConfigError
from flexor.rl.environment import Env
from flexor.rl.keyboard import Keyboard
from flexor.rl.teleoperator import NO_EVENTS, Events, TeleoperatorIntervener, make_teleoperator
from flexor.sim import hil
from flexor.sim.expert import expert_action
from flexor.sim.task import PlaceEnv


class Intervener(Protocol):
    def action(self, env: Env, step: int) -> np.ndarray | None:
        """The action instead of the policy's in this step of the episode; None: the policy acts."""

    def events(self) -> Events:
        """How the episode goes on after this step. Asked after `action`."""

    def close(self) -> None:
        """The run is over."""


class NoIntervener:
    def action(self, env: Env, step: int) -> np.ndarray | None:
        return None

    def events(self) -> Events:
        return NO_EVENTS

    def close(self) -> None:
        pass


class ScriptedIntervener(NoIntervener):
    """Helps as a patient person would: what is not done after 30 steps, an expert finishes.

    The better the policy, the less it helps.
    """

    FROM = 30  # steps; the built-in task's expert needs 25, that of gym_hil's cube 17

    def action(self, env: Env, step: int) -> np.ndarray | None:
        if step < self.FROM:
            return None
        task: Any = env.unwrapped
        return expert_action(task.state) if isinstance(task, PlaceEnv) else hil.expert_action(task)


def make_intervener(settings: RLConfig, env: Env) -> Intervener:
    """Who `rl.intervener` names. A person's device is connected."""
    kind = settings.intervener
    if kind == "none":
        return NoIntervener()
    if kind == "scripted":
        if not (isinstance(env.unwrapped, PlaceEnv) or hil.picks_cube(env)):
            raise ConfigError(
                f"rl.intervener=scripted knows the built-in task and gym_hil's PandaPickCube-v0, not {env}: use "
                "--env.type=place or --env.type=gym_hil."
            )
        return ScriptedIntervener()
    teleoperator = Keyboard() if kind == "keyboard" else make_teleoperator(kind, settings.intervener_settings)
    return TeleoperatorIntervener(teleoperator, env, settings)
