"""The settings of policies on PaliGemma, under LeRobot's names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from torch import Tensor

from flexor.core.errors import ConfigError
from flexor.core.log import log
from flexor.core.rng import NoiseSource
from flexor.policies.cross_embodiment import EmptyCamerasConfig
from flexor.policies.features import Kind, Normalization
from flexor.policies.nn.adam import FineTuningSettings
from flexor.policies.nn.resize import resize_with_padding
from flexor.policies.processing.normalize import Normalize, Unnormalize
from flexor.policies.processing.pipeline import ProcessingStep, Stats
from flexor.policies.processing.relative_actions import RelativeActionSettings
from flexor.policies.processing.rename_and_move import ToDevice
from flexor.policies.vlm.paligemma import GEMMA, PALIGEMMA


@dataclass
class PaliGemmaConfig(FineTuningSettings, RelativeActionSettings, EmptyCamerasConfig):
    """What policies on PaliGemma have. Defaults are LeRobot's."""

    trains_in_bf16: ClassVar[bool] = True
    reads_camera_masks: ClassVar[bool] = True
    unknown_to_lerobot: ClassVar[frozenset[str]] = frozenset({"load_vlm_weights"})
    base: ClassVar[str]
    """The published weights to start from."""

    paligemma_variant: str = "gemma_2b"
    """Size of the language model: gemma_2b or gemma_300m. The published weights have gemma_2b."""
    action_expert_variant: str = "gemma_300m"
    """Size of the expert that predicts actions: gemma_2b or gemma_300m. The published weights have gemma_300m."""
    dtype: Literal["bfloat16", "float32"] = "float32"
    """Type of the weights of the language model and the expert. Norms and the image encoder are always float32."""
    load_vlm_weights: bool = True
    """Refuse to train from scratch. false starts from random weights, if there is no --policy.path."""
    chunk_size: int = 50
    n_action_steps: int = 50
    rtc_config: dict[str, Any] | None = None
    """Settings of real-time chunking, under LeRobot's names: {execution_horizon: 10, max_guidance_weight: 10,
    prefix_attention_schedule: LINEAR}."""
    image_resolution: tuple[int, int] = (224, 224)
    """Images are resized to this height and width, without distortion. It must be square."""
    normalization_mapping: dict[Kind, Normalization] = field(
        default_factory=lambda: {Kind.VISUAL: "IDENTITY", Kind.STATE: "MEAN_STD", Kind.ACTION: "MEAN_STD"}
    )
    gradient_checkpointing: bool = False
    """Recompute blocks in the backward pass to save memory, as --activation_checkpointing does."""
    compile_model: bool = False
    """Compile the network with torch.compile; --compile=true compiles block by block, which is quicker."""
    compile_mode: str = "max-autotune"
    """torch.compile's mode, with policy.compile_model."""
    optimizer_lr: float = 2.5e-5
    optimizer_weight_decay: float = 0.01
    optimizer_grad_clip_norm: float = 1.0
    tokenizer_max_length: int = 48
    """Maximum number of tokens of a prompt. Shorter ones are padded."""

    def validate(self) -> None:
        super().validate()
        self.require(1, "tokenizer_max_length", "scheduler_decay_steps")
        self.require(0, "scheduler_warmup_steps")
        for setting in ("paligemma_variant", "action_expert_variant"):
            if getattr(self, setting) not in GEMMA:
                raise ConfigError(
                    f"policy.{setting}={getattr(self, setting)!r} must be one of {', '.join(GEMMA)}."
                )
        language_model, expert = GEMMA[self.paligemma_variant], GEMMA[self.action_expert_variant]
        if not expert.can_attend_to(language_model):
            raise ConfigError(
                f"policy.action_expert_variant={self.action_expert_variant} can't attend to "
                f"policy.paligemma_variant={self.paligemma_variant}: they differ in depth or attention heads."
            )
        height, width = self.image_resolution
        patch = PALIGEMMA[self.paligemma_variant].vision.patch
        if height != width or height % patch or height < patch:
            raise ConfigError(
                f"policy.image_resolution={[height, width]} must be square and a multiple of {patch}, the size of an "
                "image patch."
            )

    @property
    def stores_frozen_in_bf16(self) -> bool:
        return True

    def check_untrained(self) -> None:
        if self.load_vlm_weights:
            raise ConfigError(
                f"policy.type={self.type} without --policy.path would train a vision-language model with random "
                f"weights. Start from published ones with --policy.path={self.base}. If you do want to train from "
                "scratch, set --policy.load_vlm_weights=false."
            )
        frozen = [
            name for name in ("freeze_vision_encoder", "train_expert_only") if getattr(self, name, False)
        ]
        log.warning(
            "policy.load_vlm_weights=false: the vision-language model starts with random weights%s",
            f", and policy.{frozen[0]}=true never trains all of them" if frozen else "",
        )

    def view_images(self, images: Tensor, camera: str, noise: NoiseSource | None = None) -> Tensor:
        return resize_with_padding(images, *self.image_resolution, "centre")

    def normalizer(self, stats: Stats) -> Normalize:
        return Normalize({**self.input_features, **self.output_features}, self.normalization_mapping, stats)

    def steps_after(self, stats: Stats) -> list[ProcessingStep]:
        return [
            Unnormalize(self.output_features, self.normalization_mapping, stats),
            self.absolute_actions(),
            ToDevice("cpu"),
        ]
