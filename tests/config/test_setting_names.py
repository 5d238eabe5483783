import pytest

from flexor.config.parse import load_config
from flexor.config.setting_names import setting_names, suggestion
from flexor.core.errors import ConfigError
from flexor.policies import policy_class

NAMES = setting_names(policy_class("act").Config)


@pytest.mark.parametrize(
    ("wrong", "meant"),
    {
        "lr": "optimizer.lr",
        "optimizer.learning_rate": "optimizer.lr",
        "polcy.type": "policy.type",
        "chunk_size": "policy.chunk_size",
        "dataset.cache.teir": "dataset.cache.tier",
        "image_transforms.tfs.crop": "dataset.image_transforms.tfs",
        "batchsize": "batch_size or rl.batch_size or eval.batch_size",
        "repo_id": "policy.repo_id or dataset.repo_id",
    }.items(),
)
def test_a_wrong_name_suggests_settings_with_the_same_or_a_similar_last_part(wrong, meant):
    assert suggestion(wrong, NAMES) == f"Did you mean {meant}?"


def test_all_names_are_accepted_as_typed():
    assert len(NAMES) == len({*NAMES})
    for name in ("steps", "dataset.cache.tier", "policy.chunk_size", "optimizer.lr", "policy.path"):
        assert name in NAMES


def test_nothing_similar_says_where_all_settings_are_listed():
    assert suggestion("qqqq", NAMES) == "`flexor train --help` lists all settings."


def test_the_command_line_suggests_names_of_all_groups():
    with pytest.raises(ConfigError, match=r"Unknown setting lr='1e-4'. Did you mean optimizer.lr\?$"):
        load_config(["--config=demo", "--lr=1e-4"])
    with pytest.raises(ConfigError, match=r"polcy.type='act'. Did you mean policy.type\?$"):
        load_config(["--config=demo", "--polcy.type=act"])
