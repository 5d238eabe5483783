"""What LeRobot's TD-MPC computes for every case: run where `lerobot` is installed.

    python tests/parity/tdmpc_lerobot.py tests/golden/tdmpc

Weights, inputs and all that is drawn come from fill.py, so tdmpc_flexor.py can compute the same.
"""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest.mock import patch

import numpy as np
import tdmpc_cases as cases
import torch
from fill import fill
from inputs import BATCH, shown
from lerobot_side import act, make_policy, tensors
from records import gradients, record_batch, save

PARTS = ("consistency_loss", "reward_loss", "Q_value_loss", "V_value_loss", "pi_loss", "Q", "V")


def measure(name: str) -> dict:
    case = cases.CASES[name]
    made = make_policy("tdmpc", case)
    policy, before = made.policy, made.before
    record = {"parameters": fill(policy)}

    policy.train()
    given = tensors(cases.training_batch(case))
    kept = {key: value for key, value in given.items() if key.startswith("next.reward")}
    batch = before(given) | kept | {key: v for key, v in given.items() if key.endswith("_is_pad")}
    record["batch"] = record_batch(
        {key: value[:, 0] for key, value in batch.items() if key in case["inputs"] or key == "action"}
    )
    with drawing_for_training(case, "training"):
        loss, parts = policy(dict(batch))
    loss.backward()
    record["loss"] = {"loss": loss.item(), **{part: parts[part] for part in PARTS}}
    record["gradients"] = gradients(policy)
    policy.update()
    record["target"] = [p.norm().item() for p in policy.model_target.parameters()]

    policy.eval()
    with torch.no_grad(), drawing_for_training(case, "eval"):
        record["eval_loss"] = policy(dict(batch))[0].item()
    if case["acts"]:
        record["actions"] = act(made, shown(case["inputs"], cases.STEPS), acting)
    return record


@contextmanager
def drawing_for_training(case: dict, moment: str) -> Iterator[None]:
    """Critics for the value, then for the advantage; shifts [t b, 1, 1, (x, y)]."""
    draws = cases.Draws(moment)
    names = iter(("critics/value", "critics/advantage"))

    def choice(count: int, size: int):
        return draws.integers(next(names), (1, size), count)[0]

    def randint(low: int, high: int, size: tuple, device: object, dtype: torch.dtype) -> torch.Tensor:
        steps = case["settings"]["horizon"] + 1
        shifts = [
            [draws.integers(f"shift/{t}/{side}", (BATCH,), high) for side in ("left", "top")]
            for t in range(steps)
        ]
        return torch.from_numpy(np.array(shifts)).to(dtype).movedim(1, 2).reshape(size)  # [t, (x, y), b]

    with patch("numpy.random.choice", choice), patch("torch.randint", randint):
        yield


@contextmanager
def acting(policy, step: int) -> Iterator[None]:
    """In the order of its plan: the proposals, then per round samples, last actions and critics."""
    config, draws = policy.config, cases.Draws(step)
    batch, width, horizon = BATCH, config.action_feature.shape[0], config.horizon
    tried = config.n_gaussian_samples + config.n_pi_samples
    done = {"proposals": 0, "rounds": 0}

    def randn(*shape: int, device: object) -> torch.Tensor:
        name = f"plan/{done['rounds']}/samples"
        drawn = draws.normal(name, (batch, config.n_gaussian_samples, horizon, width))
        return torch.from_numpy(drawn).permute(2, 1, 0, 3)

    def randn_like(like: torch.Tensor) -> torch.Tensor:
        t = done["proposals"]
        if t < horizon and config.n_pi_samples > 0:
            done["proposals"] += 1
            drawn = draws.normal("plan/policy", (batch, config.n_pi_samples, horizon, width))
            return torch.from_numpy(drawn[:, :, t]).transpose(0, 1)
        name = f"plan/{done['rounds']}/last"
        done["rounds"] += config.q_ensemble_size <= 2  # no critics are drawn then
        return torch.from_numpy(draws.normal(name, (batch, tried, width))).transpose(0, 1)

    def randint(low: int, high: int, size: tuple) -> torch.Tensor:
        name = f"plan/{done['rounds']}/critics"
        done["rounds"] += 1
        return torch.from_numpy(draws.integers(name, (1, *size), high)[0])

    def multinomial(weights: torch.Tensor, count: int) -> torch.Tensor:
        chance = torch.from_numpy(draws.uniform("plan/choice", (batch, 1)))
        return (weights.cumsum(1) < chance).sum(1, keepdim=True)

    with ExitStack() as stack:
        for name, fake in (
            ("randn", randn),
            ("randn_like", randn_like),
            ("randint", randint),
            ("multinomial", multinomial),
        ):
            stack.enter_context(patch(f"torch.{name}", fake))
        yield


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    save(folder / "tdmpc.json", {name: measure(name) for name in cases.CASES})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
