"""The reward classifier of HIL-SERL (Luo et al. 2024, https://arxiv.org/abs/2410.21845), as LeRobot has it.

Each camera's image goes through a pretrained ResNet-10, learned sums over the image and a layer; a small network
decides from all cameras. Parameter names are LeRobot's. Unlike in LeRobot, all of it learns but the encoder, if that
is frozen.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flexor.core.batch import IMAGE_FEATURES, Batch
from flexor.core.errors import ConfigError
from flexor.core.rng import NoiseSource
from flexor.policies.base import Loss, Policy
from flexor.policies.image_encoder import ImageEncoder
from flexor.policies.nn.resnet10 import ResNet10, SpatialEmbedding, drop, load_resnet10
from flexor.policies.reward_classifier.config import RewardClassifierConfig

CONFIDENT = 0.5  # probability from which on a prediction counts as done


class RewardClassifier(Policy):
    Config = RewardClassifierConfig
    config: RewardClassifierConfig
    optimizes_frozen: ClassVar[bool] = True
    evaluated_parts: ClassVar[tuple[str, ...]] = ("accuracy",)

    def __init__(self, config: RewardClassifierConfig):
        super().__init__(config)
        self.cameras = list(config.images)
        self.encoder = ResNet10()
        self.encoder.requires_grad_(not config.freeze_vision_encoder)
        self.encoders = nn.ModuleDict({_module_name(key): self._head_of_camera() for key in self.cameras})
        outputs = 1 if config.num_classes == 2 else config.num_classes
        self.classifier_head = nn.Sequential(
            nn.Linear(config.latent_dim * config.num_cameras, config.hidden_dim),
            nn.Identity(),  # the place of the dropout, which `logits` computes
            nn.LayerNorm(config.hidden_dim),
            nn.ReLU(),
            nn.Linear(config.hidden_dim, outputs),
        )

    def _head_of_camera(self) -> nn.Sequential:
        config = self.config
        shape = config.images[self.cameras[0]].shape
        weight = next(self.encoder.parameters())
        with torch.no_grad():
            channels, height, width = self.encoder(torch.zeros(1, *shape, device=weight.device)).shape[1:]
        pooled = config.image_embedding_pooling_dim
        return nn.Sequential(
            self.encoder,
            SpatialEmbedding(channels, height, width, pooled),
            nn.Identity(),  # likewise
            nn.Linear(channels * pooled, config.latent_dim),
            nn.LayerNorm(config.latent_dim),
            nn.Tanh(),
        )

    def logits(self, batch: Batch, noise: NoiseSource | None = None) -> Tensor:
        """[B], or [B, num_classes] if there are more than two. With `noise`, values are dropped as in training."""
        share, encoded = self.config.dropout_rate, []
        for key in self.cameras:
            _, embedding, _, *layers = self.encoders[_module_name(key)].children()
            features = batch.get(IMAGE_FEATURES + key)
            x = embedding(self.encoder(batch[key]) if features is None else features)
            if noise is not None:
                x = drop(x, share, noise, f"dropout/{key}")
            for layer in layers:
                x = layer(x)
            encoded.append(x)
        first, _, *layers = self.classifier_head.children()
        x = first(torch.cat(encoded, -1))
        if noise is not None:
            x = drop(x, share, noise, "dropout/head")
        for layer in layers:
            x = layer(x)
        return x[:, 0] if self.config.num_classes == 2 else x

    def probability(self, batch: Batch) -> Tensor:
        """[B]: how likely the task is done, which is the last class."""
        logits = self.logits(batch).float()
        return logits.sigmoid() if self.config.num_classes == 2 else logits.softmax(-1)[:, -1]

    def loss(self, batch: Batch, noise: NoiseSource) -> Loss:
        rewards = batch[self.config.label].reshape(-1).float()
        logits = self.logits(batch, noise if self.training else None).float()
        if self.config.num_classes == 2:
            error = F.binary_cross_entropy_with_logits(logits, rewards, reduction="none")
            right = (logits.sigmoid() > CONFIDENT) == (rewards > CONFIDENT)
        else:
            error = F.cross_entropy(logits, rewards.long(), reduction="none")
            right = logits.argmax(-1) == rewards.long()
        return Loss(error, {"accuracy": right.float()})

    def predict(self, batch: Batch, noise: NoiseSource) -> Tensor:
        raise ConfigError(
            "policy.type=reward_classifier says whether a task is done, and can't act: give it to a run that learns "
            "while it acts, as --rl.reward_classifier=PATH."
        )

    def image_encoder(self) -> ImageEncoder:
        return ImageEncoder([self.encoder], {})

    def encode_images(self, images: Tensor, camera: str) -> Tensor:
        maps: Tensor = self.encoder(images)
        return maps

    def load_backbone(self) -> None:
        load_resnet10(self.encoder, "policy.model_name", self.config.model_name)


def _module_name(key: str) -> str:
    return key.replace(".", "_")  # a module's name has no dots
