"""Settings: every way to give them, and that what can't be is refused before anything is made."""

import copy
import dataclasses
import operator
import pickle
import re
import string
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from flexor.cli.main import main
from flexor.config.help import train_help
from flexor.config.lerobot_flags import IGNORED
from flexor.config.parse import build_config, flatten, load_config, nest, parse_flags
from flexor.config.schema import GROUPS, TrainConfig, group_type, pushes_policy
from flexor.config.setting_names import setting_names
from flexor.core.errors import ConfigError
from flexor.core.typed import help_texts, with_settings
from flexor.policies import POLICIES, policy_class
from flexor.policies.pretrained import as_lerobot

DATA = "--dataset.root=somewhere"


def groups() -> dict[str, type]:
    return {g: policy_class("act").Config if g == "policy" else group_type(g) for g in GROUPS}


def all_keys() -> list[str]:
    keys = [f.name for f in dataclasses.fields(TrainConfig) if f.name not in (*GROUPS, "policy_path")]
    for group, cls in groups().items():
        keys += [f"{group}.{f.name}" for f in dataclasses.fields(cls)]
    return sorted(set(keys) - set(GROUPS))


# Ways to write them


@pytest.mark.parametrize(
    "argv",
    [
        ["--optimizer.lr=1e-4", "--wandb.enable"],
        ["--optimizer.lr", "1e-4", "--wandb.enable"],
        ["optimizer.lr=1e-4", "wandb.enable=true"],
        ["--wandb.enable", "--optimizer.lr", "1e-4"],
        ["--optimizer.lr=5", "--optimizer.lr=1e-4", "--wandb.enable=True"],
    ],
)
def test_every_way_to_write_a_flag(argv):
    config = load_config([DATA, *argv])
    assert config.optimizer.lr == 1e-4 and config.wandb.enable is True


def test_dashes_and_negative_numbers():
    assert parse_flags(["--batch-size", "8"]) == {"batch_size": "8"}
    assert parse_flags(["--a", "-1"]) == {"a": "-1"}


def test_word_that_is_no_setting():
    with pytest.raises(ConfigError, match="Can't read 'oops'"):
        load_config([DATA, "oops"])


def test_file_then_flags(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("steps: 7\nbatch_size: 3\ndataset: {root: here, episodes: [1, 2]}\noptimizer.lr: 1e-3\n")
    config = load_config(["--config", str(file), "--steps=9"])
    assert (config.steps, config.batch_size, config.optimizer.lr) == (9, 3, 1e-3)
    assert config.dataset.episodes == [1, 2] and config.dataset.root == "here"


def test_demo_is_packaged_and_the_default():
    assert load_config(["--config=demo"]) == load_config([])
    assert load_config(["--steps=3"]).steps == 3
    assert load_config([]).dataset.repo_id == "builtin/place"


@pytest.mark.parametrize("text", ["- 1\n- 2\n", "steps", "a: [", "\x00"])
def test_file_that_holds_no_settings(text, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"run\.yaml"):
        load_config([f"--config={file}"])


def test_file_that_is_not_text(tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"\xff\xfe\xfd\x80")
    with pytest.raises(ConfigError, match=r"model\.safetensors"):
        load_config([f"--config={file}"])


@pytest.mark.parametrize("name", ["nothing.yaml", "", "a" * 5000])
def test_file_that_is_not_there(name):
    with pytest.raises(ConfigError, match=r"Built-in files: .*demo"):
        load_config([f"--config={name}"])


def test_another_policy_forgets_the_settings_of_the_one_before():
    before = {"policy.type": "other", "policy.setting_of_the_other": 3, "steps": 5, "dataset.root": "x"}
    config = build_config(before, {"policy.type": "act"})
    assert config.policy.type == "act" and config.steps == 5


def test_naming_the_same_policy_forgets_nothing(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("policy: {dim_model: 64}\ndataset: {root: x}\n")
    assert load_config([f"--config={file}", "--policy.type=act"]).policy.dim_model == 64


def test_nested_dictionaries_by_key():
    layer = {"env.kwargs": {"a": 1}, "dataset.root": "x"}
    config = build_config(
        layer, parse_flags(["--env.kwargs.b=[1, 2]", "--policy.normalization_mapping.ACTION=MIN_MAX"])
    )
    assert config.env.kwargs == {"a": 1, "b": [1, 2]}
    assert config.policy.normalization_mapping["ACTION"] == "MIN_MAX"


def test_episodes_from_a_file(tmp_path):
    file = tmp_path / "good.json"
    file.write_text("[4, 2]")
    assert load_config([DATA, f"--dataset.episodes=@{file}"]).dataset.episodes == [4, 2]
    for text in ("nonsense", '{"a": 1}', '["x"]'):
        file.write_text(text)
        with pytest.raises(ConfigError, match=r"dataset\.episodes"):
            load_config([DATA, f"--dataset.episodes=@{file}"])
    with pytest.raises(ConfigError, match=r"dataset\.episodes=@nowhere\.json"):
        load_config([DATA, "--dataset.episodes=@nowhere.json"])


def test_many_episodes_are_checked_quickly():
    assert (
        len(build_config({"dataset.root": "x", "dataset.episodes": list(range(200_000))}).dataset.episodes)
        == 200_000
    )


def test_whole_tree_survives_yaml(tmp_path):
    config = load_config([DATA, "--precision=no", "--optimizer.betas=[0.9, 0.95]", "--wandb.mode=offline"])
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config.to_dict()))
    assert load_config([f"--config={file}"]) == config


def test_unquoted_no_in_a_file_means_no(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("precision: no\ndataset: {root: x}\n")
    assert load_config([f"--config={file}"]).precision == "no"


@given(st.dictionaries(st.sampled_from(all_keys()), st.integers(), max_size=5))
def test_flatten_undoes_nest(flat):
    assert flatten(nest(flat)) == flat


# What is refused


@pytest.mark.parametrize(
    "flag, named",
    [
        ("--steps=0", "steps=0"),
        ("--steps=ten", "steps='ten'"),
        ("--batch_size=-1", "batch_size=-1"),
        ("--gradient_accumulation_steps=0", "gradient_accumulation_steps=0"),
        ("--num_workers=-1", "num_workers=-1"),
        ("--seed=-1", "seed=-1"),
        ("--precision=fp4", "precision='fp4'"),
        ("--policy.type=atc", "or act?"),
        ("--policy=act", "--policy.type=act"),
        ("--dataset=foo", "dataset"),
        ("--steps.x=3", "steps="),
        ("--dataset.eval_split=1", "eval_split=1"),
        ("--eval_steps=5", "eval_split"),
        ("--dataset.episodes=[]", "episodes"),
        ("--dataset.episodes=[-1]", "[-1]"),
        ("--dataset.episodes=[1,1]", "[1]"),
        ("--dataset.episodes=3:1", "dataset.episodes=3:1"),
        ("--dataset.cache.gb=-1", "cache.gb=-1"),
        ("--ema.decay=1", "ema.decay=1"),
        ("--checkpoint.keep_last=0", "keep_last=0"),
        ("--checkpoint.keep_every=0", "keep_every=0"),
        ("--optimizer.lr=-1", "optimizer.lr=-1"),
        ("--optimizer.lr=nan", "optimizer.lr='nan'"),
        ("--optimizer.betas=[1,2]", "optimizer.betas=[1.0, 2.0]"),
        ("--optimizer.eps=-1", "optimizer.eps=-1"),
        ("--optimizer.type=lion", "adamw"),
        ("--scheduler.num_warmup_steps=-1", "num_warmup_steps=-1"),
        ("--scheduler.num_decay_steps=0", "num_decay_steps=0"),
        ("--scheduler.peak_lr=0", "peak_lr=0"),
        ("--scheduler.type=linear", "cosine"),
        ("--eval.n_episodes=0", "n_episodes=0"),
        ("--eval.batch_size=-1", "batch_size=-1"),
        ("--env.max_steps=0", "max_steps=0"),
        ("--policy.n_action_steps=101", "chunk_size=100"),
        ("--policy.n_heads=0", "n_heads=0"),
        ("--policy.dim_model=510", "dim_model=510"),
        ("--policy.dropout=2", "dropout=2"),
        ("--policy.n_obs_steps=2", "n_obs_steps=2"),
        ("--policy.normalization_mapping.ACTION=MEAN", "normalization_mapping.ACTION='MEAN'"),
        ("--policy.pth=x", "policy.pth"),
        ("--=3", "Unknown setting"),
        ("--", "Unknown setting"),
        ("--a..b=1", "Unknown setting"),
    ],
)
def test_impossible_settings_are_refused_by_name(flag, named, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["train", DATA, "--output_dir=run", flag]) == 2
    error = capsys.readouterr().err
    assert named in error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "flags",
    [
        ["--optimizer.momentum=0.9"],
        ["--scheduler.type=cosine", "--scheduler.peak_lr=1"],
        ["--scheduler.type=cosine_decay_with_warmup"],
        ["--policy.device=cuda:99"],
        ["--policy.device=toaster"],
        ["--policy.vision_backbone=vgg"],
        ["--dataset.root=nowhere"],
        ["--dataset.episodes=[77]"],
    ],
)
def test_refused_later_leaves_nothing_behind(flags, dataset, tiny_act, tmp_path, monkeypatch, capsys):
    """The next try with the mistake corrected must find the folder free."""
    monkeypatch.chdir(tmp_path)
    assert main(["train", f"--dataset.root={dataset}", "--output_dir=run", *tiny_act, *flags]) in (1, 2)
    key, _, value = flags[-1][2:].partition("=")
    error = capsys.readouterr().err
    assert key.rpartition(".")[2] in error or value.strip("[]") in error
    assert list(tmp_path.iterdir()) == []


KEYS = all_keys()


@st.composite
def typos(draw) -> str:
    """A key with one letter lost, doubled, replaced or swapped with the next."""
    key = draw(st.sampled_from(KEYS))
    at = draw(st.integers(0, len(key) - 1))
    letter = draw(st.sampled_from(string.ascii_lowercase + "_"))
    return draw(
        st.sampled_from(
            [
                key[:at] + key[at + 1 :],
                key[:at] + key[at] + key[at:],
                key[:at] + letter + key[at + 1 :],
                key[:at] + key[at + 1 : at + 2] + key[at] + key[at + 2 :],
            ]
        )
    )


@given(typos(), st.sampled_from(["1", "true", "x", "[1]", "null", "@x", "{"]))
@settings(max_examples=150)
def test_no_typo_is_silent(wrong, value):
    if wrong in KEYS or any(f"{wrong}.".startswith(f"{name}.") for name in IGNORED):
        return
    with pytest.raises(ConfigError) as error:
        load_config([DATA, f"--{wrong}={value}"])
    group, _, name = wrong.partition(".")
    assert group in str(error.value) or name in str(error.value)


@given(typos())
@settings(max_examples=100)
def test_typo_in_a_known_group_suggests_a_name_that_exists(wrong):
    group, dot, _ = wrong.partition(".")
    if (
        wrong in KEYS
        or any(f"{wrong}.".startswith(f"{name}.") for name in IGNORED)
        or (dot and group not in GROUPS)
    ):
        return
    with pytest.raises(ConfigError) as error:
        load_config([DATA, f"--{wrong}=1"])
    message = str(error.value)
    suggestions = message.partition("Did you mean ")[2].rstrip("?").split(" or ")
    if "Unknown setting" in message and suggestions != [""]:
        keys = {*KEYS, *GROUPS, *setting_names(), "policy_path"}
        assert set(suggestions) <= keys


@given(st.sampled_from(KEYS), st.text(max_size=12) | st.integers().map(str) | st.floats().map(str))
@settings(max_examples=150)
def test_no_value_makes_a_traceback(key, value):
    try:
        load_config([DATA, f"--{key}={value}"])
    except ConfigError as error:
        # LeRobot's policy.optimizer_lr is optimizer.lr
        assert key.rpartition(".")[2] in str(error).replace(".", "_") or "policy" in str(error)


# What is pushed to the Hub


@pytest.mark.parametrize(
    ("flags", "pushes"),
    [
        ([], False),
        (["--policy.repo_id=me/policy"], True),  # LeRobot's default is to push, and it requires the name then
        (["--policy.repo_id=me/policy", "--policy.push_to_hub=true"], True),
        (["--policy.repo_id=me/policy", "--policy.push_to_hub=false"], False),
        (["--policy.push_to_hub=false"], False),
        (
            ["--policy.repo_id=me/policy", "--policy.push_to_hub=false", "--save_checkpoint_to_hub=true"],
            False,
        ),
    ],
)
def test_when_the_policy_is_pushed(flags, pushes):
    assert pushes_policy(load_config([DATA, *flags])) == pushes


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--policy.push_to_hub=true"],
            r"policy.push_to_hub=true needs the name .*--policy.repo_id=USER/NAME",
        ),
        (["--save_checkpoint_to_hub=true"], r"save_checkpoint_to_hub=true needs the name"),
        (["--policy.repo_id=policy"], r"policy.repo_id=policy is not the name of a repository.*USER/NAME"),
        (["--policy.repo_id=a/b/c"], r"is not the name of a repository"),
        (["--policy.repo_id=me/policy", "--save_checkpoint=false"], r"but save_checkpoint=false"),
        (["--policy.tags=a: b: c"], r"policy.tags"),
    ],
)
def test_what_can_not_be_pushed(flags, message):
    with pytest.raises(ConfigError, match=message):
        load_config([DATA, *flags])


def test_a_checkpoint_does_not_say_where_it_was_pushed():
    """Or who trains from it, here or in LeRobot, would push over it."""
    config = load_config([DATA, "--policy.repo_id=me/policy", "--policy.tags=[a]"])
    saved = as_lerobot(config.policy)
    assert saved["repo_id"] is None and saved["push_to_hub"] is False and saved["tags"] is None


# Help


def test_every_setting_has_a_help_text_and_is_in_the_help():
    helped = train_help()
    names = {f.name for f in dataclasses.fields(TrainConfig)} - set(GROUPS)
    assert names <= help_texts(TrainConfig).keys()
    for key in KEYS:
        assert f"--{key} " in helped or f"--{key}\n" in helped
    for group, cls in groups().items():
        names = {f.name for f in dataclasses.fields(cls) if f"{group}.{f.name}" not in GROUPS}
        assert names <= help_texts(cls).keys()


@pytest.mark.parametrize("policy", POLICIES)
def test_every_setting_of_a_policy_is_in_its_help(policy):
    helped, cls = train_help(policy), policy_class(policy).Config
    names = {f.name for f in dataclasses.fields(cls)}
    assert names <= help_texts(cls).keys()
    assert [name for name in names if not re.search(rf"^  --policy\.{name}\b", helped, re.MULTILINE)] == []
    assert cls.type == policy


def test_packaged_settings_load():
    for file in (Path(load_config.__code__.co_filename).parent / "configs").glob("*.yaml"):
        load_config([f"--config={file.stem}"])


def test_one_entry_of_a_mapping_leaves_the_others(tmp_path):
    flag = "--policy.normalization_mapping.ACTION=MIN_MAX"
    expected = {"VISUAL": "MEAN_STD", "STATE": "MEAN_STD", "ACTION": "MIN_MAX"}
    assert load_config([flag]).policy.normalization_mapping == expected
    file = tmp_path / "c.yaml"
    file.write_text(
        "dataset: {root: x}\npolicy: {normalization_mapping: {STATE: IDENTITY, ACTION: IDENTITY}}"
    )
    config = load_config([f"--config={file}", flag])
    assert config.policy.normalization_mapping == {"STATE": "IDENTITY", "ACTION": "MIN_MAX"}
    replaced = load_config(["--policy.normalization_mapping={ACTION: MIN_MAX}"])
    assert replaced.policy.normalization_mapping == {"ACTION": "MIN_MAX"}
    with pytest.raises(ConfigError, match="ACTON"):
        load_config(["--policy.normalization_mapping.ACTON=MIN_MAX"])


def test_lerobots_names_of_schedules():
    flags = ["--scheduler.type=diffuser", "--scheduler.name=cosine", "--scheduler.num_warmup_steps=5"]
    assert load_config(flags).scheduler.type == "cosine"
    with pytest.raises(ConfigError, match="linear"):
        load_config([*flags, "--scheduler.name=linear"])


def test_settings_are_frozen():
    config = load_config([DATA, "--steps=7"])
    for group in ("", *GROUPS):
        settings = operator.attrgetter(group)(config) if group else config
        for field in (
            dataclasses.fields(settings) if group != "policy" else ()
        ):  # users' policies are not frozen
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(settings, field.name, None)
    for same in (copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert same == config and same is not config


def test_a_copy_has_other_settings():
    config = load_config([DATA, "--steps=7"])
    changed = with_settings(config, {"steps": "8", "dataset.cache.tier": "ram", "policy.chunk_size": 3})
    assert (config.steps, config.dataset.cache.tier, config.policy.chunk_size) == (7, "auto", 100)
    assert (changed.steps, changed.dataset.cache.tier, changed.policy.chunk_size) == (8, "ram", 3)
    with pytest.raises(ConfigError, match=r"dataset.cache.tier='shelf' is not valid"):
        with_settings(config, {"dataset.cache.tier": "shelf"})
