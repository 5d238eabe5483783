"""Rewards from a classifier that sees the cameras, where the environment can't tell whether the task is done."""

from __future__ import annotations

from typing import Any

import gymnasium
import torch

from flexor.config.rl import RLConfig
from flexor.core.errors import ConfigError
from flexor.evaluate.envs import observation_to_batch
from flexor.policies.pretrained import Pretrained, load_pretrained
from flexor.policies.processing.pipeline import ACTING
from flexor.policies.reward_classifier.policy import RewardClassifier

Env = gymnasium.Env[Any, Any]


def with_classifier(env: Env, settings: RLConfig, device: torch.device) -> Env:
    """The environment, with rewards from `rl.reward_classifier` if that is set."""
    path = settings.reward_classifier
    return env if path is None else ClassifiedReward(env, load_pretrained(path, str(device)), settings)


class ClassifiedReward(gymnasium.Wrapper[Any, Any, Any, Any]):
    """The reward is 1 where the classifier says that the task is done, which ends the episode, and 0 elsewhere."""

    def __init__(self, env: Env, pretrained: Pretrained, settings: RLConfig):
        super().__init__(env)
        self.pretrained, self.settings = pretrained, settings
        if not isinstance(pretrained.policy, RewardClassifier):
            raise ConfigError(
                f"rl.reward_classifier={settings.reward_classifier} is a policy of type "
                f"{pretrained.policy.config.type}: train a classifier with --policy.type=reward_classifier."
            )
        self.classifier = pretrained.policy

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        observation, info = self.env.reset(**options)
        self._check(observation)
        return observation, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, _, terminated, truncated, info = self.env.step(action)
        done = self.probability(observation) >= self.settings.success_threshold
        ends = done and self.settings.terminate_on_success
        return observation, float(done), terminated or ends, truncated, {**info, "is_success": done}

    @torch.inference_mode()
    def probability(self, observation: Any) -> float:
        """How likely the task is done."""
        images = observation_to_batch(observation)
        batch = {name: torch.from_numpy(images[name])[None] for name in self.classifier.cameras}
        return float(self.classifier.probability(self.pretrained.preprocessor(batch, ACTING)))

    def _check(self, observation: Any) -> None:
        """Refuse an environment with other cameras."""
        available = observation_to_batch(observation)
        for name, feature in self.classifier.config.images.items():
            if name not in available or available[name].shape != feature.shape:
                described = ", ".join(f"{n} {list(v.shape)}" for n, v in available.items())
                raise ConfigError(
                    f"rl.reward_classifier={self.settings.reward_classifier} sees {name} {list(feature.shape)}, but "
                    f"the environment gives {described}. Train it on images of this environment, or crop and resize "
                    "them with --env.processor.image_preprocessing."
                )
