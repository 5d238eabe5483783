"""What `diffusers` computes for every kind of noise schedule: run where it is installed.

    python tests/parity/diffusion_schedules.py tests/golden/diffusion

Also holds the cases, and how a schedule is asked, for tests/policies/test_schedules.py.
"""

import itertools
import sys
from pathlib import Path

import torch
from fill import uniform
from records import save, values

SHAPE = (3, 4, 2)
SPACING = 7  # of the levels whose signal is stored
KINDS = itertools.product(("DDPM", "DDIM"), ("linear", "scaled_linear", "squaredcos_cap_v2"))
CASES = {
    f"{kind} {beta} {prediction} {train}/{steps}{'' if clip else ' unclipped'}": {
        "noise_scheduler_type": kind,
        "beta_schedule": beta,
        "prediction_type": prediction,
        "num_train_timesteps": train,
        "num_inference_steps": steps,
        "clip_sample": clip,
        "clip_sample_range": 1.2,
    }
    for kind, beta in KINDS
    for prediction, train, steps, clip in [
        ("epsilon", 100, 100, True),
        ("sample", 50, 7, True),
        ("epsilon", 1000, 12, False),
    ]
}


def tensor(name: str) -> torch.Tensor:
    return torch.from_numpy(uniform(name, SHAPE, -2, 2))


def measure(name: str) -> dict:
    from diffusers import DDIMScheduler, DDPMScheduler

    settings = dict(CASES[name])
    steps = settings.pop("num_inference_steps")
    kind = {"DDPM": DDPMScheduler, "DDIM": DDIMScheduler}[settings.pop("noise_scheduler_type")]
    scheduler = kind(**settings)
    levels = torch.tensor([0, 7, settings["num_train_timesteps"] - 1])
    noisy = scheduler.add_noise(tensor("clean"), tensor("noise"), levels)
    record = {"signal": values(scheduler.alphas_cumprod[::SPACING]), "noisy": values(noisy)}

    scheduler.set_timesteps(steps)
    record["levels"] = scheduler.timesteps.tolist()
    x = tensor("x")
    path = []
    for level in scheduler.timesteps:
        x = take(scheduler, tensor(f"predicted{level}"), level, x)
        path.append(values(x))
    record["path"] = path[:: max(1, steps // 5)] + path[-1:]
    return record


def take(scheduler, predicted: torch.Tensor, level: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """One step, with our noise where the scheduler draws its own."""
    from unittest.mock import patch

    drawn = "diffusers.schedulers.scheduling_ddpm.randn_tensor"
    with patch(drawn, lambda shape, **_: tensor(f"step{level}")):
        return scheduler.step(predicted, level, x).prev_sample


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save(folder / "schedules.json", {name: measure(name) for name in CASES})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
