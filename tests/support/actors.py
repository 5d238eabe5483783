"""A learner's port without a learner: what actors send is recorded, and answered by a small policy."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from flexor.policies import make_policy
from flexor.policies.pretrained import Pretrained
from flexor.policies.sac.config import ActorNetwork, SACConfig
from flexor.rl.acting import ActingPolicy, PublishedWeights
from flexor.rl.environment import fitted, statistics
from flexor.rl.intake import Intake
from flexor.rl.learner_server import LearnerServer
from flexor.rl.records import RecordFile, record_type
from flexor.rl.spec import EnvironmentSpec
from flexor.serve import background
from flexor.serve.settings import ServeSettings
from flexor_client import Collector
from support.limits import LIMIT_S

STATE, IMAGE = "observation.state", "observation.images.top"
SPEC = EnvironmentSpec(
    {STATE: [3]}, [-1.0, -2.0], [1.0, 2.0], {STATE: ([-9.0] * 3, [9.0] * 3)}, 10.0, "reach"
)
WITH_IMAGES = replace(SPEC, shapes={STATE: [3], IMAGE: [3, 48, 48]})


@contextmanager
def taking(
    folder: Path, port: int = 0, spec: EnvironmentSpec = SPEC, **settings: Any
) -> Iterator[tuple[str, Intake]]:
    """A server whose learner is idle: its address, and what takes the records."""
    config = SACConfig(latent_dim=4, image_encoder_hidden_dim=2, actor_network_kwargs=ActorNetwork([8]))
    config = fitted(config, spec)
    config = replace(config, dataset_stats=statistics(config, spec, None))
    pretrained = Pretrained(make_policy(config), *config.pipelines(config.dataset_stats or {}, "cpu"))
    weights = PublishedWeights(pretrained.policy, every_s=0)
    weights.publish(0)
    patience = {"port": port, "opening_s": LIMIT_S, "ping_s": LIMIT_S, "requests_per_s": 1e6}
    server = LearnerServer(ServeSettings(**{**patience, **settings}))
    file = RecordFile(folder, record_type(config.observed, len(spec.low)))
    acting = ActingPolicy(
        Pretrained(make_policy(config), pretrained.preprocessor, pretrained.postprocessor), 0
    )
    acting.offer(0, weights.newest.tensors)
    intake = Intake(config, spec, file, acting, weights, steps=10**6, max_lag=10**6)
    with mock.patch.object(background, "STOP_S", LIMIT_S), background.in_background(server) as url:
        server.open(intake)
        yield url, intake
        intake.close()
    file.close()


def collector(url: str, spec: EnvironmentSpec = SPEC, actor: str = "arm", **settings: Any) -> Collector:
    described = {name: getattr(spec, name) for name in ("shapes", "low", "high", "ranges", "fps", "task")}
    patience = {"timeout_s": LIMIT_S, "lost_after_s": LIMIT_S}
    return Collector(url, actor=actor, **{**described, **patience, **settings})


def observation(value: float, spec: EnvironmentSpec = SPEC) -> dict[str, np.ndarray]:
    images = {
        name: np.full(shape, int(value) % 256, np.uint8)
        for name, shape in spec.shapes.items()
        if len(shape) == 3
    }
    return {STATE: np.full(3, value, np.float32), **images}


def records(intake: Intake, actor: int | None = None) -> np.ndarray:
    """What is in the file."""
    read = intake.file.read(0, intake.file.count)
    return read if actor is None else read[read["actor"] == actor]


class LineRobot:
    """A robot that moves by its action on a line, in episodes of a few steps. It writes down what it did."""

    def __init__(self, collector: Collector, length: int = 6):
        self.collector, self.length = collector, length
        self.position, self.steps = np.float32(0), 0
        self.action: np.ndarray | None = None
        self.done: list[tuple[float, ...]] = []  # position before, action, position after
        self.idle_steps = 0

    def step(self, person: np.ndarray | None = None) -> None:
        """One period. `person`: what somebody does instead of the policy."""
        if self.steps == 0:
            self.position = np.float32(len(self.done) + self.idle_steps)
            self.action = self.collector.begin(self.observe())
        executed = self.action if person is None else self.collector.limited(person)
        before = self.position
        if executed is not None:
            self.position = before + np.float32(executed[0]) + np.float32(1)
            self.done.append((float(before), *executed.tolist(), float(self.position)))
            self.steps += 1
        else:
            self.idle_steps += 1
        ended = self.steps == self.length
        self.action = self.collector.step(
            executed,
            self.observe(),
            truncated=ended,
            intervention=person is not None and executed is not None,
        )
        self.steps %= self.length

    def observe(self) -> dict[str, np.ndarray]:
        return observation(self.position)


def transitions(records: np.ndarray) -> list[tuple[float, ...]]:
    """(position before, action, position after) of the steps in one actor's records."""
    pairs = itertools.pairwise(records)
    return [
        (float(before[STATE][0]), *step["action"].tolist(), float(step[STATE][0]))
        for before, step in pairs
        if step["is_step"]
    ]
