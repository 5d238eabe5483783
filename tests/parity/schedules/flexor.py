"""What our schedules compute."""

import torch

from flexor.policies.nn.diffusion import DiffusionSchedule, DiffusionSettings
from parity.records import values
from parity.schedules.cases import DRAWS, SHAPE, SPACING, some, tensor


def measure(case: dict) -> dict:
    settings = DiffusionSettings(**case["settings"])
    settings.check_diffusion()
    schedule = DiffusionSchedule(settings)
    levels = torch.tensor([0, 7, settings.num_train_timesteps - 1])
    noisy = schedule.add_noise(tensor("clean"), tensor("noise"), levels)
    path = []

    def network(x: torch.Tensor, level: torch.Tensor) -> torch.Tensor:
        path.append(x)
        return tensor(f"predicted{level[0]}")

    end = schedule.sample(network, SHAPE, DRAWS, torch.zeros(1))
    signal = values(schedule.signal[::SPACING])
    return {
        "signal": signal,
        "noisy": values(noisy),
        "levels": schedule.levels(),
        "path": some([*path[1:], end]),
    }
