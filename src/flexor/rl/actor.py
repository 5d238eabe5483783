"""An actor with an environment and a copy of the policy: it acts here, and a learner on another machine learns."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from flexor.config.rl import RLConfig
from flexor.config.schema import EnvConfig
from flexor.core.batch import ACTION
from flexor.core.errors import ConfigError
from flexor.core.log import log
from flexor.core.rng import key_of
from flexor.core.typed import from_plain
from flexor.evaluate.served import ServerAddress, client_errors
from flexor.policies import make_policy
from flexor.policies.pretrained import Pretrained
from flexor.policies.sac.config import SACConfig
from flexor.rl.acting import ActingPolicy
from flexor.rl.collector import Collector
from flexor.rl.environment import fitted, open_env, spec_of
from flexor.rl.intervention import make_intervener
from flexor.rl.record_reader import FLAGS
from flexor.rl.records import observed_names, record_type
from flexor.rl.reward import with_classifier
from flexor.rl.spec import EnvironmentSpec
from flexor.train.stopping import StopSignal
from flexor_client.address import Address
from flexor_client.jpeg import encode_jpeg
from flexor_client.learner import LearnerLink
from flexor_client.spool import Spool

Wait = Literal["episode", "step"]
WAIT_S = 0.2  # between two looks at signals
HAND_OVER_S = 5.0  # at the end


@dataclass
class ActorSettings:
    """How an actor is run."""

    learner: ServerAddress
    name: str
    spool: Path
    device: str = "cpu"
    wait: Wait = "episode"
    """Before what it waits for a learner that lags: an episode, or every step, as a simulator can."""


@dataclass
class ActorResult:
    """What an actor did."""

    steps: int = 0
    episodes: int = 0
    successes: int = 0
    pending: int = 0
    """Records that are still in the spool."""
    finished: bool = False
    """Whether the learner has all steps that it wanted."""


def collect(settings: ActorSettings, env: EnvConfig, rl: RLConfig) -> ActorResult:
    """Act until the learner has all its steps, or a signal comes."""
    rewarding = with_classifier(open_env(env), rl, torch.device(settings.device))
    with (
        StopSignal() as stop,
        client_errors(),
        closing(rewarding) as opened,
        closing(make_intervener(rl, opened)) as intervener,
    ):
        stop.stepping = True
        spec, spool = spec_of(opened), Spool(settings.spool)
        address = Address(settings.learner.url, settings.learner.api_key, settings.learner.certificate)
        link = LearnerLink(address, settings.name, spec.plain(), spool, has_policy=True)
        result = ActorResult()
        try:
            log.info("actor %s: waiting for the learner at %s", settings.name, address.url)
            while stop.signal is None and not link.wait(lambda: bool(link.welcome), WAIT_S):
                pass
            if stop.signal is None:
                acting, layout = _policy(link.welcome, spec, settings.device)
                link.on_weights = acting.offer
                collector = Collector(opened, acting, intervener, layout, key_of(spool.id))
                _act(link, collector, stop, result, settings)
        finally:
            link.close(HAND_OVER_S)
            result.pending, result.finished = link.pending, link.finished
    return result


def _policy(
    welcome: dict[str, Any], spec: EnvironmentSpec, device: str
) -> tuple[ActingPolicy, np.dtype[Any]]:
    """The learner's policy, with weights that are still to come."""
    described = dict(welcome.get("policy") or {})
    if described.pop("type", None) != SACConfig.type:
        raise ConfigError(
            "The learner's policy is none that learns while it acts. Use one release on both machines."
        )
    config = from_plain(SACConfig, described, "policy")
    config = replace(fitted(config, spec), device=device)
    assert config.dataset_stats is not None
    before, after = config.pipelines(config.dataset_stats, device)
    module = make_policy(config).to(device)
    if device == "cpu" and not config.images:
        torch.set_num_threads(1)
    acting = ActingPolicy(Pretrained(module, before, after), int(welcome["seed"]))
    return acting, record_type(config.observed, len(spec.low))


class Pace:
    """When an actor goes on."""

    def __init__(self, link: LearnerLink, stop: StopSignal):
        self.link, self.stop, self.max_lag = link, stop, int(link.welcome["max_lag"])

    def is_over(self) -> bool:
        return self.stop.signal is not None or self.link.finished

    def wait_for(self, condition: Callable[[], bool]) -> None:
        while not self.is_over() and not self.link.wait(lambda: condition() or self.link.finished, WAIT_S):
            pass

    def wait_for_learner(self) -> None:
        """A learner that is there gets time to catch up; without one, an actor goes on."""
        link = self.link
        self.wait_for(lambda: not link.connected or link.behind + link.pending <= self.max_lag)


def _act(
    link: LearnerLink, collector: Collector, stop: StopSignal, result: ActorResult, settings: ActorSettings
) -> None:
    """Episode after episode. It goes on while the learner is gone, with the weights that are here."""
    pace, actor, jpeg = Pace(link, stop), int(link.welcome["actor"]), settings.learner.jpeg
    pace.wait_for(lambda: link.weights_update >= 0)
    while not pace.is_over():
        pace.wait_for_learner()
        number = link.spool.last + 1  # another one in each episode of this spool
        link.add(_message(collector.begin(number), jpeg))
        while not pace.is_over() and not collector.episode.ended:
            if settings.wait == "step":
                pace.wait_for_learner()
            record = collector.step(link.spool.last + 1, actor)
            link.add(_message(record, jpeg))
            result.steps += 1
        if collector.episode.ended:
            _report(collector, link, result)


def _report(collector: Collector, link: LearnerLink, result: ActorResult) -> None:
    episode = collector.episode
    result.episodes += 1
    result.successes += episode.success
    log.info(
        "episode %d  return %.4g  steps %d%s  weights of update %d%s",
        *(result.episodes, episode.return_, episode.steps, "  success" if episode.success else ""),
        *(collector.policy.update, f"  not handed over: {link.pending}" if link.pending else ""),
    )


def _message(record: np.ndarray, jpeg: int | None) -> dict[str, Any]:
    """A record as it is handed over."""
    row = record[0]
    observed: dict[str, Any] = {name: row[name] for name in observed_names(record.dtype)}
    if jpeg is not None:
        observed = {
            n: encode_jpeg(value, jpeg) if value.ndim == 3 else value for n, value in observed.items()
        }
    message = {"is_step": bool(row["is_step"]), "update": int(row["update"]), "observation": observed}
    if not row["is_step"]:
        return message
    flags = {name: bool(row[name]) for name in FLAGS}
    return {
        **message,
        **flags,
        "reward": float(row["reward"]),
        "penalty": float(row["penalty"]),
        ACTION: row[ACTION],
    }
