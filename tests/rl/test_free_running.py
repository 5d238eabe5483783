"""`rl.updates=max`: neither the environment nor the learner waits for the other."""

import json
import time

import numpy as np
import pytest

from flexor.cli.main import main
from flexor.core.errors import FlexorError
from flexor.rl import free_running
from flexor.rl.collector import Collector
from flexor.rl.learner import Learner
from support import online

MAX = "--rl.updates=max"
LONG_S = 60.0  # nothing takes so long, however busy the machine is


def wait_until(condition) -> bool:
    until = time.monotonic() + LONG_S
    while not condition() and time.monotonic() < until:
        time.sleep(0.001)
    return condition()


def newest_line(folder) -> dict:
    return json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])


def test_the_learner_goes_on_while_a_step_takes_long(tmp_path, monkeypatch):
    learners, waited = [], []
    build, step = free_running.FreeSource.__init__, Collector.step

    def building(self, collector, file, learner, *more):
        learners.append(learner)
        build(self, collector, file, learner, *more)

    def slow(self, transition, *more):
        if transition == 30:
            waited.append(wait_until(lambda: learners[0].updates >= 40))
        return step(self, transition, *more)

    monkeypatch.setattr(free_running.FreeSource, "__init__", building)
    monkeypatch.setattr(Collector, "step", slow)
    online.train(tmp_path / "run", None, MAX, "--steps=40")
    assert waited == [True]
    assert newest_line(tmp_path / "run")["updates"] >= 40
    steps = online.records(tmp_path / "run")
    updates = steps[steps["is_step"] == 1]["update"].astype(int)
    assert len(updates) == 40 and (np.diff(updates) >= 0).all() and updates[-1] > 0


def test_steps_go_on_while_an_update_takes_long(tmp_path, monkeypatch):
    waited, once = [], Learner.update_once
    file = tmp_path / "run" / "records" / online.RECORDS

    def slow(self):
        if self.updates == 0:
            size = self.buffer.layout.itemsize
            waited.append(wait_until(lambda: file.stat().st_size >= 39 * size))
        return once(self)

    monkeypatch.setattr(Learner, "update_once", slow)
    online.train(tmp_path / "run", None, MAX, "--steps=38")
    assert waited == [True]


def test_a_resume_goes_on_without_repeating(tmp_path):
    """Records after the checkpoint are in the buffer again, but their updates are not repeated."""
    folder = tmp_path / "run"
    online.train(folder, None, MAX, "--steps=40", "--save_freq=30")
    before = online.records(folder)
    newest = max((folder / "checkpoints").glob("0*"))
    state = json.loads((newest / "training_state/training_step.json").read_text())
    assert main(["resume", str(folder), "--steps=60"]) == 0
    after = online.records(folder)
    assert after[: len(before)].tobytes() == before.tobytes() and (after["is_step"] == 1).sum() == 60
    assert after[len(before) :]["update"].max() >= state["step"]
    assert newest_line(folder)["updates"] >= state["step"]


def test_what_fails_in_the_environment_ends_the_run(tmp_path, monkeypatch):
    step = Collector.step

    def failing(self, transition, *more):
        if transition == 25:
            raise FlexorError("the gripper is off")
        return step(self, transition, *more)

    monkeypatch.setattr(Collector, "step", failing)
    with pytest.raises(FlexorError, match="the gripper is off"):
        online.train(tmp_path / "run", None, MAX, "--steps=40")
    steps = online.records(tmp_path / "run")
    assert (steps["is_step"] == 1).sum() == 25
