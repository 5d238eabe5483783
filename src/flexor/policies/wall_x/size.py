"""The sizes of a WALL-X: those of its Qwen2.5-VL, of the experts in its layers, and of states and actions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flexor.core.errors import ConfigError
from flexor.core.foreign_files import MALFORMED, read_json_object
from flexor.core.model_files import ModelFiles
from flexor.policies.vlm.qwen2_5_files import PUBLISHED, describe
from flexor.policies.vlm.qwen2_5_vl import QwenVLSize, read_size

WALL_OSS_FLOW = "x-square-robot/wall-oss-flow"
TOKENIZER = "tokenizer.json"
WORDS, ACTIONS = 0, 1
"""The experts of tokens that stand for words, images and the state, and of those that stand for actions."""
TEXT_SETTINGS = ("num_experts", "experts", "dim_inputs", "dof_config", "mlp_moe", "attention_moe")
"""Where the settings of the text model are nested, these are among them."""
BOTH_ARMS = {
    **{
        f"follow_{side}_{part}": size
        for side in ("left", "right")
        for part, size in (("ee_cartesian_pos", 3), ("ee_rotation", 3), ("gripper", 1))
    },
    "head_actions": 2,
    "height": 1,
    "car_pose": 3,
}
"""What the 20 values of a state or an action mean in the published model."""
EXPERTS = [{"hidden_size": 2048, "intermediate_size": width, "hidden_act": "silu"} for width in (11008, 2048)]


def _published() -> dict[str, Any]:
    """The config.json of wall-oss-flow: a Qwen2.5-VL of 3 B, and a smaller expert for actions."""
    described = describe(ModelFiles("Qwen/Qwen2.5-VL-3B-Instruct", ""))
    text = {
        "vocab_size": 151_665
        + 2
        + 2048,  # Qwen's tokens, those of the state and of actions, and those of FAST
        "num_experts": len(EXPERTS),
        "experts": EXPERTS,
        "dim_inputs": [2048, 2048],
        "dof_config": BOTH_ARMS,
        "mlp_moe": True,
    }
    return {
        **described,
        "text_config": {**described["text_config"], **text},
        "agent_pos_config": BOTH_ARMS,
    }


@dataclass(frozen=True)
class Expert:
    """The feed-forward layer of tokens of one kind: it reads and changes their first `width` channels."""

    width: int
    mlp_width: int


@dataclass(frozen=True)
class WallXSize:
    vlm: QwenVLSize
    experts: tuple[Expert, ...]
    """By kind of tokens, see WORDS and ACTIONS; empty: all tokens share a feed-forward layer."""
    action_values: int
    state_values: int


def describe_wall_x(files: ModelFiles) -> dict[str, Any]:
    """The config.json of a model, with the number of tokens that its tokenizer has.

    The embedding has a row for each of them: LeRobot makes it so.
    """
    if files.name == WALL_OSS_FLOW:
        return _published()
    described = describe(files)
    file = files.folder(["config.json", TOKENIZER]) / TOKENIZER if files.name not in PUBLISHED else None
    if file is None or not file.is_file():
        return described
    try:
        tokenizer = read_json_object(file)
        added = {token["content"] for token in tokenizer.get("added_tokens") or ()}
        return with_vocabulary(described, len(added | tokenizer["model"]["vocab"].keys()))
    except MALFORMED as error:
        raise files.error(f"{file} does not describe a tokenizer: {error!r}") from error


def with_vocabulary(described: Mapping[str, Any], vocabulary: int) -> dict[str, Any]:
    """A config.json with another number of tokens."""
    nested = described.get("text_config")
    if not isinstance(nested, dict):
        return {**described, "vocab_size": vocabulary}
    return {**described, "text_config": {**nested, "vocab_size": vocabulary}}


def read_wall_x_size(described: Mapping[str, Any], source: str) -> WallXSize:
    """The size in a config.json, whose text settings may be nested or not; `source` names it."""
    vlm = read_size(described, source)
    text = {**described, **(described.get("text_config") or {})}
    try:
        experts = _read_experts(text) if text.get("mlp_moe") else ()
        if text.get("attention_moe"):
            raise ValueError("attention_moe=true: experts are for feed-forward layers only")
        action, state = (sum(text[name].values()) for name in ("dof_config", "agent_pos_config"))
        size = WallXSize(vlm, experts, int(action), int(state))
        _check(size)
    except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
        raise ConfigError(f"{source} does not describe a WALL-X: {error!r}") from error
    return size


def _read_experts(text: Mapping[str, Any]) -> tuple[Expert, ...]:
    experts = [text["experts"][number] for number in range(text.get("num_experts", 4))]
    for expert, width in zip(experts, text["dim_inputs"], strict=True):
        if expert["hidden_size"] != width or expert["hidden_act"] != "silu":
            raise ValueError(
                f"an expert is {expert}, but dim_inputs says {width}, and the activation is silu"
            )
    return tuple(Expert(expert["hidden_size"], expert["intermediate_size"]) for expert in experts)


def _check(size: WallXSize) -> None:
    width = size.vlm.text.width
    if size.experts and len(size.experts) <= ACTIONS:
        raise ValueError("a WALL-X has an expert for words and one for actions")
    if any(not 0 < expert.width <= width or expert.mlp_width < 1 for expert in size.experts):
        raise ValueError(f"experts must have from 1 to hidden_size={width} channels")
    if width % 2 or width < 4:  # half of the time's embedding are sines, half cosines
        raise ValueError(f"hidden_size={width} must be even, and at least 4")
    if size.action_values < 1 or size.state_values < 1:
        raise ValueError("dof_config and agent_pos_config must name values")
