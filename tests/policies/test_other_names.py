"""Datasets with other names than LeRobot's: `state`, `actions`, `image`, as other programs write them."""

import json
import re

import numpy as np
import pytest

from flexor.cli.main import main
from flexor.config.parse import load_config
from flexor.core.errors import ConfigError
from flexor.data.check.check import check_dataset
from flexor.data.dataset import open_dataset
from flexor.data.format.common_names import suggested_names
from flexor.data.format.metadata import Feature
from flexor.data.repair.repair import repair_advice, repair_dataset
from flexor.policies.act.config import ACTConfig
from flexor.policies.fit import fit_to_dataset
from flexor.train.datasets import build_datasets
from support import runs

IMAGE, STATE, ACTION = "observation.image", "observation.state", "action"
AWAY = {IMAGE: "image", STATE: "state", ACTION: "actions"}
BACK = {new: old for old, new in AWAY.items()}
SUGGESTED = {"image": "observation.images.image", "state": STATE, "actions": ACTION}
FLAGS = ["--steps=4", "--save_freq=2"]


@pytest.fixture(scope="module")
def foreign(dataset, tmp_path_factory):
    """The built-in dataset under the names of other programs."""
    out = tmp_path_factory.mktemp("foreign") / "data"
    repair_dataset(dataset, out, rename_map=AWAY)
    return out


def as_flag(names: dict) -> str:
    return f"--rename_map={json.dumps(names)}"


def test_the_check_suggests_the_mapping(foreign, dataset):
    check = check_dataset(foreign, deep=False)
    (finding,) = [f for f in check.findings if f.name == "feature-names"]
    recommended = re.search("NEW_FOLDER --rename_map='(.*?)'` repairs", repair_advice(check))
    assert recommended and json.loads(recommended[1]) == SUGGESTED
    assert finding.severity == "error"
    suggestion = json.loads(re.search("--rename_map='(.*?)'", finding.fix)[1])
    assert suggestion == SUGGESTED
    assert f"flexor data repair {foreign} NEW_FOLDER --rename_map=" in finding.fix
    assert not [f for f in check_dataset(dataset, deep=False).findings if f.name == "feature-names"]


def test_training_suggests_the_mapping(foreign):
    with pytest.raises(ConfigError, match=r"has no 'action' to learn.*--rename_map=") as error:
        fit_to_dataset(ACTConfig(), open_dataset(root=foreign))
    assert json.loads(re.search("--rename_map='(.*?)'", str(error.value))[1]) == SUGGESTED


def test_a_camera_alone_and_a_state_alone(foreign, dataset, tmp_path, caplog):
    camera = repair_dataset(dataset, tmp_path / "camera", rename_map={IMAGE: "image"}).out
    with pytest.raises(ConfigError, match=r"names of cameras must begin.*observation.images.image"):
        fit_to_dataset(ACTConfig(), open_dataset(root=camera))
    state = repair_dataset(dataset, tmp_path / "state", rename_map={STATE: "state"}).out
    findings = check_dataset(state, deep=False).findings
    assert [f.severity for f in findings if f.name == "feature-names"] == ["warning"]
    policy = fit_to_dataset(ACTConfig(), open_dataset(root=state))
    assert policy.state is None and "the dataset's state is not used" in caplog.text


def test_a_run_under_other_names_is_the_same_run(foreign, dataset, tiny_act, tmp_path):
    runs.train(dataset, tmp_path / "plain", tiny_act, *FLAGS)
    runs.train(foreign, tmp_path / "renamed", tiny_act, *FLAGS, as_flag(BACK))
    assert runs.figures(tmp_path / "plain") == runs.figures(tmp_path / "renamed")
    cut = runs.cut_back(tmp_path / "renamed", tmp_path / "cut", 2)
    assert main(["resume", str(cut)]) == 0
    runs.assert_same(tmp_path / "renamed", cut, 4)


def test_observations_are_also_renamed_for_the_policy(foreign):
    names = {"actions": ACTION, "state": STATE, "image": "observation.images.a"}
    config = load_config(["--policy.type=act", f"--dataset.root={foreign}", as_flag(names)])
    assert config.rename_map == {} and config.dataset.rename_map == names
    mixed = {"actions": ACTION, IMAGE: "observation.images.a"}
    config = load_config(["--policy.type=act", f"--dataset.root={foreign}", as_flag(mixed)])
    assert config.rename_map == {IMAGE: "observation.images.a"}
    assert config.dataset.rename_map == {"actions": ACTION}


def test_several_datasets_share_a_map(foreign, dataset):
    """Each dataset renames what it has."""
    flags = ["--policy.type=act", f"--dataset.root={foreign},{dataset}", as_flag(BACK)]
    joined, _ = build_datasets(load_config(flags).dataset)
    assert joined.cameras == [IMAGE] and {ACTION, STATE} <= joined.columns.keys()
    half = len(joined) // 2
    np.testing.assert_array_equal(joined.columns[ACTION][:half], joined.columns[ACTION][half:])
    flags[-1] = as_flag({"acts": ACTION})
    with pytest.raises(ConfigError, match="no dataset has a feature 'acts'"):
        build_datasets(load_config(flags).dataset)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"force": "observation.force"}, "no dataset has a feature 'force'"),
        ({"image": "observation.top"}, "image is a camera, so its name must begin with 'observation.image'"),
        ({"state": "observation.images.state"}, "state is no camera, so its name can't begin with"),
        ({"state": ACTION, "actions": ACTION}, "gives two features the name action"),
        ({"actions": "torques"}, "'torques' is not an observation"),
        ({ACTION: STATE}, "'action' is not an observation"),
    ],
)
def test_maps_that_can_not_be(foreign, names, message):
    with pytest.raises(ConfigError, match=message):
        build_datasets(load_config([f"--dataset.root={foreign}", as_flag(names)]).dataset)


def test_repair_writes_the_names(foreign, dataset, tmp_path, capsys):
    out = tmp_path / "written"
    assert main(["data", "repair", str(foreign), str(out), as_flag(SUGGESTED | {"image": IMAGE})]) == 0
    assert "actions renamed to action" in capsys.readouterr().out
    written, original = open_dataset(root=out), open_dataset(root=dataset)
    assert {*written.features} == {*original.features} and written.cameras == original.cameras
    rows = np.arange(len(original))
    for name, values in original.read(rows).items():
        assert np.array_equal(written.read(rows)[name], values), name
    for name in (STATE, ACTION, IMAGE):
        np.testing.assert_allclose(written.stats[name]["mean"], original.stats[name]["mean"], atol=0.02)
    assert (
        main(["data", "repair", str(foreign), str(tmp_path / "no"), as_flag({"image": "x", "y": "z"})]) == 2
    )
    assert "it has no feature 'y'" in capsys.readouterr().err


def test_what_is_suggested():
    def names(**features: str) -> dict[str, str]:
        shapes = {"image": (8, 8, 3), "video": (8, 8, 3)}
        declared = {name: Feature(name, kind, shapes.get(kind, (2,))) for name, kind in features.items()}
        return suggested_names(declared)

    plain = {"observation.state": "float32", "action": "float32", "observation.images.top": "video"}
    assert names(**plain) == {}
    assert names(**plain, state="float32", qpos="float32", environment_state="float32") == {}
    assert names(**{"observation/image": "image", "observations/qpos": "float32", "actions": "float64"}) == {
        "actions": "action",
        "observations/qpos": "observation.state",
        "observation/image": "observation.images.image",
    }
    assert names(state="float32", qpos="float32", action="float32") == {"state": "observation.state"}
    assert (
        names(**{"action": "float32", "environment.state": "float32", "observation.joints": "float32"}) == {}
    )
    assert names(**{"images.top": "video", "obs.top": "video", "action": "float32"}) == {}  # which is which?
