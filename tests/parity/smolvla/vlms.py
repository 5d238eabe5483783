"""A tiny SmolVLM in a folder, made alike by both programs: settings, tokenizer, processor and weights, and no Hub."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from parity.fill import weight

SPECIAL = ["<pad>", "<unk>", "<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
WORDS = ["pick", "up", "the", "red", "cube", "open", "drawer", "put", "block", "on", "green", "blue", "disc"]
VOCABULARY = [*SPECIAL, "\n", *WORDS]

VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}
TEXT = {
    "model_type": "llama",
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
}
SHUFFLE = 2


def make_vlms(folder: Path) -> None:
    make_vlm(folder / "tiny-vlm")
    make_vlm(folder / "six-patches-vlm", image_size=48)


def make_vlm(folder: Path, image_size: int = VISION["image_size"]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    vision = {**VISION, "image_size": image_size}
    text = {**TEXT, "vocab_size": len(VOCABULARY), "pad_token_id": 0}
    settings = {
        "model_type": "smolvlm",
        "scale_factor": SHUFFLE,
        "image_token_id": VOCABULARY.index("<image>"),
        "pad_token_id": 0,
        "vision_config": vision,
        "text_config": text,
    }
    write(folder / "config.json", settings)
    make_tokenizer(folder)
    write(folder / "preprocessor_config.json", {"image_processor_type": "SmolVLMImageProcessor"})
    write(folder / "video_preprocessor_config.json", {"video_processor_type": "SmolVLMVideoProcessor"})
    write(folder / "processor_config.json", {"processor_class": "SmolVLMProcessor", "image_seq_len": 4})
    save_file(
        {name: torch.from_numpy(weight(name, shape)) for name, shape in shapes(text, vision).items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )


def make_tokenizer(folder: Path) -> None:
    """Words between blanks, and new lines."""
    added = [
        {"id": number, "content": word, "special": True, "normalized": False}
        | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        for number, word in enumerate(SPECIAL)
    ]
    blanks = {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed", "invert": False}
    lines = {"type": "Split", "pattern": {"String": "\n"}, "behavior": "Isolated", "invert": False}
    tokenizer = {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [blanks, lines]},
        "model": {
            "type": "WordLevel",
            "vocab": {word: number for number, word in enumerate(VOCABULARY)},
            "unk_token": "<unk>",
        },
        **dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder")),
    }
    write(folder / "tokenizer.json", tokenizer)
    names = {"image_token": "<image>", "fake_image_token": "<fake_token_around_image>"}
    names |= {"global_image_token": "<global-img>", "end_of_utterance_token": "<end_of_utterance>"}
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>",
        "pad_token": "<pad>",
        "model_max_length": 64,
        "extra_special_tokens": names,
    }
    write(folder / "tokenizer_config.json", described)


def write(file: Path, content: dict) -> None:
    file.write_text(json.dumps(content))


def shapes(text: dict, sizes: dict) -> dict[str, tuple]:
    """Of all weights, in the names of the published files."""
    wide, vision = text["hidden_size"], sizes["hidden_size"]
    named = {
        "model.connector.modality_projection.proj.weight": (wide, vision * SHUFFLE**2),
        "model.text_model.embed_tokens.weight": (text["vocab_size"], wide),
        "model.text_model.norm.weight": (wide,),
        "lm_head.weight": (text["vocab_size"], wide),
    }
    for number in range(text["num_hidden_layers"]):
        named |= {f"model.text_model.layers.{number}.{k}": v for k, v in text_layer(text).items()}
    patches = (sizes["image_size"] // sizes["patch_size"]) ** 2
    seeing = {
        "embeddings.patch_embedding.weight": (vision, 3, VISION["patch_size"], VISION["patch_size"]),
        "embeddings.patch_embedding.bias": (vision,),
        "embeddings.position_embedding.weight": (patches, vision),
        "post_layernorm.weight": (vision,),
        "post_layernorm.bias": (vision,),
    }
    for number in range(VISION["num_hidden_layers"]):
        seeing |= {f"encoder.layers.{number}.{k}": v for k, v in vision_layer().items()}
    return named | {f"model.vision_model.{name}": shape for name, shape in seeing.items()}


def text_layer(text: dict) -> dict[str, tuple]:
    wide, inner = text["hidden_size"], text["intermediate_size"]
    queries = text["num_attention_heads"] * text["head_dim"]
    keys = text["num_key_value_heads"] * text["head_dim"]
    named = {"q": (queries, wide), "k": (keys, wide), "v": (keys, wide), "o": (wide, queries)}
    linear = {f"self_attn.{name}_proj.weight": shape for name, shape in named.items()}
    linear |= {"mlp.gate_proj.weight": (inner, wide), "mlp.up_proj.weight": (inner, wide)}
    linear |= {"mlp.down_proj.weight": (wide, inner)}
    return linear | {f"{name}_layernorm.weight": (wide,) for name in ("input", "post_attention")}


def vision_layer() -> dict[str, tuple]:
    wide, inner = VISION["hidden_size"], VISION["intermediate_size"]
    named = {f"self_attn.{name}_proj": (wide, wide) for name in ("k", "v", "q", "out")}
    named |= {
        "mlp.fc1": (inner, wide),
        "mlp.fc2": (wide, inner),
        "layer_norm1": (wide,),
        "layer_norm2": (wide,),
    }
    out = {}
    for name, shape in named.items():
        out |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    return out
