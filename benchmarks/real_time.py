"""Episodes of the built-in task in real time, with a server that takes its time: what latency costs a policy.

The clock is simulated, so a result depends on nothing but the policy, the seeds and the latency.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from flexor.core.console import Progress
from flexor.sim.robot import PlaceRobot
from flexor.sim.task import TIME_LIMIT
from flexor_client import ChunkPlayer, RealTimePlayer, drive
from flexor_client.players import ChunkSource

RENAME = {"image": "observation.image", "places": "observation.environment_state"}


class DelayedAnswer:
    """An answer that is there when its time has come."""

    def __init__(self, value: Any, clock: Callable[[], float], ready: float):
        self._value, self._clock, self._ready = value, clock, ready

    def done(self) -> bool:
        return self._clock() >= self._ready - 1e-9

    def result(self) -> Any:
        assert self.done()
        return self._value


class SlowSource:
    """A policy whose answers take `latency_s` of a robot's simulated time."""

    def __init__(self, policy: ChunkSource, robot: PlaceRobot, latency_s: float):
        self.policy, self.robot, self.latency_s = policy, robot, latency_s
        self.waits = True

    @property
    def metadata(self) -> dict[str, Any]:
        return self.policy.metadata

    def reset(self, episode: int | None = None) -> None:
        self.policy.reset(episode)

    def chunk(self, observation: Mapping[str, Any], task: str = "", **options: Any) -> np.ndarray:
        chunk = self.policy.chunk(observation, task, **options)
        if self.waits:
            self.robot.sleep(self.latency_s)
        return chunk

    def start(self, work: Callable[[], Any]) -> DelayedAnswer:
        """A request that runs while the robot moves on."""
        self.waits = False
        try:
            return DelayedAnswer(work(), self.robot.clock, self.robot.now + self.latency_s)
        finally:
            self.waits = True


@dataclass(frozen=True)
class RealTimeScore:
    """The results of a set of episodes."""

    episodes: int
    successes: int
    success_rate: float
    moving: float
    """Share of the control periods in which the robot moved."""
    mean_seconds: float
    """Of an episode; a failed one takes until the time limit."""


def score_in_real_time(
    policy: ChunkSource,
    seeds: Sequence[int],
    latency_s: float,
    *,
    real_time: bool,
    execute: int | None = None,
    obs_type: str = "pixels_agent_pos",
    idle: Literal["stop", "last"] = "stop",
    block_speed: float = 0.0,
    progress: Progress | None = None,
) -> RealTimeScore:
    """Play one episode per seed, with RealTimePlayer or, without `real_time`, with ChunkPlayer, which waits."""
    robot = PlaceRobot(obs_type=obs_type, idle=idle, block_speed=block_speed)
    source = SlowSource(policy, robot, latency_s)
    player: RealTimePlayer | ChunkPlayer
    if real_time:
        player = RealTimePlayer(
            source,
            robot.fps,
            execute=execute,
            beyond_training=None,
            clock=robot.clock,
            start=source.start,
        )
    else:
        player = ChunkPlayer(source, execute, beyond_training=None)
    rename = {name: theirs for name, theirs in RENAME.items() if name in robot.observation_features}
    successes, moved, steps = 0, 0, 0
    for done, seed in enumerate(seeds):
        robot.reset(seed)
        drive(
            robot,
            player,
            fps=robot.fps,
            task=robot.task,
            steps=TIME_LIMIT,
            episode=seed,
            rename=rename,
            stop=lambda: robot.done,
            clock=robot.clock,
            sleep=robot.sleep,
        )
        successes, moved, steps = successes + robot.success, moved + robot.moved, steps + robot.steps
        if progress is not None:
            progress(done + 1, len(seeds))
    count = len(seeds)
    return RealTimeScore(count, successes, successes / count, moved / steps, steps / count / robot.fps)
