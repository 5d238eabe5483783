"""An actor with a policy and an environment of its own: it goes on while its learner is gone, and hands over later."""

import threading

import pytest

from flexor.config.rl import RLConfig
from flexor.config.schema import EnvConfig
from flexor.core.errors import FlexorError
from flexor.evaluate.served import ServerAddress
from flexor.rl.actor import ActorResult, ActorSettings, collect
from flexor.rl.environment import open_env, spec_of
from support import actors
from support.actors import SPEC, taking
from support.limits import LIMIT_S, wait_for
from support.ports import ReservedPort

PLACE = EnvConfig(type="place", kwargs={"obs_type": "environment_state_agent_pos", "reward": "sparse"})


def test_it_goes_on_while_the_learner_is_gone_and_hands_over_later(tmp_path):
    spec, results = spec_of(open_env(PLACE)), []
    with ReservedPort() as port:
        settings = ActorSettings(ServerAddress(f"ws://127.0.0.1:{port}"), "left", tmp_path / "spool")
        acting = threading.Thread(
            target=lambda: results.append(collect(settings, PLACE, RLConfig(intervener="scripted"))),
            daemon=True,
        )
        acting.start()
        with taking(tmp_path / "records", port, spec) as (_, intake):
            wait_for(lambda: intake.file.count > 30)
        spool = tmp_path / "spool/records.spool"
        size = spool.stat().st_size
        wait_for(lambda: spool.stat().st_size > size + 100 * intake.file.layout.itemsize)
        with taking(tmp_path / "records", port, spec) as (_, intake):
            intake.steps = intake.actors.steps + 50
            wait_for(lambda: intake.finished)
            acting.join(LIMIT_S)
            stored = actors.records(intake)
    (result,) = results
    assert isinstance(result, ActorResult) and result.finished
    assert stored["sequence"].tolist() == [*range(1, len(stored) + 1)]
    assert result.steps >= (stored["is_step"] == 1).sum() > 80
    assert stored["intervention"].any() and {*stored["actor"].tolist()} == {1}


def test_an_environment_that_the_policy_does_not_fit(tmp_path):
    with taking(tmp_path / "records") as (url, _):
        settings = ActorSettings(ServerAddress(url), "left", tmp_path / "spool")
        with pytest.raises(FlexorError, match=r"refused what this actor sent"):
            collect(settings, PLACE, RLConfig())
    assert SPEC.shapes != spec_of(open_env(PLACE)).shapes
