"""`flexor data tokenizer`: trained on what a policy sees, and what it prints."""

import json

import numpy as np
import pytest

from flexor.cli.main import main
from flexor.core.errors import ConfigError
from flexor.data.dataset import open_dataset
from flexor.policies.nn.fast_tokens import load_fast_tokenizer
from flexor.policies.pi0_fast.train_tokenizer import TokenizerSettings, tokenizer_of
from support.small_datasets import write

pytest.importorskip("tokenizers")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write(tmp_path_factory.mktemp("tokenizer") / "data")


def test_prints_one_object_and_writes_what_it_says(root, tmp_path, capsys):
    folder = tmp_path / "made"
    flags = ["--output", str(folder), "--chunk_size=6", "--vocab_size=300", "--fraction=0.5", "--json"]
    assert main(["data", "tokenizer", str(root), *flags]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["folder"] == str(folder)
    assert (report["action_horizon"], report["action_dim"], report["num_training_chunks"]) == (6, 2, 19)
    assert report["compression_ratio"] == pytest.approx(12 / report["mean_token_length"])
    assert 0 < report["error_rms"] <= report["error_max"]
    assert report["error_rms"] <= 0.05  # half a step of rounding
    tokenizer = load_fast_tokenizer(str(folder))
    assert (tokenizer.time_horizon, tokenizer.action_dim, tokenizer.scale) == (6, 2, 10)
    again = json.loads((folder / "metadata.json").read_text())
    assert again == {name: value for name, value in report.items() if name != "folder"}


def test_a_finer_scale_restores_better(root):
    dataset = open_dataset(root=root)
    settings = {"chunk_size": 6, "vocab_size": 1000, "fraction": 1.0}
    coarse = tokenizer_of(dataset, TokenizerSettings(**settings, scale=5))[1]
    fine = tokenizer_of(dataset, TokenizerSettings(**settings, scale=50))[1]
    assert fine["error_rms"] < 0.2 * coarse["error_rms"]


def test_actions_are_those_that_the_policy_learns(root):
    dataset = open_dataset(root=root)
    settings = TokenizerSettings(
        chunk_size=4, normalization="MIN_MAX", use_relative_actions=True, fraction=1.0, vocab_size=400
    )
    tokenizer, _ = tokenizer_of(dataset, settings)
    actions, state = dataset.columns["action"], dataset.columns["observation.state"]
    chunk = actions[:4] - state[0, :2]
    starts = [
        start + i
        for start, length in zip(dataset.episodes.start, dataset.episodes.length)
        for i in range(length - 3)
    ]
    relative = np.concatenate([actions[i : i + 4] - state[i, :2] for i in starts])
    low, high = relative.min(0), relative.max(0)
    normalised = 2 * (chunk - low) / (high - low) - 1
    decoded = tokenizer.decode(tokenizer.encode(normalised[None]))
    assert decoded.problems == [""] and tokenizer.outside(normalised[None]) == 0
    assert np.abs(decoded.actions[0] - normalised).max() < 0.2


def test_refusals(root, tmp_path, capsys):
    with pytest.raises(ConfigError, match="--fraction=2 must be from"):
        tokenizer_of(open_dataset(root=root), TokenizerSettings(fraction=2))
    (tmp_path / "file").touch()
    assert main(["data", "tokenizer", str(root), "--output", str(tmp_path)]) == 2
    assert "is not empty: name a new folder" in capsys.readouterr().err
