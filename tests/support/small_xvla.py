"""An X-VLA small enough for seconds."""

import json
from pathlib import Path
from typing import Any

from flexor.policies.features import Kind, PolicyFeature
from flexor.policies.xvla.config import XVLAConfig
from support.tokenizers import make_tokenizer

FLORENCE = {
    "vision_config": {
        "embed_dim": [8, 16, 16, 32],
        "depths": [1, 1, 1, 1],
        "num_heads": [1, 2, 2, 4],
        "num_groups": [1, 2, 2, 4],
        "window_size": 4,
        "projection_dim": 16,
        "drop_path_rate": 0.0,
    },
    "text_config": {
        "d_model": 16,
        "encoder_layers": 2,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 32,
        "vocab_size": 100,
        "max_position_embeddings": 64,
        "dropout": 0.0,
    },
}
TINY: dict[str, Any] = {
    "florence_config": FLORENCE,
    "action_mode": "auto",
    "chunk_size": 8,
    "n_action_steps": 4,
    "hidden_size": 16,
    "depth": 2,
    "num_heads": 2,
    "mlp_ratio": 2.0,
    "num_domains": 3,
    "len_soft_prompts": 2,
    "dim_time": 6,
    "max_len_seq": 64,
    "max_state_dim": 6,
    "max_action_dim": 5,
    "num_denoising_steps": 3,
    "resize_imgs_with_padding": (32, 32),
    "tokenizer_max_length": 12,
    "dropout": 0.0,
}
SETTINGS = [
    f"{name}={json.dumps(value, separators=(',', ':'))}"
    for name, value in TINY.items()
    if isinstance(value, dict | tuple)
]
SETTINGS += [f"{name}={value}" for name, value in TINY.items() if not isinstance(value, dict | tuple)]


def features(cameras: dict[str, tuple[int, int]], state: int | None = 4) -> dict[str, PolicyFeature]:
    """The inputs of a robot; `cameras`: height and width of each."""
    images = {
        f"observation.images.{name}": PolicyFeature(Kind.VISUAL, (3, *size)) for name, size in cameras.items()
    }
    states = {} if state is None else {"observation.state": PolicyFeature(Kind.STATE, (state,))}
    return states | images


def small_config(folder: Path | None = None, **changes: Any) -> XVLAConfig:
    """Of a robot with a camera, four joints and actions of three values; the tokenizer is made in `folder`."""
    robot = {
        "input_features": features({"top": (40, 56)}),
        "output_features": {"action": PolicyFeature(Kind.ACTION, (3,))},
    }
    tokenizer = {} if folder is None else {"tokenizer_name": str(make_tokenizer(folder))}
    return XVLAConfig(**{**TINY, **robot, **tokenizer, **changes})
