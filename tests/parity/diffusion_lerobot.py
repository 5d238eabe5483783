"""What LeRobot's Diffusion Policy computes for every case: run where `lerobot` is installed.

    python tests/parity/diffusion_lerobot.py tests/golden/diffusion

Weights, inputs and noise come from fill.py, so diffusion_flexor.py can compute the same.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import diffusion_cases as cases
import torch
from act_lerobot import tensors
from diffusion_cases import in_double
from fill import fill
from records import gradients, record_batch, save, values


def measure(name: str) -> dict:
    from lerobot.policies.diffusion.modeling_diffusion import DiffusionPolicy
    from lerobot.policies.factory import make_pre_post_processors

    case = cases.CASES[name]
    settings = case["settings"]
    config = make_config(case)
    policy = DiffusionPolicy(config)
    stats = {
        k: {n: torch.from_numpy(v) for n, v in s.items()} for k, s in cases.statistics(case["inputs"]).items()
    }
    before, after = make_pre_post_processors(config, dataset_stats=stats)
    record = {"parameters": fill(policy)}

    batch = before(tensors(cases.training_batch(name)))
    record["batch"] = record_batch({"action": batch["action"], "state": batch["observation.state"]})
    policy.train()
    record["gradients"] = double_gradients(policy, batch, settings)
    with torch.no_grad(), training_noise(settings):
        record["loss"] = policy(batch)[0].item()

    policy.eval()
    with torch.no_grad(), training_noise(settings):
        record["eval_loss"] = policy(batch)[0].item()
    with step_noise(policy, "chunk"):
        seen = before(tensors(cases.history(name, "chunk")))
        record["chunk"] = values(policy.predict_action_chunk(seen, noise=start("chunk", settings)))
    policy.reset()
    record["actions"] = [act(policy, before, after, case, step) for step in range(cases.STEPS)]
    return record


def double_gradients(policy, batch: dict, settings: dict) -> list:
    with training_noise(settings), in_double(policy, batch) as (twin, wide):
        twin(wide)[0].backward()
    return gradients(twin)


def act(policy, before, after, case: dict, step: int) -> list:
    seen = before(tensors(cases.observation(case["inputs"], f"step {step}")))
    with step_noise(policy, f"act {step}"):
        return values(after(policy.select_action(seen, noise=start(f"act {step}", case["settings"]))))


def make_config(case: dict):
    from lerobot.configs.types import FeatureType, NormalizationMode, PolicyFeature
    from lerobot.policies.diffusion.configuration_diffusion import DiffusionConfig

    def features(described: dict) -> dict:
        return {k: PolicyFeature(FeatureType(kind), shape) for k, (kind, shape) in described.items()}

    settings = dict(case["settings"])
    modes = settings.pop("normalization_mapping")
    return DiffusionConfig(
        **settings,
        normalization_mapping={kind: NormalizationMode(mode) for kind, mode in modes.items()},
        input_features=features(case["inputs"]),
        output_features=features(cases.ACTION),
        device="cpu",
    )


def start(moment: str, settings: dict) -> torch.Tensor:
    return torch.from_numpy(cases.normal(moment, "x", settings))


@contextmanager
def training_noise(settings: dict) -> Iterator[None]:
    """LeRobot draws crops (encoder by encoder: top, then left), then the noise, then its level."""
    separate = settings.get("use_separate_rgb_encoder_per_camera", True)
    crops = (f"crop{i if separate else ''}/{side}" for i in range(9) for side in ("top", "left"))

    def randint(low: int, high: int, size: tuple, **_: object) -> torch.Tensor:
        assert low == 0
        return torch.from_numpy(cases.integers(next(crops) if size == (1,) else "timestep", size[0], high))

    def randn(shape: tuple, **_: object) -> torch.Tensor:
        noise = torch.from_numpy(cases.normal("training", "noise", settings))
        assert noise.shape == shape
        return noise.to(torch.get_default_dtype())

    with patch("torch.randint", randint), patch("torch.randn", randn):
        yield


@contextmanager
def step_noise(policy, moment: str) -> Iterator[None]:
    """The noise that DDPM adds at each level but the last."""
    scheduler = policy.diffusion.noise_scheduler
    scheduler.set_timesteps(policy.diffusion.num_inference_steps)
    levels = iter(scheduler.timesteps.tolist())

    def randn_tensor(shape: tuple, **_: object) -> torch.Tensor:
        name = f"step{next(levels)}"
        return torch.from_numpy(cases.normal(moment, name, {"horizon": shape[1]}))

    with patch("diffusers.schedulers.scheduling_ddpm.randn_tensor", randn_tensor):
        yield


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    save(folder / "diffusion.json", {name: measure(name) for name in cases.CASES})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
