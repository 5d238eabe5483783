"""Tiny WALL-Xs in folders, made alike by both programs: settings, tokenizer, processor, weights, and no Hub."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from parity.eo1.qwen import (
    SPECIAL,
    TEXT,
    VISION,
    linear,
    make_processor,
    make_tokenizer,
    text_layer,
    vision_block,
    write,
)
from parity.fill import weight

WORDS = [
    *("\n", ".", "system", "user", "assistant", "You", "are", "a", "helpful", "Observation:", "Instruction:"),
    *(
        "Predict",
        "the",
        "next",
        "action",
        "in",
        "robot",
        "Proprioception:",
        "Execute",
        "view:",
        "top",
        "front",
    ),
    *("wrist", "above", "left", "side", "pick", "up", "red", "cube", "open", "drawer", "put", "block", "on"),
]
FAST_TOKENS = 300  # numbered last
ADDED = ["<|propri|>", "<|action|>", *(f"<|action_token_{n}|>" for n in range(FAST_TOKENS))]
VOCABULARY = [*SPECIAL, *WORDS, *ADDED]
ACTION = {"arm": 3, "gripper": 2}
STATE = {"arm": 4, "base": 2}


def experts(*sizes: tuple[int, int]) -> dict[str, Any]:
    """Channels that each expert reads, and those inside of it."""
    return {
        "mlp_moe": True,
        "num_experts": len(sizes),
        "dim_inputs": [width for width, _ in sizes],
        "experts": [
            {"hidden_size": width, "intermediate_size": inner, "hidden_act": "silu"} for width, inner in sizes
        ],
    }


LAYOUTS: dict[str, dict[str, Any]] = {
    "tiny-wall": experts((32, 48), (32, 24)),
    "narrow-wall": {**experts((32, 48), (24, 40), (16, 8)), "tie_word_embeddings": False},
    "dense-wall": {"mlp_moe": False, "num_experts": 2, "nested": True},
}


def described(layout: str) -> dict[str, Any]:
    """The config.json: flat, as the published one, or nested, as `transformers` writes it today."""
    settings = {"tie_word_embeddings": True, **LAYOUTS[layout]}
    numbers = {name: VOCABULARY.index(f"<|{name}|>") for name in ("image_pad", "video_pad", "vision_start")}
    common = {
        "model_type": "qwen2_5_vl",
        "image_token_id": numbers["image_pad"],
        "video_token_id": numbers["video_pad"],
        "vision_start_token_id": numbers["vision_start"],
        "vision_end_token_id": VOCABULARY.index("<|vision_end|>"),
        "tie_word_embeddings": settings["tie_word_embeddings"],
        "vision_config": {**VISION, "tokens_per_second": 2},
        "agent_pos_config": STATE,
    }
    text = {**TEXT, "vocab_size": 100, "dof_config": ACTION, **settings}  # the tokenizer has more
    if text.pop("nested", False):
        return {**common, "text_config": text}
    rope = text.pop("rope_parameters")
    text.pop("model_type")
    old = {
        "rope_theta": rope["rope_theta"],
        "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]},
    }
    return {**text, **old, **common}


def make_walls(folder: Path) -> None:
    for layout in LAYOUTS:
        make_wall(folder / layout, layout)


def make_wall(folder: Path, layout: str = "tiny-wall") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / "config.json", described(layout))
    make_tokenizer(folder, SPECIAL, [*WORDS, *ADDED])
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>",
        "pad_token": "<|endoftext|>",
        "eos_token": "<|im_end|>",
        "model_max_length": 4096,
        "action_token_start_index": VOCABULARY.index("<|action_token_0|>"),
        "action_token_vocab_size": FAST_TOKENS,
    }
    write(folder / "tokenizer_config.json", settings)
    make_processor(folder)
    weights = {name: torch.from_numpy(weight(name, shape)) for name, shape in shapes(layout).items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def shapes(layout: str) -> dict[str, tuple[int, ...]]:
    """Of all weights, in the names of the published file."""
    width, vision, settings = TEXT["hidden_size"], VISION["hidden_size"], LAYOUTS[layout]
    head = "action_preprocessor"
    named: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (len(VOCABULARY), width),
        "model.norm.weight": (width,),
        "visual.patch_embed.proj.weight": (vision, 3, 2, 14, 14),
        "visual.merger.ln_q.weight": (vision,),
        **linear("visual.merger.mlp.0", 4 * vision, 4 * vision),
        **linear("visual.merger.mlp.2", width, 4 * vision),
        f"{head}.w1.weight": (width, 2 * sum(ACTION.values())),
        f"{head}.w2.weight": (width, 2 * width),
        f"{head}.w3.weight": (width, width),
        f"{head}.action_proj_back.weight": (sum(ACTION.values()), width),
        f"{head}.propri_proj.weight": (width, 2 * sum(STATE.values())),
        f"{head}.normalizer_action.min.arm": (3,),  # of the published training, which nothing here uses
    }
    if not settings.get("tie_word_embeddings", True):
        named["lm_head.weight"] = (len(VOCABULARY), width)
    for number in range(TEXT["num_hidden_layers"]):
        named |= layer(f"model.layers.{number}", settings)
    for number in range(VISION["depth"]):
        named |= vision_block(f"visual.blocks.{number}")
    return named


def layer(name: str, settings: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    plain = text_layer(name)
    if not settings["mlp_moe"]:
        return plain
    named = {key: shape for key, shape in plain.items() if ".mlp." not in key}
    for number, expert in enumerate(settings["experts"]):
        width, inner = expert["hidden_size"], expert["intermediate_size"]
        inside = f"{name}.moe.experts.{number}"
        named |= {f"{inside}.{part}_proj.weight": (inner, width) for part in ("gate", "up")}
        named[f"{inside}.down_proj.weight"] = (width, inner)
    return named
