"""Relative actions: there and back, what stays absolute, their statistics. Numbers of LeRobot: tests/parity."""

import json
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from flexor.core.errors import CheckpointError, ConfigError, FlexorError
from flexor.data.dataset import open_dataset
from flexor.data.format.flat_names import flat_names
from flexor.data.statistics import relative_action_stats
from flexor.policies.act.config import ACTConfig
from flexor.policies.features import Kind, PolicyFeature
from flexor.policies.fit import fit_to_dataset, statistics
from flexor.policies.processing.pipeline import POSTPROCESSOR, PREPROCESSOR, Pipeline, StepContext
from flexor.policies.processing.relative_actions import (
    AbsoluteActions,
    RelativeActions,
    RelativeActionSettings,
)
from support.small_datasets import write

NAMES = ["shoulder", "Left_Gripper", "wrist"]
STATE = torch.tensor([[1.0, 2.0, 4.0], [0.5, 0.25, 0.125]])


@dataclass
class RelativeConfig(RelativeActionSettings, ACTConfig):
    def steps_before(self, stats):
        *first, normalize = super().steps_before(stats)
        return [*first, self.relative_actions(), normalize]

    def steps_after(self, stats):
        unnormalize, *rest = super().steps_after(stats)
        return [unnormalize, self.absolute_actions(), *rest]


def config(**settings) -> RelativeConfig:
    return RelativeConfig(
        input_features={"observation.state": PolicyFeature(Kind.STATE, (3,))},
        output_features={"action": PolicyFeature(Kind.ACTION, (3,))},
        use_relative_actions=True,
        action_feature_names=NAMES,
        **settings,
    )


def batch(*chunk: int) -> dict:
    return {"observation.state": STATE.clone(), "action": torch.rand(2, *chunk, 3)}


STATS = {
    key: {"mean": [0.5] * 3, "std": [2.0] * 3, "min": [-1.0] * 3, "max": [1.0] * 3}
    for key in ("observation.state", "action")
}


@pytest.mark.parametrize("chunk", [(), (4,)])
def test_what_is_predicted_becomes_absolute_again(chunk):
    before, after = config().pipelines(STATS, "cpu")
    raw = batch(*chunk)
    context = StepContext(observation=before.renamed(raw))
    learnt = before(raw)["action"]
    torch.testing.assert_close(after({"action": learnt}, context)["action"], raw["action"])
    expected = raw["action"] - (STATE if not chunk else STATE[:, None]) * torch.tensor([1.0, 0.0, 1.0])
    torch.testing.assert_close(learnt * 2 + 0.5, expected)


def test_saved_and_loaded_it_still_knows_what_is_excluded(tmp_path):
    pipelines = config().pipelines(STATS, "cpu")
    for pipeline in pipelines:
        pipeline.save(tmp_path)
    saved = json.loads((tmp_path / "policy_postprocessor.json").read_text())["steps"][1]
    assert saved == {"registry_name": "absolute_actions_processor", "config": {"enabled": True}}  # LeRobot's
    before, after = (Pipeline.load(tmp_path, name) for name in (PREPROCESSOR, POSTPROCESSOR))
    raw = batch(4)
    context = StepContext(observation=raw)
    with pytest.raises(CheckpointError, match=r"connect\(before\)"):
        after({"action": raw["action"]}, context)
    after.connect(before)
    expected = pipelines[1]({"action": raw["action"]}, context)["action"]
    assert torch.equal(after({"action": raw["action"]}, context)["action"], expected)


def test_after_without_before_is_refused():
    with pytest.raises(CheckpointError, match="requires 'relative_actions_processor' before it"):
        AbsoluteActions(enabled=True).connect(Pipeline(PREPROCESSOR, []))


@pytest.mark.parametrize(
    ("exclude", "names", "expected"),
    [
        (["gripper"], NAMES, [True, False, True]),
        (["GRIP", "shoulder"], NAMES, [False, False, True]),
        ([], NAMES, [True, True, True]),
        ([""], NAMES, [True, True, True]),
        (["gripper"], None, [True, True, True]),
        (["gripper"], ["gripper"], [False, True, True]),
    ],
)
def test_which_actions_are_relative(exclude, names, expected):
    assert RelativeActions(True, exclude, names).relative(3) == expected


def test_disabled_and_without_actions_nothing_happens():
    raw = batch(4)
    assert RelativeActions()(raw) is raw
    assert AbsoluteActions()(raw) is raw
    states = {"observation.state": STATE}
    assert RelativeActions(enabled=True)(states) is states


def test_actions_without_a_state():
    wide = {"observation.state": STATE[:, :1], "action": torch.zeros(2, 4, 3)}
    with pytest.raises(ConfigError, match=r"has 1 values and action has 3.*relative_exclude_joints"):
        RelativeActions(enabled=True)(wide)
    step = RelativeActions(True, ["gripper", "wrist"], NAMES)
    assert step(wide)["action"][:, :, 0].eq(-STATE[:, :1]).all()
    with pytest.raises(FlexorError, match=r"require observation\.state"):
        RelativeActions(enabled=True)({"action": torch.zeros(2, 4, 3)})


def test_of_several_observations_the_last_counts():
    raw = batch(4)
    several = {**raw, "observation.state": torch.stack([torch.zeros(2, 3), STATE], 1)}
    step = RelativeActions(enabled=True)
    assert torch.equal(step(several)["action"], step(raw)["action"])


@pytest.mark.parametrize(
    ("names", "flat"),
    [
        (NAMES, NAMES),
        ({"motors": NAMES}, NAMES),
        ({"left": ["a"], "right": ["b", "c"]}, ["a", "b", "c"]),
        (None, None),
        (["motors"], None),
    ],
)
def test_names_as_datasets_have_them(names, flat):
    assert flat_names(names, 3) == flat


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return open_dataset(root=write(tmp_path_factory.mktemp("relative") / "data"))


def test_statistics_are_those_of_what_is_learnt(dataset):
    """Every chunk that ends within its episode, as the step makes it."""
    step, chunk = RelativeActions(enabled=True), 5
    stats = relative_action_stats(dataset, step.relative(dataset.features["action"].shape[0]), chunk)
    last = dataset.episodes.end[dataset.episode_of(np.arange(len(dataset)))] - chunk
    rows = np.flatnonzero(np.arange(len(dataset)) <= last)
    read = dataset.read(rows, {"action": range(chunk)}, [])
    made = step({key: torch.from_numpy(read[key]) for key in ("action", "observation.state")})["action"]
    flat = made.flatten(0, 1).double()
    assert stats["count"] == len(flat)
    for name, expected in (("mean", flat.mean(0)), ("std", flat.std(0, correction=0))):
        np.testing.assert_allclose(stats[name], expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(stats["min"], flat.min(0).values, rtol=1e-6)
    width = np.asarray(flat.max(0).values - flat.min(0).values)
    assert (np.abs(stats["q10"] - np.quantile(flat, 0.1, axis=0)) <= 0.02 * width + 1e-6).all()


def test_a_policy_gets_them_instead_of_the_datasets(dataset):
    policy = fit_to_dataset(
        RelativeConfig(use_relative_actions=True, chunk_size=5, n_action_steps=5), dataset
    )
    computed = statistics(dataset, policy, use_imagenet=True)
    expected = relative_action_stats(dataset, [True] * policy.action.shape[0], 5)
    np.testing.assert_array_equal(computed["action"]["mean"], expected["mean"])
    absolute = statistics(dataset, replace(policy, use_relative_actions=False), use_imagenet=True)
    np.testing.assert_array_equal(absolute["action"]["mean"], dataset.stats["action"]["mean"])


def test_episodes_shorter_than_a_chunk_have_statistics(dataset):
    longest = int(dataset.episodes.length.max())
    actions = dataset.features["action"].shape[0]
    stats = relative_action_stats(dataset, [False] * actions, 10_000)
    assert stats["count"] == longest * np.count_nonzero(dataset.episodes.length == longest)
