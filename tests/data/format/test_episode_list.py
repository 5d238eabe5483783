import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexor.config.parse import load_config
from flexor.core.errors import ConfigError
from flexor.data.format.episode_list import parse_episodes


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 9)), min_size=1), st.booleans())
def test_episode_lists(parts, brackets):
    text = ", ".join(str(a) if n == 1 else f"{a}:{a + n}" for a, n in parts)
    wanted = [episode for a, n in parts for episode in range(a, a + n)]
    assert parse_episodes(f"[{text}]" if brackets else text, "episodes") == wanted


@pytest.mark.parametrize(
    "text", ["", "[]", "a", "1,", "-1", "5:5", "5:2", "1:", "1.5", "[1", "@nowhere.json"]
)
def test_what_is_no_list_of_episodes(text):
    with pytest.raises(ConfigError, match="--episodes="):
        parse_episodes(text, "--episodes")


def test_list_in_a_file(tmp_path):
    (tmp_path / "good.json").write_text("[0, 2]\n")
    assert parse_episodes(f"@{tmp_path / 'good.json'}", "episodes") == [0, 2]
    (tmp_path / "bad.json").write_text('{"episodes": [0]}')
    with pytest.raises(ConfigError, match="something else"):
        parse_episodes(f"@{tmp_path / 'bad.json'}", "episodes")


def test_as_a_setting_of_training():
    config = load_config(["--policy.type=act", "--dataset.root=anywhere", "--dataset.episodes=0,4:6"])
    assert config.dataset.episodes == [0, 4, 5]
