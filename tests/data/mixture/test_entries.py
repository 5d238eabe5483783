"""Which datasets the settings name, and what contradicts itself."""

from pathlib import Path

import pytest

from flexor.config.parse import build_config, flatten, load_config, read_file
from flexor.core.errors import ConfigError
from flexor.data.mixture.entries import absolute_roots, entries_of, parse_episode_weights


def entries(*flags):
    return entries_of(load_config(["--policy.type=act", *flags]).dataset)


def test_lists_on_the_command_line():
    first, second = entries("--dataset.repo_id=lab/a,lab/b", "--dataset.weights=3,1", "--dataset.tasks=pick")
    assert (first.name, first.weight, second.repo_id, second.weight) == ("lab/a", 3, "lab/b", 1)
    assert first.tasks == second.tasks == "pick"
    first, second = entries("--dataset.root=/x/a,s3://bucket/a")
    assert (first.root, first.name, second.root, second.name) == ("/x/a", "a (1)", "s3://bucket/a", "a (2)")
    first, second = entries("--dataset.repo_id=a,b", "--dataset.root=x,y")
    assert (first.repo_id, first.root, second.repo_id, second.root) == ("a", "x", "b", "y")
    (first,) = entries("--dataset.root=x", "--dataset.episodes=0:2", "--dataset.episode_weights=0=2")
    assert (first.name, first.episodes, first.episode_weights) == ("x", [0, 1], "0=2")


def test_folder_with_a_comma_in_its_name(tmp_path):
    (tmp_path / "a,b").mkdir()
    assert len(entries(f"--dataset.root={tmp_path / 'a,b'}")) == 1


FILES = {
    "mix": """
dataset:
  mix:
    - {repo_id: lab/a, weight: 2, episodes: 5:9, rename_map: {observation.image: observation.images.top}}
    - {root: data/b, name: b, weight: 1, exclude_episodes: [1, 2]}
""",
    "repo_id": """
dataset:
  repo_id:
    - {repo_id: lab/a, weight: 2, episodes: 5:9, rename_map: {observation.image: observation.images.top}}
    - {root: data/b, name: b, weight: 1, exclude_episodes: [1, 2]}
""",
    "dataset": """
dataset:
  - {repo_id: lab/a, weight: 2, episodes: 5:9, rename_map: {observation.image: observation.images.top}}
  - {root: data/b, name: b, weight: 1, exclude_episodes: [1, 2]}
""",
}


@pytest.mark.parametrize("way", FILES)
def test_list_in_a_file(way, tmp_path):
    (tmp_path / "run.yaml").write_text(FILES[way])
    config = load_config([f"--config={tmp_path / 'run.yaml'}"])
    first, second = entries_of(config.dataset)
    assert (first.name, first.weight, first.episodes) == (
        "lab/a",
        2,
        "5:9",
    )  # YAML 1.1 has it as the number 309
    assert first.rename_map == {"observation.image": "observation.images.top"}
    assert (second.name, second.root, second.exclude_episodes) == ("b", "data/b", [1, 2])
    again = build_config(flatten(config.to_dict()))
    assert again.dataset == config.dataset
    assert absolute_roots(config.dataset).mix[1].root == str(Path("data/b").absolute())


def test_names_in_a_file_and_a_list_as_a_flag(tmp_path):
    (tmp_path / "run.yaml").write_text("dataset:\n  repo_id: [lab/a, lab/b]\n")
    assert flatten(read_file(tmp_path / "run.yaml")) == {"dataset.repo_id": ["lab/a", "lab/b"]}
    assert [e.name for e in entries_of(load_config([f"--config={tmp_path / 'run.yaml'}"]).dataset)] == [
        "lab/a",
        "lab/b",
    ]
    first, second = entries("--dataset.mix=[{repo_id: a, weight: 1}, {repo_id: b, weight: 2}]")
    assert (first.weight, second.weight) == (1, 2)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--dataset.repo_id=a,b", "--dataset.episodes=0:5"],
            r"dataset.episodes=.*ambiguous with 2 datasets",
        ),
        (["--dataset.repo_id=a,b", "--dataset.root=x"], r"dataset.root names 1 datasets, not 2"),
        (["--dataset.repo_id=a,b", "--dataset.weights=1,2,3"], r"3 weights, but there are 2 datasets: a, b"),
        (["--dataset.repo_id=a,b", "--dataset.weights=3"], r"1 weights, but there are 2 datasets: a, b"),
        (["--dataset.root=x,y", "--dataset.weights=3"], r"1 weights, but there are 2 datasets: x, y"),
        (["--dataset.root=x", "--dataset.weights=3,1"], r"2 weights, but there are 1 datasets: x"),
        (["--dataset.repo_id=[a, b]", "--dataset.weights=[3]"], r"1 weights, but there are 2 datasets"),
        (["--dataset.mix=[{root: x}, {root: y}]", "--dataset.weights=3"], r"1 weights, but there are 2"),
        (["--dataset.repo_id=a,b", "--dataset.weights=1,0"], r"dataset.weights=.* must be more than 0"),
        (["--dataset.repo_id=a,b", "--dataset.save_stats_of=c"], r"c is not one of the datasets: a, b"),
        (["--dataset.repo_id=a,,b"], "without a name"),
        (["--dataset.mix=[]"], "empty list"),
        (["--dataset.mix=[{weight: 1}]"], "names no dataset"),
        (["--dataset.mix=[{repo_id: a}]", "--dataset.root=x"], "give only one of them"),
        (["--dataset.mix=[{repo_id: a, weight: 1}, {repo_id: b}]"], "b lack one"),
        (["--dataset.mix=[{repo_id: a, weight: -1}]"], "weight=-1.* must be more than 0"),
        (["--dataset.mix=[{repo_id: a, wait: 1}]"], r"Unknown setting .*wait.* Did you mean .*weight"),
        (["--dataset.mix=[{repo_id: a, episodes: x}]"], "'x' is not an episode index"),
        (["--dataset.root=x", "--dataset.episode_weights=0:5"], "'0:5' is not EPISODES=WEIGHT"),
        (["--dataset.root=x", "--dataset.episode_weights=0=0"], "more than 0"),
    ],
)
def test_contradictions_are_refused(flags, message):
    with pytest.raises(ConfigError, match=message):
        load_config(["--policy.type=act", *flags])


@pytest.mark.parametrize("way", ["repo_id: [a, b]", "root: 'x,y'", "mix: [{repo_id: a}, {repo_id: b}]"])
@pytest.mark.parametrize("weights", ["3", "3,1,1"])
def test_a_wrong_number_of_weights_in_a_file(way, weights, tmp_path):
    (tmp_path / "run.yaml").write_text(f"dataset:\n  {way}\n  weights: [{weights}]\n")
    with pytest.raises(ConfigError, match=r"weights, but there are 2 datasets"):
        load_config([f"--config={tmp_path / 'run.yaml'}"])


def names(config):
    dataset = config.dataset
    return dataset.repo_id, dataset.root, dataset.revision, dataset.mix and [e.root for e in dataset.mix]


FILE_AND_FLAGS = [
    # (the file's naming, the flags', what is read)
    ("repo_id: lab/a", ["--dataset.root=x"], (None, "x", None, None)),
    ("repo_id: lab/a\n  revision: v1", ["--dataset.root=x"], (None, "x", None, None)),
    ("repo_id: lab/a\n  revision: v1", ["--dataset.repo_id=lab/b"], ("lab/b", None, None, None)),
    ("repo_id: lab/a\n  revision: v1", ["--dataset.repo_id=lab/a"], ("lab/a", None, "v1", None)),
    ("repo_id: lab/a\n  revision: v1", ["--dataset.root=null"], ("lab/a", None, "v1", None)),
    ("root: x", ["--dataset.repo_id=lab/b"], ("lab/b", None, None, None)),
    ("mix: [{root: x}]", ["--dataset.root=y"], (None, "y", None, None)),
    ("root: x", ["--dataset.mix=[{root: y}, {root: z}]"], (None, None, None, ["y", "z"])),
    ("root: x", ["--dataset.repo_id=[{root: y}, {root: z}]"], (None, None, None, ["y", "z"])),
    ("repo_id: lab/a\n  root: x", [], ("lab/a", "x", None, None)),  # LeRobot's: its copy is in x
    ("repo_id: lab/a", ["--dataset.repo_id=lab/b", "--dataset.root=y"], ("lab/b", "y", None, None)),
]


@pytest.mark.parametrize(("file", "flags", "expected"), FILE_AND_FLAGS)
def test_flags_that_name_data_replace_the_naming_of_the_file(file, flags, expected, tmp_path):
    (tmp_path / "run.yaml").write_text(f"dataset:\n  {file}\n")
    assert names(load_config([f"--config={tmp_path / 'run.yaml'}", *flags])) == expected


def test_a_root_replaces_the_data_of_the_demo():
    assert names(load_config(["--config=demo", "--dataset.root=x"])) == (None, "x", None, None)


def test_weights_of_episodes():
    assert parse_episode_weights("0:2=3, 7=0.5,8:=2", 10, "w") == {0: 3, 1: 3, 7: 0.5, 8: 2, 9: 2}
