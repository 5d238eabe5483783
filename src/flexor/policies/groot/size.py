"""The size of a GR00T N1.7, as the config.json of its base model describes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flexor.core.errors import ConfigError
from flexor.core.foreign_files import read_json_object
from flexor.core.model_files import ModelFiles
from flexor.policies.groot.dit import BlockSize, DiTSize
from flexor.policies.hf_transformers import resolve_builtin
from flexor.policies.sizes import check_model_sizes
from flexor.policies.vlm.qwen3_files import describe_qwen3
from flexor.policies.vlm.qwen3_vl import Qwen3VLSize, read_qwen3_size

BASE_MODEL = "nvidia/GR00T-N1.7-3B"
BACKBONE = "nvidia/Cosmos-Reason2-2B"
N1_5 = (
    "Flexor has GR00T N1.7 only. To use an N1.5, install the last LeRobot that has it: pip install 'lerobot==0.5.1'. "
    f"Or fine-tune N1.7 instead, whose base model is {BASE_MODEL}."
)
PUBLISHED: dict[str, Any] = {
    "model_type": "Gr00tN1d7",
    "model_name": BACKBONE,
    "backbone_model_type": "qwen",
    "select_layer": 16,
    "backbone_embedding_dim": 2048,
    "hidden_size": 1024,
    "input_embedding_dim": 1536,
    "max_state_dim": 132,
    "max_action_dim": 132,
    "action_horizon": 40,
    "state_history_length": 1,
    "add_pos_embed": True,
    "max_seq_len": 1024,
    "use_vlln": True,
    "use_alternate_vl_dit": True,
    "attend_text_every_n_blocks": 2,
    "diffusion_model_cfg": {
        "positional_embeddings": None,
        "num_layers": 32,
        "num_attention_heads": 32,
        "attention_head_dim": 48,
        "norm_type": "ada_norm",
        "dropout": 0.2,
        "final_dropout": True,
        "output_dim": 1024,
        "interleave_self_attention": True,
    },
    "vl_self_attention_cfg": {
        "positional_embeddings": None,
        "num_layers": 4,
        "num_attention_heads": 32,
        "attention_head_dim": 64,
        "dropout": 0.2,
        "final_dropout": True,
    },
    "num_inference_timesteps": 4,
    "noise_beta_alpha": 1.5,
    "noise_beta_beta": 1.0,
    "noise_s": 0.999,
    "num_timestep_buckets": 1000,
    "state_dropout_prob": 0.2,
    "max_num_embodiments": 32,
    "rtc_ramp_rate": 6.0,
}
"""The config.json of nvidia/GR00T-N1.7-3B, which is also what another one leaves out."""


@dataclass(frozen=True)
class GrootSize:
    backbone: Qwen3VLSize
    dit: DiTSize
    vl: BlockSize | None
    """Of the blocks that the backbone's tokens go through first; None: there are none."""
    hidden: int
    state: int
    action: int
    horizon: int
    """Actions that the policy predicts at once."""
    embodiments: int
    normalizes_tokens: bool
    positions: int | None
    """How many actions there are learned positions for; None: they have none."""
    steps: int
    """Integration steps at inference."""
    beta: tuple[float, float]
    time_max: float
    time_buckets: int
    state_dropout: float
    ramp_rate: float


def describe_base(name: str, label: str) -> dict[str, Any]:
    """The config.json of a base model, with that of its vision-language model as `backbone_config`."""
    described = dict(PUBLISHED)
    if name != BASE_MODEL:
        files = ModelFiles(resolve_builtin(name), label)
        file = files.path("config.json")
        try:
            described |= read_json_object(file)
        except (ValueError, TypeError) as error:
            raise files.error(f"{file} does not describe a GR00T: {error!r}") from error
        check_version(described, label)
    if "backbone_config" not in described:
        backbone = str(described["model_name"])
        files = ModelFiles(resolve_builtin(backbone), f"the vision-language model {backbone} of {label}")
        described["backbone_config"] = describe_qwen3(files)
    return described


def check_version(described: Mapping[str, Any], label: str) -> None:
    """Refuse a GR00T of another version."""
    version = str(described.get("model_type") or described.get("model_version") or "")
    plain = "".join(character for character in version.lower() if character.isalnum())
    older = plain.endswith(("n15", "n1d5")) or "eagle_path" in (described.get("backbone_cfg") or {})
    if older or described.get("type") == "groot" or (version and not plain.endswith(("n17", "n1d7"))):
        named = "N1.5" if older else f"of the version {version!r}"
        if described.get("type") == "groot":
            raise ConfigError(
                f"{label} is a fine-tuned policy, not a base model: load it with --policy.path."
            )
        raise ConfigError(f"{label} is a GR00T {named}. {N1_5}")


def read_size(described: Mapping[str, Any], label: str) -> GrootSize:
    """The size in a base model's config.json; `label` names it in errors."""
    check_model_sizes(label, described)
    backbone = read_qwen3_size(described["backbone_config"], f"{label}: its vision-language model")
    config = {**PUBLISHED, **described}
    try:
        dit_config, vl_config = config["diffusion_model_cfg"], config.get("vl_self_attention_cfg") or {}
        size = GrootSize(
            backbone=backbone.with_layers(int(config["select_layer"])),
            dit=DiTSize(
                BlockSize.from_config(dit_config),
                output=dit_config["output_dim"],
                memory=config["backbone_embedding_dim"],
                interleave=bool(dit_config.get("interleave_self_attention", False)),
                alternate=bool(config["use_alternate_vl_dit"]),
                words_every=int(config["attend_text_every_n_blocks"]),
            ),
            vl=BlockSize.from_config(vl_config) if vl_config.get("num_layers", 0) else None,
            hidden=config["hidden_size"],
            state=config["max_state_dim"],
            action=config["max_action_dim"],
            horizon=config["action_horizon"],
            embodiments=config["max_num_embodiments"],
            normalizes_tokens=bool(config["use_vlln"]),
            positions=config["max_seq_len"] if config["add_pos_embed"] else None,
            steps=config["num_inference_timesteps"],
            beta=(float(config["noise_beta_alpha"]), float(config["noise_beta_beta"])),
            time_max=float(config["noise_s"]),
            time_buckets=int(config["num_timestep_buckets"]),
            state_dropout=float(config["state_dropout_prob"]),
            ramp_rate=float(config["rtc_ramp_rate"]),
        )
        _check(size, config)
    except (KeyError, TypeError, AttributeError, ValueError, ZeroDivisionError) as error:
        raise ConfigError(f"{label} does not describe a GR00T N1.7: {error!r}") from error
    return size


def _check(size: GrootSize, config: Mapping[str, Any]) -> None:
    """Refuse sizes that do not go together."""
    if config["state_history_length"] != 1:
        raise ValueError("state_history_length must be 1")
    if size.dit.alternate and not size.dit.interleave:
        raise ValueError("use_alternate_vl_dit requires interleave_self_attention")
    pairs = {
        "backbone_embedding_dim and hidden_size of the vision-language model": (
            size.dit.memory,
            size.backbone.text.width,
        ),
        "input_embedding_dim and heads x channels of diffusion_model_cfg": (
            config["input_embedding_dim"],
            size.dit.blocks.width,
        ),
        "hidden_size and output_dim of diffusion_model_cfg": (size.hidden, size.dit.output),
    }
    if size.vl is not None:
        pairs["backbone_embedding_dim and heads x channels of vl_self_attention_cfg"] = (
            size.dit.memory,
            size.vl.width,
        )
    for names, (first, second) in pairs.items():
        if first != second:
            raise ValueError(f"{names} must be the same, but are {first} and {second}")
    if size.positions is not None and size.positions < size.horizon:
        raise ValueError(f"max_seq_len={size.positions} is less than action_horizon={size.horizon}")
