"""Tiny tokenizers in folders, as a Hub repository holds them."""

import json
from pathlib import Path


def make_tokenizer(
    folder: Path, words: str = "pick up the red cube open drawer Task State Action", special_tokens: str = ""
) -> Path:
    """A tokenizer of words: `<pad>` is 0, `<bos>` 2, which comes first, `<unk>` 3; more special tokens follow, then
    words."""
    folder.mkdir(parents=True, exist_ok=True)
    special = {"<pad>": 0, "<eos>": 1, "<bos>": 2, "<unk>": 3}
    special |= {token: number for number, token in enumerate(special_tokens.split(), len(special))}
    vocabulary = special | {
        word: number for number, word in enumerate(dict.fromkeys(words.split()), len(special))
    }
    described = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": number,
                "content": word,
                "special": True,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
            }
            for word, number in special.items()
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [
                {"SpecialToken": {"id": "<bos>", "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
            ],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<bos>": {"id": "<bos>", "ids": [2], "tokens": ["<bos>"]}},
        },
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(described))
    names = {f"{name}_token": token for name, token in zip(("pad", "eos", "bos", "unk"), special)}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 1000, **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
