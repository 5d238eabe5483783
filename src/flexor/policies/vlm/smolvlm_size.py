"""The sizes of a SmolVLM, from its config.json. Those of LeRobot's default are built in."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from flexor.core.errors import ConfigError
from flexor.core.foreign_files import read_json_object
from flexor.core.model_files import ModelFiles
from flexor.policies.hf_transformers import resolve_builtin
from flexor.policies.nn.siglip import SiglipSize
from flexor.policies.nn.transformer import TransformerSize
from flexor.policies.sizes import check_model_sizes

# differences from the defaults below
BUILTIN_SIZES: dict[str, dict[str, Any]] = {
    "HuggingFaceTB/SmolVLM2-500M-Video-Instruct": {
        "scale_factor": 4,
        "vision_config": {"hidden_size": 768, "num_attention_heads": 12, "image_size": 512, "patch_size": 16},
        "text_config": {
            "vocab_size": 49280,
            "hidden_size": 960,
            "intermediate_size": 2560,
            "num_hidden_layers": 32,
            "num_attention_heads": 15,
            "num_key_value_heads": 5,
            "head_dim": 64,
            "rms_norm_eps": 1e-5,
        },
    }
}
# defaults of SmolVLM and Llama in `transformers`, which config.json leaves out
VISION = {
    "hidden_size": 1152,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "image_size": 224,
    "patch_size": 32,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}
TEXT = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "mlp_bias": False,
}
# supported values; no published SmolVLM has others
REQUIRED = (
    ("vision_config", "hidden_act", "gelu_pytorch_tanh"),
    ("vision_config", "layer_norm_eps", 1e-6),
    ("text_config", "model_type", "llama"),
    ("text_config", "hidden_act", "silu"),
    ("text_config", "mlp_bias", False),
    ("tie_word_embeddings", None, False),
)


@dataclass(frozen=True)
class SmolVLMSize:
    """The size of a vision-language model."""

    vision: SiglipSize
    text: TransformerSize
    vocabulary: int
    shuffle: int
    """Blocks of so many patches, squared, become one token of the language model."""

    def with_depth(self, layers: int) -> SmolVLMSize:
        """Only so many layers of the language model; all if not positive."""
        if layers > self.text.depth:
            raise ConfigError(
                f"policy.num_vlm_layers={layers}: the language model has only {self.text.depth} layers."
            )
        return replace(self, text=replace(self.text, depth=layers)) if layers > 0 else self


def smolvlm_files(name: str) -> ModelFiles:
    return ModelFiles(resolve_builtin(name), f"policy.vlm_model_name={name}")


def read_size(name: str) -> SmolVLMSize:
    """The size of the vision-language model in a local folder or a Hub repository."""
    config = BUILTIN_SIZES[name] if name in BUILTIN_SIZES else _read(name)
    parts: dict[str, Any] = {
        "tie_word_embeddings": config.get("tie_word_embeddings", False),
        "vision_config": {**VISION, **(config.get("vision_config") or {})},
        "text_config": {**TEXT, **(config.get("text_config") or {})},
    }
    for part, key, required in REQUIRED:
        value = parts[part] if key is None else parts[part][key]
        if value != required:
            name_in_file = part if key is None else f"{part}.{key}"
            raise ConfigError(
                f"policy.vlm_model_name={name}: its config.json has {name_in_file}={value}; Flexor supports "
                f"only {required}."
            )
    vision, text = parts["vision_config"], parts["text_config"]
    _require_positive(name, vision, VISION)
    _require_positive(name, text, TEXT)
    for key in ("num_key_value_heads", "head_dim"):
        if text.get(key) is not None:
            _require_positive(name, text, {key: 1})
    return SmolVLMSize(
        SiglipSize(
            width=vision["hidden_size"],
            depth=vision["num_hidden_layers"],
            mlp_width=vision["intermediate_size"],
            heads=vision["num_attention_heads"],
            image=vision["image_size"],
            patch=vision["patch_size"],
        ),
        TransformerSize.from_config(text, qkv_bias=text["attention_bias"], o_bias=text["attention_bias"]),
        vocabulary=text["vocab_size"],
        shuffle=config.get("scale_factor", 2),
    )


def _require_positive(name: str, sizes: dict[str, Any], usual: dict[str, Any]) -> None:
    """Refuse sizes that no network has: of those that are integers usually, where they are given."""
    for key, value in usual.items():
        size = sizes.get(key, value)
        if type(value) is int and (type(size) is not int or size < 1):
            raise ConfigError(
                f"policy.vlm_model_name={name}: its config.json has {key}={size!r}, which is no size."
            )


def _read(name: str) -> dict[str, Any]:
    file = smolvlm_files(name).path("config.json")
    try:
        described = read_json_object(file)
        if described["model_type"] != "smolvlm":
            raise ConfigError(
                f"policy.vlm_model_name={name} is a {described['model_type']}: SmolVLA requires a SmolVLM."
            )
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file} does not describe a vision-language model: {error!r}") from error
    check_model_sizes(f"{file}: config", described)
    return dict(described)
