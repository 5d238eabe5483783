"""Tiny CLIPs in folders, made alike by both programs: settings, tokenizer and weights, and no Hub.

The folders' names have "clip" in them, which LeRobot insists on.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from parity.fill import weight

LETTERS = "abcdefghijklmnopqrstuvwxyz"
MERGES = ["t h", "th e</w>", "c u", "cu b", "cub e</w>", "o p", "e n</w>", "op en</w>", "r e", "re d</w>"]
START, END = "<|startoftext|>", "<|endoftext|>"

VISION = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
TEXT = {"hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 3}
CLIPS = {
    # sizes that differ wherever they can; the second is marked as the first published CLIPs are, whose
    # end of a text is its largest token
    "tiny-clip": {"vision": {**VISION, "image_size": 32, "patch_size": 16}, "text": TEXT},
    "old-clip": {
        "vision": {**VISION, "image_size": 28, "patch_size": 14, "hidden_act": "gelu"},
        "text": {**TEXT, "num_hidden_layers": 1, "eos_token_id": 2, "hidden_act": "gelu"},
    },
}


def vocabulary() -> dict[str, int]:
    merged = [merge.replace(" ", "") for merge in MERGES]
    words = [*LETTERS, *(f"{letter}</w>" for letter in LETTERS), *merged, START, END]
    return {word: number for number, word in enumerate(words)}


def make_clips(folder: Path) -> None:
    for name in CLIPS:
        make_clip(folder / name, **CLIPS[name])


def make_clip(folder: Path, vision: dict, text: dict) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    words = vocabulary()
    ends = {"bos_token_id": words[START], "eos_token_id": words[END], "pad_token_id": words[END]}
    text = {"vocab_size": len(words), "max_position_embeddings": 24, **ends, **text}
    settings = {"model_type": "clip", "projection_dim": 8, "vision_config": vision, "text_config": text}
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "vocab.json").write_text(json.dumps(words))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *MERGES]) + "\n")
    special = {"bos_token": START, "eos_token": END, "pad_token": END, "unk_token": END}
    tokenizer = {"tokenizer_class": "CLIPTokenizer", "model_max_length": 24, **special}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    shapes = {**vision_shapes(**vision), **text_shapes(**text)}
    save_file(
        {name: torch.from_numpy(weight(name, shape)) for name, shape in shapes.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )


def vision_shapes(hidden_size: int, image_size: int, patch_size: int, **rest: object) -> dict[str, tuple]:
    places = (image_size // patch_size) ** 2 + 1
    shapes = {
        "embeddings.class_embedding": (hidden_size,),
        "embeddings.patch_embedding.weight": (hidden_size, 3, patch_size, patch_size),
        "embeddings.position_embedding.weight": (places, hidden_size),
        **norm("pre_layrnorm", hidden_size),
        **norm("post_layernorm", hidden_size),
        **layers(hidden_size, **rest),
    }
    return {f"vision_model.{name}": shape for name, shape in shapes.items()}


def text_shapes(
    hidden_size: int, vocab_size: int, max_position_embeddings: int, **rest: object
) -> dict[str, tuple]:
    shapes = {
        "embeddings.token_embedding.weight": (vocab_size, hidden_size),
        "embeddings.position_embedding.weight": (max_position_embeddings, hidden_size),
        **norm("final_layer_norm", hidden_size),
        **layers(hidden_size, **rest),
    }
    return {f"text_model.{name}": shape for name, shape in shapes.items()}


def layers(dim: int, intermediate_size: int, num_hidden_layers: int, **_: object) -> dict[str, tuple]:
    shapes: dict[str, tuple] = {}
    for number in range(num_hidden_layers):
        prefix = f"encoder.layers.{number}"
        linears = {f"self_attn.{kind}_proj": (dim, dim) for kind in ("q", "k", "v", "out")}
        linears |= {"mlp.fc1": (intermediate_size, dim), "mlp.fc2": (dim, intermediate_size)}
        for name, shape in linears.items():
            shapes |= {f"{prefix}.{name}.weight": shape, f"{prefix}.{name}.bias": shape[:1]}
        shapes |= norm(f"{prefix}.layer_norm1", dim) | norm(f"{prefix}.layer_norm2", dim)
    return shapes


def norm(name: str, dim: int) -> dict[str, tuple]:
    return {f"{name}.weight": (dim,), f"{name}.bias": (dim,)}
