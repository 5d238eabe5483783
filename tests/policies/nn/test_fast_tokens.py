"""FAST tokens: there and back within the rounding, whatever a network writes, files in the published form."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from flexor.core.errors import ConfigError
from flexor.policies.nn.fast_tokens import (
    FastTokenizer,
    cosine_transform,
    load_fast_tokenizer,
    train_fast_tokenizer,
)

pytest.importorskip("tokenizers")
STEPS, VALUES = 12, 3


def smooth(count: int, seed: int = 0) -> np.ndarray:
    """Motions as a robot makes them: [count, STEPS, VALUES]."""
    rng = np.random.default_rng(seed)
    phase, speed = rng.uniform(0, 6, (2, count, 1, VALUES))
    return np.sin(phase + 0.1 * speed * np.arange(STEPS)[:, None]).astype(np.float32)


@pytest.fixture(scope="module")
def tokenizer() -> FastTokenizer:
    return train_fast_tokenizer([smooth(150), smooth(150, 1)], vocab_size=400)


def test_the_cosine_transform_is_the_published_one():
    scipy = [7.5, -5.114166477213515, 1.5, -0.5876233856353159]  # scipy.fft.dct([1, 2, 4, 8], norm="ortho")
    x = np.array([1.0, 2.0, 4.0, 8.0])
    np.testing.assert_allclose(cosine_transform(x[None, :, None])[0, :, 0], scipy, rtol=1e-12)


def test_what_is_encoded_comes_back_within_the_rounding(tokenizer):
    chunks = smooth(50, 2)
    tokens = tokenizer.encode(chunks)
    decoded = tokenizer.decode(tokens)
    assert decoded.problems == [""] * 50
    # Orthonormal: squared errors of coefficients and of actions add up to the same.
    error = np.square(decoded.actions - chunks).sum((1, 2))
    assert (error <= STEPS * VALUES * (0.5 / tokenizer.scale) ** 2 * (1 + 1e-4)).all()
    assert np.mean([len(row) for row in tokens]) < 0.7 * STEPS * VALUES  # and it is compressed


@settings(max_examples=60, deadline=None)
@given(
    chunk=arrays(np.float32, (STEPS, VALUES), elements=st.floats(-3, 3, width=32)),
    other=st.tuples(st.integers(1, 9), st.integers(1, 4)),
)
def test_any_chunk_and_any_size_comes_back(tokenizer, chunk, other):
    assert tokenizer.outside(chunk[None]) == 0 or np.abs(chunk).max() > 1
    for actions in (chunk, np.resize(chunk, other)):
        inside = FastTokenizer(tokenizer.bpe, 10.0, 1000, -500)  # a range that holds all of these
        assert inside.outside(actions[None]) == 0
        decoded = inside.decode(inside.encode(actions[None]), *actions.shape)
        assert decoded.problems == [""]
        limit = np.sqrt(actions.size) * 0.5 / 10 + 1e-4
        assert np.linalg.norm(decoded.actions[0] - actions) <= limit


@settings(max_examples=200, deadline=None)
@given(tokens=st.lists(st.integers(-5, 500), max_size=60))
def test_no_sequence_of_tokens_is_too_strange_to_decode(tokenizer, tokens):
    decoded = tokenizer.decode([tokens, []])
    assert decoded.actions.shape == (2, STEPS, VALUES) and np.isfinite(decoded.actions).all()
    # without a problem no coefficient is beyond the range, so no action is either
    most = (tokenizer.vocab_size + abs(tokenizer.min_token)) / tokenizer.scale * np.sqrt(STEPS * VALUES)
    assert np.abs(decoded.actions).max() <= most or "above the tokenizer's range" in decoded.problems[0]
    if any(not 0 <= token < tokenizer.bpe.get_vocab_size() for token in tokens):
        assert decoded.problems[0]
    assert decoded.problems[1] == f"0 coefficients instead of {STEPS * VALUES}"
    assert not decoded.actions[1].any()


def test_what_is_wrong_with_a_sequence_is_said(tokenizer):
    good = tokenizer.encode(smooth(1))[0]
    complete = tokenizer.decode([good]).actions[0]
    half, double, foreign = good[: len(good) // 2], good * 2, [9999, *good[:3], -1, *good[3:]]
    broken = tokenizer.bpe.token_to_id("\u00e2")  # the first byte of a character of three
    decoded = tokenizer.decode([half, double, foreign, [broken, *good]])
    assert "coefficients instead of 36" in decoded.problems[0]
    assert decoded.problems[1] == "72 coefficients instead of 36"
    assert decoded.problems[2] == "token 9999 at 0 is not one of 400"  # left out, like -1
    assert decoded.problems[3] == "coefficient 0 is not valid; 0 coefficients instead of 36"
    np.testing.assert_array_equal(decoded.actions[1], complete)  # the beginning counts
    np.testing.assert_array_equal(decoded.actions[2], complete)
    assert not decoded.actions[3].any()
    # of half a sequence the slow motions are there
    slow = cosine_transform(decoded.actions[:1])[0, 0]
    np.testing.assert_allclose(slow, cosine_transform(complete[None])[0, 0], atol=1e-5)


def test_outliers_are_counted_and_kept_if_they_are_characters(tokenizer):
    wild = np.full((1, STEPS, VALUES), 100, np.float32)
    assert tokenizer.outside(wild) == VALUES
    decoded = tokenizer.decode(tokenizer.encode(wild))
    code = round(100 * STEPS**0.5 * tokenizer.scale) - tokenizer.min_token
    assert decoded.problems == [f"coefficient 0 is {code}, above the tokenizer's range of 400"]
    np.testing.assert_allclose(decoded.actions, wild, atol=0.5 / tokenizer.scale)
    # half of another character can't be encoded
    for enormous, value in ((1e6, (0xD7FF + tokenizer.min_token) / 10), (-1e6, tokenizer.min_token / 10)):
        decoded = tokenizer.decode(tokenizer.encode(np.full((1, STEPS, VALUES), enormous, np.float32)))
        np.testing.assert_allclose(decoded.actions, value / STEPS**0.5, rtol=1e-5)
    assert "above" not in decoded.problems[0]
    with pytest.raises(ConfigError, match="NaN"):
        tokenizer.encode(np.full((1, 2, 2), np.nan))


def test_saved_and_loaded(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    chunks = smooth(5, 3)
    for path in (
        "",
        "tokenizer.json",
    ):  # with the vocabulary in both places, and only where transformers 5 has it
        if path:
            (tmp_path / path).unlink()
        again = load_fast_tokenizer(str(tmp_path))
        assert again.encode(chunks) == tokenizer.encode(chunks)
        np.testing.assert_array_equal(
            again.decode(again.encode(chunks)).actions, tokenizer.decode(again.encode(chunks)).actions
        )
    saved = json.loads((tmp_path / "processor_config.json").read_text())
    assert saved["min_token"] == tokenizer.min_token and (saved["time_horizon"], saved["action_dim"]) == (
        12,
        3,
    )


def test_transformers_reads_the_vocabulary_alike(tokenizer, tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizer.save(tmp_path)
    text = "".join(map(chr, range(200)))
    for place in (tmp_path, tmp_path / "bpe_tokenizer"):
        theirs = transformers.AutoTokenizer.from_pretrained(place)
        assert theirs(text)["input_ids"] == tokenizer.bpe.encode(text).ids
        assert theirs.decode(theirs(text)["input_ids"]) == text


def test_refusals(tokenizer, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"vocab_size=300 is too small.*--vocab_size="):
        train_fast_tokenizer([100 * smooth(20)], vocab_size=300)
    with pytest.raises(ConfigError, match="without actions"):
        train_fast_tokenizer([])
    with pytest.raises(ConfigError, match="time_horizon and action_dim"):
        FastTokenizer(tokenizer.bpe).decode([[1]])
    with pytest.raises(ConfigError, match=r"must hold processor_config.json and tokenizer.json"):
        load_fast_tokenizer(str(tmp_path))
    with pytest.raises(ConfigError, match=r"no such folder.*flexor data tokenizer"):
        load_fast_tokenizer(str(tmp_path / "nowhere"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=r"no/such.*Put its processor_config.json and tokenizer.json"):
        load_fast_tokenizer("no/such")
    tokenizer.save(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="Can't read the FAST tokenizer"):
        load_fast_tokenizer(str(tmp_path))
