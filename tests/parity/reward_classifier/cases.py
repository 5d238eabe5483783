"""The reward classifiers that are compared, and the images that they see. Imported by both programs.

Nothing is dropped: the classifiers are in evaluation mode. Both programs compute the encoder with our ResNet-10, since
LeRobot's is code on the Hub.
"""

import numpy as np
import torch

from parity.fill import fill, uniform
from parity.inputs import BATCH, camera, observation
from parity.records import values

SIZE = 128  # LeRobot's sums over the image are for maps of 4x4
TOP, SIDE = camera("top", SIZE, SIZE), camera("side", SIZE, SIZE)
SMALL = {"hidden_dim": 12, "latent_dim": 10, "image_embedding_pooling_dim": 3}
MODES = {"VISUAL": "MEAN_STD"}


def case(inputs: dict, **settings: object) -> dict:
    modes = settings.pop("modes", MODES)
    return {
        "inputs": inputs,
        "settings": {**SMALL, "num_cameras": len(inputs), "normalization_mapping": modes, **settings},
    }


CASES = {
    "camera": case(TOP),
    "cameras": case(TOP | SIDE),
    "classes": case(TOP, num_classes=3),
    "identity": case(SIDE, modes={"VISUAL": "IDENTITY"}, image_embedding_pooling_dim=8),
}


def images(case: dict) -> dict[str, np.ndarray]:
    return observation(case["inputs"], "classified")


def labels(case: dict) -> np.ndarray:
    classes = case["settings"].get("num_classes", 2)
    return uniform("labels", (BATCH,), 0, classes).astype(np.int64).astype(np.float32)


def record(model: torch.nn.Module, probabilities: torch.Tensor, loss: torch.Tensor, groups: list) -> dict:
    """Of gradients, those of the last layers: LeRobot computes no others."""
    last = [(name, p) for name, p in model.named_parameters() if name.startswith("classifier_head.")]
    gradients = torch.autograd.grad(loss, [p for _, p in last])
    return {
        "groups": groups,
        "out": values(probabilities),
        "loss": {"loss": loss.item()},
        "gradients": {name: g.double().norm().item() for (name, _), g in zip(last, gradients)},
    }


def fill_policy(model: torch.nn.Module) -> str:
    return fill(model)
