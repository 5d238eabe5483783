"""The ResNets of ACT, compared with torchvision's. Imported by both programs."""

from collections.abc import Callable

import torch

from parity.fill import fill, uniform
from parity.records import gradients, values

CASES = {name: {"settings": {"name": name}} for name in ("resnet18", "resnet34", "resnet50")}


def measure(network: torch.nn.Module, feature_map: Callable[[torch.Tensor], torch.Tensor]) -> dict:
    parameters = fill(network)
    picture = torch.from_numpy(uniform("picture", (2, 3, 50, 70), -2, 2)).requires_grad_()
    out = feature_map(picture)
    out.square().mean().backward()
    assert picture.grad is not None
    return {
        "parameters": parameters,
        "size": list(out.shape),
        "out": values(out[:, ::32]),
        "gradients": [picture.grad.double().norm().item(), *gradients(network)],
    }
