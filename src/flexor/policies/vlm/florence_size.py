"""The sizes of a Florence-2, from its config.json: as `transformers` writes it, or as Microsoft's own code did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flexor.core.errors import ConfigError
from flexor.policies.sizes import check_model_sizes
from flexor.policies.vlm.bart import BartSize
from flexor.policies.vlm.davit import DaViTSize, DaViTStage

FLORENCE_2_LARGE: Mapping[str, Any] = {
    "vision_config": {
        "embed_dim": [256, 512, 1024, 2048],
        "num_heads": [8, 16, 32, 64],
        "num_groups": [8, 16, 32, 64],
    },
    "text_config": {"model_type": "bart", "vocab_size": 51289, "max_position_embeddings": 4096},
}
"""Differences from the defaults below."""
VISION = {
    "in_channels": 3,
    "depths": [1, 1, 9, 1],
    "patch_size": [7, 3, 3, 3],
    "patch_stride": [4, 2, 2, 2],
    "patch_padding": [3, 1, 1, 1],
    "patch_prenorm": [False, True, True, True],
    "embed_dim": [128, 256, 512, 1024],
    "num_heads": [4, 8, 16, 32],
    "num_groups": [4, 8, 16, 32],
    "window_size": 12,
    "drop_path_rate": 0.1,
    "mlp_ratio": 4.0,
    "qkv_bias": True,
    "activation_function": "gelu",
    "projection_dim": 1024,
    "max_temporal_embeddings": 100,
    "max_position_embeddings": 50,
}
TEXT = {
    "vocab_size": 50265,
    "max_position_embeddings": 1024,
    "encoder_layers": 12,
    "encoder_ffn_dim": 4096,
    "encoder_attention_heads": 16,
    "encoder_layerdrop": 0.0,
    "activation_function": "gelu",
    "d_model": 1024,
    "dropout": 0.1,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "scale_embedding": False,
}
STAGES = (
    *("depths", "patch_size", "patch_stride", "patch_padding", "patch_prenorm"),
    *("embed_dim", "num_heads", "num_groups"),
)
VISION_TYPES = (None, "davit", "florence_vision")
TEXT_TYPES = (None, "florence2_language", "bart")
FEATURES = ["spatial_avg_pool", "temporal_avg_pool"]
REQUIRED = (
    ("vision_config", "in_channels", 3),
    ("vision_config", "activation_function", "gelu"),
    ("text_config", "activation_function", "gelu"),
    ("text_config", "encoder_layerdrop", 0),
)


@dataclass(frozen=True)
class FlorenceSize:
    vision: DaViTSize
    text: BartSize
    places: int
    """The most rows, and columns, of an image's grid."""
    frames: int
    """Frames of a video, of which an image is the first."""

    def image_tokens(self, height: int, width: int) -> int:
        """Tokens of an image of this size."""
        rows, columns = self.vision.grid(height, width)
        return 1 + rows * columns


def read_florence(config: Mapping[str, Any], source: str) -> FlorenceSize:
    """The sizes in a config.json. `source` is named in errors."""
    parts = _native(config, source)
    check_model_sizes(source, parts)
    for part, key, required in REQUIRED:
        if parts[part][key] != required:
            raise ConfigError(
                f"{source}.{part}.{key}={parts[part][key]!r} is not supported: Flexor has Florence-2 with {required!r}."
            )
    vision, text = parts["vision_config"], parts["text_config"]
    if vision["projection_dim"] != text["d_model"]:
        raise ConfigError(
            f"{source}: vision_config.projection_dim={vision['projection_dim']} and text_config.d_model="
            f"{text['d_model']} must be equal: images and words are one sequence."
        )
    encoder = _text_size(text, f"{source}.text_config")
    tower = _vision_size(vision, f"{source}.vision_config")
    return FlorenceSize(tower, encoder, vision["max_position_embeddings"], vision["max_temporal_embeddings"])


def _native(config: Mapping[str, Any], source: str) -> dict[str, dict[str, Any]]:
    """Both parts in the layout of `transformers`, with its defaults."""
    missing = [part for part in ("vision_config", "text_config") if not isinstance(config.get(part), Mapping)]
    if missing:
        raise ConfigError(
            f"{source} has no {' and no '.join(missing)}: it must be the config.json of a Florence-2, or {{}} for "
            "Florence-2 large."
        )
    vision, text = dict(config["vision_config"]), dict(config["text_config"])
    for part, types, kind in (
        ("vision_config", VISION_TYPES, vision.get("model_type")),
        ("text_config", TEXT_TYPES, text.get("model_type")),
    ):
        if kind not in types:
            raise ConfigError(
                f"{source}.{part}.model_type={kind!r} is no part of a Florence-2, which has {types[1]} or {types[2]}."
            )
    for old, kind, number, name in (
        ("image_pos_embed", "learned_abs_2d", "max_pos_embeddings", "max_position_embeddings"),
        ("visual_temporal_embedding", "COSINE", "max_temporal_embeddings", "max_temporal_embeddings"),
    ):
        embedding = vision.pop(old, None)
        if embedding is None:
            continue
        if embedding.get("type") != kind or number not in embedding:
            raise ConfigError(
                f"{source}.vision_config.{old}={embedding!r} is not supported: its type must be {kind}, with {number}."
            )
        vision[name] = embedding[number]
    if (features := vision.pop("image_feature_source", None)) is not None and list(features) != FEATURES:
        raise ConfigError(
            f"{source}.vision_config.image_feature_source={features!r} is not supported, only {FEATURES}."
        )
    if "dim_embed" in vision:
        vision["embed_dim"] = vision.pop("dim_embed")
    return {"vision_config": {**VISION, **_not_none(vision)}, "text_config": {**TEXT, **_not_none(text)}}


def _not_none(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if value is not None}


def _text_size(text: Mapping[str, Any], source: str) -> BartSize:
    whole_numbers = (
        *("vocab_size", "max_position_embeddings", "encoder_layers"),
        *("encoder_ffn_dim", "encoder_attention_heads", "d_model"),
    )
    _require_sizes(source, {name: text[name] for name in whole_numbers})
    for name in ("dropout", "attention_dropout", "activation_dropout"):
        _require_share(source, name, text[name])
    width, heads = text["d_model"], text["encoder_attention_heads"]
    if width % heads:
        raise ConfigError(f"{source}: d_model={width} must be a multiple of encoder_attention_heads={heads}.")
    return BartSize(
        width=width,
        depth=text["encoder_layers"],
        heads=heads,
        mlp_width=text["encoder_ffn_dim"],
        vocabulary=text["vocab_size"],
        positions=text["max_position_embeddings"],
        dropout=text["dropout"],
        attention_dropout=text["attention_dropout"],
        activation_dropout=text["activation_dropout"],
        embed_scale=width**0.5 if text["scale_embedding"] else 1.0,
    )


def _vision_size(vision: Mapping[str, Any], source: str) -> DaViTSize:
    columns: dict[str, Sequence[Any]] = {}
    for name in STAGES:
        if not isinstance(vision[name], list | tuple):
            raise ConfigError(
                f"{source}.{name}={vision[name]!r} must be a list with a number for each stage."
            )
        columns[name] = vision[name]
    counts = {name: len(values) for name, values in columns.items()}
    if len({*counts.values()}) > 1:
        listed = ", ".join(f"{name} {count}" for name, count in counts.items())
        raise ConfigError(f"{source}: every list must have a value for each stage, but there are {listed}.")
    scalars = ("window_size", "max_temporal_embeddings", "max_position_embeddings", "projection_dim")
    _require_sizes(source, {name: vision[name] for name in scalars})
    _require_share(source, "drop_path_rate", vision["drop_path_rate"])
    if not isinstance(vision["mlp_ratio"], int | float) or not 0 < vision["mlp_ratio"] <= 64:
        raise ConfigError(f"{source}.mlp_ratio={vision['mlp_ratio']!r} must be a number above 0, such as 4.")
    widths = [vision["in_channels"], *columns["embed_dim"]]
    rows = zip(*(columns[name] for name in STAGES), strict=True)
    stages = [
        _stage(dict(zip(STAGES, row, strict=True)), inputs, source) for row, inputs in zip(rows, widths)
    ]
    return DaViTSize(
        tuple(stages),
        window=vision["window_size"],
        mlp_ratio=vision["mlp_ratio"],
        qkv_bias=bool(vision["qkv_bias"]),
        drop_path=vision["drop_path_rate"],
    )


def _stage(row: Mapping[str, Any], inputs: int, source: str) -> DaViTStage:
    sizes = {name: value for name, value in row.items() if name not in ("patch_padding", "patch_prenorm")}
    _require_sizes(source, sizes)
    if type(row["patch_padding"]) is not int or row["patch_padding"] < 0:
        raise ConfigError(f"{source}.patch_padding={row['patch_padding']!r} must be 0 or more.")
    for name in ("num_heads", "num_groups"):
        if row["embed_dim"] % row[name]:
            raise ConfigError(
                f"{source}: embed_dim={row['embed_dim']} must be a multiple of {name}={row[name]}."
            )
    return DaViTStage(
        inputs=inputs,
        width=row["embed_dim"],
        depth=row["depths"],
        heads=row["num_heads"],
        groups=row["num_groups"],
        kernel=row["patch_size"],
        stride=row["patch_stride"],
        padding=row["patch_padding"],
        norm_first=bool(row["patch_prenorm"]),
    )


def _require_sizes(source: str, sizes: Mapping[str, Any]) -> None:
    for name, value in sizes.items():
        if type(value) is not int or value < 1:
            raise ConfigError(f"{source}.{name}: {value!r} is no size, which is an integer of at least 1.")


def _require_share(source: str, name: str, value: Any) -> None:
    if not isinstance(value, int | float) or not 0 <= value < 1:
        raise ConfigError(f"{source}.{name}={value!r} must be from 0 to below 1.")
