"""Actors and a learner in processes of their own, killed with -9. `benchmarks/kill_actors.py` does it more often."""

import time

import numpy as np
import pytest

from flexor.cli.main import main
from support import actor_kills, online


@pytest.mark.ranks(waits=True)
def test_a_learner_of_two_robots_that_is_killed_again_and_again(tmp_path, capsys):
    run = actor_kills.kill_learner(tmp_path, kills=2, steps=40, seed=time.time_ns())
    stored = online.records(run)
    assert len(np.unique(stored["actor"])) == 2
    assert main(["export", str(run), f"--records={tmp_path / 'exported'}"]) == 0
    assert main(["data", "check", str(tmp_path / "exported")]) == 0


@pytest.mark.ranks(waits=True)
def test_an_actor_with_its_own_policy_that_is_killed_again_and_again(tmp_path):
    run = actor_kills.kill_actor(tmp_path, kills=2, steps=40, seed=time.time_ns())
    assert online.records(run)["update"].max() > 0  # new weights came while it acted
