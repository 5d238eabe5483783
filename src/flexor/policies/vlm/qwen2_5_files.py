"""Files of pretrained Qwen2.5-VLs: their settings, which are built in for published ones, and their weights."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from torch import Tensor

from flexor.core.foreign_files import read_json_object
from flexor.core.model_files import ModelFiles
from flexor.core.run_files import SPLIT_WEIGHTS, WEIGHTS
from flexor.core.weight_files import WeightFiles, load_tensors
from flexor.policies.adapters import is_adapter
from flexor.policies.vlm.qwen2_5_vl import QwenVL
from flexor.policies.weight_names import unique_state

OLD_NAMES = {"model.language_model.": "model.", "model.visual.": "visual."}
"""How names begin in published files, where `transformers` changed them since."""


def _published(
    width: int, mlp_width: int, depth: int, heads: int, kv_heads: int, vocabulary: int
) -> dict[str, Any]:
    """A config.json, as `transformers` writes it."""
    return {
        "model_type": "qwen2_5_vl",
        "dtype": "bfloat16",
        "image_token_id": 151655,
        "video_token_id": 151656,
        "vision_start_token_id": 151652,
        "vision_end_token_id": 151653,
        "tie_word_embeddings": width == 2048,
        "text_config": {
            "model_type": "qwen2_5_vl_text",
            "hidden_size": width,
            "intermediate_size": mlp_width,
            "num_hidden_layers": depth,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 128000,
            "use_sliding_window": False,
            "bos_token_id": 151643,
            "eos_token_id": 151645,
            "vocab_size": vocabulary,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e6,
                "mrope_section": [16, 24, 24],
            },
        },
        "vision_config": {
            "model_type": "qwen2_5_vl_vision",
            "depth": 32,
            "hidden_size": 1280,
            "hidden_act": "silu",
            "intermediate_size": 3420,
            "num_heads": 16,
            "in_channels": 3,
            "out_hidden_size": width,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "tokens_per_second": 2,
            "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31],
        },
    }


PUBLISHED = {
    "Qwen/Qwen2.5-VL-3B-Instruct": _published(2048, 11008, 36, 16, 2, 151936),
    "Qwen/Qwen2.5-VL-7B-Instruct": _published(3584, 18944, 28, 28, 4, 152064),
}


def describe(files: ModelFiles) -> dict[str, Any]:
    """The config.json of a model."""
    if files.name in PUBLISHED:
        return deepcopy(PUBLISHED[files.name])
    file = files.path("config.json")
    try:
        return dict(read_json_object(file))
    except (ValueError, TypeError) as error:
        raise files.error(f"{file} does not describe a model: {error!r}") from error


def load_weights(files: ModelFiles, model: QwenVL) -> None:
    """Fill the model from files that have the names of today, or those of published ones."""
    weights = {name: tensor for name, tensor in unique_state(model).items() if not is_adapter(name)}
    if model.size.tied:  # named after the head, which the files need not have
        weights["model.language_model.embed_tokens.weight"] = weights.pop("lm_head.weight")
    present = names_of_weights(files)
    load_tensors(files, {_name_in_file(name, present): tensor for name, tensor in weights.items()})


def names_of_weights(files: ModelFiles) -> Mapping[str, str | Tensor]:
    """The weights in a model's files, by name."""
    weights = WeightFiles(files.folder([WEIGHTS, SPLIT_WEIGHTS]), files.error)
    if weights.index is not None:
        return weights.index
    return weights.described() if weights.file.is_file() else {}  # `load_tensors` says that there are none


def _name_in_file(name: str, present: Mapping[str, Any]) -> str:
    if name not in present:
        for prefix, old in OLD_NAMES.items():
            if name.startswith(prefix):
                return old + name.removeprefix(prefix)
    return name
