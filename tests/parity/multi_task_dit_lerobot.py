"""What LeRobot's multi-task DiT computes for every case: run where `lerobot` and `transformers` are installed.

    python tests/parity/multi_task_dit_lerobot.py tests/golden/multi_task_dit

Weights, inputs and noise come from fill.py, so multi_task_dit_flexor.py can compute the same.
"""

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import multi_task_dit_cases as cases
import torch
from act_lerobot import tensors
from fill import fill
from multi_task_dit_clip import make_clips
from records import record_batch, save, values


def measure(name: str, clips: Path) -> dict:
    from lerobot.policies.factory import make_pre_post_processors
    from lerobot.policies.multi_task_dit.modeling_multi_task_dit import MultiTaskDiTPolicy

    case = cases.CASES[name]
    settings = case["settings"]
    config = make_config(case, clips)
    policy = MultiTaskDiTPolicy(config)
    stats = {
        k: {n: torch.from_numpy(v) for n, v in s.items()} for k, s in cases.statistics(case["inputs"]).items()
    }
    before, after = make_pre_post_processors(config, dataset_stats=stats)
    record = {"parameters": fill(policy), "drop_last": config.drop_n_last_frames}
    record["groups"] = [len(group["params"]) for group in policy.get_optim_params()]

    batch = before({**tensors(cases.training_batch(name)), "task": cases.TASKS})
    record["batch"] = record_batch({"action": batch["action"], "state": batch["observation.state"]})
    record["tokens"] = batch["observation.language.tokens"].tolist()
    record["mask"] = batch["observation.language.attention_mask"].int().tolist()
    policy.train()
    with training_noise(settings):
        loss = policy(dict(batch))[0]
        loss.backward()
    record["loss"] = loss.item()
    record["gradients"] = gradients(policy)

    policy.eval()
    with torch.no_grad(), training_noise(settings):
        record["eval_loss"] = policy(dict(batch))[0].item()
    seen = policy._prepare_batch(before({**tensors(cases.history(name, "chunk")), "task": cases.TASKS}))
    with torch.no_grad(), acting_noise(policy, "chunk", settings):
        record["chunk"] = values(policy._generate_actions(seen))
    policy.reset()
    record["actions"] = [act(policy, before, after, case, step) for step in range(cases.STEPS)]
    return record


def act(policy, before, after, case: dict, step: int) -> list:
    seen = before({**tensors(cases.observation(case["inputs"], f"step {step}")), "task": cases.TASKS})
    with acting_noise(policy, f"act {step}", case["settings"]):
        return values(after(policy.select_action(seen)))


def gradients(policy: torch.nn.Module) -> list[float | None]:
    """Of what is trained and plays no part (CLIP's last normalisation), zero."""
    norms = [None if p.grad is None else p.grad.norm().item() for p in policy.parameters()]
    return [n or 0.0 if p.requires_grad else n for p, n in zip(policy.parameters(), norms)]


def make_config(case: dict, clips: Path):
    from lerobot.configs.types import FeatureType, NormalizationMode, PolicyFeature
    from lerobot.policies.multi_task_dit.configuration_multi_task_dit import MultiTaskDiTConfig

    def features(described: dict) -> dict:
        return {k: PolicyFeature(FeatureType(kind), shape) for k, (kind, shape) in described.items()}

    settings = dict(case["settings"])
    modes = settings.pop("normalization_mapping")
    return MultiTaskDiTConfig(
        **settings,
        vision_encoder_name=str(clips / case["clip"]),
        text_encoder_name=str(clips / case["clip"]),
        normalization_mapping={kind: NormalizationMode(mode) for kind, mode in modes.items()},
        input_features=features(case["inputs"]),
        output_features=features(cases.ACTION),
        device="cpu",
    )


@contextmanager
def training_noise(settings: dict) -> Iterator[None]:
    """LeRobot draws crops (encoder by encoder: top, then left), then the noise, then its level or time."""
    crops = (f"crop{i}/{side}" for i in range(9) for side in ("top", "left"))
    noise = torch.from_numpy(cases.normal("training", "noise", settings))
    times = torch.from_numpy(cases.times(settings))

    def randint(low: int, high: int, size: tuple, **_: object) -> torch.Tensor:
        assert low == 0
        return torch.from_numpy(cases.integers(next(crops) if size == (1,) else "timestep", size[0], high))

    with (
        patch("torch.randint", randint),
        patch("torch.randn_like", lambda like: noise.to(like)),
        patch("torch.rand", lambda count, **_: times),
        patch("torch.distributions.Beta.sample", lambda _, shape: times),
    ):
        yield


@contextmanager
def acting_noise(policy, moment: str, settings: dict) -> Iterator[None]:
    """The noise at the start, and that which DDPM adds at each level but the last."""
    levels: Iterator[int] = iter(())
    if settings.get("objective") != "flow_matching":
        policy.objective.noise_scheduler.set_timesteps(policy.objective.num_inference_steps)
        levels = iter(policy.objective.noise_scheduler.timesteps.tolist())

    def given(name: str) -> torch.Tensor:
        return torch.from_numpy(cases.normal(moment, name, settings))

    with (
        patch("torch.randn", lambda *_, **__: given("x")),
        patch(
            "diffusers.schedulers.scheduling_ddpm.randn_tensor", lambda *_, **__: given(f"step{next(levels)}")
        ),
    ):
        yield


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as clips:
        make_clips(Path(clips))
        save(folder / "multi_task_dit.json", {name: measure(name, Path(clips)) for name in cases.CASES})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
