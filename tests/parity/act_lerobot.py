"""What LeRobot's ACT computes for every case: run where `lerobot` is installed.

    python tests/parity/act_lerobot.py tests/golden/act

Weights, inputs and the latent's noise come from fill.py, so act_flexor.py can compute the same.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from unittest.mock import patch

import act_cases as cases
import torch
from fill import fill
from inputs import observation, shown
from lerobot_side import act, make_policy, tensors, with_state
from records import gradients, record_batch, save, values

FEATURE_MAP = ("resnet18", "resnet34", "resnet50")


def measure(name: str) -> dict:
    case = cases.CASES[name]
    made = make_policy("act", case)
    policy, before = made.policy, made.before
    record = {"parameters": fill(policy)}

    policy.train()
    batch = before(tensors(cases.training_batch(case["inputs"])))
    record["batch"] = record_batch({k: v for k, v in batch.items() if k in case["inputs"] or k == "action"})
    with latent_noise(case["settings"]):
        loss, parts = policy(with_state(batch))
    loss.backward()
    record["loss"] = {"loss": loss.item(), **parts}
    record["gradients"] = gradients(policy)

    # the loss as it is on held-out data: no latent from the true actions
    policy.eval()
    with torch.no_grad():
        record["eval_loss"] = policy(with_state(batch))[0].item()
    seen = before(tensors(observation(case["inputs"], "step 0")))
    record["chunk"] = values(policy.predict_action_chunk(with_state(seen)))
    record["actions"] = act(made, shown(case["inputs"], cases.STEPS), acting)
    return record


def acting(policy, step: int) -> nullcontext:
    """Nothing is drawn."""
    return nullcontext()


@contextmanager
def latent_noise(settings: dict) -> Iterator[None]:
    noise = torch.from_numpy(cases.latent_noise(settings))
    with patch("torch.randn_like", lambda like: noise.to(like)):
        yield


def resnet(name: str) -> dict:
    """torchvision's backbone alone, as ACT uses it."""
    import torchvision
    from torchvision.models._utils import IntermediateLayerGetter
    from torchvision.ops.misc import FrozenBatchNorm2d

    network = getattr(torchvision.models, name)(norm_layer=FrozenBatchNorm2d)
    network = IntermediateLayerGetter(network, {"layer4": "out"})
    parameters = fill(network)
    picture = torch.from_numpy(cases.uniform("picture", (2, 3, 50, 70), -2, 2)).requires_grad_()
    out = network(picture)["out"]
    out.square().mean().backward()
    return {
        "parameters": parameters,
        "size": list(out.shape),
        "out": values(out[:, ::32]),
        "picture_gradient": picture.grad.norm().item(),
        "gradients": gradients(network),
    }


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    save(folder / "act.json", {name: measure(name) for name in cases.CASES})
    save(folder / "resnet.json", {name: resnet(name) for name in FEATURE_MAP})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
