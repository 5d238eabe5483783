"""A learner for actors on the network: its port, what its actors observe, and what they get."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flexor.config.rl import RLServeConfig
from flexor.config.schema import TrainConfig
from flexor.core.errors import CheckpointError, ConfigError
from flexor.core.foreign_files import MALFORMED, read_json_object
from flexor.core.log import log
from flexor.core.machine import flush_to_disk
from flexor.policies.pretrained import Pretrained
from flexor.policies.sac.config import SACConfig
from flexor.rl.acting import ActingPolicy, PublishedWeights
from flexor.rl.intake import Intake
from flexor.rl.learner import Learner
from flexor.rl.learner_server import LearnerServer
from flexor.rl.measures import Measures
from flexor.rl.records import RecordFile
from flexor.rl.sources import ActorSource
from flexor.rl.spec import EnvironmentSpec
from flexor.serve.background import in_background
from flexor.serve.settings import ServeSettings

KEY = "FLEXOR_API_KEY"
SPEC = "environment.json"  # beside the records
REQUESTS_PER_S = 5000.0
LOCAL = ("127.0.0.1", "::1", "localhost")


@contextmanager
def serving(settings: RLServeConfig) -> Iterator[LearnerServer | None]:
    """Inside, actors can connect; they are not taken before the learner has begun. None without a port."""
    if settings.port is None:
        yield None
        return
    server = LearnerServer(
        ServeSettings(
            host=settings.host,
            port=settings.port,
            api_key=os.environ.get(KEY),
            tls_cert=None if settings.tls_cert is None else Path(settings.tls_cert),
            tls_key=None if settings.tls_key is None else Path(settings.tls_key),
            allow_hosts=tuple(settings.allow_hosts),
            requests_per_s=REQUESTS_PER_S,
        )
    )
    if server.settings.api_key is None and settings.host not in LOCAL:
        log.warning("No API key is set: everybody who reaches this machine can send records. Set %s.", KEY)
    with in_background(server) as url:
        log.info("listening for actors on %s", url)
        yield server


def spec_of_actors(records: Path, server: LearnerServer | None) -> EnvironmentSpec:
    """What the actors of this run observe and do: as it was when the run began, or as the first one says."""
    path = records / SPEC
    if path.exists():
        try:
            return EnvironmentSpec.read(read_json_object(path))
        except (OSError, ConfigError, *MALFORMED) as error:
            raise CheckpointError(
                f"{path} can't be read: {error}. Restore it from a copy of the run."
            ) from error
    if server is None:
        raise ConfigError("Actors need a port: give --rl.serve.port=8000, or an environment with --env.type.")
    return server.wait_for_actor()


def save_spec(records: Path, spec: EnvironmentSpec) -> None:
    path = records / SPEC
    if path.exists():
        return
    temporary = path.with_name(f".{SPEC}")
    temporary.write_text(json.dumps(spec.plain(), indent=1))
    flush_to_disk(temporary)
    temporary.rename(path)


def actor_source(
    server: LearnerServer,
    config: TrainConfig,
    spec: EnvironmentSpec,
    file: RecordFile,
    learner: Learner,
    pretrained: Pretrained,
    measures: Measures,
) -> ActorSource:
    """Steps from the actors. The policy that acts for them is a copy, which gets the learner's weights now and then."""
    assert isinstance(config.policy, SACConfig)
    serve = config.rl.serve
    weights = PublishedWeights(learner.policy, serve.weights_s)
    acting = ActingPolicy(copy.deepcopy(pretrained), config.seed)
    intake = Intake(config.policy, spec, file, acting, weights, steps=config.steps, max_lag=serve.max_lag)
    return ActorSource(server, intake, learner, weights, measures)
