"""Every kind of noise schedule, compared with those of `diffusers`. Imported by both programs."""

import itertools

from torch import Tensor

from parity.fill import Draws
from parity.records import values

SHAPE = (3, 4, 2)
SPACING = 7  # of the levels whose signal is stored
KINDS = itertools.product(("DDPM", "DDIM"), ("linear", "scaled_linear", "squaredcos_cap_v2"))
CASES = {
    f"{kind} {beta} {prediction} {train}/{steps}{'' if clip else ' unclipped'}": {
        "settings": {
            "noise_scheduler_type": kind,
            "beta_schedule": beta,
            "prediction_type": prediction,
            "num_train_timesteps": train,
            "num_inference_steps": steps,
            "clip_sample": clip,
            "clip_sample_range": 1.2,
        }
    }
    for kind, beta in KINDS
    for prediction, train, steps, clip in [
        ("epsilon", 100, 100, True),
        ("sample", 50, 7, True),
        ("epsilon", 1000, 12, False),
    ]
}
DRAWS = Draws("schedule")


def tensor(name: str) -> Tensor:
    return DRAWS.normal(name, SHAPE)


def some(path: list[Tensor]) -> list:
    """Of the way from noise to actions a few steps, and the last."""
    return [values(x) for x in path[:: max(1, len(path) // 5)] + path[-1:]]
