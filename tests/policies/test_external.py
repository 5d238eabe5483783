"""A policy from outside of the package: the docs' example is trained, resumed and evaluated; mistakes are named; and
no code is run because a checkpoint says so."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
import yaml

from flexor.cli.main import main
from flexor.config.help import train_help
from flexor.config.parse import build_config, load_config
from flexor.core import model_files
from flexor.core.errors import CheckpointError, ConfigError
from flexor.policies import POLICIES, external, policy_class
from flexor.policies.pretrained import load_pretrained, read_config
from flexor.policies.processing.pipeline import STEPS
from support import runs
from support.samples import write_lowdim

PAGE = Path(__file__).parents[2] / "docs/your-own-policy.md"
CODE, STEP = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
TINY = ["--policy.type=my_policy.py:MyPolicy", "--policy.device=cpu", "--policy.width=8"]
MARKED = f"{CODE}\n(__import__('pathlib').Path(__file__).parent / 'was_run').touch()\n"  # it leaves a trace


@pytest.fixture(autouse=True)
def project(tmp_path, monkeypatch) -> Path:
    """The folder the user is in, with the docs' policy; nothing is loaded yet."""
    (tmp_path / "my_policy.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    forget(monkeypatch)
    return tmp_path


@pytest.fixture
def run(project, dataset) -> Path:
    return runs.train(dataset, project / "run", TINY, "--steps=4", "--save_freq=2")


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """What another process would know: nothing."""
    monkeypatch.setattr(external, "_loaded", {})
    for name in [
        name for name in sys.modules if re.match(r"(my_policy|robots)\b|(my_policy|renamed)_", name)
    ]:
        del sys.modules[name]


@pytest.fixture
def another_machine(project, monkeypatch) -> None:
    """One on which the user has named no code yet."""
    forget(monkeypatch)
    monkeypatch.delenv("FLEXOR_TRUST", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(project / "another_home"))


def policy_folder(run: Path) -> Path:
    return run / "checkpoints/last/pretrained_model"


# Training, resuming, evaluating


def test_it_resumes_exactly_and_plays(run, project, monkeypatch, capsys):
    assert (
        json.loads((policy_folder(run) / "config.json").read_text())["type"]
        == f"{project}/my_policy.py:MyPolicy"
    )
    cut = runs.cut_back(run, project / "cut", 2)
    (project / "elsewhere").mkdir()
    monkeypatch.chdir(project / "elsewhere")
    forget(monkeypatch)
    assert main(["resume", str(cut)]) == 0
    runs.assert_same(run, cut, 4)
    forget(monkeypatch)
    flags = [
        "--env.type=place",
        "--eval.n_episodes=1",
        "--env.kwargs.image_size=32",
        "--env.max_steps=3",
        "--json",
    ]
    assert main(["eval", str(cut), *flags]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["episodes"] == 1


def test_its_own_processing_step_is_trained_planned_saved_and_acted_with(
    project, dataset, monkeypatch, capsys
):
    (project / "my_policy.py").write_text(f"{CODE}\n\n{STEP}")
    bright = [
        "--policy.type=my_policy.py:BrightPolicy",
        *TINY[1:],
        "--steps=2",
        "--save_freq=1",
        "--log_freq=1",
    ]
    run = runs.train(dataset, project / "bright", bright)
    plain = runs.train(dataset, project / "plain", [TINY[0], *bright[1:]])
    losses = [
        json.loads((each / "metrics.jsonl").read_text().splitlines()[0])["loss"] for each in (run, plain)
    ]
    assert losses[0] != losses[1]  # the images were others
    steps = json.loads((run / "checkpoints/last/pretrained_model/policy_preprocessor.json").read_text())[
        "steps"
    ]
    assert {"registry_name": "my_brightness", "config": {"amount": 0.2}} in steps
    assert main(["plan", bright[0], f"--dataset.root={dataset}", "--gpu=4090", "--json"]) == 0

    forget(monkeypatch)
    capsys.readouterr()
    assert main(["eval", str(run), "--env.type=place", "--eval.n_episodes=1", "--policy.device=cpu"]) == 0
    monkeypatch.delitem(STEPS, "my_brightness")
    with pytest.raises(CheckpointError, match="my_brightness"):
        load_pretrained(str(run))


def test_a_resume_by_the_same_command_finds_the_run(run, dataset, monkeypatch):
    forget(monkeypatch)
    again = [*runs.flags(dataset, run, TINY, "--steps=5", "--save_freq=2"), "--resume=auto"]
    assert main(["train", *again]) == 0
    assert [line["step"] for line in runs.metrics(run)] == [1, 2, 3, 4, 5]


def test_a_run_without_a_name_is_named_after_the_class(project, dataset):
    flags = [f for f in runs.flags(dataset, project, TINY, "--steps=1") if "output_dir" not in f]
    assert main(["train", *flags]) == 0
    assert [folder.name.endswith("_MyPolicy") for folder in (project / "runs").iterdir()] == [True]


def test_it_is_a_policy_to_start_from(run, project, dataset, monkeypatch):
    forget(monkeypatch)
    flags = runs.flags(
        dataset, project / "second", [f"--policy.path={run}", "--policy.device=cpu"], "--steps=1"
    )
    assert main(["train", *flags]) == 0


def test_help_lists_its_settings_and_every_type():
    text = train_help("my_policy.py:MyPolicy")
    assert "--policy.state_noise" in text and "Noise added to the robot's state" in text
    assert all(name in text for name in POLICIES) and "path/to/file.py:CLASS" in text


# Ways to name it


def test_the_whole_path_is_kept(project, monkeypatch):
    (project / "below").mkdir()
    monkeypatch.chdir(project / "below")
    kinds = ["../my_policy.py:MyPolicy", f"{project}/below/../my_policy.py:MyPolicy"]
    for kind in kinds:
        assert (
            build_config({"dataset.root": "x", "policy.type": kind}).policy.type
            == f"{project}/my_policy.py:MyPolicy"
        )


def test_naming_it_another_way_forgets_nothing(project):
    file = project / "settings.yaml"
    file.write_text(f"policy: {{type: '{project}/my_policy.py:MyPolicy', width: 3}}\ndataset: {{root: x}}\n")
    assert load_config([f"--config={file}", "--policy.type=my_policy.py:MyPolicy"]).policy.width == 3


def test_two_files_of_one_name_are_two_policies(project):
    (project / "other").mkdir()
    (project / "other/my_policy.py").write_text(CODE.replace("width: int = 256", "width: int = 7"))
    widths = [policy_class(f"{where}my_policy.py:MyPolicy").Config().width for where in ("", "other/")]
    assert widths == [256, 7]


@pytest.fixture
def package(project, monkeypatch) -> Path:
    """An installed package `robots` that registers its policy as `grasp`, and tries to take the name `act`."""
    installed = project / "installed"
    (installed / "robots").mkdir(parents=True)
    (installed / "robots/__init__.py").touch()
    (installed / "robots/grasp.py").write_text(CODE)
    info = installed / "robots-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: robots\nVersion: 1.0\n")
    points = "grasp = robots.grasp:MyPolicy\nact = robots.grasp:MyPolicy\n"
    (info / "entry_points.txt").write_text(f"[flexor.policies]\n{points}")
    monkeypatch.syspath_prepend(installed)
    return installed


@pytest.mark.parametrize("kind", ["grasp", "robots.grasp:MyPolicy"])
def test_a_module_and_an_entry_point(kind, package, dataset, project, monkeypatch):
    run = runs.train(dataset, project / "run", [f"--policy.type={kind}", *TINY[1:]], "--steps=1")
    forget(monkeypatch)
    assert load_pretrained(str(run)).policy.config.type == kind
    assert "grasp" in train_help("grasp")
    assert policy_class("act").__module__ == "flexor.policies.act.policy"


# Planning

# Each weight and bias of the docs' policy with a width of 8, for a state and an action of 3 numbers.
SIZES = [3 * 32 * 25, 32, 32 * 64 * 9, 64, 64 * 64 * 9, 64, 64 * 8 * 8 * 8, 8]  # it sees,
SIZES += [(8 + 3) * 8, 8, 8 * 8, 8, 8 * 8 * 3, 8 * 3]  # and decides
BLOCK = 512  # bytes, by which torch hands out a GPU's memory


@pytest.mark.parametrize("kind", ["my_policy.py:MyPolicy", "robots.grasp:MyPolicy", "grasp"])
def test_it_is_planned_like_any_other(kind, package, dataset, capsys):
    flags = [f"--policy.type={kind}", "--policy.width=8", f"--dataset.root={dataset}", "--gpu=4090", "--json"]
    assert main(["plan", *flags]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["parameters"] == plan["trained_parameters"] == sum(SIZES) and plan["fits"]
    weights = sum(-(-4 * size // BLOCK) * BLOCK for size in SIZES)  # each tensor by itself
    assert plan["memory"]["weights_bytes"] == weights
    # Adam's two moments of each weight, and of each tensor the number of its step
    assert plan["memory"]["optimizer_bytes"] == 2 * weights + BLOCK * len(SIZES)


def test_what_it_does_with_values_is_named_where_a_plan_has_none(project, dataset, capsys):
    line = "        mse = mean_over_valid"
    checked = CODE.replace(line, f"        assert error.isfinite().all(), 'not a number'\n{line}")
    (project / "my_policy.py").write_text(checked)
    number = checked.splitlines().index("        assert error.isfinite().all(), 'not a number'") + 1
    assert main(["plan", TINY[0], f"--dataset.root={dataset}", "--gpu=4090"]) == 2
    errors = capsys.readouterr().err
    assert f"AssertionError: not a number ({project}/my_policy.py, line {number})" in errors
    assert "A plan runs the policy without data" in errors


# Mistakes


@pytest.mark.parametrize(
    "kind, code, message",
    [
        ("nowhere.py:MyPolicy", "", r"there is no file .*nowhere\.py"),
        ("my_policy.py:MyPolic", CODE, "'MyPolic' is not a subclass of Policy there. Did you mean MyPolicy"),
        ("my_policy.py:MyConfig", CODE, "not a subclass of Policy"),
        ("my_policy.py:", CODE, "not a subclass of Policy"),
        (":MyPolicy", CODE, "policy.type=:MyPolicy"),
        ("my_policy.py:MyPolicy", "x = 1", "It has none"),
        ("my_policy.py:MyPolicy", "x = 1\ny = z\n", r"NameError: name 'z' .*my_policy\.py, line 2"),
        ("my_policy.py:MyPolicy", "def", "SyntaxError"),
        ("my_policy.py:MyPolicy", "import nothing_like_it", "no module nothing_like_it. Install it"),
        ("no_such.module:MyPolicy", CODE, "no module no_such. Install it"),
        (
            "my_policy.py:MyPolicy",
            CODE.replace("    Config = MyConfig\n", ""),
            "must be a subclass of PolicyConfig",
        ),
        ("my_policy.py:MyPolicy", CODE.replace("@dataclass\n", ""), "write @dataclass above MyConfig"),
        (
            "my_policy.py:MyPolicy",
            CODE.replace("width: int = 256", "width: int = field(kw_only=True)"),
            "width needs a default",
        ),
        (
            "my_policy.py:ACT",
            "from flexor.policies.act.policy import ACT",
            "ACTConfig belongs to another policy",
        ),
        ("my_polici", "", "path/to/file.py:CLASS"),
        ("difusion", "", "Did you mean diffusion"),
    ],
)
def test_mistakes_are_named(kind, code, message, project):
    (project / "my_policy.py").write_text(code)
    with pytest.raises(ConfigError, match=message):
        build_config({"dataset.root": "x", "policy.type": kind})


def test_two_policies_of_one_file_have_a_config_each(project):
    (project / "my_policy.py").write_text(f"{CODE}\nclass Second(MyPolicy):\n    pass\n")
    policy_class("my_policy.py:MyPolicy")
    with pytest.raises(ConfigError, match=r"class SecondConfig\(MyConfig\)"):
        policy_class("my_policy.py:Second")


def test_a_dataset_it_can_not_use_is_refused_before_anything_is_built(lowdim, project, capsys):
    assert main(["train", *runs.flags(lowdim, project / "run", TINY, "--steps=1")]) == 2
    assert "MyPolicy needs observation.state and one camera" in capsys.readouterr().err
    assert not (project / "run").exists()


def test_rewards_that_are_not_there_are_missed_before_anything_is_built(project, capsys):
    wanting = CODE.replace(
        "    @property\n",
        "    @property\n    def reward_deltas(self):\n        return [0, 1]\n\n    @property\n",
        1,
    )
    (project / "my_policy.py").write_text(wanting)
    data = write_lowdim(project / "data", reward=False)
    assert main(["train", *runs.flags(data, project / "run", TINY, "--steps=1")]) == 2
    assert "has no column 'next.reward'" in capsys.readouterr().err
    assert not (project / "run").exists()


@pytest.mark.parametrize("verb", [["resume"], ["eval", "--env.type=place"]])
def test_a_file_that_is_gone_is_named(verb, run, project, monkeypatch, capsys):
    (project / "my_policy.py").unlink()
    forget(monkeypatch)
    assert main([verb[0], str(run), *verb[1:]]) == 2
    assert f"there is no file {project}/my_policy.py" in capsys.readouterr().err


# Whose code is run


@pytest.fixture
def received(run, project, another_machine) -> Path:
    """The whole run on a machine that it was not trained on. Its code would leave a trace."""
    shutil.copytree(run, project / "received", symlinks=True)
    (project / "my_policy.py").write_text(MARKED)
    return project / "received"


@pytest.fixture
def downloaded(received, project) -> Path:
    """The policy alone."""
    shutil.copytree(policy_folder(received), project / "downloaded")
    return project / "downloaded"


def was_run(project: Path) -> bool:
    return (project / "was_run").exists()


@pytest.mark.parametrize(
    "kind", ["{project}/my_policy.py:MyPolicy", "my_policy.py:MyPolicy", "my_policy:MyPolicy"]
)
def test_code_that_a_policy_from_the_hub_names_is_not_run(kind, downloaded, project, monkeypatch, capsys):
    settings = json.loads((downloaded / "config.json").read_text())
    settings["type"] = kind.format(project=project)
    (downloaded / "config.json").write_text(json.dumps(settings))
    monkeypatch.syspath_prepend(project)
    monkeypatch.setattr(model_files, "download", lambda *_, **options: downloaded)
    for command in (
        ["eval", "somebody/policy", "--env.type=place"],
        ["train", "--policy.path=somebody/policy"],
    ):
        assert main(command) in (1, 2)
        assert f"--policy.type={settings['type']}" in capsys.readouterr().err
    assert not was_run(project) and "my_policy" not in sys.modules
    read_config("somebody/policy", {"type": "my_policy.py:MyPolicy"})  # the user names it
    assert was_run(project)


@pytest.mark.parametrize("checkpoint", ["received", "downloaded", "received/checkpoints/last"])
def test_code_that_only_a_checkpoint_names_is_not_run(checkpoint, downloaded, project):
    with pytest.raises(CheckpointError, match="Code that only a checkpoint names is not run"):
        load_pretrained(str(project / checkpoint))
    assert not was_run(project)


COMMANDS = {
    "resume": ["resume", "received"],
    "its settings": ["train", "--config=received/config.yaml", "--output_dir=new", "--steps=1"],
    "its policy": [
        "train",
        "--policy.path=received",
        "--dataset.root={data}",
        "--output_dir=new",
        "--steps=1",
    ],
    "plan": ["plan", "--config=received/config.yaml", "--gpu=4090"],
    "eval": ["eval", "received", "--env.type=place", "--eval.n_episodes=1", "--env.max_steps=2"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_run_from_elsewhere_runs_its_code_only_if_it_is_trusted(
    command, received, project, dataset, capsys
):
    words = [word.format(data=dataset) for word in COMMANDS[command]]
    assert main(words) in (1, 2)
    errors = capsys.readouterr().err
    assert "is not run" in errors and f"--trust={project}/my_policy.py:MyPolicy" in errors
    assert not was_run(project)
    trusted = {"resume": "my_policy.py", "plan": f"{project}/my_policy.py"}.get(
        command, "my_policy.py:MyPolicy"
    )
    assert main([*words, f"--trust={trusted}"]) == 0, capsys.readouterr().err
    assert was_run(project)


def test_trust_is_remembered_by_the_user_not_by_the_run(received, project, monkeypatch, capsys):
    assert main(["plan", "--config=received/config.yaml", "--gpu=4090", "--trust=my_policy.py:MyPolicy"]) == 0
    forget(monkeypatch)
    monkeypatch.delenv("FLEXOR_TRUST")
    assert main(["resume", "received"]) == 0
    monkeypatch.setenv("XDG_CONFIG_HOME", str(project / "third_home"))
    monkeypatch.delenv("FLEXOR_TRUST", raising=False)
    forget(monkeypatch)
    assert main(["resume", "received"]) == 2 and "is not run" in capsys.readouterr().err


def test_the_package_of_an_environment_is_imported_only_if_it_is_trusted(
    received, project, monkeypatch, capsys
):
    (project / "somebodys_env.py").write_text(
        "(__import__('pathlib').Path(__file__).parent / 'was_run').touch()\n"
    )
    monkeypatch.syspath_prepend(project)
    settings = yaml.safe_load((received / "config.yaml").read_text())
    for env in (
        {"type": "place", "package": "somebodys_env"},
        {"type": "somebodys_env/Task-v0"},
        {"type": "somebodys_env/other/Task-v0"},
        {"type": "somebodys_env", "task": "Task-v0"},
    ):
        (received / "config.yaml").write_text(yaml.safe_dump({**settings, "env": env}))
        for verb in ("resume", "eval"):
            assert main([verb, "received", "--trust=my_policy.py"]) == 2
            assert "--trust=somebodys_env" in capsys.readouterr().err
    assert "somebodys_env" not in sys.modules


@pytest.mark.parametrize("flags", [["--trust"], ["--trust="]])
def test_trust_in_nothing(flags, capsys):
    assert main(["resume", "run", *flags]) == 2
    assert "--trust=path/to/file.py:CLASS" in capsys.readouterr().err


def test_code_that_has_moved_is_run_from_where_the_user_says(downloaded, project):
    (project / "new").mkdir()
    (project / "my_policy.py").rename(project / "new/renamed.py")
    loaded = load_pretrained(str(downloaded), overrides={"type": "new/renamed.py:MyPolicy"})
    assert loaded.policy.config.type == f"{project}/new/renamed.py:MyPolicy" and was_run(project / "new")


@pytest.mark.parametrize("named", ["my_policy.py:Another", "act"])
def test_another_class_than_the_checkpoints_is_refused(named, downloaded, project):
    with pytest.raises(ConfigError, match=rf"policy\.type={re.escape(named)}, but .* leave policy\.type out"):
        load_pretrained(str(downloaded), overrides={"type": named})
    assert not was_run(project)


def test_a_built_in_type_needs_no_naming(lowdim, tiny_act, project):
    run = runs.train(lowdim, project / "act", tiny_act, "--steps=1")
    shutil.copytree(policy_folder(run), project / "alone")
    assert load_pretrained(os.fspath(project / "alone")).policy.config.type == "act"


@pytest.mark.parametrize("text", ["[1]", "{}", "3", "{"])
def test_a_config_that_is_none(text, project):
    (project / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match="is not a policy's configuration"):
        read_config(str(project))
