"""What LeRobot's ACT computes for every case: run where `lerobot` is installed.

    python tests/parity/act_lerobot.py tests/golden/act

Weights, inputs and the latent's noise come from fill.py, so act_flexor.py can compute the same.
"""

import sys
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import act_cases as cases
import torch
from fill import fill
from records import gradients, record_batch, save, values

FEATURE_MAP = ("resnet18", "resnet34", "resnet50")


def measure(name: str) -> dict:
    from lerobot.policies.act.modeling_act import ACTPolicy
    from lerobot.policies.factory import make_pre_post_processors

    case = cases.CASES[name]
    config = make_config(case)
    policy = ACTPolicy(config)
    stats = {
        k: {n: torch.from_numpy(v) for n, v in s.items()} for k, s in cases.statistics(case["inputs"]).items()
    }
    before, after = make_pre_post_processors(config, dataset_stats=stats)
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
    seen = before(tensors(cases.observation(case["inputs"], "step 0")))
    record["chunk"] = values(policy.predict_action_chunk(with_state(seen)))
    policy.reset()
    record["actions"] = [
        values(after(policy.select_action(with_state(before(observe(case, step))))))
        for step in range(cases.STEPS)
    ]
    return record


def make_config(case: dict):
    from lerobot.configs.types import FeatureType, NormalizationMode, PolicyFeature
    from lerobot.policies.act.configuration_act import ACTConfig

    def features(described: dict) -> dict:
        return {k: PolicyFeature(FeatureType(kind), shape) for k, (kind, shape) in described.items()}

    settings = dict(case["settings"])
    modes = settings.pop("normalization_mapping")
    return ACTConfig(
        **settings,
        normalization_mapping={kind: NormalizationMode(mode) for kind, mode in modes.items()},
        input_features=features(case["inputs"]),
        output_features=features(cases.ACTION),
        device="cpu",
    )


def tensors(batch: dict) -> dict:
    """Pictures as LeRobot's datasets and environments give them: floats in [0, 1]."""
    return {
        key: torch.from_numpy(v).float() / 255 if v.dtype == "uint8" else torch.from_numpy(v)
        for key, v in batch.items()
    }


def observe(case: dict, step: int) -> dict:
    return tensors(cases.observation(case["inputs"], f"step {step}"))


def with_state(batch: dict) -> dict:
    """LeRobot asks the state for its device even where a policy has none."""
    return {"observation.state": torch.zeros(cases.BATCH, 1), **batch}


@contextmanager
def latent_noise(settings: dict):
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
