"""What may leave for the robot: ranges and steps, clamped or refused, and never anything that is not finite."""

import numpy as np
import pytest

from flexor_client import ActionLimits, ClientError, LimitError
from flexor_client.limits import TrainingRange

NAMES = ["shoulder.pos", "gripper.pos"]


def act(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def test_inside_the_limits_nothing_changes():
    limits = ActionLimits(low=[-1, 0], high=[1, 2], step=0.3, names=NAMES)
    action = act(0.1, 1.9999999)
    np.testing.assert_array_equal(limits(action, last=act(0.4, 1.7)), action)
    assert limits.clamped == 0
    np.testing.assert_array_equal(ActionLimits()(act(1e6, -1e6), last=act(0, 0)), act(1e6, -1e6))


def test_range_and_step_are_clamped(caplog):
    limits = ActionLimits(low=-1, high=1, step=[0.5, 0.1], names=NAMES)
    np.testing.assert_allclose(limits(act(3, 0.2)), [1, 0.2])  # the first action has none before it
    np.testing.assert_allclose(limits(act(-3, 0.0), last=act(0.9, 0.0)), [0.4, 0.0], rtol=1e-6)
    np.testing.assert_allclose(limits(act(0, 0.5), last=act(0, 0.0)), [0, 0.1], rtol=1e-6)
    assert limits.clamped == 3
    assert len(caplog.records) == 1 and "shoulder.pos is 3" in caplog.text and "allow 1" in caplog.text


def test_a_robot_outside_of_its_range_is_led_back():
    limits = ActionLimits(low=-1, high=1, step=0.5)
    np.testing.assert_allclose(limits(act(3), last=act(2.5)), [2.0])


def test_errors_name_the_part():
    limits = ActionLimits(high=[1, 5], step=2, when_exceeded="error", names=NAMES)
    with pytest.raises(LimitError, match=r"gripper.pos is 4 after 1; the limits allow 3.*not sent"):
        limits(act(0, 4), last=act(0, 1))
    with pytest.raises(LimitError, match=r"shoulder\.pos is 1\.5; the limits allow 1"):
        limits(act(1.5, 0))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("when_exceeded", ["clamp", "error"])
def test_what_is_not_finite_never_leaves(bad, when_exceeded):
    with pytest.raises(LimitError, match="not finite"):
        ActionLimits(low=-1, high=1, when_exceeded=when_exceeded)(act(0, bad))


@pytest.mark.parametrize("when_exceeded", ["clamp", "error"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_position_that_is_not_finite_makes_no_action(bad, when_exceeded):
    """A step from there would not be finite either."""
    limits = ActionLimits(step=0.1, when_exceeded=when_exceeded)
    with pytest.raises(LimitError, match="position is not finite"):
        limits(act(0.5, 0.5), last=np.array([bad, 0]))


def test_limits_that_an_action_can_not_hold_make_none():
    with pytest.raises(LimitError, match="an action of float16 can't be"):
        ActionLimits(low=70_000)(np.zeros(2, np.float16))
    with pytest.raises(LimitError, match="an action of float32 can't be"):
        ActionLimits(low=1e39)(act(0, 0))


def test_an_action_of_another_robot_is_refused():
    for action in (act(0, 0, 0), np.zeros((1, 2), np.float32), np.zeros(2, int)):
        with pytest.raises(LimitError, match="another robot"):
            ActionLimits(names=NAMES)(action)
    with pytest.raises(LimitError, match="the one before"):
        ActionLimits()(act(0, 0), last=act(0, 0, 0))


def test_the_training_range_allows_as_much_again_on_either_side():
    check = TrainingRange([-1, 0, 5], [1, 100, 5], names=["a", "b", "c"]).check
    for action in (
        act(-3, -100, 5),
        act(3, 200, 5.9),
        act(0, 0, 4.1),
    ):  # c never moved: 1 % of the widest range
        check(action)
    for action, name in (
        (act(-3.1, 0, 5), "a"),
        (act(0, 201, 5), "b"),
        (act(0, 0, 6.1), "c"),
        (act(-1.2e37, 0, 5), "a"),
        (act(0, np.nan, 5), "b"),
    ):
        with pytest.raises(LimitError, match=f"action's {name} is"):
            check(action)
    with pytest.raises(LimitError, match="has 2 parts, but the policy was trained on 3"):
        check(act(0, 0))
    TrainingRange([2, 2], [2, 2]).check(act(2, 2))
    with pytest.raises(LimitError):
        TrainingRange([2, 2], [2, 2]).check(act(2, 2.1))
    assert TrainingRange.of({}, 1.0) is None
    assert TrainingRange.of({"action_range": {"low": [0], "high": [1]}}, None) is None


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"when_exceeded": "warn"}, "clamp"),
        ({"step": 0}, "more than 0"),
        ({"low": 2, "high": [3, 1]}, "above high"),
        ({"low": [0, 0], "high": [1, 1, 1]}, r"\[2, 3\] parts"),
        ({"low": [0, 0, 0], "names": NAMES}, "3 values for 2 parts"),
        ({"high": float("nan")}, "give a number"),
    ],
)
def test_limits_that_can_not_be_meant(settings, message):
    with pytest.raises(ClientError, match=message):
        ActionLimits(**settings)
