"""The pi0-FASTs that are compared, what they are shown and told, and tokenizers. Imported by both programs."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from parity.fill import fill
from parity.inputs import STATE, actions, camera, observation
from parity.kinds import FOLDER
from parity.pi0 import small

STEPS = 8  # of acting: two chunks
PARTS = ("ce_loss",)
SKIPPED = 4
WORDS = {**small.WORDS, **{f"<extra{n}>": len(small.WORDS) + n for n in range(340)}}
FIRST = len(WORDS) - 1 - SKIPPED  # the word of FAST token 0
PRINTABLE = 94  # FAST tokens that are a character of one byte
MERGES = ["P P", "PP PP", "Q P", "P O", "PPPP PPPP", "R Q"]  # of characters that stand for small coefficients
MIN_TOKEN = -80
TINY: dict[str, Any] = {
    "chunk_size": 6,
    "n_action_steps": 6,
    "image_resolution": (28, 28),
    "tokenizer_max_length": 80,
    "max_action_tokens": 40,
    "max_decoding_steps": 20,
    "fast_skip_tokens": SKIPPED,
    "validate_action_token_prefix": False,
    "text_tokenizer_name": FOLDER,
    "action_tokenizer_name": f"{FOLDER}/fast",
}
MODES = {"VISUAL": "IDENTITY", "STATE": "MEAN_STD", "ACTION": "MEAN_STD"}
QUANTILES = {"VISUAL": "IDENTITY", "STATE": "QUANTILES", "ACTION": "QUANTILES"}


def case(inputs: dict, **settings: object) -> dict:
    return {"inputs": inputs, "settings": {**TINY, "normalization_mapping": MODES, **settings}}


ONE_CAMERA = STATE | camera("top")
CASES = {
    "default": case(ONE_CAMERA),
    "two_cameras": case(STATE | camera("wrist", 33, 70) | camera("above", 64, 48)),
    "without_cache": case(ONE_CAMERA, use_kv_cache=False),
    "long": case(ONE_CAMERA, max_decoding_steps=30, chunk_size=9, n_action_steps=9),
    "cut_off": case(ONE_CAMERA, max_action_tokens=20),
    "recomputed": case(ONE_CAMERA, gradient_checkpointing=True),
    "quantiles": case(ONE_CAMERA, normalization_mapping=QUANTILES, tokenizer_max_length=60),
    "small": case(ONE_CAMERA, paligemma_variant="gemma_300m"),
    "relative": case(ONE_CAMERA, use_relative_actions=True, n_action_steps=6),
}
CASES["relative"]["acts"] = False  # LeRobot adds the state at the time of each action
# codes above the vocabulary, and below 0
CASES["outliers"] = {**case(ONE_CAMERA, max_action_tokens=120), "acts": False, "action_scale": 40.0}
STORED = {"decoded": 1e-6}


def make_files(folder: Path) -> None:
    """A tokenizer of text with enough words for actions, and a FAST tokenizer."""
    small.make_tokenizer(folder)
    described = json.loads((folder / "tokenizer.json").read_text())
    described["model"]["vocab"] = WORDS
    (folder / "tokenizer.json").write_text(json.dumps(described))
    make_fast(folder / "fast")


def make_fast(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder.mkdir()
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in MERGES)]
    merges = [tuple(merge.split()) for merge in MERGES]
    bpe = Tokenizer(models.BPE(vocab={word: n for n, word in enumerate(words)}, merges=merges))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.save(str(folder / "tokenizer.json"))
    settings = {"scale": 10, "vocab_size": 300, "min_token": MIN_TOKEN}
    (folder / "processor_config.json").write_text(json.dumps(settings))


def training_batch(case: dict) -> dict[str, np.ndarray]:
    """Observations and actions. Padded ones count like all others."""
    batch = {**observation(case["robot"], "training"), **actions(case["settings"]["chunk_size"], (1, 4))}
    return {**batch, "action": batch["action"] * np.float32(case.get("action_scale", 1))}


def sequences(tokens: list[int]) -> list[list[int]]:
    """Tokens as a network may write them: those of a chunk, with unknown ones, only such, and too many."""
    return [tokens, [5000, *tokens[:7], 9999, *tokens[7:]], [5000], tokens * 2]


def fill_policy(policy: Any) -> str:
    """The head's rows are 0 but for words that stand for a character, and the end: only these are written."""
    digest = fill(policy)
    head = policy.state_dict()["model.paligemma_with_expert.paligemma.lm_head.weight"]
    mask = torch.zeros(len(head), 1)
    mask[FIRST - PRINTABLE + 1 : FIRST + 1] = mask[WORDS["|"]] = 1
    head.mul_(mask)
    return digest


def forgotten(step: Any, folder: Path) -> Any:
    """Inside, the defaults of the step that writes actions are those of the cases: LeRobot does not save them."""
    *first, _, _ = step.__init__.__defaults__
    return patch.object(step.__init__, "__defaults__", (*first, SKIPPED, str(folder)))


def recorded(batch: dict) -> list:
    """The words that are learnt."""
    return [batch[name].int().tolist() for name in ("action.tokens", "action.token_mask")]
