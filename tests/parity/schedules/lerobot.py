"""What `diffusers`, which LeRobot uses, computes."""

from unittest.mock import patch

import torch

from parity.records import values
from parity.schedules.cases import SPACING, some, tensor


def measure(case: dict) -> dict:
    from diffusers import DDIMScheduler, DDPMScheduler

    settings = dict(case["settings"])
    steps = settings.pop("num_inference_steps")
    kind = {"DDPM": DDPMScheduler, "DDIM": DDIMScheduler}[settings.pop("noise_scheduler_type")]
    scheduler = kind(**settings)
    levels = torch.tensor([0, 7, settings["num_train_timesteps"] - 1])
    noisy = scheduler.add_noise(tensor("clean"), tensor("noise"), levels)
    scheduler.set_timesteps(steps)
    x, path = tensor("x"), []
    for level in scheduler.timesteps:
        noise = tensor(f"step{level}")
        with patch("diffusers.schedulers.scheduling_ddpm.randn_tensor", lambda *_, noise=noise, **__: noise):
            x = scheduler.step(tensor(f"predicted{level}"), level, x).prev_sample
        path.append(x)
    signal = values(scheduler.alphas_cumprod[::SPACING])
    levels = scheduler.timesteps.tolist()
    return {"signal": signal, "noisy": values(noisy), "levels": levels, "path": some(path)}
