"""`flexor data check --policy.path`: data that does not fit a policy is named for the reason, other data is not."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from flexor.cli.main import main
from flexor.data.check.action_kind import find_action_kind
from flexor.data.check.summary import DataSummary, summarise_data
from flexor.data.dataset import open_dataset
from flexor.data.format.writer import DatasetWriter
from flexor.evaluate.data_fit.check_fit import check_fit
from flexor.evaluate.data_fit.trained_on import TrainedOn, read_trained_on
from flexor.policies.act.config import ACTConfig
from flexor.policies.fit import fit_to_dataset
from support import runs

FRONT, SIDE, STATE, ACTION = (
    "observation.images.front",
    "observation.images.side",
    "observation.state",
    "action",
)
JOINTS = ["shoulder", "elbow", "gripper"]
TASKS = ("pick the cube", "place the cube")
EPISODES, LENGTH = 6, 40


def episodes(seed: int) -> dict[str, np.ndarray]:
    """Smooth joints with ranges of their own, actions one frame ahead, and two cameras that look different."""
    rng = np.random.default_rng(seed)
    time = np.arange(LENGTH + 1)[None, :, None] / LENGTH
    phase = rng.uniform(0, 0.3, (EPISODES, 1, 3))
    path = np.sin(2 * np.pi * (time + phase)) * [0.4, 1.2, 0.5] + [1.2, -0.8, 0.5]
    light = rng.integers(0, 30, (EPISODES, LENGTH, 3, 16, 16), np.uint8)
    front, side = light + 40, light + 190
    front[..., :8] += 90  # a light half
    return {STATE: path[:, :-1], ACTION: path[:, 1:], FRONT: front, SIDE: side}


def write(root: Path, values: dict[str, np.ndarray], fps: int = 10, tasks=TASKS, joints=JOINTS) -> Path:
    picture = {"dtype": "image", "shape": (16, 16, 3), "names": ["height", "width", "channels"]}
    numbers = {"dtype": "float32", "shape": (3,), "names": joints}
    features = {FRONT: picture, SIDE: picture, STATE: numbers, ACTION: numbers}
    with DatasetWriter(root, fps, features) as writer:
        for episode in range(EPISODES):
            for frame in range(values[STATE].shape[1]):
                images = {name: np.moveaxis(values[name][episode, frame], 0, -1) for name in (FRONT, SIDE)}
                vectors = {name: values[name][episode, frame].astype(np.float32) for name in (STATE, ACTION)}
                writer.add_frame({**images, **vectors})
            writer.save_episode(tasks[episode % len(tasks)])
    return root


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> TrainedOn:
    """What a policy knows that was trained on such episodes, and that reads words."""
    dataset = open_dataset(root=write(tmp_path_factory.mktemp("fit") / "training", episodes(0)))
    summary = DataSummary.of_json(json.loads(json.dumps(summarise_data(dataset).to_json())))
    return TrainedOn(
        config=fit_to_dataset(ACTConfig(), dataset),
        values=summary.values,
        cameras=summary.cameras,
        fps=summary.fps,
        tasks=summary.tasks,
        action_kind=summary.action_kind,
        reads_words=True,
    )


def checked(trained: TrainedOn, root: Path, **options: bool) -> dict[str, str]:
    return {f.name: f.evidence for f in check_fit(open_dataset(root=root), trained, **options).findings}


def test_other_episodes_of_the_same_robot_fit(trained, tmp_path):
    assert checked(trained, write(tmp_path / "data", episodes(1))) == {}
    assert trained.action_kind == "absolute"


def test_swapped_cameras_are_suspected(trained, tmp_path):
    values = episodes(1)
    data = write(tmp_path / "data", {**values, FRONT: values[SIDE], SIDE: values[FRONT]})
    assert [*checked(trained, data)] == ["cameras swapped"]


def test_degrees_are_named_with_all_joints(trained, tmp_path):
    values = episodes(1)
    factor = 180 / np.pi
    data = write(
        tmp_path / "data", {**values, STATE: values[STATE] * factor, ACTION: values[ACTION] * factor}
    )
    fit = check_fit(open_dataset(root=data), trained)
    assert {finding.name for finding in fit.findings} == {"other units"}
    assert "degrees instead of radians" in fit.findings[0].evidence
    assert all(name in fit.findings[0].evidence for name in JOINTS)
    np.testing.assert_allclose(fit.sizes, factor, rtol=0.2)


def test_a_gripper_in_percent_is_named_alone(trained, tmp_path):
    values = episodes(1)
    scale = np.array([1, 1, 100])
    data = write(tmp_path / "data", {**values, STATE: values[STATE] * scale, ACTION: values[ACTION] * scale})
    evidence = checked(trained, data)["other units"]
    assert evidence.startswith("gripper of ") and "percent instead of fractions" in evidence


def test_joints_in_another_order_are_named_by_their_names_and_by_their_values(trained, tmp_path):
    values = episodes(1)
    order = [1, 0, 2]
    moved = {**values, STATE: values[STATE][..., order], ACTION: values[ACTION][..., order]}
    by_name = write(tmp_path / "named", moved, joints=[JOINTS[number] for number in order])
    assert [*checked(trained, by_name)] == ["joints permuted"]
    by_value = write(tmp_path / "unnamed", moved)
    assert "shoulder and elbow" in checked(trained, by_value)["joints permuted"]


def test_a_mirrored_joint_may_have_the_opposite_sign(trained, tmp_path):
    values = episodes(1)
    sign = np.array([-1, 1, 1])
    data = write(tmp_path / "data", {**values, STATE: values[STATE] * sign, ACTION: values[ACTION] * sign})
    result = checked(trained, data)
    assert [*result] == ["sign flipped"] and result["sign flipped"].startswith("shoulder of ")


def test_half_the_frame_rate_is_named(trained, tmp_path):
    half = {name: value[:, ::2] for name, value in episodes(1).items()}
    assert [*checked(trained, write(tmp_path / "data", half, fps=5))] == ["other frame rate"]


def test_relative_actions_are_named(trained, tmp_path):
    values = episodes(1)
    data = write(tmp_path / "data", {**values, ACTION: values[ACTION] - values[STATE]})
    assert checked(trained, data) == {
        "action kind": "the actions are relative here, and were absolute in training"
    }


def test_a_state_that_was_not_recorded_is_named(trained, tmp_path):
    values = episodes(1)
    assert "state constant" in checked(
        trained, write(tmp_path / "data", {**values, STATE: values[STATE] * 0})
    )


def test_values_outside_of_the_training_are_counted(trained, tmp_path):
    values = episodes(1)
    shift = np.array([0, 1.5, 0])
    data = write(tmp_path / "data", {**values, STATE: values[STATE] + shift, ACTION: values[ACTION] + shift})
    result = checked(trained, data)
    assert [*result] == ["outside of the training data"]
    assert "elbow" in result["outside of the training data"]


def test_tasks_that_are_new_or_look_the_same_are_named(trained, tmp_path):
    data = write(tmp_path / "data", episodes(1), tasks=("pick the CUBE.", "sort the mail"))
    assert [*checked(trained, data)] == ["task unseen"]
    assert "sort the mail" in checked(trained, data)["task unseen"]
    assert checked(trained, data, new_tasks=True) == {}
    assert [*checked(replace(trained, reads_words=False), data)] == ["tasks alike"]
    first_word = replace(trained, tokens=lambda tasks: [(hash(task.split()[1]),) for task in tasks])
    both = write(tmp_path / "alike", episodes(1), tasks=TASKS)
    assert [*checked(first_word, both)] == ["tasks alike"]


def test_an_input_that_is_missing_is_an_error(trained, tmp_path):
    dataset = open_dataset(root=write(tmp_path / "data", episodes(1)))
    camera = replace(trained.config, input_features={
        **trained.config.input_features,
        "observation.images.wrist": trained.config.input_features[FRONT],
    })  # fmt: skip
    findings = check_fit(dataset, replace(trained, config=camera)).findings
    assert [(finding.name, finding.severity) for finding in findings] == [("input missing", "error")]


@pytest.mark.parametrize("kind", ["absolute", "relative", "velocity"])
def test_the_kind_of_actions_is_told_from_the_data(kind):
    values = episodes(3)
    state, goal = (values[name].reshape(-1, 3) for name in (STATE, ACTION))
    actions = {"absolute": goal, "relative": goal - state, "velocity": 10 * (goal - state)}[kind]
    starts = np.arange(EPISODES) * LENGTH
    assert find_action_kind(actions, state, starts, [0, 1, 2]).name == kind
    noise = np.random.default_rng(0).normal(size=goal.shape)
    assert find_action_kind(noise, state, starts, [0, 1, 2]) is None
    assert find_action_kind(actions, state, starts, [None] * 3) is None


# --- with a run


@pytest.fixture(scope="module")
def act(dataset, tiny_act, tmp_path_factory) -> Path:
    return runs.train(dataset, tmp_path_factory.mktemp("fit") / "act", tiny_act, "--steps=2")


def test_the_built_in_task_fits_its_policy(act, dataset, capsys):
    trained = read_trained_on(str(act))
    assert trained.fps == 10 and [*trained.tasks] and trained.cameras.keys() == {"observation.image"}
    assert main(["data", "check", str(dataset), f"--policy.path={act}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["problems"] == []


def test_without_a_description_statistics_are_compared(act, dataset, tmp_path):
    full = read_trained_on(str(act))
    copy = tmp_path / "policy"
    copy.mkdir()
    for file in (act / "checkpoints/last/pretrained_model").iterdir():
        if file.name != "training_data.json":
            (copy / file.name).write_bytes(file.read_bytes())
    bare = read_trained_on(str(copy))
    assert bare.fps is None and not bare.tasks and not bare.cameras
    np.testing.assert_allclose(bare.values[STATE].mean, full.values[STATE].mean, atol=1e-3)
    assert check_fit(open_dataset(root=dataset), bare).findings == []


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        '{"fps": "fast"}',
        '{"fps": 10, "values": {"action": {"names": [], "mean": [1], "std": [], "low": [], "high": [], "change": []}}}',
        '{"fps": 10, "cameras": {"observation.image": {"mean": [[[1]]], "std": []}}}',
    ],
)
def test_a_damaged_description_is_not_used(act, content, tmp_path, log_lines):
    shutil.copytree(act / "checkpoints/last/pretrained_model", tmp_path / "policy")
    (tmp_path / "policy/training_data.json").write_text(content)
    assert read_trained_on(str(tmp_path / "policy")).fps is None
    assert any("training_data.json is not used" in line for line in log_lines)


def test_fine_tuning_warns_of_data_that_does_not_fit(act, dataset, tiny_act, tmp_path):
    """The same demonstrations at another rate, with the state in degrees."""
    from flexor.sim.record import features

    source = open_dataset(root=dataset)
    names = ("observation.image", STATE, ACTION)
    with DatasetWriter(
        tmp_path / "data", 20, {name: features(32)[name] for name in names}, codec="h264"
    ) as writer:
        for start, end in zip(source.episodes.start.tolist(), source.episodes.end.tolist()):
            batch = source.read(np.arange(start, end))
            for row in range(end - start):
                vectors = {name: batch[name][row] * np.float32(180 / np.pi) for name in (STATE, ACTION)}
                writer.add_frame(
                    {"observation.image": np.moveaxis(batch["observation.image"][row], 0, -1), **vectors}
                )
            writer.save_episode("Put the red block on the green disc.")
    tuned = [word for word in tiny_act if not word.startswith("--policy.") or "device" in word]
    runs.train(tmp_path / "data", tmp_path / "run", tuned, "--steps=1", f"--policy.path={act}")
    health = json.loads((tmp_path / "run/run.json").read_text())["health"]
    assert {"other units", "other frame rate"} <= {entry["what"] for entry in health}
