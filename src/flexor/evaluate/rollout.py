"""Runs episodes with an actor, several at a time, and summarises the results.

Episodes run in groups in lock-step, so that a policy gets one batch per step. A row of the batch is
the same environment from `reset` to `reset`: an episode that ends early keeps its row, with its last
observation, until the group is done, and the actor's action for it is ignored. This wastes a little
work on finished rows, but an actor with a queue of actions per row does not have to handle them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import gymnasium
import numpy as np

from flexor.core.console import Progress
from flexor.core.errors import ConfigError, FlexorError
from flexor.evaluate.envs import observation_to_batch, stack_batch
from flexor.policies.pretrained import Pretrained
from flexor.policies.session import Session, act_together
from flexor.sim.expert import expert_action
from flexor.sim.task import PlaceEnv

Env = gymnasium.Env[Any, Any]


class Actor(Protocol):
    """Chooses the actions: a policy, the expert, or a random actor.

    An actor that needs more than observations may also have `attach(envs, seeds)`, which is called
    before each `reset`: the expert reads the simulator's state, and an actor with random numbers seeds
    them per episode, so that an episode does not depend on the others in its batch.
    """

    def reset(self, num_envs: int) -> None:
        """New episodes start in all rows."""

    def act(self, batch: dict[str, np.ndarray], task: list[str]) -> np.ndarray:
        """Actions [N, A] for observations [N, ...]."""
        ...


@dataclass
class Episode:
    """The result of one episode."""

    seed: int
    success: bool = False
    return_: float = 0.0
    max_reward: float = -math.inf
    steps: int = 0
    frames: list[np.ndarray] | None = None  # images for a video, if requested
    fps: float = 10.0  # frame rate of the video for real time


def rollout(
    make_env: Callable[[], Env],
    actor: Actor,
    seeds: Sequence[int],
    max_steps: int | None = None,
    *,
    batch_size: int = 10,
    record: Collection[int] = (),
    progress: Progress | None = None,
) -> list[Episode]:
    """Run one episode per seed, in the order of `seeds`; keep images of the seeds in `record`.

    An episode is a success if `info["is_success"]` (or `info["success"]`) was true at any step; in an
    environment that reports neither, if it terminated with a positive reward.
    """
    unknown = set(record) - set(seeds)
    if unknown:
        raise ConfigError(f"record contains seeds that are not in `seeds`: {sorted(unknown)}; use only those")
    if batch_size < 1:
        raise ConfigError(f"batch_size={batch_size} is not valid: at least one environment is needed")
    envs: list[Env] = []
    episodes: list[Episode] = []
    try:
        for start in range(0, len(seeds), batch_size):
            group = seeds[start : start + batch_size]
            envs += [make_env() for _ in range(len(group) - len(envs))]

            def report(done: int, before: int = start) -> None:
                if progress is not None:
                    progress(before + done, len(seeds))

            episodes += _play_group(envs[: len(group)], actor, group, max_steps, set(record), report)
    finally:
        for env in envs:
            env.close()
    return episodes


@dataclass
class _Row:
    """One environment of a group and its current episode."""

    env: Env
    episode: Episode
    observation: dict[str, np.ndarray] = field(default_factory=dict)
    task: str = ""
    done: bool = False

    def start(self) -> None:
        observation, _ = self.env.reset(seed=self.episode.seed)
        self.observation = observation_to_batch(observation)
        self.task = task_of(self.env)
        self.episode.fps = float(self.env.metadata.get("render_fps") or self.episode.fps)
        self._keep_frame()

    def step(self, action: np.ndarray, max_steps: int | None) -> None:
        observation, reward, terminated, truncated, info = self.env.step(action)
        self.observation = observation_to_batch(observation)
        episode, reward = self.episode, float(reward)
        episode.steps += 1
        episode.return_ += reward
        episode.max_reward = max(episode.max_reward, reward)
        episode.success |= succeeded(info, reward, terminated)
        self.done = bool(terminated or truncated or episode.steps == max_steps)
        self._keep_frame()

    def _keep_frame(self) -> None:
        if self.episode.frames is None:
            return
        frame: Any = self.env.render()
        if not isinstance(frame, np.ndarray):
            raise FlexorError(
                f"can't record a video of {self.env}: render() returned {type(frame).__name__}, not an image; "
                "create the environment with render_mode='rgb_array'"
            )
        self.episode.frames.append(frame)


def _play_group(
    envs: list[Env],
    actor: Actor,
    seeds: Sequence[int],
    max_steps: int | None,
    record: set[int],
    report: Callable[[int], None],
) -> list[Episode]:
    """Run one episode in each environment, until the last one ends."""
    rows = [_Row(env, Episode(int(s), frames=[] if s in record else None)) for env, s in zip(envs, seeds)]
    for row in rows:
        _check_ends(row.env, max_steps)
        row.start()
    if hasattr(actor, "attach"):
        actor.attach(envs, list(seeds))
    actor.reset(len(rows))
    tasks = [row.task for row in rows]
    while not all(row.done for row in rows):
        actions = np.asarray(actor.act(stack_batch([row.observation for row in rows]), tasks))
        for row, action in zip(rows, actions):
            if not row.done:
                row.step(action, max_steps)
        report(sum(row.done for row in rows))
    return [row.episode for row in rows]


def _check_ends(env: Env, max_steps: int | None) -> None:
    """Raise an error if an episode might never end."""
    if max_steps is None and (env.spec is None or env.spec.max_episode_steps is None):
        raise ConfigError(
            f"{env} has no time limit of its own, so an episode might never end; set env.max_steps"
        )


def succeeded(info: dict[str, Any], reward: float, terminated: bool) -> bool:
    """Whether a step's outcome is a success."""
    for key in ("is_success", "success"):
        if key in info:
            return bool(info[key])
    return bool(terminated and reward > 0)


def task_of(env: Env) -> str:
    """The environment's task description; empty if it has none."""
    for name in ("task_description", "task"):
        words = getattr(env.unwrapped, name, None)
        if isinstance(words, str):
            return words
    return ""


class PolicyActor:
    """A policy that plays: a session for each environment."""

    def __init__(self, pretrained: Pretrained, seed: int = 0):
        self.pretrained, self.seed = pretrained, seed
        self.episodes: list[int] = []
        self.sessions: list[Session] = []

    def attach(self, envs: Sequence[Env], seeds: Sequence[int]) -> None:
        """Key the policy's noise by episode, so that it does not depend on what runs beside it."""
        self.episodes = list(seeds)

    def reset(self, num_envs: int) -> None:
        episodes = self.episodes if len(self.episodes) == num_envs else range(num_envs)
        self.sessions = [Session(self.pretrained, self.seed, episode) for episode in episodes]

    def act(self, batch: dict[str, np.ndarray], task: list[str]) -> np.ndarray:
        rows = [{name: value[row] for name, value in batch.items()} for row in range(len(self.sessions))]
        return act_together(self.sessions, rows, task)


class ExpertActor:
    """Solves the built-in task by reading the simulator's state."""

    def attach(self, envs: Sequence[Env], seeds: Sequence[int]) -> None:
        self._envs = [env.unwrapped for env in envs if isinstance(env.unwrapped, PlaceEnv)]
        if len(self._envs) < len(envs):
            supported = "the expert solves only the built-in task"
            raise ConfigError(f"{supported}, not {envs[0]}; use --env.type=place")

    def reset(self, num_envs: int) -> None:
        assert num_envs == len(self._envs)

    def act(self, batch: dict[str, np.ndarray], task: list[str]) -> np.ndarray:
        return np.stack([expert_action(env.state) for env in self._envs])


@dataclass(frozen=True)
class Summary:
    """The results of a set of episodes."""

    episodes: int
    successes: int
    success_rate: float
    success_low: float  # Wilson's 95 % interval
    success_high: float
    mean_return: float
    mean_max_reward: float
    mean_steps: float

    def __str__(self) -> str:
        return (
            f"success {self.success_rate:.1%} ({self.successes} of {self.episodes}, 95 % interval "
            f"{self.success_low:.1%} to {self.success_high:.1%}), mean return {self.mean_return:.2f}, "
            f"mean best reward {self.mean_max_reward:.2f}, mean steps {self.mean_steps:.1f}"
        )


def summarize(episodes: Sequence[Episode]) -> Summary:
    """Success rate and means of a set of episodes."""
    if not episodes:
        raise ConfigError("no episodes were run, so there is no result; run at least one")
    successes = sum(episode.success for episode in episodes)
    low, high = wilson_interval(successes, len(episodes))
    return Summary(
        episodes=len(episodes),
        successes=successes,
        success_rate=successes / len(episodes),
        success_low=low,
        success_high=high,
        mean_return=float(np.mean([episode.return_ for episode in episodes])),
        mean_max_reward=float(np.mean([episode.max_reward for episode in episodes])),
        mean_steps=float(np.mean([episode.steps for episode in episodes])),
    )


def wilson_interval(successes: int, trials: int, z: float = 1.959964) -> tuple[float, float]:
    """Bounds of a success rate (95 %): unlike the textbook interval, valid for few trials and near 0 or 1."""
    rate = successes / trials
    spread = 1 + z * z / trials
    centre = (rate + z * z / (2 * trials)) / spread
    half = z / spread * math.sqrt(rate * (1 - rate) / trials + z * z / (4 * trials * trials))
    # At 0 and at `trials` successes a bound is exactly 0 or 1; rounding would make it 1e-17.
    return (0.0 if successes == 0 else centre - half), (1.0 if successes == trials else centre + half)
