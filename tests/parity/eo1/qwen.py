"""A tiny Qwen2.5-VL in a folder, made alike by both programs: settings, tokenizer, processor, weights, and no Hub."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from parity.fill import weight

SPECIAL = [
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"),
    *("<|vision_pad|>", "<|image_pad|>", "<|video_pad|>", "<unk>"),
]
WORDS = [
    *("\n", ".", "system", "user", "assistant", "You", "are", "a", "helpful", "physical"),
    *("pick", "up", "the", "red", "cube", "open", "drawer", "put", "block", "on", "green", "blue", "disc"),
]
VOCABULARY = [*SPECIAL, *WORDS]
ROWS = 48  # of the embedding: those of the vocabulary, of EO-1's own tokens, and some more
TEXT = {
    "model_type": "qwen2_5_vl_text",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": ROWS,
    "rms_norm_eps": 1e-6,
    "use_sliding_window": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 1, 2]},
}
VISION = {
    "model_type": "qwen2_5_vl_vision",
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "out_hidden_size": 32,
    "window_size": 112,
    "fullatt_block_indexes": [1],
}
# a turn of each message; LeRobot's processor renders it
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}<|im_end|>\n{% endfor %}"
)


def described(tied: bool) -> dict:
    numbers = {name: VOCABULARY.index(f"<|{name}|>") for name in ("image_pad", "video_pad", "vision_start")}
    return {
        "model_type": "qwen2_5_vl",
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "image_token_id": numbers["image_pad"],
        "video_token_id": numbers["video_pad"],
        "vision_start_token_id": numbers["vision_start"],
        "vision_end_token_id": VOCABULARY.index("<|vision_end|>"),
        "tie_word_embeddings": tied,
        "dtype": "float32",
        "text_config": {**TEXT, "tie_word_embeddings": tied},
        "vision_config": VISION,
    }


def make_qwens(folder: Path) -> None:
    make_qwen(folder / "tiny-qwen")
    make_qwen(folder / "untied-qwen", tied=False)


def make_qwen(folder: Path, tied: bool = True) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / "config.json", described(tied))
    make_tokenizer(folder)
    make_processor(folder)
    weights = {name: torch.from_numpy(weight(name, shape)) for name, shape in shapes(tied).items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def make_processor(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    images = {"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2}
    limits = {"min_pixels": 3136, "max_pixels": 12845056}
    colours = {
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    }
    processor = {"image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2_5_VLProcessor"}
    write(folder / "preprocessor_config.json", {**processor, **images, **limits, **colours})
    videos = {"video_processor_type": "Qwen2VLVideoProcessor"}
    write(folder / "video_preprocessor_config.json", {**videos, **images, **limits, **colours})


def make_tokenizer(folder: Path, special: list[str] = SPECIAL, words: list[str] = WORDS) -> None:
    """Words between blanks; new lines and full stops are words."""
    vocabulary = [*special, *words]
    added = [
        {"id": number, "content": word, "special": True, "normalized": False}
        | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        for number, word in enumerate(vocabulary)
        if word.startswith("<")
    ]
    parts = [
        {"type": "Split", "pattern": {"String": text}, "behavior": behavior, "invert": False}
        for text, behavior in ((" ", "Removed"), ("\n", "Isolated"), (".", "Isolated"))
    ]
    tokenizer = {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": parts},
        "model": {
            "type": "WordLevel",
            "vocab": {word: number for number, word in enumerate(vocabulary)},
            "unk_token": "<unk>",
        },
        **dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder")),
    }
    write(folder / "tokenizer.json", tokenizer)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>",
        "pad_token": "<|endoftext|>",
        "eos_token": "<|endoftext|>",
        "model_max_length": 4096,
    }
    write(folder / "tokenizer_config.json", settings)


def write(file: Path, content: dict) -> None:
    file.write_text(json.dumps(content))


def shapes(tied: bool) -> dict[str, tuple[int, ...]]:
    """Of all weights, in the names of the published files."""
    width, vision = TEXT["hidden_size"], VISION["hidden_size"]
    named: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (ROWS, width),
        "model.norm.weight": (width,),
        "visual.patch_embed.proj.weight": (vision, 3, 2, 14, 14),
        "visual.merger.ln_q.weight": (vision,),
        **linear("visual.merger.mlp.0", 4 * vision, 4 * vision),
        **linear("visual.merger.mlp.2", width, 4 * vision),
    }
    if not tied:
        named["lm_head.weight"] = (ROWS, width)
    for number in range(TEXT["num_hidden_layers"]):
        named |= text_layer(f"model.layers.{number}")
    for number in range(VISION["depth"]):
        named |= vision_block(f"visual.blocks.{number}")
    return named


def linear(name: str, output: int, inputs: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (output, inputs), f"{name}.bias": (output,)}


def text_layer(name: str) -> dict[str, tuple[int, ...]]:
    width, inner = TEXT["hidden_size"], TEXT["intermediate_size"]
    keys = width // TEXT["num_attention_heads"] * TEXT["num_key_value_heads"]
    return {
        **linear(f"{name}.self_attn.q_proj", width, width),
        **linear(f"{name}.self_attn.k_proj", keys, width),
        **linear(f"{name}.self_attn.v_proj", keys, width),
        f"{name}.self_attn.o_proj.weight": (width, width),
        f"{name}.mlp.gate_proj.weight": (inner, width),
        f"{name}.mlp.up_proj.weight": (inner, width),
        f"{name}.mlp.down_proj.weight": (width, inner),
        f"{name}.input_layernorm.weight": (width,),
        f"{name}.post_attention_layernorm.weight": (width,),
    }


def vision_block(name: str) -> dict[str, tuple[int, ...]]:
    width, inner = VISION["hidden_size"], VISION["intermediate_size"]
    return {
        **linear(f"{name}.attn.qkv", 3 * width, width),
        **linear(f"{name}.attn.proj", width, width),
        **linear(f"{name}.mlp.gate_proj", inner, width),
        **linear(f"{name}.mlp.up_proj", inner, width),
        **linear(f"{name}.mlp.down_proj", width, inner),
        f"{name}.norm1.weight": (width,),
        f"{name}.norm2.weight": (width,),
    }
