"""A dataset, or an environment, whose observations have other names than the policy's."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from flexor.cli.main import main
from flexor.core.errors import ConfigError, FlexorError
from flexor.data.dataset import open_dataset
from flexor.policies.act.config import ACTConfig
from flexor.policies.fit import deltas_of, fit_to_dataset, sample_of, statistics
from flexor.policies.pi0.config import Pi0Config
from flexor.policies.pretrained import load_pretrained
from flexor.policies.processing.rename_and_move import RenameObservations, renaming_of, with_renaming
from flexor.policies.session import Session
from support import runs
from support.small_datasets import SIDE, TOP, write

FIRST, SECOND, THIRD = (f"observation.images.camera{number}" for number in (1, 2, 3))
IMAGE, FRONT, STATE = "observation.image", "observation.images.front", "observation.state"
BOTH = {TOP: FIRST, SIDE: SECOND}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return open_dataset(root=write(tmp_path_factory.mktemp("rename") / "data"))


def base(written, kind=ACTConfig, cameras=(FIRST, SECOND)):
    """A policy that was trained with these cameras."""
    fitted = fit_to_dataset(kind(), written)
    image = fitted.input_features[TOP]
    return replace(fitted, input_features={STATE: fitted.state, **dict.fromkeys(cameras, image)})


def test_a_policy_gets_its_own_names_and_the_data_keeps_its(written):
    policy = fit_to_dataset(base(written), written, BOTH)
    assert list(policy.images) == [FIRST, SECOND]
    assert sample_of(policy, BOTH)[0] == [TOP, SIDE]
    stats = statistics(written, policy, use_imagenet=False, rename_map=BOTH)
    np.testing.assert_array_equal(stats[FIRST]["mean"], written.stats[TOP]["mean"])
    assert set(stats) == {STATE, FIRST, SECOND, "action"}


@pytest.mark.parametrize(
    ("rename_map", "message"),
    [
        ({"observation.images.tpo": FIRST}, "the dataset has no observation.images.tpo. Did you mean " + TOP),
        ({"observation.none": STATE}, "the dataset has no observation.none"),
        ({TOP: SIDE}, f"the dataset has its own {SIDE}"),
        ({TOP: "observation.images.camera7"}, "the policy has no observation.images.camera7. Did you mean"),
        ({TOP: "observation.top"}, "is a camera, so its name must start with 'observation.image'"),
        ({STATE: FIRST}, "is not a camera, so its name can't start with 'observation.image'"),
    ],
)
def test_a_map_that_does_not_fit_is_refused(rename_map, message, written):
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        fit_to_dataset(base(written), written, rename_map)


def test_names_can_be_swapped_and_moved_away(written):
    trained = base(written, cameras=(TOP, SIDE))
    swapped = {TOP: SIDE, SIDE: TOP}
    assert fit_to_dataset(trained, written, swapped) == trained
    assert sample_of(trained, swapped)[0] == [SIDE, TOP]
    moved = {TOP: f"{TOP}_unused", SIDE: TOP}
    assert sample_of(fit_to_dataset(base(written, cameras=(TOP,)), written, moved), moved)[0] == [SIDE]


def test_without_a_map_the_error_names_it(written):
    with pytest.raises(ConfigError, match=f"requires {FIRST}.*--rename_map='{{NAME: {FIRST}}}'"):
        fit_to_dataset(base(written), written)


def test_a_map_names_all_cameras_that_a_large_policy_sees(written, log_lines):
    trained = base(written, Pi0Config, (FIRST, SECOND, THIRD))
    policy = fit_to_dataset(trained, written, {SIDE: SECOND})
    assert list(policy.images) == [SECOND]
    assert log_lines == [
        f"the dataset's {TOP} is not used: rename_map maps it to no camera of the policy",
        f"the policy's camera {FIRST} is left out: the dataset has none for its place",
        f"the policy's camera {THIRD} is left out: the dataset has none for its place",
    ]
    assert fit_to_dataset(policy, written, {SIDE: SECOND}) == policy  # as when the run resumes


def test_what_stands_beside_an_observation_is_renamed_with_it():
    """As in a batch of TD-MPC, which learns from the windows of observations."""
    batch = {TOP: 1, f"{TOP}_is_pad": 2, f"{TOP}_padding_mask": 3, "action": 4, "action_is_pad": 5}
    renamed = RenameObservations({TOP: FIRST})(batch)
    assert renamed == {
        FIRST: 1,
        f"{FIRST}_is_pad": 2,
        f"{FIRST}_padding_mask": 3,
        "action": 4,
        "action_is_pad": 5,
    }


def test_windows_are_asked_for_under_the_names_of_the_data(written):
    class Windows(ACTConfig):
        @property
        def observation_deltas(self):
            return [-1, 0]

    policy = fit_to_dataset(Windows(), written, BOTH)
    assert {TOP, SIDE, STATE} <= deltas_of(policy, BOTH).keys() and FIRST not in deltas_of(policy, BOTH)


def test_a_pipeline_without_the_step_gets_one(written):
    before, _ = fit_to_dataset(ACTConfig(), written).pipelines({}, "cpu")
    bare = replace(before, steps=before.steps[1:])
    assert renaming_of(bare) == {} and len(with_renaming(bare, {}).steps) == len(bare.steps)
    assert renaming_of(with_renaming(bare, BOTH)) == renaming_of(with_renaming(before, BOTH)) == BOTH


# runs

MAP = {IMAGE: FRONT}
FLAGS = ["--steps=4", "--save_freq=2", "--dataset.eval_split=0.25"]


@pytest.fixture(scope="module")
def trained(dataset, tiny_act, tmp_path_factory):
    """The same run under the dataset's names and under others."""
    folder = tmp_path_factory.mktemp("renamed")
    runs.train(dataset, folder / "plain", tiny_act, *FLAGS)
    runs.train(dataset, folder / "renamed", tiny_act, *FLAGS, f"--rename_map={json.dumps(MAP)}")
    return folder


def test_other_names_do_not_change_a_run(trained):
    plain, renamed = trained / "plain", trained / "renamed"
    assert runs.figures(plain) == runs.figures(renamed)
    held_out = [
        [m["held_out_loss"] for m in runs.metrics(r) if "held_out_loss" in m] for r in (plain, renamed)
    ]
    assert held_out[0] == held_out[1] != []
    original, with_names = load_pretrained(str(plain)), load_pretrained(str(renamed))
    assert FRONT in with_names.policy.config.images and IMAGE not in with_names.policy.config.images
    assert renaming_of(with_names.preprocessor) == MAP
    config = json.loads((renamed / "checkpoints/last/pretrained_model/train_config.json").read_text())
    assert config["rename_map"] == MAP
    image = np.random.default_rng(0).integers(0, 255, (1, 3, 32, 32), np.uint8)
    state = np.zeros((1, 3), np.float32)
    expected = original.chunk({IMAGE: image, STATE: state}, [""])
    for name in (IMAGE, FRONT):  # the robot may use either
        np.testing.assert_array_equal(with_names.chunk({name: image, STATE: state}, [""]), expected)


def test_a_renamed_run_resumes_exactly(trained, tmp_path, capsys):
    cut = runs.cut_back(trained / "renamed", tmp_path / "cut", 2)
    assert main(["resume", str(cut)]) == 0
    runs.assert_same(trained / "renamed", cut, 4)
    assert main(["resume", str(cut), "--steps=5", "--rename_map={}"]) == 2
    assert "rename_map can't change" in capsys.readouterr().err


def test_evaluation_uses_the_saved_names_or_those_given(trained, capsys):
    short = [
        "--env.type=place",
        "--env.kwargs.image_size=32",
        "--eval.n_episodes=1",
        "--env.max_steps=2",
        "--json",
    ]
    scores = []
    for run, more in [
        ("plain", []),
        ("renamed", []),
        ("renamed", [f"--rename_map={json.dumps(MAP)}"]),
        ("plain", ["--rename_map={}"]),
    ]:
        assert main(["eval", str(trained / run), *short, *more]) == 0
        scores.append(json.loads(capsys.readouterr().out))
    assert len({score["mean_return"] for score in scores}) == 1
    for more, message in [
        (["--rename_map={}"], f"The policy needs {FRONT}.*--rename_map"),
        (["--rename_map={a: b}"], "'a' is not an observation"),
        (["--rename_map.a=b"], "give all names at once"),
    ]:
        assert main(["eval", str(trained / "renamed"), *short, *more]) != 0
        assert re.search(message, capsys.readouterr().err)


def test_a_policy_is_trained_on_under_its_own_names(trained, dataset, tmp_path, capsys):
    """Its map is not taken over, as in LeRobot, but named."""
    start = [f"--policy.path={trained / 'renamed'}", "--policy.device=cpu", "--steps=1"]
    flags = runs.flags(dataset, tmp_path / "refused", start)
    assert main(["train", *flags]) == 2
    errors = capsys.readouterr().err
    assert f"--rename_map='{{NAME: {FRONT}}}'" in errors and f"--rename_map='{json.dumps(MAP)}'" in errors
    still = ["--optimizer.lr=0", "--policy.optimizer_lr_backbone=0"]
    run = runs.train(dataset, tmp_path / "run", start, f"--rename_map={json.dumps(MAP)}", *still)
    before, after = (load_pretrained(str(r)).policy.state_dict() for r in (trained / "renamed", run))
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_robot_that_has_both_names_is_refused(trained):
    session = Session(load_pretrained(str(trained / "renamed")))
    image = np.zeros((3, 32, 32), np.uint8)
    with pytest.raises(FlexorError, match=f"both {IMAGE} and {FRONT}"):
        session.act({IMAGE: image, FRONT: image, STATE: np.zeros(3, np.float32)})
