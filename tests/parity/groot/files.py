"""Tiny base models of GR00T in folders, made alike by both programs: settings, tokenizer, processor, weights."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from parity.fill import uniform, weight

BACKBONE = "tiny-qwen3"
SPECIAL = [
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"),
    *("<|vision_pad|>", "<|image_pad|>", "<|video_pad|>", "<unk>"),
]
# LeRobot's results depend on padding, so all tasks here have as many words
WORDS = ["\n", "user", "pick up", "red cube", "open", "drawer", "perform", "task", "put", "disc on green"]
VOCABULARY = [*SPECIAL, *WORDS]
ROWS = 32  # of the embedding
TEXT = {
    "model_type": "qwen3_vl_text",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": ROWS,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 5e6,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
VISION = {
    "model_type": "qwen3_vl_vision",
    "depth": 3,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "out_hidden_size": 32,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 25,
    "deepstack_visual_indexes": [0, 1, 2],
}
LAYERS = 4  # of the text model that GR00T uses
DIT = {"num_layers": 6, "num_attention_heads": 4, "attention_head_dim": 6, "output_dim": 20}
HEAD = {
    "model_type": "Gr00tN1d7",
    "architectures": ["Gr00tN1d7"],
    "dtype": "float32",
    "model_dtype": "float32",
    "backbone_model_type": "qwen",
    "select_layer": LAYERS,
    "backbone_embedding_dim": 32,
    "hidden_size": 20,
    "input_embedding_dim": 24,
    "max_state_dim": 8,
    "max_action_dim": 7,
    "action_horizon": 10,
    "max_seq_len": 16,
    "max_num_embodiments": 11,
    "state_dropout_prob": 0.3,
    "diffusion_model_cfg": {
        "positional_embeddings": None,
        "norm_type": "ada_norm",
        "dropout": 0.0,
        "final_dropout": True,
        "interleave_self_attention": True,
        **DIT,
    },
    "vl_self_attention_cfg": {
        "positional_embeddings": None,
        "num_layers": 2,
        "num_attention_heads": 4,
        "attention_head_dim": 8,
        "dropout": 0.0,
        "final_dropout": True,
    },
}
PLAIN = {
    **HEAD,
    "use_alternate_vl_dit": False,
    "use_vlln": False,
    "add_pos_embed": False,
    "state_dropout_prob": 0.0,
    "vl_self_attention_cfg": {**HEAD["vl_self_attention_cfg"], "num_layers": 0},
}
# a turn of each message; LeRobot's processor renders it
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}<|im_end|>\n{% endfor %}"
)


def make_files(folder: Path) -> None:
    make_backbone(folder / BACKBONE)
    bases = {"tiny-groot": HEAD, "plain-groot": PLAIN, "raw-groot": HEAD, "relative-groot": HEAD}
    for name, head in bases.items():
        make_base(folder / name, head, folder / BACKBONE)
    make_raw(folder / "raw-groot", relative=False)
    make_raw(folder / "relative-groot", relative=True)


GROUPS = {"joints": slice(0, 2), "gripper": slice(2, 3)}
STATES = {"joints": slice(0, 2), "gripper": slice(2, 3), "more": slice(3, 4)}
TAG = "simpler_env_google"


def make_raw(folder: Path, relative: bool) -> None:
    """The files beside NVIDIA's weights."""
    names = ("min", "max", "mean", "std", "q01", "q99")
    shift = {"min": -2.0, "max": 2.0, "mean": 0.0, "std": 1.0, "q01": -1.5, "q99": 1.6}

    def statistics(modality: str, groups: dict, steps: int = 0) -> dict:
        out: dict = {}
        for key, place in groups.items():
            shape = (steps, place.stop - place.start) if steps else (place.stop - place.start,)
            for name in names:
                noise = uniform(f"{modality}/{key}/{name}", shape, -0.3, 0.3)
                out.setdefault(key, {})[name] = (noise + shift[name]).tolist()
        return out

    stats = {"state": statistics("state", STATES), "action": statistics("action", GROUPS)}
    if relative:
        stats["relative_action"] = statistics("relative", {"joints": GROUPS["joints"]}, steps=8)
    reps = ["RELATIVE" if relative else "ABSOLUTE", "ABSOLUTE"]
    configs = [{"rep": rep, "type": "NON_EEF", "format": "DEFAULT", "state_key": None} for rep in reps]
    modalities = {
        "video": {"delta_indices": [0], "modality_keys": ["left", "wrist_image"]},
        "state": {"delta_indices": [0], "modality_keys": [*STATES]},
        "action": {"delta_indices": [*range(8)], "modality_keys": [*GROUPS], "action_configs": configs},
    }
    kwargs = {
        "modality_configs": {TAG: modalities},
        "use_percentiles": not relative,
        "use_relative_action": relative,
        "max_action_horizon": 10,
        "formalize_language": not relative,
        "image_target_size": [256, 256],
        "image_crop_size": [244, 244],
        "shortest_image_edge": 256,
        "crop_fraction": 0.95,
        "use_albumentations": True,
        "letter_box_transform": relative,
    }
    write(folder / "processor_config.json", {"processor_kwargs": kwargs})
    write(folder / "statistics.json", {TAG: stats})
    write(folder / "embodiment_id.json", {TAG: 3, "new_embodiment": 7})


def make_base(folder: Path, head: dict, backbone: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / "config.json", {**head, "model_name": str(backbone)})
    weights = {name: torch.from_numpy(weight(name, shape)) for name, shape in shapes(head).items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def make_backbone(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    numbers = {name: VOCABULARY.index(f"<|{name}|>") for name in ("image_pad", "video_pad", "vision_start")}
    config = {
        "model_type": "qwen3_vl",
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "image_token_id": numbers["image_pad"],
        "video_token_id": numbers["video_pad"],
        "vision_start_token_id": numbers["vision_start"],
        "vision_end_token_id": VOCABULARY.index("<|vision_end|>"),
        "tie_word_embeddings": True,
        "dtype": "float32",
        "text_config": {**TEXT, "tie_word_embeddings": True},
        "vision_config": VISION,
    }
    write(folder / "config.json", config)
    make_tokenizer(folder)
    images = {"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2}
    limits = {"size": {"shortest_edge": 65536, "longest_edge": 16777216}}
    colours = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
    processor = {"image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen3VLProcessor"}
    write(folder / "preprocessor_config.json", {**processor, **images, **limits, **colours})
    videos = {"video_processor_type": "Qwen3VLVideoProcessor"}
    write(folder / "video_preprocessor_config.json", {**videos, **images, **limits, **colours})


def make_tokenizer(folder: Path) -> None:
    """ "the" is between words; new lines are words."""
    added = [
        {"id": number, "content": word, "special": True, "normalized": False}
        | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        for number, word in enumerate(SPECIAL)
    ]
    parts = [
        {"type": "Split", "pattern": {"String": text}, "behavior": behavior, "invert": False}
        for text, behavior in ((" the ", "Removed"), ("\n", "Isolated"))
    ]
    tokenizer = {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": parts},
        "model": {
            "type": "WordLevel",
            "vocab": {word: number for number, word in enumerate(VOCABULARY)},
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
        "chat_template": TEMPLATE,
    }
    write(folder / "tokenizer_config.json", settings)


def write(file: Path, content: dict) -> None:
    file.write_text(json.dumps(content))


def shapes(head: dict) -> dict[str, tuple[int, ...]]:
    """Of all weights, in the names of a base model."""
    return {
        **{f"backbone.model.model.{name}": shape for name, shape in backbone_shapes().items()},
        **{f"action_head.{name}": shape for name, shape in head_shapes(head).items()},
    }


def backbone_shapes() -> dict[str, tuple[int, ...]]:
    width, vision = TEXT["hidden_size"], VISION["hidden_size"]
    named = {
        "language_model.embed_tokens.weight": (ROWS, width),
        "language_model.norm.weight": (width,),
        "visual.patch_embed.proj.weight": (vision, 3, 2, 16, 16),
        "visual.patch_embed.proj.bias": (vision,),
        "visual.pos_embed.weight": (VISION["num_position_embeddings"], vision),
        **merger("visual.merger", vision),
    }
    for number in range(len(VISION["deepstack_visual_indexes"])):
        named |= merger(f"visual.deepstack_merger_list.{number}", 4 * vision)
    for number in range(LAYERS):
        named |= text_layer(f"language_model.layers.{number}")
    for number in range(VISION["depth"]):
        named |= vision_block(f"visual.blocks.{number}")
    return named


def head_shapes(head: dict) -> dict[str, tuple[int, ...]]:
    dit, vl = head["diffusion_model_cfg"], head["vl_self_attention_cfg"]
    width, memory, hidden = head["input_embedding_dim"], head["backbone_embedding_dim"], head["hidden_size"]
    robots, action = head["max_num_embodiments"], head["max_action_dim"]
    named = {
        **linear("model.timestep_encoder.timestep_embedder.linear_1", width, 256),
        **linear("model.timestep_encoder.timestep_embedder.linear_2", width, width),
        **linear("model.proj_out_1", 2 * width, width),
        **linear("model.proj_out_2", dit["output_dim"], width),
        **by_robot("state_encoder.layer1", robots, head["max_state_dim"], hidden),
        **by_robot("state_encoder.layer2", robots, hidden, width),
        **by_robot("action_encoder.W1", robots, action, width),
        **by_robot("action_encoder.W2", robots, 2 * width, width),
        **by_robot("action_encoder.W3", robots, width, width),
        **by_robot("action_decoder.layer1", robots, hidden, hidden),
        **by_robot("action_decoder.layer2", robots, hidden, action),
    }
    if head.get("use_vlln", True):
        named |= norm("vlln", memory)
    if head.get("add_pos_embed", True):
        named["position_embedding.weight"] = (head["max_seq_len"], width)
    for number in range(dit["num_layers"]):
        name = f"model.transformer_blocks.{number}"
        named |= linear(f"{name}.norm1.linear", 2 * width, width)
        named |= attention_block(name, width, width if number % 2 else memory)
    for number in range(vl["num_layers"]):
        name = f"vl_self_attention.transformer_blocks.{number}"
        named |= norm(f"{name}.norm1", memory) | norm(f"{name}.norm3", memory)
        named |= attention_block(name, memory, memory)
    return named


def linear(name: str, output: int, inputs: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (output, inputs), f"{name}.bias": (output,)}


def norm(name: str, width: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def by_robot(name: str, robots: int, inputs: int, output: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.W": (robots, inputs, output), f"{name}.b": (robots, output)}


def attention_block(name: str, width: int, memory: int) -> dict[str, tuple[int, ...]]:
    return {
        **linear(f"{name}.attn1.to_q", width, width),
        **linear(f"{name}.attn1.to_k", width, memory),
        **linear(f"{name}.attn1.to_v", width, memory),
        **linear(f"{name}.attn1.to_out.0", width, width),
        **linear(f"{name}.ff.net.0.proj", 4 * width, width),
        **linear(f"{name}.ff.net.2", width, 4 * width),
    }


def merger(name: str, normed: int) -> dict[str, tuple[int, ...]]:
    merged = 4 * VISION["hidden_size"]
    return {
        **norm(f"{name}.norm", normed),
        **linear(f"{name}.linear_fc1", merged, merged),
        **linear(f"{name}.linear_fc2", TEXT["hidden_size"], merged),
    }


def text_layer(name: str) -> dict[str, tuple[int, ...]]:
    width, inner, head = TEXT["hidden_size"], TEXT["intermediate_size"], TEXT["head_dim"]
    queries, keys = head * TEXT["num_attention_heads"], head * TEXT["num_key_value_heads"]
    return {
        f"{name}.self_attn.q_proj.weight": (queries, width),
        f"{name}.self_attn.k_proj.weight": (keys, width),
        f"{name}.self_attn.v_proj.weight": (keys, width),
        f"{name}.self_attn.o_proj.weight": (width, queries),
        f"{name}.self_attn.q_norm.weight": (head,),
        f"{name}.self_attn.k_norm.weight": (head,),
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
        **linear(f"{name}.mlp.linear_fc1", inner, width),
        **linear(f"{name}.mlp.linear_fc2", width, inner),
        **norm(f"{name}.norm1", width),
        **norm(f"{name}.norm2", width),
    }
