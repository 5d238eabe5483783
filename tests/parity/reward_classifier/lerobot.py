"""What LeRobot's reward classifier computes, with our ResNet-10 in it."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from flexor.policies.nn.resnet10 import CHANNELS, ResNet10
from parity import lerobot_side
from parity.inputs import statistics
from parity.reward_classifier.cases import fill_policy, images, labels, record


class Encoder(ResNet10):
    """As `transformers` would return it."""

    config = SimpleNamespace(hidden_sizes=CHANNELS)

    def forward(self, pictures: torch.Tensor) -> Any:
        return SimpleNamespace(last_hidden_state=super().forward(pictures))


@contextmanager
def own_encoder() -> Iterator[None]:
    with patch("transformers.AutoModel.from_pretrained", lambda *_, **__: Encoder()):
        yield


def make(case: dict) -> tuple:
    from lerobot.configs.types import FeatureType, NormalizationMode, PolicyFeature
    from lerobot.rewards.classifier import Classifier, RewardClassifierConfig, make_classifier_processor

    settings = dict(case["settings"])
    modes = settings.pop("normalization_mapping")
    config = RewardClassifierConfig(
        **settings,
        normalization_mapping={kind: NormalizationMode(mode) for kind, mode in modes.items()},
        input_features={
            key: PolicyFeature(FeatureType(kind), shape) for key, (kind, shape) in case["inputs"].items()
        },
    )
    stats = {
        key: {name: torch.from_numpy(value) for name, value in values.items()}
        for key, values in statistics(case["inputs"]).items()
    }
    with own_encoder():
        model = Classifier(config).eval()
    return model, *make_classifier_processor(config, stats)


def measure(case: dict) -> dict:
    model, before, _ = make(case)
    parameters = fill_policy(model)
    batch = before(lerobot_side.tensors(images(case)))
    batch["next.reward"] = torch.from_numpy(labels(case))
    loss, _ = model(batch)
    with torch.no_grad():
        logits = model.predict([batch[key] for key in case["inputs"]]).logits
    return {"parameters": parameters, **record(model, logits, loss, lerobot_side.groups(model))}
