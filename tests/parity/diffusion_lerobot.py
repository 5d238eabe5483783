"""What LeRobot's Diffusion Policy computes for every case: run where `lerobot` is installed.

    python tests/parity/diffusion_lerobot.py tests/golden/diffusion

Weights, inputs and noise come from fill.py, so diffusion_flexor.py can compute the same.
"""

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from unittest.mock import patch

import diffusion_cases as cases
import torch
from fill import fill
from inputs import history, shown
from lerobot_side import act, make_policy, tensors
from records import gradients, record_batch, save, values


def measure(name: str) -> dict:
    case = cases.CASES[name]
    settings = case["settings"]
    made = make_policy("diffusion", case)
    policy, before = made.policy, made.before
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
    with step_noise(scheduler(policy), "chunk"):
        record["chunk"] = values(policy.predict_action_chunk(before(tensors(history(case, "chunk")))))
    record["actions"] = act(made, shown(case["inputs"], cases.STEPS), acting)
    return record


def scheduler(policy):
    policy.diffusion.noise_scheduler.set_timesteps(policy.diffusion.num_inference_steps)
    return policy.diffusion.noise_scheduler


def acting(policy, step: int) -> AbstractContextManager:
    return step_noise(scheduler(policy), f"act {step}")


def double_gradients(policy, batch: dict, settings: dict) -> list:
    with training_noise(settings), cases.in_double(policy, batch) as (twin, wide):
        twin(wide)[0].backward()
    return gradients(twin)


@contextmanager
def training_noise(settings: dict) -> Iterator[None]:
    """LeRobot draws crops (encoder by encoder: top, then left), then the noise, then its level."""
    separate = settings.get("use_separate_rgb_encoder_per_camera", True)
    crops = (f"crop{i if separate else ''}/{side}" for i in range(9) for side in ("top", "left"))

    def randint(low: int, high: int, size: tuple, **_: object) -> torch.Tensor:
        assert low == 0
        return cases.integers(next(crops) if size == (1,) else "timestep", size[0], high)

    def randn(shape: tuple, **_: object) -> torch.Tensor:
        return cases.normal("training", "noise", shape).to(torch.get_default_dtype())

    with patch("torch.randint", randint), patch("torch.randn", randn):
        yield


@contextmanager
def step_noise(scheduler, moment: str) -> Iterator[None]:
    """The noise at the start, and that which DDPM adds at each level but the last; flow matching has no levels."""
    levels = iter(scheduler.timesteps.tolist() if scheduler else ())

    def randn(size: tuple, **_: object) -> torch.Tensor:
        return cases.normal(moment, "x", size)

    def randn_tensor(shape: tuple, **_: object) -> torch.Tensor:
        return cases.normal(moment, f"step{next(levels)}", shape)

    with (
        patch("torch.randn", randn),
        patch("diffusers.schedulers.scheduling_ddpm.randn_tensor", randn_tensor),
    ):
        yield


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    save(folder / "diffusion.json", {name: measure(name) for name in cases.CASES})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
