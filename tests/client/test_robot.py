"""Driving a robot: names, rates, what is recorded, and that nothing is sent after an error."""

import numpy as np
import pytest

from flexor_client import ActionLimits, ClientError, DriveReport, LimitError, RobotNames, drive

FPS = 10


class Arm:
    """Two joints and a camera, with the methods of LeRobot's robots, on a clock of its own."""

    def __init__(self):
        self.now, self.sent, self.reading_s = 0.0, [], 0.0
        self.joints = {"shoulder.pos": 10.0, "gripper.pos": 50.0}
        self.observation_features = {"shoulder.pos": float, "gripper.pos": float, "top": (4, 6, 3)}
        self.action_features = {"shoulder.pos": float, "gripper.pos": float}

    def get_observation(self):
        self.now += self.reading_s
        return {**self.joints, "top": np.full((4, 6, 3), 7, np.uint8)}

    def send_action(self, action):
        self.sent.append((round(self.now, 6), action))
        self.joints = {name: min(value, 100.0) for name, value in action.items()}  # it clips
        return dict(self.joints)

    def sleep(self, seconds):
        self.now += seconds


class Script:
    """A player that plays what it is given; numbers are those of both joints, None is to hold."""

    def __init__(self, actions, limits=None, seconds=0.0, arm=None):
        self.actions, self.limits, self.seconds, self.arm = list(actions), limits, seconds, arm
        self.calls, self.position = [], None

    def reset(self, episode=0, position=None):
        self.episode, self.position = episode, position

    def act(self, observation, task=""):
        self.calls.append((observation, task))
        if self.arm is not None:
            self.arm.now += self.seconds
        value = self.actions.pop(0)
        if value is None:
            return None
        action = np.array([value, value], np.float32)
        return action if self.limits is None else self.limits(action, self.position)


def run(arm, player, **settings) -> DriveReport:
    return drive(arm, player, **{"fps": FPS, "clock": lambda: arm.now, "sleep": arm.sleep, **settings})


def test_names_go_both_ways_at_the_right_rate():
    arm, player, steps = Arm(), Script([1, 2, 300]), []
    report = run(arm, player, steps=3, task="fold", episode=4, on_step=lambda *step: steps.append(step))
    assert report == DriveReport(steps=3, idle_steps=0, late=0)
    assert [when for when, _ in arm.sent] == [0.0, 0.1, 0.2]
    assert arm.sent[1][1] == {"shoulder.pos": 2.0, "gripper.pos": 2.0}
    observation, task = player.calls[0]
    assert task == "fold" and player.episode == 4
    np.testing.assert_array_equal(observation["observation.state"], np.array([10, 50], np.float32))
    assert observation["observation.images.top"].shape == (4, 6, 3)
    np.testing.assert_array_equal(player.position, [10, 50])
    assert steps[0][0] is observation
    assert steps[2][1].tolist() == [100, 100]  # what the robot did, not what it was told


def test_time_spent_is_part_of_the_period_and_is_not_made_up_for():
    arm = Arm()
    assert run(arm, Script(range(4), seconds=0.06, arm=arm), steps=4).late == 0
    assert np.diff([when for when, _ in arm.sent]).tolist() == pytest.approx([0.1] * 3)
    arm = Arm()
    arm.reading_s = 0.02
    assert run(arm, Script(range(4), seconds=0.25, arm=arm), steps=4).late == 4
    assert min(np.diff([when for when, _ in arm.sent])) >= 0.1  # two actions at once would be too fast


def test_to_hold_sends_nothing_or_what_it_was_told():
    arm = Arm()
    report = run(arm, Script([1, None, None, 2]), steps=4)
    assert report.idle_steps == report.held == 2
    assert [when for when, _ in arm.sent] == [0.0, pytest.approx(0.3)]
    arm = Arm()
    run(arm, Script([None, 1]), steps=2, when_held=lambda observation: {**arm.joints, "gripper.pos": 0})
    assert arm.sent[0][1] == {"shoulder.pos": 10.0, "gripper.pos": 0}


def test_nothing_is_sent_after_an_error():
    arm = Arm()
    with pytest.raises(LimitError):
        run(arm, Script([11, 99, 12], ActionLimits(high=60, when_exceeded="error")), steps=3)
    assert len(arm.sent) == 1


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_is_not_sent_whatever_the_player(bad):
    arm = Arm()
    with pytest.raises(LimitError, match="not finite"):
        run(arm, Script([11, bad, 12]), steps=3)
    assert len(arm.sent) == 1


def test_it_ends_when_it_is_told_to():
    arm = Arm()
    assert run(arm, Script(range(99)), stop=lambda: len(arm.sent) == 5).steps == 5


def test_names_of_the_policy():
    arm = Arm()
    names = RobotNames(arm, {"top": "observation.image"}, ["gripper.pos", "shoulder.pos"])
    assert names.action(np.array([1, 2])) == {"gripper.pos": 1.0, "shoulder.pos": 2.0}
    assert names.position(arm.get_observation()).tolist() == [50, 10]
    assert names.observation(arm.get_observation()).keys() == {"observation.image", "observation.state"}
    with pytest.raises(ClientError, match="no front"):
        RobotNames(arm, {"front": "observation.image"})
    with pytest.raises(ClientError, match="Is it the right robot"):
        RobotNames(arm, action_names=["wheel", "gripper.pos"])
    with pytest.raises(ClientError, match=r"needs 2: shoulder\.pos"):
        names = RobotNames(arm)
        names.action(np.zeros(3))
    arm.action_features = {"wheel": float}
    assert RobotNames(arm).position(arm.get_observation()) is None
