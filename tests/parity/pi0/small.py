"""Sizes that both programs give pi0 and pi05 for a comparison, and a tokenizer. Imported by both programs."""

import json
import string
from pathlib import Path

WIDTHS = {"gemma_2b": 32, "gemma_300m": 16}
GEMMA = {"depth": 3, "mlp": 24, "heads": 8, "kv_heads": 1, "head_dim": 6}  # LeRobot's attention has 8 heads
VISION = {"width": 24, "depth": 2, "mlp": 40, "heads": 2}
SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>"]
WORDS = {
    word: n for n, word in enumerate([*SPECIAL, *string.ascii_letters, *string.digits, *" \n,;:-_.()|<>"])
}


def make_tokenizer(folder: Path) -> None:
    """A token per character, after one for the beginning."""
    folder.mkdir(parents=True, exist_ok=True)
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    start = {"SpecialToken": {"id": "<bos>", "type_id": 0}}
    described = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": WORDS[word], "content": word, **plain} for word in SPECIAL],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"Regex": r"[\s\S]"},
            "behavior": "Isolated",
            "invert": False,
        },
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [start, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [start, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<bos>": {"id": "<bos>", "ids": [WORDS["<bos>"]], "tokens": ["<bos>"]}},
        },
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": WORDS, "unk_token": "<unk>"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(described))
    tokens = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 10_000, **tokens}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
