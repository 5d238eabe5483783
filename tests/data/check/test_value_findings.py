"""What is wrong with values is found in a dataset that has it, and not in the one beside it."""

from pathlib import Path

import numpy as np
import pytest

from flexor.data.check.check import check_dataset
from flexor.data.check.episode_names import EpisodeNames
from flexor.data.check.values import outliers, summarise_rows
from flexor.data.repair.repair import repair_dataset
from support.faulty_arm import TOP, change_statistics, glitch, scaled, still, write_arm

DEGREES = 180 / np.pi
STATE = "observation.state"


def kinds_of(root: Path) -> set[tuple]:
    findings = check_dataset(root, deep=False).findings
    return {(finding.name, finding.episode, finding.frame, finding.feature) for finding in findings}


def test_a_healthy_arm_has_no_finding(tmp_path):
    assert kinds_of(write_arm(tmp_path / "arm")) == set()


def test_what_training_would_say_at_its_start(tmp_path):
    assert kinds_of(write_arm(tmp_path / "dead", still(6))) == {
        ("dead-action-dimension", None, None, "action")
    }
    report = check_dataset(write_arm(tmp_path / "units", scaled(DEGREES, [1, 5], slice(0, 6))), deep=False)
    where = {(finding.name, finding.episode, finding.frame, finding.feature) for finding in report.findings}
    assert where == {("mixed-units", episode, 0, name) for episode in (1, 5) for name in (STATE, "action")}
    assert "episodes 1, 5 than in the others" in str(report) and "exclude_episodes=1,5" in str(report)
    root = write_arm(tmp_path / "glitch", glitch(2, 5, 1))
    assert kinds_of(root) == {("values-out-of-range", 2, 5, STATE)}
    notes = repair_dataset(root, tmp_path / "repaired", dry_run=True).notes
    assert any("not repaired (values-out-of-range)" in note for note in notes)


@pytest.mark.parametrize(("factor", "is_wrong"), [(7.0, True), (1 / 7, True), (1.3, False)])
def test_a_standard_deviation_that_is_not_that_of_the_data(tmp_path, factor, is_wrong):
    """Six to eight times too large in a real dataset, within what its smallest and largest values allow."""
    root = write_arm(tmp_path / "arm")
    wide = change_statistics(root, "action", lambda name, value: value * (factor if name == "std" else 1.0))
    wide = change_statistics(wide, "action", lambda name, value: value * (9 if name in ("min", "max") else 1))
    assert kinds_of(wide) == ({("stats-wrong", None, None, "action")} if is_wrong else set())


@pytest.mark.parametrize(("factor", "is_wrong"), [(20.0, True), (1.2, False)])
def test_limits_that_are_not_those_of_the_data(tmp_path, factor, is_wrong):
    """A policy that normalises by them gets values near 0."""
    root = write_arm(tmp_path / "arm")
    change_statistics(root, STATE, lambda name, value: value * (factor if name in ("min", "max") else 1))
    assert kinds_of(root) == ({("stats-wrong", None, None, STATE)} if is_wrong else set())


def test_a_mean_that_is_not_that_of_the_data(tmp_path):
    root = write_arm(tmp_path / "arm")
    change_statistics(root, STATE, lambda name, value: value + 10 * (name in ("mean", "max")))
    assert kinds_of(root) == {("stats-wrong", None, None, STATE)}


def test_placeholders_are_no_camera_that_never_changes(tmp_path):
    root = write_arm(tmp_path / "arm", cameras=True)
    placeholders = {"mean": 0.0, "std": 0.0, "min": 0.0, "max": 255.0}
    change_statistics(root, TOP, lambda name, value: np.full_like(value, placeholders.get(name, 0.0)))
    (finding,) = check_dataset(root, deep=False).findings
    assert (finding.name, finding.feature) == ("stats-wrong", TOP)
    assert finding.evidence.endswith("is 0, which values from 0 to 255 can't have")


def test_statistics_of_all_episodes_are_not_compared_with_some(tmp_path):
    root = write_arm(tmp_path / "arm", scaled(DEGREES, [3], slice(0, 6)))
    assert check_dataset(root, deep=False, episodes=[0, 1]).findings == []


def test_a_joint_that_mostly_rests_has_no_outliers():
    """It moves in less than a hundredth of the frames, but it moves; a failed sensor jumps."""
    rest = np.random.default_rng(0).normal(0, 1e-4, (2000, 1))
    index, start = EpisodeNames(np.arange(10)), np.arange(0, 2000, 200)

    def outliers_of(rows: np.ndarray) -> list:
        values = summarise_rows(STATE, [], index, rows, start)
        return [fault.frames for fault in outliers(values, np.zeros((10, 1), bool))]

    moved, jumped, stuck, lifted = (rest.copy() for _ in range(4))
    moved[600:616, 0] += np.sin(np.linspace(0, np.pi, 16))
    jumped[607, 0] += 1
    stuck[607:620, 0] += 1
    lifted[600:, 0] += np.linspace(0, 1, 1400)  # is not rare
    assert outliers_of(moved) == outliers_of(rest) == outliers_of(lifted) == []
    assert [{*frames} for frames in (*outliers_of(jumped), *outliers_of(stuck))] == [{3}, {3}]
