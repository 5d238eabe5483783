"""The settings of the reward classifier, under LeRobot's names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Self

import numpy as np

from flexor.core.errors import ConfigError
from flexor.policies.base import MOST_DROPOUT, PolicyConfig
from flexor.policies.features import Kind, Normalization, PolicyFeature
from flexor.policies.lerobot_settings import LerobotSetting
from flexor.policies.processing.pipeline import ProcessingStep, Stats
from flexor.policies.processing.rename_and_move import ToDevice

SMALLEST_IMAGE = 32  # pixels, of which ResNet-10 leaves one


@dataclass
class RewardClassifierConfig(PolicyConfig):
    """Defaults are LeRobot's."""

    type: ClassVar[str] = "reward_classifier"
    processor_names: ClassVar[tuple[str, str]] = ("classifier_preprocessor", "classifier_postprocessor")
    unknown_to_lerobot: ClassVar[frozenset[str]] = frozenset(
        {"n_obs_steps", "label", "freeze_vision_encoder", "use_amp", "use_peft"}
    )
    only_in_lerobot = MappingProxyType({"name": LerobotSetting("it is the type")})

    label: Literal["next.reward", "next.success"] = "next.reward"
    """Column of the dataset that says whether the task is done, or which class it is."""
    num_classes: int = 2
    """Number of classes: 2 for done or not."""
    hidden_dim: int = 256
    """Width of the layer before the last one."""
    latent_dim: int = 256
    """Size of what encodes each camera."""
    image_embedding_pooling_dim: int = 8
    """Weighted sums over the image that are kept of each channel."""
    dropout_rate: float = 0.1
    """Share of the values that is dropped in training."""
    model_name: str = "lerobot/resnet10"
    """Pretrained ResNet-10 that encodes images: a folder or Hub repository."""
    model_type: Literal["cnn"] = "cnn"
    """Kind of encoder; LeRobot's other kind, transformer, is not supported."""
    freeze_vision_encoder: bool = True
    """Do not train the image encoder."""
    num_cameras: int = 2
    """Number of cameras; set to that of the dataset."""
    learning_rate: float = 1e-4
    """Learning rate."""
    weight_decay: float = 0.01
    """Weight decay."""
    grad_clip_norm: float = 1.0
    """Clip gradients to this norm."""
    normalization_mapping: dict[Kind, Normalization] = field(
        default_factory=lambda: {Kind.VISUAL: "MEAN_STD"}
    )
    """How images are normalised."""

    def validate(self) -> None:
        self.check_one_observation()
        self.require(2, "num_classes")
        self.require(1, "hidden_dim", "latent_dim", "image_embedding_pooling_dim", "num_cameras")
        self.require(0, "dropout_rate", high=MOST_DROPOUT)
        if not self.input_features:
            return
        if not self.images:
            raise self.missing_input("a camera")
        if len(self.images) != self.num_cameras:
            raise ConfigError(
                f"policy.num_cameras={self.num_cameras}, but the classifier sees {', '.join(self.images)}."
            )
        if len({feature.shape for feature in self.images.values()}) > 1:
            shapes = ", ".join(f"{name} {list(f.shape)}" for name, f in self.images.items())
            raise ConfigError(f"The reward classifier needs cameras with images of one size: {shapes}.")
        size = next(iter(self.images.values())).shape[1:]
        if min(size) < SMALLEST_IMAGE:
            raise ConfigError(
                f"The images are {list(size)}, but the reward classifier needs at least {SMALLEST_IMAGE} pixels: use "
                "larger images."
            )

    def fitted(self, inputs: dict[str, PolicyFeature], outputs: dict[str, PolicyFeature]) -> Self:
        cameras = {name: feature for name, feature in inputs.items() if feature.type is Kind.VISUAL}
        config = super().fitted(cameras, outputs)
        return replace(config, num_cameras=len(config.images))

    def check_columns(self, columns: Mapping[str, Any]) -> None:
        """A label is a class, or for two classes the probability of the second."""
        if self.label not in columns:
            raise ConfigError(
                f"The dataset has no column {self.label!r}, from which the reward classifier learns: see policy.label."
            )
        rewards = np.asarray(columns[self.label], np.float32)
        classes = np.isin(rewards, range(self.num_classes)).all()
        between = self.num_classes == 2 and (rewards >= 0).all() and (rewards <= 1).all()
        if not (classes or between):
            raise ConfigError(
                f"{self.label} is from {rewards.min():g} to {rewards.max():g}, but the reward classifier learns "
                f"{self.num_classes} classes from it: 0 to {self.num_classes - 1}."
            )

    def steps_after(self, stats: Stats) -> list[ProcessingStep]:
        return [ToDevice("cpu")]

    def optimizer_preset(self) -> dict[str, Any]:
        return {
            "type": "adamw",
            "lr": self.learning_rate,
            "weight_decay": self.weight_decay,
            "grad_clip_norm": self.grad_clip_norm,
        }

    @property
    def observed(self) -> dict[str, PolicyFeature]:
        return self.images

    @property
    def action_deltas(self) -> list[int]:
        return [0]  # actions are not used, but a sample has them

    @property
    def action_steps(self) -> int:
        return 1

    @property
    def label_columns(self) -> Sequence[str]:
        return (self.label,)
