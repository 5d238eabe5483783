"""Episodes that can't be read: refused by name with the flag to paste, or left out and counted."""

import json
import logging
import re
import shutil

import numpy as np
import pyarrow.parquet as pq
import pytest

from flexor.cli.main import main
from flexor.config.parse import load_config
from flexor.core.errors import DatasetError
from flexor.data.dataset import open_dataset
from support.legacy import to_v2
from support.samples import FEATURES, write_sample

TOP = "observation.images.top"


@pytest.fixture(scope="module")
def intact(tmp_path_factory):
    """v2.1, so that every episode has files of its own."""
    folder = tmp_path_factory.mktemp("samples")
    features = {name: FEATURES[name] for name in (TOP, "observation.state", "action")}
    return to_v2(write_sample(folder / "v3.0", features=features), folder / "v2.1", chunks_size=1000)


@pytest.fixture
def root(intact, tmp_path):
    return shutil.copytree(intact, tmp_path / "data")


def video(root, episode):
    return root / f"videos/chunk-000/{TOP}/episode_{episode:06d}.mp4"


def table(root, episode):
    return root / f"data/chunk-000/episode_{episode:06d}.parquet"


def cut_rows(root, episode):
    pq.write_table(pq.read_table(table(root, episode)).slice(1), table(root, episode))


BREAKAGES = {
    "video is missing": lambda root, episode: video(root, episode).unlink(),
    "video is cut short": lambda root, episode: video(root, episode).write_bytes(b"\0" * 100),
    "video of another episode": lambda root, episode: shutil.copy(video(root, 0), video(root, episode)),
    "table is missing": lambda root, episode: table(root, episode).unlink(),
    "table is damaged": lambda root, episode: table(root, episode).write_bytes(b"PAR1"),
    "rows are missing": cut_rows,
}


@pytest.mark.parametrize("breakage", BREAKAGES)
def test_left_out_and_named(breakage, root, intact, caplog):
    BREAKAGES[breakage](root, 2)
    with caplog.at_level(logging.WARNING, "flexor"):
        dataset = open_dataset(root=root, on_bad_episode="skip")
    assert dataset.episodes.index.tolist() == [0, 1, 3] and list(dataset.skipped) == [2]
    assert caplog.text.count("1 episode can't be read: skipped") == 1 and "episode 2: " in caplog.text
    rows = np.arange(len(dataset))
    by_choice = open_dataset(root=intact, episodes=[0, 1, 3])
    for name, values in by_choice.read(rows).items():
        if name != "index":
            np.testing.assert_array_equal(dataset.read(rows)[name], values)
    assert dataset.fingerprint() != by_choice.fingerprint()


@pytest.mark.parametrize("breakage", ["video is missing", "table is missing", "rows are missing"])
def test_refused_with_the_flag_that_helps(breakage, root):
    for episode in (1, 2):
        BREAKAGES[breakage](root, episode)
    with pytest.raises(DatasetError) as error:
        open_dataset(root=root)
    text = str(error.value)
    assert "2 of 4 episodes can't be read" in text and "episode 1: " in text and "episode 2: " in text
    (flag,) = re.findall(r"--dataset\.exclude_episodes=\S+", text)
    config = load_config(["--policy.type=act", f"--dataset.root={root}", flag]).dataset
    dataset = open_dataset(root=root, exclude_episodes=config.exclude_episodes)
    assert dataset.episodes.index.tolist() == [0, 3] and not dataset.skipped


def test_many_are_three_examples_and_a_count(intact, tmp_path):
    root = shutil.copytree(intact, tmp_path / "data")
    for episode in (0, 1, 2):
        video(root, episode).unlink()
    # more, in other ways
    lines = (root / "meta/episodes.jsonl").read_text().splitlines()
    last = json.loads(lines[3])
    more = [{**last, "episode_index": 4}, {**last, "episode_index": 5}]
    (root / "meta/episodes.jsonl").write_text("\n".join([*lines, *map(json.dumps, more)]))
    shutil.copy(table(root, 3), table(root, 4))
    shutil.copy(video(root, 3), video(root, 4))
    shutil.copy(table(root, 3), table(root, 5))
    with pytest.raises(DatasetError) as error:
        open_dataset(root=root)
    assert "5 of 6 episodes" in str(error.value) and "and 2 more" in str(error.value)
    assert "exclude_episodes=0:3,4:6" in str(error.value)
    lines = str(error.value).replace(str(root), "data").splitlines()
    assert max(map(len, lines[2:6])) < 110


def test_nothing_left(root):
    for episode in range(4):
        cut_rows(root, episode)
    with pytest.raises(DatasetError, match="4 of 4 episodes can't be read"):
        open_dataset(root=root, on_bad_episode="skip")


def test_exclude_and_choose(intact):
    assert open_dataset(root=intact, exclude_episodes=[1]).episodes.index.tolist() == [0, 2, 3]
    assert open_dataset(root=intact, episodes=[0, 1], exclude_episodes=[1]).episodes.index.tolist() == [0]
    with pytest.raises(DatasetError, match=r"has no episodes \[9\].*--dataset.exclude_episodes"):
        open_dataset(root=intact, exclude_episodes=[9])
    with pytest.raises(DatasetError, match="excludes all of its 2 episodes"):
        open_dataset(root=intact, episodes=[0, 1], exclude_episodes=[1, 0])


def test_a_run_counts_what_it_left_out(root, tmp_path, tiny_act, capsys):
    video(root, 1).unlink()
    run = tmp_path / "run"
    flags = [*tiny_act, f"--dataset.root={root}", f"--output_dir={run}", "--batch_size=2", "--num_workers=0"]
    flags += ["--policy.input_features=null", "--log_freq=1", "--steps=2"]
    assert main(["train", *flags]) == 1
    assert "--dataset.exclude_episodes=1" in capsys.readouterr().err
    flags = [*flags, "--dataset.on_bad_episode=skip"]
    shutil.rmtree(run, ignore_errors=True)
    assert main(["train", *flags]) == 0
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["skipped_episodes"] for line in lines if "loss" in line] == [1, 1]
    # the file comes back: that is another dataset, and a resume says so
    shutil.copy(video(root, 0), video(root, 1))
    assert main(["resume", str(run), "--steps=3"]) == 0  # still no video for all its rows
    shutil.rmtree(root)
    assert main(["resume", str(run), "--steps=4"]) == 1


def test_a_file_that_comes_back_is_another_run(root, intact, tmp_path, tiny_act, capsys):
    video(root, 1).unlink()
    run = tmp_path / "run"
    flags = [*tiny_act, f"--dataset.root={root}", f"--output_dir={run}", "--batch_size=2", "--num_workers=0"]
    assert main(["train", *flags, "--steps=1", "--dataset.on_bad_episode=skip"]) == 0
    shutil.copy(video(intact, 1), video(root, 1))
    assert main(["resume", str(run), "--steps=2"]) == 1
    assert "The dataset is not the one" in capsys.readouterr().err
