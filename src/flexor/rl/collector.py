"""Collects transitions: the policy acts in the environment, and someone may take over."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from flexor.core.rng import key_of
from flexor.evaluate.envs import observation_to_batch
from flexor.evaluate.rollout import succeeded
from flexor.rl.acting import ActingPolicy
from flexor.rl.environment import Env, action_limits
from flexor.rl.intervention import Intervener
from flexor.rl.records import first_record, step_record
from flexor.rl.teleoperator import NO_EVENTS, Events


@dataclass
class EpisodeSummary:
    """What happened in an episode so far."""

    number: int
    steps: int = 0
    return_: float = 0.0
    interventions: int = 0
    success: bool = False
    ended: bool = False
    discarded: bool = False

    def add(self, record: np.ndarray) -> None:
        row = record[0]
        self.steps += 1
        self.return_ += float(row["reward"])
        self.interventions += int(row["intervention"])
        self.success |= bool(row["success"])
        self.discarded = bool(row["discarded"])
        self.ended = bool(row["terminated"] or row["truncated"])


class Collector:
    """One environment. What it collects is a function of the seed, the weights, and what the environment does."""

    def __init__(
        self, env: Env, policy: ActingPolicy, intervener: Intervener, layout: np.dtype[Any], seed: int
    ):
        self.env, self.policy, self.intervener, self.layout, self.seed = env, policy, intervener, layout, seed
        self.low, self.high = action_limits(env)
        self.episode = EpisodeSummary(-1, ended=True)
        self.observation: dict[str, np.ndarray] = {}

    def begin(self, number: int) -> np.ndarray:
        """Start episode `number`; its first record."""
        seed = key_of(self.seed, "episode", number) % (1 << 31)
        observation, _ = self.env.reset(seed=seed)
        self.episode = EpisodeSummary(number)
        self.observation = observation_to_batch(observation)
        return first_record(self.layout, self.observation)

    def step(self, transition: int, actor: int = 0) -> np.ndarray:
        """One step, which will be transition number `transition`."""
        takeover = self.intervener.action(self.env, self.episode.steps)
        if takeover is None:
            action = self.policy.action(self.observation, transition, actor)
        else:
            action = np.asarray(takeover, np.float32)
        events = self.intervener.events()
        action = np.clip(action, self.low, self.high)
        return self._execute(action, takeover is not None, self.policy.update, events)

    def _execute(
        self, action: np.ndarray, intervention: bool, update: int, events: Events = NO_EVENTS
    ) -> np.ndarray:
        observation, reward, terminated, truncated, info = self.env.step(action)
        if info.get("is_intervention"):  # with a device of the environment's own, as some of gym_hil's have
            intervention, action = True, np.asarray(info.get("teleop_action", action), np.float32)
        if info.get("rerecord_episode"):
            events = events._replace(rerecord_episode=True)
        self.observation = observation_to_batch(observation)
        outcome = {
            "reward": float(reward),
            "terminated": float(bool(terminated)),
            "truncated": float(bool(truncated)),
            "success": float(succeeded(info, float(reward), terminated)),
            "penalty": float(info.get("discrete_penalty", 0.0)),
        }
        record = step_record(
            self.layout,
            self.observation,
            action,
            intervention=intervention,
            update=update,
            **events.applied(outcome),
        )
        self.episode.add(record)
        return record

    def repeat(self, records: np.ndarray, number: int) -> bool:
        """Bring the environment to where an episode was left, if it does again what it did in these records."""
        first = self.begin(number)
        if not _same(first, records[:1]):
            return False
        for place in range(1, len(records)):
            before = records[place : place + 1]
            again = self._execute(
                before["action"][0], bool(before["intervention"][0]), int(before["update"][0])
            )
            if not _same(again, before):
                return False
        return True


def _same(first: np.ndarray, second: np.ndarray) -> bool:
    names = [name for name in first.dtype.names or () if name != "checksum"]
    return all(np.array_equal(first[name], second[name]) for name in names)
