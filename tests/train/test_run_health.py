"""Runs that learn badly say why: in the log once, in their metrics and in their record."""

import json

import numpy as np
import pytest

from flexor.cli.main import main
from flexor.runs.health import findings, to_json
from flexor.runs.reader import RunReader
from flexor.runs.watch.screen import Screen
from support import runs
from support.faulty_arm import WRIST, scaled, still, write_arm


def record_of(run):
    return json.loads((run / "run.json").read_text()).get("health")


def health_of(run):
    return [finding for line in runs.metrics(run) for finding in line.get("health", [])]


@pytest.fixture(scope="module")
def faulty(tmp_path_factory, tiny_act):
    """A run on an arm with an unplugged camera, an episode in degrees and a gripper that was not recorded."""
    folder = tmp_path_factory.mktemp("faulty")
    degrees = scaled(180 / np.pi, [3], slice(0, 6))
    arm = write_arm(folder / "arm", degrees, still(6), blank=[2, 5], cameras=True)
    return runs.train(arm, folder / "run", tiny_act, "--steps=4", "--save_freq=2")


def test_faults_of_the_data_are_named_with_joint_camera_and_episodes(faulty):
    first = runs.metrics(faulty)[0]["health"]
    texts = {finding["what"]: finding["evidence"] for finding in first}
    assert texts["dead action dimension"] == "action[6] (gripper) is constant in all 8 episodes (it is 0.25)"
    assert "observation.state[0] (base) and 5 more" in next(
        finding["evidence"] for finding in first if finding["what"] == "mixed units"
    )
    assert "larger in episode 3 than in the others" in texts["mixed units"]
    assert texts["blank camera"] == f"{WRIST} is blank (one colour) in episodes 2, 5"
    assert [line.get("health") for line in runs.metrics(faulty)[1:]] == [None] * 3  # said once
    log = (faulty / "train.log").read_text()
    assert log.count("action[6] (gripper) is constant") == 1 and " W blank camera: " in log
    assert record_of(faulty) == [{**finding, "step": 0} for finding in first]


def test_those_who_read_a_run_show_them(faulty):
    reader = RunReader(faulty)
    reader.poll()
    assert [finding.name for finding in reader.state().health] == [x["what"] for x in health_of(faulty)]
    assert not any("health" in name for name in reader.series)
    screen = [line.plain for line in Screen([reader]).lines(200, 40)]
    (row,) = [line for line in screen if line.startswith("health")]
    assert any(f"blank camera: {WRIST} is blank (one colour) in episodes 2, 5" in line for line in screen)
    assert any("more: see train.log" in line for line in screen) == (len(health_of(faulty)) > 3) and row


def test_a_resumed_run_does_not_repeat_them(faulty, tmp_path, log_lines):
    copy = runs.cut_back(faulty, tmp_path / "copy", 2)
    before = record_of(copy)
    later = {"what": "loss spike", "evidence": "of a step that is repeated", "change": "", "step": 4}
    record = json.loads((copy / "run.json").read_text())
    (copy / "run.json").write_text(json.dumps(record | {"health": [*before, later]}))
    assert main(["resume", str(copy)]) == 0
    assert record_of(copy) == before and health_of(copy) == health_of(faulty)
    assert not [line for line in log_lines if "constant in all" in line]
    runs.assert_same(faulty, copy, 4)


def test_a_learning_rate_that_is_far_too_large(lowdim, tiny_act, tmp_path):
    run = runs.train(lowdim, tmp_path / "run", tiny_act, "--steps=6", "--optimizer.lr=0.2", "--save_freq=6")
    (exploded,) = health_of(run)
    assert exploded["what"] == "loss exploded" and "(now 0.2)" in exploded["change"]
    (from_file,) = findings(runs.metrics(run), {"optimizer": {"grad_clip_norm": 10}})
    assert to_json(from_file) == exploded


def test_a_held_out_loss_that_was_lower_before_a_resume(lowdim, tiny_act, tmp_path):
    more = "--steps=4", "--save_freq=2", "--dataset.eval_split=0.25", "--eval_steps=1"
    run = runs.train(lowdim, tmp_path / "run", tiny_act, *more)
    lines = runs.metrics(run)
    for line in lines:
        if "held_out_loss" in line:
            line["held_out_loss"] *= 0.01 * (8 - line["step"])
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["resume", str(run), "--steps=7"]) == 0
    (rises,) = health_of(run)
    assert rises["what"] == "held-out loss rises" and "at step 6, the lowest was" in rises["evidence"]
    assert "use checkpoint 000004, which has the lowest held-out loss" in rises["change"]
    assert record_of(run) == [{**rises, "step": 6}]


def test_a_healthy_run_has_nothing_to_say(dataset, tiny_act, tmp_path):
    run = runs.train(dataset, tmp_path / "run", tiny_act, "--steps=15", "--save_checkpoint=false")
    assert health_of(run) == [] and record_of(run) is None
