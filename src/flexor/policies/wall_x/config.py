"""The settings of WALL-X, under LeRobot's names."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import torch

from flexor.core.errors import ConfigError
from flexor.core.foreign_files import read_json_object
from flexor.core.log import log
from flexor.core.model_files import ModelFiles
from flexor.core.weight_files import WeightFiles
from flexor.policies.cross_embodiment import CrossEmbodimentConfig
from flexor.policies.features import Kind, Normalization
from flexor.policies.hf_transformers import BUILTIN, resolve_builtin
from flexor.policies.nn.adam import FineTuningSettings
from flexor.policies.nn.real_time import RealTimeSettings
from flexor.policies.processing.pipeline import ProcessingStep, Stats
from flexor.policies.processing.rename_and_move import ToDevice
from flexor.policies.vlm.qwen2_5_images import ImageGrid
from flexor.policies.wall_x.answer import MOST_STEPS, TokenizeAnswer
from flexor.policies.wall_x.images import grid_of
from flexor.policies.wall_x.prompt import TokenizePrompt, WallXTask
from flexor.policies.wall_x.size import (
    TOKENIZER,
    WALL_OSS_FLOW,
    WallXSize,
    describe_wall_x,
    read_wall_x_size,
    with_vocabulary,
)

SAVED = "vlm"  # in a checkpoint: the sizes and the tokenizer of the model that it started from
SIZES, TOKENIZER_SETTINGS = "config.json", "tokenizer_config.json"
PROJECTION = "model.model.layers.0.self_attn.q_proj.weight"
EMBEDDING = ("model.model.embed_tokens.weight", "model.lm_head.weight")


@dataclass
class WallXConfig(FineTuningSettings, CrossEmbodimentConfig):
    """Defaults are LeRobot's."""

    type: ClassVar[str] = "wall_x"
    trains_in_bf16: ClassVar[bool] = True
    reads_camera_masks: ClassVar[bool] = True
    ignores_unknown_settings: ClassVar[bool] = True
    unknown_to_lerobot: ClassVar[frozenset[str]] = frozenset(
        {"vlm_config", "tokenizer_path", "load_vlm_weights", "num_denoise_steps", "dtype", "round_actions"}
        | {"gradient_checkpointing", "rtc_config", "max_decoding_steps"}
    )

    chunk_size: int = 32
    n_action_steps: int = 32
    max_action_dim: int = 20
    """Actions are padded with zeros to this many values: those of dof_config in the model's config.json."""
    max_state_dim: int = 20
    """States are padded with zeros to this many values: those of agent_pos_config in the model's config.json."""
    normalization_mapping: dict[Kind, Normalization] = field(
        default_factory=lambda: {Kind.VISUAL: "IDENTITY", Kind.STATE: "MEAN_STD", Kind.ACTION: "MEAN_STD"}
    )
    pretrained_name_or_path: str = WALL_OSS_FLOW
    """The WALL-X that a new policy starts from, as published: a Hub repository or a local folder. Also its sizes and
    its tokenizer, unless a checkpoint has them."""
    vlm_config: dict[str, Any] | None = None
    """The sizes of the model, as in its config.json; default: those of policy.pretrained_name_or_path."""
    tokenizer_path: str | None = None
    """The folder or Hub repository of the tokenizer; default: policy.pretrained_name_or_path."""
    load_vlm_weights: bool = True
    """Start a new policy from the weights of policy.pretrained_name_or_path. false starts from random weights."""
    action_tokenizer_path: str | None = "lerobot/fast-action-tokenizer"
    """The FAST tokenizer of policy.prediction_mode=fast: a Hub repository or a local folder."""
    prediction_mode: Literal["diffusion", "fast"] = "diffusion"
    """diffusion denoises actions, fast writes them as tokens."""
    attn_implementation: Literal["eager"] = "eager"
    """No effect: attention is computed by torch's fused kernels."""
    vision_attn_implementation: Literal["auto", "sdpa", "varlen"] = "auto"
    """No effect: attention within an image is computed by torch's fused kernels."""
    num_denoise_steps: int = 10
    """Integration steps at inference. Fewer steps are faster and less accurate."""
    max_decoding_steps: int = 100
    """The longest chunk in tokens that policy.prediction_mode=fast writes."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Type of the weights; auto: that of a checkpoint, bfloat16 for a new policy. With bfloat16, weights of the
    decoder's norms and of the layers around it are float32."""
    round_actions: bool = True
    """With weights in bfloat16, round states, actions and the hidden states that velocities are learned from to
    bfloat16, as LeRobot does. false learns from exact actions."""
    gradient_checkpointing: bool = False
    """Recompute blocks in the backward pass to save memory, as --activation_checkpointing does."""
    rtc_config: dict[str, Any] | None = None
    """Settings of real-time chunking: {execution_horizon: 10, max_guidance_weight: 10,
    prefix_attention_schedule: LINEAR}."""
    optimizer_lr: float = 2e-5
    optimizer_betas: tuple[float, float] = (0.9, 0.95)
    optimizer_weight_decay: float = 0.01
    optimizer_grad_clip_norm: float = 1.0
    scheduler_warmup_steps: int = 1000
    scheduler_decay_steps: int = 100_000
    scheduler_decay_lr: float = 1e-6

    def validate(self) -> None:
        super().validate()
        self.require(1, "num_denoise_steps", "scheduler_decay_steps")
        self.require(0, "scheduler_warmup_steps")
        self.require(1, "max_decoding_steps")
        if self.writes_tokens and (self.chunk_size > MOST_STEPS or not self.action_tokenizer_path):
            raise ConfigError(
                f"policy.prediction_mode=fast requires policy.action_tokenizer_path={self.action_tokenizer_path}, a "
                f"FAST tokenizer, and policy.chunk_size={self.chunk_size} of at most {MOST_STEPS}."
            )
        _ = self.grids
        if self.rtc_config is not None:
            RealTimeSettings.of(self.rtc_config)
        if self.vlm_config is not None:
            self.model_size()

    @property
    def writes_tokens(self) -> bool:
        return self.prediction_mode == "fast"

    @property
    def image_sizes(self) -> dict[str, tuple[int, int]]:
        """Height and width of each camera's images."""
        return {name: (feature.shape[1], feature.shape[2]) for name, feature in self.images.items()}

    @property
    def grids(self) -> list[ImageGrid]:
        """The patches of each camera's images."""
        return [grid_of(*size) for size in self.image_sizes.values()]

    @property
    def model_files(self) -> ModelFiles:
        name = self.pretrained_name_or_path
        return ModelFiles(resolve_builtin(name), f"policy.pretrained_name_or_path={name}")

    @property
    def tokenizer_name(self) -> str:
        return resolve_builtin(self.tokenizer_path or self.pretrained_name_or_path)

    def described_model(self) -> dict[str, Any]:
        """The config.json of the model."""
        return describe_wall_x(self.model_files) if self.vlm_config is None else self.vlm_config

    def model_size(self) -> WallXSize:
        from_setting = f"policy.pretrained_name_or_path={self.pretrained_name_or_path}"
        source = from_setting if self.vlm_config is None else "policy.vlm_config"
        size = read_wall_x_size(self.described_model(), source)
        for name, values, described in (
            ("max_action_dim", size.action_values, "dof_config"),
            ("max_state_dim", size.state_values, "agent_pos_config"),
        ):
            if getattr(self, name) != values:
                raise ConfigError(
                    f"policy.{name}={getattr(self, name)}, but the {described} of {source} has {values} values. Set "
                    f"--policy.{name}={values}."
                )
        return size

    @property
    def model_dtype(self) -> torch.dtype:
        return torch.float32 if self.dtype == "float32" else torch.bfloat16

    def for_lerobot(self) -> Self:
        """LeRobot has no FAST tokenizer where actions are denoised."""
        return self if self.writes_tokens else replace(self, action_tokenizer_path=None)

    def can_act_without(self, names: Collection[str]) -> bool:
        return not names

    @property
    def resizes_images(self) -> bool:
        """The number of an image's tokens follows from its size, as in LeRobot: another size is another prompt."""
        return False

    def steps_before(self, stats: Stats) -> list[ProcessingStep]:
        rename, to_batch, to_device, normalize = super().steps_before(stats)
        return [rename, to_batch, WallXTask(), normalize, self._tokenize(), to_device]

    def completed(self, steps: Sequence[ProcessingStep]) -> list[ProcessingStep]:
        """A checkpoint's steps are LeRobot's, which tokenises in its training step."""
        place = next((n for n, step in enumerate(steps) if isinstance(step, ToDevice)), len(steps))
        return [*steps[:place], self._tokenize(), *steps[place:]]

    def _tokenize(self) -> TokenizePrompt:
        vocabulary = self.model_size().vlm.vocabulary
        if self.writes_tokens:
            fast = self.action_tokenizer_path or ""
            return TokenizeAnswer(self.tokenizer_name, self.image_sizes, 0, vocabulary, action_tokenizer=fast)
        return TokenizePrompt(self.tokenizer_name, self.image_sizes, self.chunk_size, vocabulary)

    def save_files(self, folder: Path) -> None:
        """The model's sizes and tokenizer, so that the checkpoint is complete."""
        if (self.tokenizer_path or self.pretrained_name_or_path).startswith(BUILTIN):
            return
        files = [TOKENIZER, TOKENIZER_SETTINGS]
        try:
            source = ModelFiles(self.tokenizer_name, f"the tokenizer of {self.tokenizer_name}").folder(files)
            (folder / SAVED).mkdir(exist_ok=True)
            for name in files:
                shutil.copyfile(source / name, folder / SAVED / name)
        except (ConfigError, OSError) as error:
            log.warning("%s has no tokenizer of its own: %s", folder, error)
            return
        (folder / SAVED / SIZES).write_text(json.dumps(self.described_model(), indent=2))

    def with_saved_files(self, folder: Path) -> Self:
        """With the sizes and the tokenizer in a checkpoint, and the type of its weights, which LeRobot does not say."""
        weights = WeightFiles(folder)
        described = weights.described() if weights.file.is_file() else {}
        completed = self
        if self.dtype == "auto" and (projection := described.get(PROJECTION)) is not None:
            completed = replace(self, dtype="float32" if projection.dtype == torch.float32 else "bfloat16")
        if self.vlm_config is not None or self.tokenizer_path is not None:
            return completed
        saved = folder / SAVED
        if all((saved / name).is_file() for name in (SIZES, TOKENIZER)):
            sizes = dict(read_json_object(saved / SIZES))
            return replace(completed, vlm_config=sizes, tokenizer_path=str(saved))
        rows = next((described[name].shape[0] for name in EMBEDDING if name in described), None)
        if rows is None:
            return completed
        return replace(completed, vlm_config=with_vocabulary(self.described_model(), rows))

    def lora_targets(self) -> list[str] | str:
        """Queries and values of the decoder, and the layers around it."""
        around = r"w1|w2|w3|action_proj_back|propri_proj"
        return rf"model\.model\..*\.(q|v)_proj|model\.action_preprocessor\.({around})"
