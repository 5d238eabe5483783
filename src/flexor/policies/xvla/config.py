"""The settings of X-VLA, under LeRobot's names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Self

import numpy as np
import torch
from torch import Tensor

from flexor.core.batch import ACTION, DATASET_NUMBER, STATE
from flexor.core.errors import ConfigError
from flexor.core.log import log
from flexor.core.rng import NoiseSource
from flexor.core.typed import setting
from flexor.policies.base import MOST_DROPOUT
from flexor.policies.cross_embodiment import EmptyCamerasConfig, Features
from flexor.policies.features import Kind, Normalization, PolicyFeature
from flexor.policies.nn.adam import FineTuningSettings
from flexor.policies.nn.resize import resize_with_padding
from flexor.policies.processing.pipeline import ProcessingStep, Stats
from flexor.policies.processing.tokenize import Tokenize
from flexor.policies.vlm.florence_size import FLORENCE_2_LARGE, FlorenceSize, read_florence
from flexor.policies.xvla.action_spaces import AUTO, ActionSpace, action_space
from flexor.policies.xvla.processing import (
    DOMAIN,
    IMAGENET_MEAN,
    IMAGES,
    AddDomainId,
    ImageNetNormalize,
    ImageToFloat,
)

FLORENCE = "policy.florence_config"


@dataclass
class XVLAConfig(FineTuningSettings, EmptyCamerasConfig):
    """Defaults are LeRobot's, but for `florence_config`, which has none there."""

    type: ClassVar[str] = "xvla"
    trains_in_bf16: ClassVar[bool] = True
    reads_camera_masks: ClassVar[bool] = True
    draws_by_place: ClassVar[bool] = True
    unknown_to_lerobot: ClassVar[frozenset[str]] = frozenset(
        {"domain_id", "domain_ids", "dropout", "rtc_config", "vision_drop_path"}
    )

    chunk_size: int = 32
    n_action_steps: int = 32
    dtype: Literal["bfloat16", "float32"] = setting("float32", may_change=True)
    """Type of the weights when the policy acts and in exported files. Training keeps float32 weights."""
    normalization_mapping: dict[Kind, Normalization] = field(
        default_factory=lambda: {Kind.VISUAL: "IDENTITY", Kind.STATE: "IDENTITY", Kind.ACTION: "IDENTITY"}
    )
    florence_config: dict[str, Any] = field(default_factory=dict)
    """The config.json of a Florence-2 (vision_config and text_config), of which the decoder is not used; {} is
    Florence-2 large."""
    tokenizer_name: str = "facebook/bart-large"
    """The tokenizer that reads the task: a Hub repository or a folder."""
    tokenizer_max_length: int = 64
    """Tokens of a task: shorter ones are padded, longer ones are truncated."""
    tokenizer_padding_side: Literal["right", "left"] = "right"
    """Where tasks are padded."""
    pad_language_to: Literal["max_length", "longest"] = "max_length"
    """How tasks are padded. The policy sees the padding, and training always pads to policy.tokenizer_max_length, so
    `longest` is only for checkpoints that were trained with it."""
    hidden_size: int = 1024
    """Width of the transformer that denoises actions."""
    depth: int = 24
    """Its layers."""
    num_heads: int = 16
    """Its attention heads."""
    mlp_ratio: float = 4.0
    """Width of its feed-forward layers, as a multiple of its own."""
    num_domains: int = 30
    """How many kinds of robots there are weights for."""
    len_soft_prompts: int = 32
    """Learned tokens of each domain."""
    dim_time: int = 32
    """Channels that encode the time of denoising."""
    max_len_seq: int = 512
    """The longest sequence of actions, image tokens and words."""
    use_hetero_proj: bool = False
    """Each domain has its own projections of images and words, too."""
    action_mode: Literal["ee6d", "joint", "agibot_ee6d", "franka_joint7", "so101_bimanual", "auto"] = "ee6d"
    """What the numbers of an action mean. auto: joints, as many as the dataset has."""
    num_denoising_steps: int = 10
    """Denoising steps at inference. Fewer steps are faster and less accurate."""
    use_proprio: bool = True
    """Use observation.state."""
    max_action_dim: int = 20
    """With policy.action_mode=auto, actions are padded with zeros to this many values. Others have a width of their
    own."""
    domain_feature_key: str | None = None
    """The dataset's column with the domain of each sample; default: policy.domain_id for all."""
    resize_imgs_with_padding: tuple[int, int] | None = None
    """Height and width that images are resized to, grey at their left and top to keep the aspect ratio; default: all
    cameras have the same size, and images stay as they are."""
    num_image_views: int | None = None
    """Images that the policy has tokens for; default: one for each camera. Missing ones are zeros."""
    empty_cameras: int = 0
    """Number of cameras that the policy has but the robot does not. Their tokens are zeros."""
    freeze_vision_encoder: bool = False
    """Do not train the image encoder."""
    freeze_language_encoder: bool = False
    """Do not train the encoder of words."""
    train_policy_transformer: bool = True
    """Train the transformer that denoises actions."""
    train_soft_prompts: bool = True
    """Train the soft prompts."""
    domain_id: int | None = setting(None, may_change=True)
    """Which of policy.num_domains the robot is: published policies leave 19 and above to new ones. Default: that of
    the checkpoint, else 0."""
    domain_ids: list[int] | None = None
    """In training on several datasets: the domain of each, in their order. policy.domain_id is then that of the robot
    which will act; default: the first."""
    dropout: float = 0.1
    """Dropout in the transformer that denoises actions. LeRobot's is always 0.1."""
    vision_drop_path: float | None = None
    """Share of branches that the image encoder leaves out at random in training, also if it is frozen; default: as in
    policy.florence_config, 0.1 for published policies. With 0, a frozen one encodes each image only once."""
    rtc_config: dict[str, Any] | None = None
    """Settings of real-time chunking, under LeRobot's names: {execution_horizon: 10,
    prefix_attention_schedule: LINEAR}."""
    optimizer_betas: tuple[float, float] = (0.9, 0.99)
    optimizer_weight_decay: float = 0.0
    optimizer_soft_prompt_lr_scale: float = 1.0
    """Learning rate of the soft prompts, as a multiple of the others'."""
    optimizer_soft_prompt_warmup_lr_scale: float | None = None
    """If given, it is used instead of policy.optimizer_soft_prompt_lr_scale, for the whole run: nothing raises it
    later, in LeRobot neither."""

    def validate(self) -> None:
        self.require(
            1, "hidden_size", "depth", "num_heads", "num_domains", "max_len_seq", "num_denoising_steps"
        )
        self.require(1, "tokenizer_max_length", "num_image_views")
        self.require(0, "len_soft_prompts", "optimizer_soft_prompt_lr_scale", "scheduler_warmup_steps")
        self.require(0, "optimizer_soft_prompt_warmup_lr_scale")
        self.require(2, "dim_time")
        self.require(1 / 64, "mlp_ratio", high=64)
        self.require(0, "dropout", "vision_drop_path", high=MOST_DROPOUT)
        if self.hidden_size % self.num_heads:
            raise ConfigError(
                f"policy.hidden_size={self.hidden_size} must be a multiple of policy.num_heads={self.num_heads}."
            )
        super().validate()
        self._check_domains()
        self._check_states()
        self._check_images(self.florence_size())

    def _check_domains(self) -> None:
        for name, domain in (
            ("domain_id", self.domain_id),
            *(("domain_ids", d) for d in self.domain_ids or ()),
        ):
            if domain is not None and not 0 <= domain < self.num_domains:
                raise ConfigError(
                    f"policy.{name}: {domain} is no domain. With policy.num_domains={self.num_domains} they are 0 to "
                    f"{self.num_domains - 1}."
                )

    def _check_states(self) -> None:
        """Grippers are hidden in the state, so it must have their channels."""
        space = self.action_space
        least = 1 + max(space.hidden, default=-1)
        mode = f"policy.action_mode={self.action_mode}"
        if not self.use_proprio:
            if space.hidden:
                raise ConfigError(
                    f"{mode} needs the robot's state: set --policy.use_proprio=true, or --policy.action_mode=auto."
                )
        elif space.state_width is not None and self.max_state_dim != space.state_width:
            raise ConfigError(
                f"{mode} needs --policy.max_state_dim={space.state_width}, not {self.max_state_dim}."
            )
        elif self.max_state_dim < least:
            raise ConfigError(
                f"{mode} needs --policy.max_state_dim of at least {least}, not {self.max_state_dim}: it hides the "
                "grippers in the state."
            )

    def _check_images(self, size: FlorenceSize) -> None:
        """Refuse images that the network has no place for."""
        shapes = {name: feature.shape for name, feature in self.images.items()}
        if not shapes:
            return
        if len({*shapes.values()}) > 1 and self.resize_imgs_with_padding is None:
            listed = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
            raise ConfigError(
                f"X-VLA needs images of one size, but there are {listed}. Set --policy.resize_imgs_with_padding="
                "'[256, 256]' (height, width)."
            )
        height, width = self.resize_imgs_with_padding or next(iter(shapes.values()))[1:]
        image = f"Images of {height} x {width} pixels"
        resize = "a smaller --policy.resize_imgs_with_padding='[224, 224]'"
        rows, columns = size.vision.grid(height, width)
        if min(rows, columns) < 1:
            raise ConfigError(f"{image} are too small: set --policy.resize_imgs_with_padding='[224, 224]'.")
        if max(rows, columns) > size.places:
            raise ConfigError(
                f"{image} have {rows} x {columns} tokens, but {FLORENCE} has places for {size.places} rows and columns "
                f"(max_position_embeddings). Set {resize}."
            )
        tokens, words = size.image_tokens(height, width), self.tokenizer_max_length
        if tokens + words > size.text.positions:
            raise ConfigError(
                f"{image} have {tokens} tokens, and a task {words}, but {FLORENCE} has places for "
                f"{size.text.positions} (text_config.max_position_embeddings). Set {resize}."
            )
        length = self.chunk_size + words + tokens * self.views
        if length > self.max_len_seq:
            raise ConfigError(
                f"policy.max_len_seq={self.max_len_seq} is too short: {self.chunk_size} actions, {words} words and "
                f"{self.views} images of {tokens} tokens are {length}. Set {resize}, fewer cameras, or, for a policy "
                "without pretrained weights, a larger --policy.max_len_seq."
            )

    def check_padding(self) -> None:
        space, feature = self.action_space, self.output_features.get(ACTION)
        if feature is not None and feature.shape[0] > space.output:
            fix = "--policy.action_mode=auto, or another that fits the robot"
            if self.action_mode == AUTO:
                fix = "a larger --policy.max_action_dim, which requires other weights"
            raise ConfigError(
                f"{ACTION} has {feature.shape[0]} values, but policy.action_mode={self.action_mode} predicts "
                f"{space.output}. Set {fix}."
            )
        super().check_padding()

    def most_values(self, name: str) -> tuple[int, str]:
        most, setting_name = super().most_values(name)
        return (most if name == STATE else self.action_space.width), setting_name

    def florence_size(self) -> FlorenceSize:
        size = read_florence(self.florence_config or FLORENCE_2_LARGE, FLORENCE)
        if self.vision_drop_path is None:
            return size
        return replace(size, vision=replace(size.vision, drop_path=self.vision_drop_path))

    @property
    def action_space(self) -> ActionSpace:
        feature = self.output_features.get(ACTION)
        real = self.max_action_dim if feature is None else feature.shape[0]
        return action_space(self.action_mode, self.max_action_dim, real)

    @property
    def state_width(self) -> int:
        """Values of the state that the network takes."""
        return self.max_state_dim if self.use_proprio else 0

    @property
    def views(self) -> int:
        """Images that there are tokens for. In LeRobot their number grows whenever a policy is loaded."""
        return max(self.num_image_views or 0, len(self.images) + self.empty_cameras)

    @property
    def reads_state(self) -> bool:
        return self.use_proprio

    @property
    def observed(self) -> Features:
        return {name: f for name, f in super().observed.items() if name != STATE or self.use_proprio}

    def view_images(self, images: Tensor, camera: str, noise: NoiseSource | None = None) -> Tensor:
        size = self.resize_imgs_with_padding
        grey = sum(IMAGENET_MEAN) / len(IMAGENET_MEAN)
        return images if size is None else resize_with_padding(images, *size, "left-top", grey)

    @property
    def resizes_images(self) -> bool:
        return self.resize_imgs_with_padding is not None

    def accepts_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        """Without statistics, a state may have any number of values that fits: LeRobot's fine-tuned policies keep the
        inputs of the first robot."""
        normalized = self.normalization_mapping.get(Kind.STATE, "IDENTITY") != "IDENTITY"
        if name == STATE and not normalized:
            return len(shape) == 1 and shape[0] <= self.max_state_dim
        return super().accepts_shape(name, shape)

    @property
    def computes_with_bf16_copies(self) -> bool:
        return True

    @property
    def stores_frozen_in_bf16(self) -> bool:
        return True

    def acting_dtypes(self, stored: Mapping[str, torch.dtype]) -> dict[str, torch.dtype]:
        weights = (name for name in stored if not name.endswith("pos_idx_to_embed"))  # that is a table
        return dict.fromkeys(weights, getattr(torch, self.dtype))

    def fitted(self, inputs: Features, outputs: Features) -> Self:
        fitted = super().fitted(inputs, outputs)
        if fitted.pad_language_to != "max_length":
            log.warning(
                "policy.pad_language_to=%s becomes max_length: training pads all tasks to policy.tokenizer_max_length "
                "(%d), and the policy sees the padding",
                *(fitted.pad_language_to, fitted.tokenizer_max_length),
            )
        return replace(fitted, pad_language_to="max_length")

    def check_columns(self, columns: Mapping[str, Any]) -> None:
        if self.domain_ids is not None:
            datasets = 1 + int(columns[DATASET_NUMBER].max()) if DATASET_NUMBER in columns else 1
            if len(self.domain_ids) != datasets:
                raise ConfigError(
                    f"policy.domain_ids={self.domain_ids} must name the domain of each dataset, of which there are "
                    f"{datasets}."
                )
        key = self.domain_feature_key
        if key is None:
            return
        if key not in columns:
            raise ConfigError(
                f"policy.domain_feature_key={key}: the dataset has no such column. It has {', '.join(columns)}."
            )
        ids = np.asarray(columns[key])
        if ids.size and not (
            ids.min() >= 0 and ids.max() < self.num_domains and (ids == ids.astype(int)).all()
        ):
            raise ConfigError(
                f"policy.domain_feature_key={key}: the column has values from {ids.min()} to {ids.max()}, but domains "
                f"are whole numbers from 0 to {self.num_domains - 1}."
            )

    def with_saved_steps(self, steps: Sequence[Mapping[str, Any]]) -> Self:
        """The domain is only in the processing of a checkpoint."""
        saved = [step.get("config") or {} for step in steps if step.get("registry_name") == AddDomainId.name]
        if self.domain_id is not None or not saved:
            return self
        domain = saved[0].get(DOMAIN, 0)
        return replace(self, domain_id=domain) if type(domain) is int else self

    def completed(self, steps: Sequence[ProcessingStep]) -> list[ProcessingStep]:
        return [self.domain_step() if isinstance(step, AddDomainId) else step for step in steps]

    def domain_step(self) -> AddDomainId:
        first = self.domain_ids[0] if self.domain_ids else 0
        domain = first if self.domain_id is None else self.domain_id
        return AddDomainId(domain, self.domain_ids, keeps_column=self.domain_feature_key == DOMAIN)

    def steps_before(self, stats: Stats) -> list[ProcessingStep]:
        tokenize = Tokenize(
            self.tokenizer_name,
            max_length=self.tokenizer_max_length,
            padding=self.pad_language_to,
            padding_side=self.tokenizer_padding_side,
        )
        # LeRobot's steps find cameras by how their names begin, which `observation.image` does not
        cameras = None if all(name.startswith(IMAGES) for name in self.images) else [*self.images]
        rename, to_batch, *remaining = super().steps_before(stats)
        return [
            *(rename, to_batch, tokenize),
            *(ImageToFloat(cameras), ImageNetNormalize(cameras), self.domain_step()),
            *remaining,
        ]

    def lerobot_optimizer(self) -> dict[str, Any]:
        return {
            "type": "xvla-adamw",
            "soft_prompt_lr_scale": self.optimizer_soft_prompt_lr_scale,
            "soft_prompt_warmup_lr_scale": self.optimizer_soft_prompt_warmup_lr_scale,
        }

    def for_lerobot(self) -> Self:
        """With the number of views, and without the cameras that LeRobot adds: it would count them twice."""
        empty = self.empty_camera_names
        inputs: dict[str, PolicyFeature] = {n: f for n, f in self.input_features.items() if n not in empty}
        florence = self.florence_config or dict(FLORENCE_2_LARGE)
        return replace(self, input_features=inputs, num_image_views=self.views, florence_config=florence)

    def lora_targets(self) -> list[str] | str:
        """Attention of the transformer that denoises actions, and what projects images and words to it."""
        return r"model\.transformer\.(blocks\.\d+\.attn\.(qkv|proj)|vlm_proj|aux_visual_proj)"
