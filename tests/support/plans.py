"""Settings of small runs for tests of the planner, and a GPU to plan for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flexor.config.schema import TrainConfig
from flexor.core.model_files import ModelFiles
from flexor.plan.memory.memory import MemoryPlan, MemoryPlanner
from flexor.plan.trace.cuda_on_meta import Card
from flexor.plan.trace.trace import trace_step
from flexor.policies import policy_class
from flexor.policies.features import Kind, PolicyFeature
from flexor.policies.hf_transformers import resolve_builtin
from flexor.policies.wall_x.size import describe_wall_x
from flexor.train.ranks.split import split_batch
from support import small_pi, small_resnet, small_xvla

PLAIN: dict[str, Any] = {"precision": "no", "step": "eager", "channels_last": False}
CAMERA = {"vision_backbone": small_resnet.NAME}

TINY_WALL = describe_wall_x(ModelFiles(resolve_builtin("builtin/tiny-wall"), ""))
SIX_VALUES = {**TINY_WALL, "agent_pos_config": {"joints": 6}}
SIX_VALUES["text_config"] = {**TINY_WALL["text_config"], "dof_config": {"joints": 6}}

SMALL: dict[str, dict[str, Any]] = {
    "act": {
        **CAMERA,
        "chunk_size": 10,
        "n_action_steps": 10,
        "dim_model": 64,
        "n_heads": 4,
        "dim_feedforward": 128,
        "n_encoder_layers": 1,
        "n_vae_encoder_layers": 1,
    },
    "diffusion": {**CAMERA, "horizon": 8, "n_action_steps": 4, "down_dims": (32, 64), "crop_shape": None},
    "vqbet": {**CAMERA, "crop_shape": None, "gpt_n_layer": 2, "gpt_n_head": 2, "n_vqvae_training_steps": 10},
    "tdmpc": {},
    "multi_task_dit": {"hidden_dim": 32, "num_layers": 2, "num_heads": 2, "tokenizer_max_length": 20},
    "pi0": small_pi.CONFIG,
    "pi05": small_pi.CONFIG,
    "smolvla": {
        "num_vlm_layers": 4,
        "chunk_size": 8,
        "n_action_steps": 4,
        "resize_imgs_with_padding": (32, 32),
    },
    "pi0_fast": small_pi.FAST_CONFIG,
    "xvla": {**small_xvla.TINY, "max_action_dim": 6},
    "wall_x": {
        "pretrained_name_or_path": "builtin/tiny-wall",
        "vlm_config": SIX_VALUES,
        "dtype": "float32",
        "max_state_dim": 6,
        "max_action_dim": 6,
    },
    "eo1": {"vlm_base": "builtin/tiny-qwen", "image_min_pixels": 784, "image_max_pixels": 3136},
    "groot": {
        "base_model_path": "builtin/tiny-groot",
        "processor_name": "builtin/tiny-qwen",
        "load_base_model": False,
        "image_target_size": (64, 64),
        "image_crop_size": None,
        "image_min_pixels": 4096,
        "max_state_dim": 8,
        "max_action_dim": 8,
        "chunk_size": 8,
        "n_action_steps": 8,
    },
}


@dataclass(frozen=True)
class Gpu:
    memory: int = 140 << 30
    compute_capability: tuple[int, int] | None = (9, 0)


H200 = Gpu()


def settings(
    kind: str = "act", size: tuple[int, int] = (64, 64), policy: dict[str, Any] | None = None, **more: Any
) -> TrainConfig:
    """A run of a policy on one camera, a state and actions of six numbers: in float32, operation by operation."""
    made = policy_class(kind).Config(
        input_features={
            "observation.images.top": PolicyFeature(Kind.VISUAL, (3, *size)),
            "observation.state": PolicyFeature(Kind.STATE, (6,)),
        },
        output_features={"action": PolicyFeature(Kind.ACTION, (6,))},
        **{**SMALL.get(kind, {}), **(policy or {})},
    )
    return TrainConfig(policy=made, **(PLAIN | more))


def plan_memory(
    config: TrainConfig,
    gpu: Card,
    batch_size: int | None = None,
    *,
    world_size: int = 1,
    local_world_size: int | None = None,
    expandable: bool = True,
) -> MemoryPlan:
    """The memory of a run on one of its GPUs, from a single trace."""
    planner = MemoryPlanner(
        config, gpu, world_size=world_size, local_world_size=local_world_size, expandable=expandable
    )
    batch_size = batch_size or split_batch(config, world_size).batch_size
    accumulation = planner.accumulation(batch_size)
    return planner.plan(trace_step(planner.config, batch_size, gpu, accumulation))
