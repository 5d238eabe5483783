"""Settings of pretrained Qwen3-VLs, which are built in for published ones."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from flexor.core.foreign_files import read_json_object
from flexor.core.model_files import ModelFiles

QWEN3_VL_2B: dict[str, Any] = {
    "model_type": "qwen3_vl",
    "image_token_id": 151655,
    "video_token_id": 151656,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "tie_word_embeddings": True,
    "text_config": {
        "model_type": "qwen3_vl_text",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 6144,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 5e6,
            "mrope_section": [24, 20, 20],
            "mrope_interleaved": True,
        },
    },
    "vision_config": {
        "model_type": "qwen3_vl_vision",
        "depth": 24,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_heads": 16,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": 2048,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [5, 11, 17],
    },
}
"""A config.json, as `transformers` writes it."""

PUBLISHED_QWEN3 = dict.fromkeys(
    ("nvidia/Cosmos-Reason2-2B", "Qwen/Qwen3-VL-2B-Instruct", "Qwen/Qwen3-VL-2B-Thinking"), QWEN3_VL_2B
)


def describe_qwen3(files: ModelFiles) -> dict[str, Any]:
    """The config.json of a model."""
    if files.name in PUBLISHED_QWEN3:
        return deepcopy(PUBLISHED_QWEN3[files.name])
    file = files.path("config.json")
    try:
        return dict(read_json_object(file))
    except (ValueError, TypeError) as error:
        raise files.error(f"{file} does not describe a model: {error!r}") from error
