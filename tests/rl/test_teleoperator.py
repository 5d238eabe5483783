"""A person takes over: what a teleoperator does and says becomes actions, rewards, and episodes that do not count."""

import enum
import json

import gymnasium
import numpy as np
import pytest

from flexor.cli.main import main
from flexor.config.rl import RLConfig
from flexor.core.errors import ConfigError, FlexorError
from flexor.data.dataset import open_dataset
from flexor.rl.teleoperator import Events, TeleoperatorIntervener, make_teleoperator
from support import online


class Said(enum.Enum):
    """LeRobot's events are members of an enumeration."""

    SUCCESS = "success"
    IS_INTERVENTION = "is_intervention"
    TERMINATE_EPISODE = "terminate_episode"
    RERECORD_EPISODE = "rerecord_episode"


class Device:
    """Says and does what a test has written down, a pair per step."""

    def __init__(self, *steps):
        self.steps = list(steps)
        self.calls = []

    def connect(self):
        self.calls.append("connect")

    def get_action(self):
        action, self.now = self.steps.pop(0)
        return action

    def get_teleop_events(self):
        return dict.fromkeys(self.now, True)

    def disconnect(self):
        self.calls.append("disconnect")


class Steps(gymnasium.Env):
    """An arm that is moved in steps, with a gripper."""

    action_space = gymnasium.spaces.Box(np.array([-1, -1, -1, 0], "f4"), np.array([1, 1, 1, 2], "f4"))


class Angles(gymnasium.Env):
    action_space = gymnasium.spaces.Box(-1, 1, (2,))


def intervener(device, env=None, **settings) -> TeleoperatorIntervener:
    return TeleoperatorIntervener(
        device, env or Steps(), RLConfig(intervener="a.device:Device", fps=0, **settings)
    )


HELPS = (Said.IS_INTERVENTION,)


def test_the_policy_acts_until_somebody_takes_over():
    device = Device(({"delta_x": 1.0}, ()), ({"delta_x": 0.5, "delta_z": -1.0, "gripper": 2.0}, HELPS))
    person = intervener(device)
    assert person.action(Steps(), 0) is None and person.events() == Events()
    assert person.action(Steps(), 1).tolist() == [0.5, 0, -1, 2]
    person.close()
    assert device.calls == ["connect", "disconnect"]


def test_an_action_of_joints_is_in_their_order():
    device = Device(({"shoulder.pos": 0.5, "wrist.pos": -0.25}, HELPS), (np.array([[0.1, 0.2]]), HELPS))
    person = intervener(device, Angles())
    assert person.action(Angles(), 0).tolist() == [0.5, -0.25]
    assert np.allclose(person.action(Angles(), 1), [0.1, 0.2])


@pytest.mark.parametrize(
    ("action", "says"),
    [
        ({"a": 1.0}, "2 finite numbers"),
        ({"a": 1.0, "b": float("nan")}, "2 finite numbers"),
    ],
)
def test_actions_of_another_robot_are_refused(action, says):
    with pytest.raises(FlexorError, match=says):
        intervener(Device((action, HELPS)), Angles()).action(Angles(), 0)


@pytest.mark.parametrize(
    ("said", "ends", "changes"),
    [
        ((Said.SUCCESS,), True, {"reward": 1.0, "success": 1.0, "terminated": 1.0}),
        ((Said.SUCCESS,), False, {"reward": 1.0, "success": 1.0}),
        ((Said.TERMINATE_EPISODE,), True, {"terminated": 1.0}),
        ((Said.RERECORD_EPISODE,), True, {"truncated": 1.0, "discarded": 1.0}),
        (("success",), True, {"reward": 1.0, "success": 1.0, "terminated": 1.0}),
    ],
)
def test_what_is_said_changes_the_outcome(said, ends, changes):
    person = intervener(Device(({}, said)), terminate_on_success=ends)
    person.action(Steps(), 0)
    outcome = {"reward": 0.25, "success": 0.0, "terminated": 0.0, "truncated": 0.0}
    assert person.events().applied(outcome) == {**outcome, **changes}


def test_a_device_that_fails_ends_the_run_with_its_reason():
    class Unplugged(Device):
        def get_action(self):
            raise OSError(19, "No such device")

    with pytest.raises(FlexorError, match=r"get_action\(\) failed.*No such device"):
        intervener(Unplugged()).action(Steps(), 0)


MODULE = """
class Config:
    def __init__(self, port="none"):
        self.port = port

class Leader:
    config_class = Config
    def __init__(self, config):
        self.port = config.port
    def connect(self): pass
    def get_action(self): return {}
    def get_teleop_events(self): return {}
    def disconnect(self): pass

class Mute:
    def connect(self): pass
"""


def test_classes_are_named_as_lerobots_are(tmp_path):
    file = tmp_path / "devices.py"
    file.write_text(MODULE)
    assert make_teleoperator(f"{file}:Leader", {"port": "usb"}).port == "usb"
    for name, settings, says in (
        ("Leader", {"baud": 1}, "does not accept"),
        ("Mute", {}, "get_action"),
        ("Nobody", {}, "no class Nobody"),
    ):
        with pytest.raises(ConfigError, match=says):
            make_teleoperator(f"{file}:{name}", settings)
    with pytest.raises(ConfigError, match="can't be imported"):
        make_teleoperator("no.such.module:Leader", {})


PERSON = """
class Person:
    '''Discards the first episode, helps in the second, and says at its 6th step that it is done.'''

    def __init__(self):
        self.step = -1

    def connect(self): pass
    def disconnect(self): pass

    def get_action(self):
        self.step += 1
        return [0.5, -0.5, 1.0]

    def get_teleop_events(self):
        return {
            "is_intervention": self.step >= 6,
            "rerecord_episode": self.step == 3,
            "success": self.step % 6 == 3 and self.step > 3,
        }
"""


def test_a_run_with_a_person(tmp_path):
    """Steps 0 to 3 are recorded and not learned from; every 6th step afterwards is a success."""
    (tmp_path / "person.py").write_text(PERSON)
    more = [f"--rl.intervener={tmp_path}/person.py:Person", "--rl.fps=0", "--steps=40"]
    result = online.train(tmp_path / "run", None, *more)
    records = online.records(tmp_path / "run")
    steps = records[records["is_step"] == 1]
    assert len(steps) == 40
    assert np.flatnonzero(steps["discarded"]).tolist() == [3] and steps["truncated"][3] == 1
    assert np.flatnonzero(steps["intervention"]).tolist() == [*range(6, 40)]
    assert np.flatnonzero(steps["reward"]).tolist() == [9, 15, 21, 27, 33, 39]
    assert np.array_equal(steps["reward"], steps["terminated"])
    assert (steps["action"][6:] == [0.5, -0.5, 1.0]).all()
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["updates"] == 40 - 19 - 4  # none for what was discarded
    assert result.metrics["success_rate"] == 1.0
    assert main(["export", str(tmp_path / "run"), f"--records={tmp_path / 'exported'}"]) == 0
    assert len(open_dataset(None, tmp_path / "exported")) == 36
