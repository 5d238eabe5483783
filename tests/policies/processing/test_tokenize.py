"""Tokens of tasks: padding and its side, static shapes in training, what is cut off, tokenizers that are not there."""

import pytest
import torch

from flexor.core.errors import ConfigError
from flexor.core.log import _warn_once
from flexor.policies.processing.pipeline import PREPROCESSOR, Pipeline, StepContext
from flexor.policies.processing.tokenize import TASK_MASK, TASK_TOKENS, Tokenize
from support.tokenizers import make_tokenizer

pytest.importorskip("transformers")
TASKS = ["pick up the red cube", "open", "pick up the red cube"]
CUBE, OPEN = [2, 4, 5, 6, 7, 8], [2, 9]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(make_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def test_tokens_and_mask(folder):
    out = Tokenize(folder, max_length=8)({"task": TASKS})
    padded = [[*CUBE, 0, 0], OPEN + [0] * 6, [*CUBE, 0, 0]]
    assert out[TASK_TOKENS].tolist() == padded
    assert out[TASK_MASK].tolist() == [[token != 0 for token in row] for row in padded]


def test_padding_on_the_left(folder):
    out = Tokenize(folder, max_length=7, padding_side="left")({"task": ["open"]})
    assert out[TASK_TOKENS].tolist() == [[0] * 5 + OPEN]
    assert out[TASK_MASK].tolist() == [[False] * 5 + [True] * 2]


def test_the_longest_of_a_batch_counts_when_acting_and_never_in_training(folder):
    step = Tokenize(folder, max_length=12, padding="longest")
    assert step({"task": ["open"]})[TASK_TOKENS].shape == (1, 2)
    assert step({"task": TASKS})[TASK_TOKENS].shape == (3, 6)
    for tasks in (TASKS, ["open"]):
        learning = step({"task": tasks}, StepContext(training=True))
        assert learning[TASK_TOKENS].shape == (len(tasks), 12)
        acting = step({"task": tasks})
        width = acting[TASK_TOKENS].shape[1]
        assert torch.equal(learning[TASK_TOKENS][:, :width], acting[TASK_TOKENS])
        assert not learning[TASK_MASK][:, width:].any()


def test_a_task_that_is_cut_off_is_told_once(folder, caplog):
    _warn_once.cache_clear()
    step = Tokenize(folder, max_length=6)
    step({"task": ["pick up the red cube"]})  # fills it, without being cut off
    assert not caplog.records
    for last in ("drawer", "State"):  # prompts with a state are never the same
        cut = step({"task": [f"pick up the red cube {last}", "open"]})
    assert cut[TASK_TOKENS].tolist()[0] == CUBE
    assert len(caplog.records) == 1
    assert "has 7 tokens, but the policy's maximum is 6: its end is cut off" in caplog.text


def test_it_is_saved_and_loaded_in_lerobots_form(folder, tmp_path):
    step = Tokenize(folder, max_length=9, padding="longest", padding_side="left")
    Pipeline(PREPROCESSOR, [step]).save(tmp_path)
    (again,) = Pipeline.load(tmp_path, PREPROCESSOR).steps
    assert again.config() == step.config() and again.config().keys() == {
        *("tokenizer_name", "max_length", "task_key", "padding_side", "padding", "truncation")
    }


def test_offline_the_error_says_which_files_to_put_where(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    message = (
        r"hf download google/paligemma config.json tokenizer.json tokenizer_config.json"
        rf".*{tmp_path}/models--google--paligemma.*"
        r"hf auth login.*into any folder and use its path instead of 'google/paligemma'"
    )
    with pytest.raises(ConfigError, match=message):
        Tokenize("google/paligemma").prepare()


def test_a_folder_without_a_tokenizer_is_named_with_what_it_lacks(tmp_path):
    with pytest.raises(
        ConfigError, match=rf"{tmp_path}.*must hold config.json, tokenizer.json, tokenizer_config.json"
    ):
        Tokenize(str(tmp_path)).prepare()
