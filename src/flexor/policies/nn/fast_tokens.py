"""FAST: chunks of actions as a few tokens (Pertsch et al. 2025, https://arxiv.org/abs/2501.09747).

The cosine transform of each action over the chunk concentrates it in few coefficients. They are rounded, ordered from
the slowest motion of all actions to the fastest, mapped to characters, and compressed by byte pair encoding.
Files are those of `physical-intelligence/fast`, and `save` names the code that reads them elsewhere.
"""

from __future__ import annotations

import functools
import importlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flexor.core.errors import ConfigError
from flexor.core.foreign_files import read_json_object
from flexor.core.model_files import ModelFiles

SETTINGS, VOCABULARY = "processor_config.json", "tokenizer.json"
INNER = "bpe_tokenizer"  # where `transformers` 5 looks for the vocabulary
CODE = "lerobot/fast-action-tokenizer--processing_action_tokenizer.UniversalActionProcessor"  # that reads our files
LAST_CODE = 0xD7FF  # the characters after it are half of others and can't be encoded
BYTES = 256  # the vocabulary holds every byte, so that every chunk can be encoded
INVALID = "\ufffd"  # what bytes become that are not text


@dataclass(frozen=True)
class Decoded:
    """Actions [N, H, A] of N token sequences, and the problem of each, "" for none."""

    actions: np.ndarray
    problems: list[str]


@dataclass(frozen=True)
class FastTokenizer:
    """Encodes normalised chunks of actions [N, H, A] as token sequences, and decodes them."""

    bpe: Any  # a tokenizers.Tokenizer
    scale: float = 10.0
    """A coefficient is rounded to a multiple of 1 / scale."""
    vocab_size: int = 1024
    """Number of tokens. The rounded coefficients of usual actions are in a range that is not wider."""
    min_token: int = 0
    """The smallest rounded coefficient: it becomes the character 0."""
    time_horizon: int | None = None
    """Steps of a chunk, if the tokenizer was trained on chunks of one size."""
    action_dim: int | None = None
    """Values of an action, likewise."""

    def encode(self, chunks: np.ndarray) -> list[list[int]]:
        """The tokens of each chunk of [N, H, A]."""
        if not np.isfinite(chunks).all():
            raise ConfigError("Actions that are NaN or infinite can't be encoded as tokens.")
        # as in physical-intelligence/fast: codes above the range are kept, and take more tokens
        codes = (self._rounded(chunks) - self.min_token).clip(0, LAST_CODE)
        return [encoding.ids for encoding in self.bpe.encode_batch([_text(row) for row in codes])]

    def outside(self, chunks: np.ndarray) -> int:
        """How many coefficients of [N, H, A] are outside the range: those below it are clipped."""
        codes = self._rounded(chunks) - self.min_token
        return int(np.count_nonzero((codes < 0) | (codes > self.vocab_size)))

    def decode(
        self, tokens: Sequence[Sequence[int]], time_horizon: int | None = None, action_dim: int | None = None
    ) -> Decoded:
        """The chunks of token sequences. A network may predict any sequence, so invalid ones are mended.

        Tokens that the vocabulary does not have are left out, and a sequence ends at bytes that are no character.
        Missing coefficients, which are those of the fastest motions, are 0, and surplus ones are dropped.
        """
        steps, values = time_horizon or self.time_horizon, action_dim or self.action_dim
        if steps is None or values is None:
            raise ConfigError(
                "The tokenizer does not say what size its chunks are: give time_horizon and action_dim to decode."
            )
        coefficients = np.zeros((len(tokens), steps * values))
        problems = []
        for row, sequence in zip(coefficients, tokens):
            codes, wrong = self._codes([int(token) for token in sequence])
            used = codes[: len(row)]
            row[: len(used)] = used
            if len(codes) != len(row):
                wrong.append(f"{len(codes)} coefficients instead of {len(row)}")
            problems.append("; ".join(wrong))
        transformed = coefficients.reshape(-1, steps, values) / self.scale
        actions = np.einsum("kn,bka->bna", _cosines(steps), transformed)
        return Decoded(actions.astype(np.float32), problems)

    def _codes(self, tokens: list[int]) -> tuple[np.ndarray, list[str]]:
        """The rounded coefficients of a sequence, and its problems."""
        size = self.bpe.get_vocab_size()
        problems = [
            f"token {token} at {place} is not one of {size}"
            for place, token in enumerate(tokens)
            if not 0 <= token < size
        ][:1]
        text = self.bpe.decode([token for token in tokens if 0 <= token < size], skip_special_tokens=False)
        if INVALID in text:
            end = text.index(INVALID)
            text, problems = text[:end], [*problems, f"coefficient {end} is not valid"]
        codes = np.array([ord(character) for character in text], dtype=np.int64)
        if above := np.flatnonzero(codes > self.vocab_size).tolist():
            problems.append(
                f"coefficient {above[0]} is {codes[above[0]]}, above the tokenizer's range of {self.vocab_size}"
            )
        return codes + self.min_token, problems

    def _rounded(self, chunks: np.ndarray) -> np.ndarray:
        """Rounded coefficients [N, H * A]."""
        rounded = np.rint(cosine_transform(chunks) * self.scale)
        limit = 2.0**31  # an outlier must not overflow
        return rounded.clip(-limit, limit).astype(np.int64).reshape(len(chunks), -1)

    def save(self, folder: Path) -> None:
        """Write the files of `physical-intelligence/fast`, but for the code that reads them, which is named."""
        settings = {
            "processor_class": "UniversalActionProcessor",
            "auto_map": {"AutoProcessor": CODE},
            "scale": self.scale,
            "vocab_size": self.vocab_size,
            "min_token": self.min_token,
            "time_horizon": self.time_horizon,
            "action_dim": self.action_dim,
        }
        described = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "processor_class": "UniversalActionProcessor",
            "clean_up_tokenization_spaces": False,
        }
        for place in (folder, folder / INNER):  # older versions look in the folder itself
            place.mkdir(parents=True, exist_ok=True)
            (place / "tokenizer_config.json").write_text(json.dumps(described, indent=2))
            self.bpe.save(str(place / VOCABULARY))
        (folder / SETTINGS).write_text(json.dumps(settings, indent=2))


def cosine_transform(chunks: np.ndarray) -> np.ndarray:
    """The coefficients [N, H, A] of chunks [N, H, A], the constant part first: the orthonormal DCT-II over time."""
    return np.einsum("kn,bna->bka", _cosines(chunks.shape[1]), np.asarray(chunks, np.float64))


@functools.cache
def _cosines(steps: int) -> np.ndarray:
    """[coefficients, steps], orthonormal: its transpose is its inverse."""
    frequency, place = np.arange(steps)[:, None], np.arange(steps)
    waves = np.sqrt(2 / steps) * np.cos(np.pi / steps * (place + 0.5) * frequency)
    waves[0] /= np.sqrt(2)
    waves.flags.writeable = False
    return waves


def _text(codes: np.ndarray) -> str:
    return "".join(map(chr, codes.tolist()))


def train_fast_tokenizer(
    chunks: Iterable[np.ndarray], vocab_size: int = 1024, scale: float = 10.0
) -> FastTokenizer:
    """A tokenizer for chunks like these, normalised, which come in parts [n, H, A]."""
    library = _tokenizers()
    parts, shape = [], None
    untrained = FastTokenizer(None, scale, vocab_size)
    for part in chunks:
        shape = part.shape[1:]
        parts.append(untrained._rounded(part).astype(np.int32))
    if shape is None:
        raise ConfigError("A tokenizer can't be trained without actions.")
    low, high = min(int(part.min()) for part in parts), max(int(part.max()) for part in parts)
    if vocab_size < BYTES or high - low > vocab_size:
        raise ConfigError(
            f"vocab_size={vocab_size} is too small: it must be at least {BYTES}, and the rounded coefficients of "
            f"these actions take {high - low + 1} values. Use --vocab_size={max(BYTES, 2 * (high - low))}, or a "
            "smaller --scale."
        )
    bpe = library.Tokenizer(library.models.BPE())
    # no expression that splits: words and numbers mean nothing in characters that stand for coefficients
    bpe.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        show_progress=False,
        initial_alphabet=sorted(library.pre_tokenizers.ByteLevel.alphabet()),
        max_token_length=10_000,
    )
    bpe.train_from_iterator(_texts(parts, low), trainer)
    return FastTokenizer(bpe, scale, vocab_size, low, *shape)


def _texts(parts: Sequence[np.ndarray], low: int) -> Iterator[str]:
    return (_text(row) for part in parts for row in part - low)


def load_fast_tokenizer(name: str) -> FastTokenizer:
    """A tokenizer in a local folder or a Hub repository."""
    advice = (
        f" Put its {SETTINGS} and {VOCABULARY} into a folder and use its path, or train a tokenizer on your dataset "
        "with `flexor data tokenizer`."
    )
    folder = ModelFiles(name, f"The FAST tokenizer {name}", advice).folder(["*.json"])
    vocabulary = next(
        (place / VOCABULARY for place in (folder, folder / INNER) if (place / VOCABULARY).is_file()), None
    )
    if vocabulary is None or not (folder / SETTINGS).is_file():
        raise ConfigError(f"{folder} is not a FAST tokenizer: it must hold {SETTINGS} and {VOCABULARY}.")
    try:
        settings = read_json_object(folder / SETTINGS)
        sizes = {key: settings.get(key) for key in ("time_horizon", "action_dim")}
        bpe = _tokenizers().Tokenizer.from_file(str(vocabulary))
        return FastTokenizer(
            bpe, float(settings["scale"]), int(settings["vocab_size"]), int(settings["min_token"]), **sizes
        )
    except ConfigError:
        raise
    except Exception as error:  # the library raises plain exceptions
        raise ConfigError(f"Can't read the FAST tokenizer in {folder}: {error!r}") from error


def _tokenizers() -> Any:
    try:
        return importlib.import_module("tokenizers")
    except ImportError as error:
        raise ConfigError(
            f"FAST requires the package tokenizers ({error}): pip install 'flexor[vla]'."
        ) from error
