"""Which settings nodes may have for themselves; `distributed/test_hosts.py` has nodes that differ in others."""

from flexor.config.parse import flatten, load_config
from flexor.train.ranks.agreement import shared_settings


def settings(*flags: str) -> dict[str, object]:
    return shared_settings(flatten(load_config(list(flags)).to_saved()))


def test_each_node_may_have_its_data_in_another_place():
    assert settings("--dataset.root=/here") == settings("--dataset.root=/there", "--num_workers=3")
    mix = "--dataset.mix=[{root: /%s/a, weight: 2}, {root: /%s/b, weight: 1}]"
    assert settings(mix % ("here", "here")) == settings(mix % ("there", "there"))
    assert settings(mix % ("here", "here")) != settings((mix % ("here", "here")).replace("2", "3"))
