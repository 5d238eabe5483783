import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexor.config.parse import load_config
from flexor.core.errors import ConfigError, DatasetError
from flexor.data.dataset import open_dataset
from flexor.data.format.episode_list import parse_episodes, select_episodes


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 9)), min_size=1), st.booleans())
def test_episode_lists(parts, brackets):
    text = ", ".join(str(a) if n == 1 else f"{a}:{a + n}" for a, n in parts)
    expected = [episode for a, n in parts for episode in range(a, a + n)]
    assert parse_episodes(f"[{text}]" if brackets else text, "episodes") == expected


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


@given(st.integers(0, 40), st.integers(1, 40))
def test_ranges_without_an_end_or_a_beginning(first, more):
    count = first + more
    assert parse_episodes(f"{first}:", "episodes", count) == [*range(first, count)]
    assert parse_episodes(f":{count}", "episodes") == [*range(count)]
    with pytest.raises(ConfigError, match=f"there are {count} episodes"):
        parse_episodes(f"{count}:", "episodes", count)


def test_open_range_as_a_setting_is_checked_and_kept_until_the_dataset_is_open(lowdim):
    config = load_config(["--policy.type=act", "--dataset.root=anywhere", "--dataset.exclude_episodes=0,2:"])
    assert config.dataset.exclude_episodes == "0,2:"
    assert open_dataset(root=lowdim, exclude_episodes="0,2:").episodes.index.tolist() == [1]
    assert open_dataset(root=lowdim, episodes="1:").episodes.index.tolist() == [1, 2, 3]
    with pytest.raises(ConfigError, match=r"dataset.episodes=4:: .* there are 4 episodes"):
        open_dataset(root=lowdim, episodes="4:")
    with pytest.raises(ConfigError, match="'x' is not an episode index"):
        load_config(["--policy.type=act", "--dataset.root=anywhere", "--dataset.episodes=x,2:"])


TASKS = [["Pick the cup"], ["place the cup"], ["pick the box", "close it"], []]


@pytest.mark.parametrize(
    ("tasks", "expected"),
    [
        ("pick", [0, 2]),
        ("CUP", [0, 1]),
        ("pick*cup", [0]),
        ("cup*", None),
        (["close", "place*"], [1, 2]),
        (["close", "pour"], None),
    ],
)
def test_by_task(tasks, expected):
    if expected is not None:
        assert select_episodes("it", np.arange(4), TASKS, by_task=tasks) == expected
        return
    with pytest.raises(
        DatasetError, match=r"--dataset.tasks=.*Their tasks are 'Pick the cup', 'place the cup'"
    ):
        select_episodes("it", np.arange(4), TASKS, by_task=tasks)


@given(st.sets(st.integers(0, 9), min_size=1), st.sets(st.integers(0, 9)), st.booleans())
def test_all_ways_to_select_combine(episodes, exclude, even):
    tasks = [["even" if episode % 2 == 0 else "odd"] for episode in range(10)]
    expected = sorted(e for e in episodes - exclude if not even or e % 2 == 0)
    ways = {"episodes": sorted(episodes), "exclude": sorted(exclude), "by_task": "even" if even else None}
    if expected:
        assert select_episodes("it", np.arange(10), tasks, **ways) == expected
    else:
        with pytest.raises(DatasetError):
            select_episodes("it", np.arange(10), tasks, **ways)


def test_task_of_a_dataset(lowdim):
    assert open_dataset(root=lowdim, tasks="push").episodes.index.tolist() == [1, 3]
    config = load_config(["--policy.type=act", "--dataset.root=anywhere", "--dataset.tasks=pick, then place"])
    assert config.dataset.tasks == "pick, then place"
    config = load_config(["--policy.type=act", "--dataset.root=anywhere", "--dataset.tasks=[pick, place]"])
    assert config.dataset.tasks == ["pick", "place"]
