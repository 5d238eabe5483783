"""pi0-FAST at small sizes: what it writes, reads and saves. LeRobot's numbers: tests/parity/pi0_fast."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from flexor.core.log import _warn_once
from flexor.core.rng import Noise
from flexor.policies.adapters import LoraConfig, LoraLinear, add_adapters
from flexor.policies.pi0_fast.action_tokens import ACTION_TOKENS, ActionWords, TokenizeActions
from flexor.policies.pi0_fast.policy import mean_of_tokens
from flexor.policies.pretrained import Pretrained, load_pretrained, save_pretrained
from flexor.policies.processing.pipeline import PREPROCESSOR, Pipeline
from parity import flexor_side
from parity.inputs import BATCH, TASKS, observation
from parity.kinds import cases_of
from parity.pi0_fast.cases import FIRST, fill_policy, training_batch
from parity.pi0_fast.flexor import prepared

pytest.importorskip("transformers")
NOISE = Noise(0, 0, torch.arange(BATCH))


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    return cases_of("pi0_fast", tmp_path_factory.mktemp("pi0_fast") / "files")["default"]


@pytest.fixture(scope="module")
def words(case):
    return ActionWords.load(case["settings"]["text_tokenizer_name"], case["settings"]["fast_skip_tokens"])


def make(case: dict, **settings: object) -> Pretrained:
    with prepared(case["folder"]):
        made = flexor_side.make_policy("pi0_fast", {**case, "settings": {**case["settings"], **settings}})
    fill_policy(made.policy)
    return made


def batch_of(made: Pretrained, case: dict) -> dict:
    return made.preprocessor({**flexor_side.tensors(training_batch(case)), "task": TASKS})


def chunk(made: Pretrained, case: dict) -> np.ndarray:
    return made.chunk(observation(case["inputs"], "now"), TASKS, NOISE)


def test_the_chunk_is_decoded_as_long_as_it_is_however_many_actions_are_executed(case):
    """LeRobot decodes as many steps as are executed, which makes other actions of the same tokens."""
    whole, few = (chunk(make(case, n_action_steps=steps), case) for steps in (6, 2))
    assert few.shape == (BATCH, 6, 3)
    np.testing.assert_array_equal(whole, few)


def test_what_is_written_word_by_word_is_what_the_loss_expects(case):
    """With a cache and without one, the same words are the most likely ones."""
    made = make(case, max_decoding_steps=12)
    policy = made.policy.eval()
    batch = batch_of(made, case)
    with torch.no_grad():
        written = policy.written(policy.run(batch, NOISE))
        start = torch.full((BATCH, 1), policy.words.beginning)
        likely = torch.cat((start, written), 1)
        best = policy.writer.losses(policy._prompt(batch), likely)
        for place in (1, 4, 9):
            other = likely.clone()
            other[:, place] = torch.where(other[:, place] == FIRST, FIRST - 1, FIRST)
            worse = policy.writer.losses(policy._prompt(batch), other)
            assert (worse[:, place - 1] > best[:, place - 1]).all()
            torch.testing.assert_close(
                worse[:, : place - 1], best[:, : place - 1]
            )  # later words are not seen


def test_whatever_is_written_there_are_actions_and_it_is_said(case, monkeypatch, caplog):
    made = make(case, validate_action_token_prefix=True)
    for rows in ([[5, 0, 1]] * BATCH, [[made.policy.words.stop]] * BATCH, [[400] * 50] * BATCH):
        caplog.clear()
        monkeypatch.setattr(made.policy, "written", lambda *_, rows=rows: torch.tensor(rows))
        assert np.isfinite(chunk(made, case)).all()
        assert f"the tokens of {BATCH} are not those of a whole chunk" in caplog.text


def test_what_is_learnt_is_read_back(case, words, caplog):
    """The words of a chunk, without their beginning, decode to its actions. What is far outside is cut, and told."""
    _warn_once.cache_clear()
    made = make(case)
    step = next(step for step in made.preprocessor.steps if isinstance(step, TokenizeActions))
    actions = torch.sin(torch.arange(BATCH * 6 * 3).reshape(BATCH, 6, 3) / 7)
    read = [words.read(row[1:]) for row in step({"action": actions})[ACTION_TOKENS].tolist()]
    assert all(begins for _, begins in read)
    decoded = made.policy.fast.decode([tokens for tokens, _ in read], 6, 3)
    assert decoded.problems == [""] * BATCH
    assert np.abs(decoded.actions - actions.numpy()).max() < 0.15  # rounding to tenths
    assert not caplog.records
    step({"action": 30 * actions})
    assert "beyond the range of the FAST tokenizer" in caplog.text


def test_words_of_a_sequence(words):
    written = words.write([0, 5])
    assert written == [words.beginning, *words.prefix, FIRST, FIRST - 5, *words.end]
    assert words.read(written[1:]) == ([0, 5], True)
    assert words.read([FIRST, *words.prefix, FIRST - 1, words.stop, FIRST]) == ([0, 1], False)
    assert words.read([]) == ([], False)


def test_a_temperature_draws_words_that_depend_on_the_noise_alone(case):
    made = make(case, temperature=5.0)
    one, again = chunk(made, case), chunk(made, case)
    np.testing.assert_array_equal(one, again)
    other = made.chunk(observation(case["inputs"], "now"), TASKS, Noise(1, 0, torch.arange(BATCH)))
    assert not np.array_equal(one, other)
    assert not np.array_equal(one, chunk(make(case), case))


def test_the_loss_of_a_sample_does_not_depend_on_the_others(case):
    made = make(case)
    batch = batch_of(made, case)
    with torch.no_grad():
        both = made.policy.loss(batch, NOISE).per_sample
        for n in range(BATCH):
            alone = {key: value[n : n + 1] for key, value in batch.items() if isinstance(value, torch.Tensor)}
            torch.testing.assert_close(made.policy.loss(alone, NOISE).per_sample, both[n : n + 1])
    errors, mask = torch.tensor([[1.0, 3.0], [5.0, 9.0]]), torch.tensor([[True, True], [True, False]])
    assert mean_of_tokens(errors, mask).tolist() == [2, 5]


def test_saved_and_loaded_it_acts_the_same(case, tmp_path):
    made = make(case)
    parts = made.preprocessor, made.postprocessor
    save_pretrained(tmp_path, made.policy.config, made.policy.state_dict(), *parts)
    with prepared(case["folder"]):
        np.testing.assert_array_equal(chunk(load_pretrained(str(tmp_path)), case), chunk(made, case))


def test_bfloat16_weights_act(case):
    made = make(case, dtype="bfloat16")
    assert made.policy.writer.lm_head.weight.dtype == torch.bfloat16
    assert np.isfinite(chunk(made, case)).all()
    made.policy.loss(batch_of(made, case), NOISE).per_sample.mean().backward()


def test_adapters_are_on_queries_and_values_by_default(case):
    policy = make(case).policy
    add_adapters(policy, LoraConfig(r=2), 0, policy.config.lora_targets())
    adapted = [name for name, module in policy.named_modules() if isinstance(module, LoraLinear)]
    assert len(adapted) == 2 * len(policy.writer.language.layers)
    assert all(name.endswith(("q_proj", "v_proj")) and "language_model" in name for name in adapted)


def test_a_chunk_of_too_many_tokens_is_cut_off_and_it_is_said(case, caplog):
    _warn_once.cache_clear()
    out = batch_of(make(case, max_action_tokens=10), case)
    assert out[ACTION_TOKENS].shape == (BATCH, 10)
    assert "max_action_tokens=10 tokens: their end is cut off" in caplog.text


def test_the_step_reads_what_lerobot_saves_and_rehearses_without_files(case, tmp_path):
    theirs = {"trust_remote_code": True, "max_action_tokens": 40, "action_tokenizer_name": "x/y"}
    step = TokenizeActions.from_config(theirs)
    assert step.fast_skip_tokens == 128
    given = {"action": torch.empty(2, 6, 3, device="meta")}
    assert step.rehearse(given)[ACTION_TOKENS].shape == (2, 40)
    observed = {"task": ["a"]}
    assert step(observed) is observed  # without actions there is nothing to write
    own = replace(
        step,
        action_tokenizer_name=case["settings"]["action_tokenizer_name"],
        paligemma_tokenizer_name=case["settings"]["text_tokenizer_name"],
    )
    Pipeline(PREPROCESSOR, [own]).save(tmp_path)
    assert Pipeline.load(tmp_path, PREPROCESSOR).steps[0].config() == own.config()
