"""States and actions: each fault of a recording is found and named, with the joint and the episodes."""

from pathlib import Path

import numpy as np
import pytest

from flexor.data.check.episode_names import EpisodeNames
from flexor.data.check.units import other_units
from flexor.data.check.values import outliers, summarise
from flexor.data.dataset import open_dataset
from flexor.data.mixture.mixed import Member, join_datasets
from flexor.monitor.inputs import value_findings
from flexor.policies.features import Kind, PolicyFeature
from flexor.policies.processing.normalize import Normalize
from flexor.policies.processing.pipeline import Pipeline
from support.faulty_arm import change_statistics, glitch, scaled, still, write_arm

DEGREES = 180 / np.pi
MODES = ("MEAN_STD", "MIN_MAX", "QUANTILES")
ARM, GRIPPER = slice(0, 6), slice(6, 7)


def findings(root: Path, mode: str = "MEAN_STD") -> list:
    dataset = open_dataset(root=root)
    features = {
        "observation.state": PolicyFeature(Kind.STATE, (7,)),
        "action": PolicyFeature(Kind.ACTION, (7,)),
    }
    normalize = Normalize(features, dict.fromkeys(("STATE", "ACTION"), mode), dataset.stats)
    return value_findings(dataset, Pipeline("before", [normalize]))


@pytest.mark.parametrize("mode", MODES)
def test_healthy_arms_have_no_finding(tmp_path, mode):
    assert findings(write_arm(tmp_path / "arm"), mode) == []
    assert findings(write_arm(tmp_path / "degrees", scaled(DEGREES, range(8), ARM)), mode) == []


def test_an_action_that_never_changes(tmp_path):
    (dead,) = findings(write_arm(tmp_path / "arm", still(6)))
    assert dead.name == "dead action dimension"
    assert dead.evidence == "action[6] (gripper) is constant in all 8 episodes (it is 0.25)"
    two = findings(write_arm(tmp_path / "two", still(6), still(0)))[0]
    assert "action[0 (base), 6 (gripper)] are constant" in two.evidence


@pytest.mark.parametrize("odd", [[3], [1, 2, 3, 6], [0, 1, 2, 4, 5, 6, 7]])
def test_episodes_in_degrees_among_others_in_radians(tmp_path, odd):
    """Whichever are fewer: one in degrees, half of them, or one in radians."""
    faults = findings(write_arm(tmp_path / "arm", scaled(DEGREES, odd, ARM)))
    assert [fault.name for fault in faults] == ["mixed units"] * 2
    few = odd if len(odd) <= 4 else [3]
    words = {1: "episode 3", 4: "episodes 1 to 3, 6"}[len(few)]
    size = "larger" if few == odd else "smaller"
    for fault, feature in zip(faults, ("observation.state", "action")):
        assert fault.evidence.startswith(f"{feature}[0] (base) and 5 more are about ")
        assert fault.evidence.endswith(
            f"{feature}[0 (base), 1 (shoulder), 2 (elbow), 3 (roll), 4 (pitch), 5 (yaw)]"
        )
        assert f"{size} in {words} than in the others" in fault.evidence
        assert "gripper" not in fault.evidence and "degrees and radians" in fault.evidence
        assert f"--dataset.exclude_episodes={'1:4,6' if len(few) == 4 else '3'}" in fault.fix


@pytest.mark.parametrize("factor", [100, 0.01])
def test_a_gripper_in_percent(tmp_path, factor):
    in_percent = [scaled(100, range(8), GRIPPER)] if factor < 1 else []
    faults = findings(write_arm(tmp_path / "arm", *in_percent, scaled(factor, [1, 4], GRIPPER)))
    assert [fault.name for fault in faults] == ["mixed units"] * 2
    size = "larger" if factor > 1 else "smaller"
    for fault, feature in zip(faults, ("observation.state", "action")):
        assert fault.evidence.startswith(f"{feature}[6] (gripper) is about ")
        assert f" times {size} in episodes 1, 4 than in the others" in fault.evidence
        assert fault.evidence.endswith("percent and fractions")


def test_a_joint_that_is_used_now_and_then_is_no_fault(tmp_path):
    """An arm that rests at zero, with a little jitter, in all episodes except two; a button that is pressed once."""

    def rests(episode, states, actions):
        rng = np.random.default_rng(episode)
        for values in (states, actions):
            if episode not in (2, 5):
                values[:, :3] = rng.normal(0, 0.002, (len(values), 3)) * [1, 3, 9]
            values[:, 6] = 0
        states[:, 6], actions[:, 6] = 0, 0
        if episode == 4:
            states[3, 6] = actions[3, 6] = 1

    assert findings(write_arm(tmp_path / "arm", rests)) == []


@pytest.mark.parametrize("tick", [0.0012, 0.08, 1.5])
@pytest.mark.parametrize("tremble", [True, False])
def test_a_joint_that_moves_only_in_some_episodes_has_no_other_unit(tmp_path, tick, tremble):
    """At rest, an encoder trembles about zero or has a few levels, a thousand times smaller than the motion."""

    def rests(episode, states, actions):
        rng = np.random.default_rng(episode)
        motion = 922 * tick * np.sin(np.linspace(0, 2, len(states)) + 0.1 * episode)
        rest = rng.normal(0, tick / 3, len(states)) if tremble else tick * (np.arange(len(states)) // 3 % 2)
        for values in (states, actions):
            values[:, 0] = motion if episode in (2, 5) else rest

    assert "mixed units" not in [fault.name for fault in findings(write_arm(tmp_path / "arm", rests))]


def test_a_length_in_millimetres(tmp_path):
    """Beside it: both kinds of episodes move, so it is found."""
    in_mm = write_arm(tmp_path / "arm", scaled(0.1, range(8), slice(0, 1)), scaled(1000, [2, 5], slice(0, 1)))
    faults = [fault for fault in findings(in_mm) if fault.name == "mixed units"]
    assert len(faults) == 2 and all("larger in episodes 2, 5" in fault.evidence for fault in faults)
    assert all(fault.evidence.endswith("It looks like m and mm") for fault in faults)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "change",
    [
        lambda name, value: value * DEGREES,
        lambda name, value: value if name == "std" else value + 60,
        lambda name, value: value / 100,
    ],
)
def test_statistics_of_another_dataset(tmp_path, mode, change):
    root = change_statistics(write_arm(tmp_path / "arm"), "observation.state", change)
    (wrong,) = findings(root, mode)
    assert wrong.name == "wrong statistics"
    assert wrong.evidence.startswith("observation.state[0 (base), 1 (shoulder),")
    assert wrong.evidence.endswith("in all 8 episodes")
    assert "`flexor data stats DIR --write`" in wrong.fix


def test_a_standard_deviation_that_is_too_large(tmp_path):
    root = change_statistics(
        write_arm(tmp_path / "arm"), "action", lambda name, value: value * 7 if name == "std" else value
    )
    (wrong,) = findings(root)
    assert wrong.name == "wrong statistics" and "a standard deviation of 0.1429 instead" in wrong.evidence


def test_a_sensor_that_failed_in_one_frame(tmp_path):
    faults = findings(write_arm(tmp_path / "arm", glitch(2, 5, 1)))
    (far,) = [fault for fault in faults if fault.name == "values out of range"]
    assert far.evidence.startswith("observation.state[1] (shoulder) is 1.00e+06 in episode 2, frame 5; 98 %")
    assert far.fix.endswith("--dataset.exclude_episodes=2")


def test_a_selection_of_episodes_has_the_numbers_of_the_whole(tmp_path):
    root = write_arm(tmp_path / "arm", scaled(DEGREES, [6], ARM))
    selection = open_dataset(root=root).select([1, 2, 5, 6])
    faults, odd = other_units(summarise(selection, "observation.state"))
    assert "in episode 6 than" in faults[0].evidence and odd.any(1).tolist() == [False, False, False, True]
    assert outliers(summarise(selection, "observation.state"), odd) == []


def test_episodes_of_several_datasets(tmp_path):
    first = write_arm(tmp_path / "one")
    second = write_arm(tmp_path / "two", scaled(DEGREES, [3], ARM))
    mixed = join_datasets([Member("a", open_dataset(root=first)), Member("b", open_dataset(root=second))])
    faults, _ = other_units(summarise(mixed, "action"))
    assert "in episode 3 of b than" in faults[0].evidence
    assert "exclude_episodes: 3 of b in dataset.mix" in faults[0].fix
    assert EpisodeNames.of(mixed).in_words([1, 8, 9, 10, 12]) == "episode 1 of a and episodes 0 to 2, 4 of b"
    names = EpisodeNames.of(open_dataset(root=first))
    assert names.exclude([0, 1, 4, 5, 6]) == "--dataset.exclude_episodes=0,1,4:7"


def test_values_that_are_not_finite_do_not_disturb(tmp_path):
    dataset = open_dataset(root=write_arm(tmp_path / "arm"))
    dataset.columns["action"] = dataset.columns["action"].copy()
    dataset.columns["action"][5] = np.nan
    values = summarise(dataset, "action")
    assert other_units(values)[0] == [] and np.isfinite(values.low).all()
