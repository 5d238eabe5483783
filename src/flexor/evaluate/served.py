"""Episodes with a policy that a server has: evaluated, or recorded as a dataset."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flexor.core.console import Progress
from flexor.core.errors import FlexorError
from flexor.data.format.writer import DatasetWriter
from flexor.evaluate.envs import observation_to_batch
from flexor.evaluate.rollout import Env, succeeded, task_of
from flexor.sim.record import OUTCOME
from flexor_client import ChunkPlayer, ClientError, RemotePolicy

ANSWER_S = 120.0  # nothing moves meanwhile, so there is no hurry


@dataclass(frozen=True)
class ServerAddress:
    """Where a policy is served, and how to get in."""

    url: str
    api_key: str | None = None
    certificate: Path | None = None
    jpeg: int | None = None

    def open(self, timeout_s: float = ANSWER_S, reconnect_s: float = 10.0) -> RemotePolicy:
        return RemotePolicy(
            self.url,
            api_key=self.api_key,
            certificate=self.certificate,
            jpeg=self.jpeg,
            timeout_s=timeout_s,
            reconnect_s=reconnect_s,
        )


@contextmanager
def client_errors() -> Iterator[None]:
    """Inside, errors of the connection are errors for the user."""
    try:
        yield
    except ClientError as error:
        raise FlexorError(str(error)) from error


class ServedActor:
    """A policy on a server that plays: a connection for each environment, so that the server predicts in batches."""

    def __init__(self, server: ServerAddress):
        self.server = server
        self.seeds: list[int] = []
        self.players: list[ChunkPlayer] = []
        self._threads: ThreadPoolExecutor | None = None

    def attach(self, envs: Sequence[Env], seeds: Sequence[int]) -> None:
        """The policy's noise depends on the episode, as in an evaluation without a server."""
        self.seeds = list(seeds)

    def reset(self, num_envs: int) -> None:
        with client_errors():
            while len(self.players) < num_envs:
                # what a simulator is told does no harm, and an episode goes on as it does without a server
                self.players.append(ChunkPlayer(self.server.open(), beyond_training=None))
            for player, seed in zip(self.players, self.seeds):
                player.reset(seed)
        self._threads = self._threads or ThreadPoolExecutor(num_envs)

    def act(self, batch: dict[str, np.ndarray], task: list[str]) -> np.ndarray:
        def act_in_row(row: int) -> np.ndarray:
            return self.players[row].act({name: value[row] for name, value in batch.items()}, task[row])

        assert self._threads is not None
        with client_errors():
            return np.stack([*self._threads.map(act_in_row, range(len(task)))])

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown()
        for player in self.players:
            policy = player.policy
            assert isinstance(policy, RemotePolicy)
            policy.close()


def record_served(
    root: Path,
    server: ServerAddress,
    make_env: Callable[[], Env],
    *,
    episodes: int,
    seed: int = 0,
    max_steps: int | None = None,
    successes_only: bool = False,
    codec: str = "h264",
    progress: Progress | None = None,
) -> dict[str, int]:
    """Play episodes with the served policy, and write what it saw and did into the new folder `root`.

    With `successes_only`, episodes that fail are left out, and not replaced.
    """
    env = make_env()
    counts = {"episodes": 0, "successes": 0, "frames": 0}
    with client_errors(), server.open() as policy:
        player = ChunkPlayer(policy, beyond_training=None)
        first = observation_to_batch(env.reset(seed=seed)[0])
        names = policy.metadata.get("action_names")
        fps = float(env.metadata.get("render_fps") or 10)
        features = _features(first, env.action_space.shape or (1,), names)
        robot_type = getattr(env.unwrapped, "robot_type", None) or str(env.spec.id if env.spec else env)
        # In small images, colour at half the resolution would blur the edges of coloured objects.
        pix_fmt = "yuv444p" if codec == "h264" else "yuv420p"
        settings: dict[str, Any] = {"robot_type": robot_type, "codec": codec, "crf": 12, "pix_fmt": pix_fmt}
        with DatasetWriter(root, fps, features, **settings) as writer:
            for number in range(episodes):
                success = _play(env, player, seed + number, max_steps, writer)
                counts["successes"] += success
                if success or not successes_only:
                    counts["episodes"] += 1
                    counts["frames"] += writer.length
                    writer.save_episode(task_of(env) or "Do the task.")
                else:
                    writer.discard_episode()
                if progress is not None:
                    progress(number + 1, episodes)
            if not counts["episodes"]:
                raise FlexorError(
                    f"None of {episodes} episodes succeeded, so nothing was recorded. Leave out --successes-only to "
                    "keep failures."
                )
    return counts


def _play(env: Env, player: ChunkPlayer, seed: int, max_steps: int | None, writer: DatasetWriter) -> bool:
    """One episode; its frames are added to the dataset. Returns whether it succeeded."""
    observation, _ = env.reset(seed=seed)
    player.reset(seed)
    success, done, steps = False, False, 0
    while not done:
        inputs = observation_to_batch(observation)
        action = player.act(inputs, task_of(env))
        observation, reward, terminated, truncated, info = env.step(action)
        steps += 1
        success |= succeeded(info, float(reward), terminated)
        done = bool(terminated or truncated or steps == max_steps)
        writer.add_frame(
            {
                **{name: _as_recorded(value) for name, value in inputs.items()},
                "action": np.asarray(action, np.float32),
                "next.reward": np.array([reward], np.float32),
                "next.done": np.array([done]),
                "next.success": np.array([success]),
            }
        )
    return success


def _as_recorded(value: np.ndarray) -> np.ndarray:
    """Images are recorded as [height, width, 3]."""
    if value.dtype == np.uint8 and value.ndim == 3:
        return np.ascontiguousarray(np.broadcast_to(value.transpose(1, 2, 0), (*value.shape[1:], 3)))
    return value


def _features(
    observation: Mapping[str, np.ndarray], action: tuple[int, ...], names: Sequence[str] | None
) -> dict[str, dict[str, Any]]:
    """The dataset's features, from an observation and the shape of an action."""
    features: dict[str, dict[str, Any]] = {}
    for name, value in observation.items():
        recorded = _as_recorded(value)
        image = recorded.ndim == 3
        features[name] = {
            "dtype": "video" if image else "float32",
            "shape": recorded.shape,
            "names": ["height", "width", "channels"] if image else None,
        }
    action_names = None if names is None else list(names)
    return {**features, "action": {"dtype": "float32", "shape": action, "names": action_names}, **OUTCOME}
