"""What LeRobot's multi-task DiT computes for every case: run where `lerobot` and `transformers` are installed.

    python tests/parity/multi_task_dit_lerobot.py tests/golden/multi_task_dit

Weights, inputs and noise come from fill.py, so multi_task_dit_flexor.py can compute the same.
"""

import sys
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from unittest.mock import patch

import multi_task_dit_cases as cases
import torch
from diffusion_cases import integers, normal
from diffusion_lerobot import step_noise
from fill import fill
from inputs import TASKS, history, shown
from lerobot_side import act, make_policy, tensors
from records import group, record_batch, save, values


def measure(name: str, case: dict) -> dict:
    made = make_policy("multi_task_dit", case)
    policy, before, config = made.policy, made.before, made.policy.config
    record = {"parameters": fill(policy), "drop_last": config.drop_n_last_frames}
    record["groups"] = [group(policy, each["params"], each) for each in policy.get_optim_params()]

    batch = before({**tensors(cases.training_batch(name)), "task": TASKS})
    record["batch"] = record_batch({"action": batch["action"], "state": batch["observation.state"]})
    record["tokens"] = batch["observation.language.tokens"].tolist()
    record["mask"] = batch["observation.language.attention_mask"].int().tolist()
    policy.train()
    with training_noise():
        loss = policy(dict(batch))[0]
        loss.backward()
    record["loss"] = loss.item()
    record["gradients"] = gradients(policy)

    policy.eval()
    with torch.no_grad(), training_noise():
        record["eval_loss"] = policy(dict(batch))[0].item()
    seen = policy._prepare_batch(before({**tensors(history(case, "chunk")), "task": TASKS}))
    with torch.no_grad(), step_noise(scheduler(policy), "chunk"):
        record["chunk"] = values(policy._generate_actions(seen))
    record["actions"] = act(made, shown(case["inputs"], cases.STEPS), acting)
    return record


def scheduler(policy):
    """None for flow matching."""
    if policy.config.is_flow_matching:
        return None
    policy.objective.noise_scheduler.set_timesteps(policy.objective.num_inference_steps)
    return policy.objective.noise_scheduler


def acting(policy, step: int) -> AbstractContextManager:
    return step_noise(scheduler(policy), f"act {step}")


def gradients(policy: torch.nn.Module) -> list[float | None]:
    """Of what is trained and plays no part (CLIP's last normalisation), zero."""
    norms = [None if p.grad is None else p.grad.norm().item() for p in policy.parameters()]
    return [n or 0.0 if p.requires_grad else n for p, n in zip(policy.parameters(), norms)]


@contextmanager
def training_noise() -> Iterator[None]:
    """LeRobot draws crops (encoder by encoder: top, then left), then the noise, then its level or time."""
    crops = (f"crop{i}/{side}" for i in range(9) for side in ("top", "left"))

    def randint(low: int, high: int, size: tuple, **_: object) -> torch.Tensor:
        assert low == 0
        return integers(next(crops) if size == (1,) else "timestep", size[0], high)

    with (
        patch("torch.randint", randint),
        patch("torch.randn_like", lambda like: normal("training", "noise", like.shape)),
        patch("torch.rand", lambda count, **_: cases.times()),
        patch("torch.distributions.Beta.sample", lambda _, shape: cases.times()),
    ):
        yield


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as clips:
        placed = cases.placed(Path(clips) / "clips")
        save(folder / "multi_task_dit.json", {name: measure(name, case) for name, case in placed.items()})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
