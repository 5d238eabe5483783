"""The settings of SmolVLA, under LeRobot's names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor

from flexor.core.errors import ConfigError
from flexor.core.rng import NoiseSource
from flexor.core.typed import setting
from flexor.policies.calibration import Calibration
from flexor.policies.cross_embodiment import EmptyCamerasConfig
from flexor.policies.features import Kind, Normalization
from flexor.policies.nn.adam import FineTuningSettings
from flexor.policies.nn.resize import resize_with_padding
from flexor.policies.processing.pipeline import ProcessingStep, Stats
from flexor.policies.processing.prompt import AddNewLine
from flexor.policies.processing.tokenize import Tokenize
from flexor.policies.smolvla.expert import is_cross_layer


@dataclass
class SmolVLAConfig(FineTuningSettings, EmptyCamerasConfig):
    """Defaults are LeRobot's, but for `load_vlm_weights`: see there."""

    type: ClassVar[str] = "smolvla"
    calibration = Calibration(
        settings={
            "num_vlm_layers": 2,
            "train_expert_only": False,
            "freeze_vision_encoder": False,
            "load_vlm_weights": False,
        },
        narrow={"vlm_model_name": "builtin/tiny-vlm", "resize_imgs_with_padding": (32, 32)},
    )
    trains_in_bf16: ClassVar[bool] = True
    unknown_to_lerobot: ClassVar[frozenset[str]] = frozenset({"dtype"})
    reads_camera_masks: ClassVar[bool] = True

    chunk_size: int = 50
    n_action_steps: int = 50
    normalization_mapping: dict[Kind, Normalization] = field(
        default_factory=lambda: {Kind.VISUAL: "IDENTITY", Kind.STATE: "MEAN_STD", Kind.ACTION: "MEAN_STD"}
    )
    resize_imgs_with_padding: tuple[int, int] | None = (512, 512)
    """Width and height that images are resized to, black at their left and top to keep the aspect ratio."""
    empty_cameras: int = 0
    """Number of missing cameras that keep a place, of those that the policy has and of others that no dataset has.
    They are never seen. With policy.add_image_special_tokens, tokens mark their places."""
    adapt_to_pi_aloha: bool = False
    """Convert the joints of an Aloha to pi0's conventions. Not supported: must be false."""
    use_delta_joint_actions_aloha: bool = False
    """Predict Aloha's joints relative to the current ones. Not supported, as in LeRobot: must be false."""
    tokenizer_max_length: int = 48
    """Maximum number of tokens of a task; longer ones are truncated."""
    num_steps: int = 10
    """Integration steps at inference. Fewer steps are faster and less accurate."""
    use_cache: bool = True
    """No effect: what the language model computed is always used for all integration steps."""
    freeze_vision_encoder: bool = True
    """Do not train the image encoder."""
    train_expert_only: bool = True
    """Train the action expert only, not the vision-language model."""
    train_state_proj: bool = True
    """Train the projection of the state."""
    vlm_model_name: str = "HuggingFaceTB/SmolVLM2-500M-Video-Instruct"
    """The vision-language model: a Hub repository or a local folder. Its config.json defines the sizes, and its
    tokenizer reads the task."""
    load_vlm_weights: bool = True
    """Start a new policy from the weights of policy.vlm_model_name. LeRobot's default is false: it then trains on a
    random vision-language model, by default a frozen one. A checkpoint's own weights are always used."""
    dtype: Literal["bfloat16", "float32"] | None = setting(None, may_change=True)
    """Type of the vision-language model and the expert when the policy acts and in exported files; default: bfloat16,
    as in LeRobot, with policy.load_vlm_weights or if the file has it, else float32. Training keeps float32 weights."""
    add_image_special_tokens: bool = False
    """Put the vision-language model's special tokens around each image."""
    attention_mode: str = "cross_attn"
    """cross_attn: some layers of the expert attend only to the language model, see policy.self_attn_every_n_layers.
    Any other value: all its layers attend to the language model and to the actions before."""
    prefix_length: int = -1
    """Pad images, task and state to this number of tokens; -1 does not."""
    pad_language_to: Literal["longest", "max_length"] = "longest"
    """How tasks are padded when the policy acts: to the longest of the batch, or to policy.tokenizer_max_length. In
    training it is always the latter, so that all steps have the same shapes."""
    num_expert_layers: int = -1
    """Layers of the expert, a divisor of the language model's; -1 for as many as the language model has."""
    num_vlm_layers: int = 16
    """Use only this many layers of the language model, from the first on; -1 for all."""
    self_attn_every_n_layers: int = 2
    """With cross_attn: every n-th layer of the expert, from the first on, attends to the actions before, too; -1 for
    none."""
    expert_width_multiplier: float = 0.75
    """Width of the expert as a fraction of the language model's."""
    min_period: float = 4e-3
    """Shortest period of the sines that encode the time of flow matching."""
    max_period: float = 4.0
    """Longest period of them."""
    rtc_config: dict[str, Any] | None = None
    """Settings of real-time chunking, under LeRobot's names: {execution_horizon: 10, max_guidance_weight: 10,
    prefix_attention_schedule: LINEAR}."""
    compile_model: bool = False
    """No effect: use --compile=true."""
    compile_mode: str = "max-autotune"
    """No effect."""

    def validate(self) -> None:
        super().validate()
        self.require(1, "num_steps", "tokenizer_max_length")
        self.require(1e-9, "expert_width_multiplier", "min_period", "max_period")
        for name in ("adapt_to_pi_aloha", "use_delta_joint_actions_aloha"):
            if getattr(self, name):
                raise ConfigError(f"policy.{name}=true is not supported: leave it out, or use LeRobot.")

    @property
    def cameras(self) -> list[str]:
        """All cameras, those that no dataset has at the end."""
        return [*self.images, *self.empty_camera_names]

    @property
    def image_side(self) -> int | None:
        """Height and width of images; None for what the encoder was trained on, if there are no images to ask."""
        sizes = {self.resize_imgs_with_padding}
        if self.resize_imgs_with_padding is None:
            sizes = {(feature.shape[2], feature.shape[1]) for feature in self.images.values()}
        if len(sizes) > 1 or any(size is not None and size[0] != size[1] for size in sizes):
            raise ConfigError(
                f"SmolVLA requires square images of one size, not {', '.join(map(str, sizes))} (width, height): set "
                "--policy.resize_imgs_with_padding='[512, 512]'."
            )
        size = next(iter(sizes), None)
        return None if size is None else size[0]

    def for_lerobot(self) -> Self:
        """With a size to resize images to, which LeRobot requires. Images that have it stay as they are."""
        side = self.image_side
        return self if side is None else replace(self, resize_imgs_with_padding=(side, side))

    def acting_dtypes(self, stored: Mapping[str, torch.dtype]) -> dict[str, torch.dtype]:
        """Without those that LeRobot adds to the expert of `transformers`, in float32."""
        backbone = {name for name in stored if ".vlm_with_expert." in name and not self._in_float32(name)}
        in_bf16 = self.load_vlm_weights or any(stored[name] == torch.bfloat16 for name in backbone)
        dtype = self.dtype or ("bfloat16" if in_bf16 else "float32")
        return dict.fromkeys(backbone, getattr(torch, dtype))

    def _in_float32(self, weight: str) -> bool:
        match = re.search(r"lm_expert\.layers\.(\d+)\.self_attn\.[kv]_proj\.", weight)
        return match is not None and is_cross_layer(
            int(match[1]), self.attention_mode, self.self_attn_every_n_layers
        )

    @property
    def stores_frozen_in_bf16(self) -> bool:
        return True

    def view_images(self, images: Tensor, camera: str, noise: NoiseSource | None = None) -> Tensor:
        resize = self.resize_imgs_with_padding  # width, height
        return images if resize is None else resize_with_padding(images, resize[1], resize[0], "left-top")

    @property
    def resizes_images(self) -> bool:
        return self.resize_imgs_with_padding is not None

    def steps_before(self, stats: Stats) -> list[ProcessingStep]:
        tokenize = Tokenize(
            self.vlm_model_name, max_length=self.tokenizer_max_length, padding=self.pad_language_to
        )
        rename, to_batch, *remaining = super().steps_before(stats)
        return [rename, to_batch, AddNewLine(), tokenize, *remaining]

    def lora_targets(self) -> list[str] | str:
        """Queries and values of the expert, and the layers around it."""
        around = "state_proj|action_in_proj|action_out_proj|action_time_mlp_in|action_time_mlp_out"
        return rf"model\.vlm_with_expert\.lm_expert\..*\.(q|v)_proj|model\.({around})"
