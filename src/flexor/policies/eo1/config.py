"""The settings of EO-1, under LeRobot's names."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Self

import torch

from flexor.core.errors import ConfigError
from flexor.core.model_files import ModelFiles
from flexor.policies.cross_embodiment import CrossEmbodimentConfig
from flexor.policies.eo1.conversation import ConversationTemplate, TokenizeConversation
from flexor.policies.features import Kind, Normalization
from flexor.policies.hf_transformers import resolve_builtin
from flexor.policies.lerobot_settings import LerobotSetting
from flexor.policies.nn.adam import FineTuningSettings
from flexor.policies.processing.pipeline import ProcessingStep, Stats
from flexor.policies.vlm.qwen2_5_files import describe
from flexor.policies.vlm.qwen2_5_images import FACTOR, MAX_PIXELS, MIN_PIXELS, ImageGrid, choose_grid
from flexor.policies.vlm.qwen2_5_vl import QwenVLSize, read_size

ACTIVATIONS = ("linear", "relu", "gelu", "gelu_pytorch_tanh", "silu", "swish", "tanh", "sigmoid", "mish")
TEXT = "EO-1 predicts actions only, and learns no text here"
LATER = {
    "use_language_recipe": LerobotSetting(TEXT, (False,)),
    "recipe_path": LerobotSetting(TEXT, (None,)),
    "recipe": LerobotSetting(),
    "text_temperature": LerobotSetting(),
    "text_top_p": LerobotSetting(),
    "text_loss_weight": LerobotSetting(),
    "flow_loss_weight": LerobotSetting(
        "the loss of actions is the only one", (1, 1.0), "The policy acts the same, and is fine-tuned with 1"
    ),
    "tokenizer_max_length": LerobotSetting("prompts are not cut off", (1000,), "They are read to their end"),
}
"""Settings of releases after 0.6.1."""


@dataclass
class EO1Config(FineTuningSettings, CrossEmbodimentConfig):
    """Defaults are LeRobot's."""

    type: ClassVar[str] = "eo1"
    trains_in_bf16: ClassVar[bool] = True
    reads_camera_masks: ClassVar[bool] = True
    ignores_unknown_settings: ClassVar[bool] = True
    unknown_to_lerobot: ClassVar[frozenset[str]] = frozenset({"load_vlm_weights", "rtc_config"})
    only_in_lerobot: ClassVar[Mapping[str, LerobotSetting]] = LATER

    vlm_base: str = "Qwen/Qwen2.5-VL-3B-Instruct"
    """The vision-language model, a Qwen2.5-VL: a Hub repository or a local folder. A new policy starts from its
    weights, and its tokenizer reads the task."""
    vlm_config: dict[str, Any] | None = None
    """The sizes of the vision-language model, as in its config.json; default: those of policy.vlm_base."""
    load_vlm_weights: bool = True
    """Start a new policy from the weights of policy.vlm_base. false starts from random weights."""
    image_min_pixels: int | None = 64 * FACTOR**2
    """Smaller images are enlarged to this number of pixels; null: to 3,136, Qwen's own limit."""
    image_max_pixels: int | None = 128 * FACTOR**2
    """Larger images are reduced to this number of pixels; null: to 12,845,056, Qwen's own limit. A token has 784."""
    use_fast_processor: bool = False
    """No effect: images are resized as Pillow does, which is LeRobot's default, on the GPU."""
    chunk_size: int = 8
    n_action_steps: int = 8
    num_denoise_steps: int = 10
    """Integration steps at inference. Fewer steps are faster and less accurate."""
    num_action_layers: int = 2
    """Layers that turn hidden states into actions."""
    action_act: str = "linear"
    """The activation between these layers: linear (none), relu, gelu, gelu_pytorch_tanh, silu, swish, tanh, sigmoid or
    mish."""
    time_sampling_beta_alpha: float = 1.5
    """Times in training are scale x b + offset, where b has a beta distribution: its alpha."""
    time_sampling_beta_beta: float = 1.0
    """The beta of that distribution."""
    time_sampling_scale: float = 0.999
    """The scale of times."""
    time_sampling_offset: float = 0.001
    """The offset of times: the earliest one."""
    min_period: float = 4e-3
    """Shortest period in the embedding of the time."""
    max_period: float = 4.0
    """Longest period in the embedding of the time."""
    supervise_padding_action_dims: bool = True
    """Learn zeros for the values that actions are padded with up to policy.max_action_dim."""
    supervise_padding_actions: bool = True
    """Learn actions beyond the end of an episode, which repeat the last one. false also hides them from the others."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Type of the vision-language model's weights; auto: that in its config.json, bfloat16 for published ones. The
    layers around it are always float32."""
    force_fp32_autocast: bool = True
    """Compute the layers around the vision-language model in float32, in mixed precision too."""
    attn_implementation: str | None = None
    """No effect: attention is computed by torch's fused kernels."""
    gradient_checkpointing: bool = False
    """Recompute blocks in the backward pass to save memory, as --activation_checkpointing does."""
    rtc_config: dict[str, Any] | None = None
    """Settings of real-time chunking: {execution_horizon: 10, max_guidance_weight: 10,
    prefix_attention_schedule: LINEAR}."""
    normalization_mapping: dict[Kind, Normalization] = field(
        default_factory=lambda: {Kind.VISUAL: "IDENTITY", Kind.STATE: "MEAN_STD", Kind.ACTION: "MEAN_STD"}
    )
    optimizer_lr: float = 1e-4
    optimizer_betas: tuple[float, float] = (0.9, 0.999)
    optimizer_weight_decay: float = 0.1
    optimizer_grad_clip_norm: float = 1.0
    scheduler_warmup_steps: int = 900
    scheduler_decay_steps: int = 30_000
    scheduler_decay_lr: float = 0.0

    def validate(self) -> None:
        super().validate()
        self.require(1, "num_denoise_steps", "num_action_layers", "scheduler_decay_steps")
        self.require(0, "time_sampling_scale", "time_sampling_offset", "scheduler_warmup_steps")
        self.require(1e-6, "min_period", "max_period", "time_sampling_beta_alpha", "time_sampling_beta_beta")
        self.require(FACTOR**2, "image_min_pixels", "image_max_pixels")
        low, high = self.pixel_limits
        if low > high:
            raise ConfigError(
                f"policy.image_min_pixels={low} is more than policy.image_max_pixels={high}: no image has so many "
                "pixels."
            )
        if self.action_act not in ACTIVATIONS:
            raise ConfigError(
                f"policy.action_act={self.action_act!r} is not known: use one of {', '.join(ACTIVATIONS)}."
            )
        if self.vlm_config is not None:
            self.vlm_size()

    @property
    def pixel_limits(self) -> tuple[int, int]:
        low, high = self.image_min_pixels, self.image_max_pixels
        return MIN_PIXELS if low is None else low, MAX_PIXELS if high is None else high

    @property
    def image_sizes(self) -> list[tuple[int, int]]:
        """Height and width of each camera's images."""
        return [(feature.shape[1], feature.shape[2]) for feature in self.images.values()]

    @property
    def grids(self) -> list[ImageGrid]:
        """The patches of each camera's images."""
        return [choose_grid(*size, *self.pixel_limits) for size in self.image_sizes]

    @property
    def vlm_files(self) -> ModelFiles:
        return ModelFiles(resolve_builtin(self.vlm_base), f"policy.vlm_base={self.vlm_base}")

    def described_vlm(self) -> dict[str, Any]:
        """The vision-language model's config.json."""
        return describe(self.vlm_files) if self.vlm_config is None else self.vlm_config

    def vlm_size(self) -> QwenVLSize:
        source = f"policy.vlm_base={self.vlm_base}" if self.vlm_config is None else "policy.vlm_config"
        return read_size(self.described_vlm(), source)

    @property
    def vlm_dtype(self) -> torch.dtype:
        """The type of the vision-language model's weights."""
        described = self.described_vlm()
        named = described.get("dtype") or described.get("torch_dtype") if self.dtype == "auto" else self.dtype
        return torch.bfloat16 if named in ("bfloat16", "float16") else torch.float32

    def for_lerobot(self) -> Self:
        """With the sizes of the vision-language model, for which LeRobot would ask the Hub."""
        return replace(self, vlm_config=self.described_vlm())

    def can_act_without(self, names: Collection[str]) -> bool:
        return not names

    @property
    def resizes_images(self) -> bool:
        """The number of an image's tokens follows from its size, as in LeRobot: another size is another prompt."""
        return False

    def steps_before(self, stats: Stats) -> list[ProcessingStep]:
        rename, to_batch, to_device, normalize = super().steps_before(stats)
        template = ConversationTemplate(dict(self.input_features), self.chunk_size)
        tokenize = TokenizeConversation(
            self.vlm_base,
            self.image_min_pixels,
            self.image_max_pixels,
            self.use_fast_processor,
            vocabulary=self.vlm_size().vocabulary,
        )
        return [rename, to_batch, normalize, template, tokenize, to_device]

    def lora_targets(self) -> list[str] | str:
        """Queries and values of the language model, and the layers around it."""
        around = r"state_proj|action_in_proj|action_out_proj\.\d+|action_time_mlp_in|action_time_mlp_out"
        return rf"model\.vlm_backbone\.model\.language_model\..*\.(q|v)_proj|model\.({around})"
