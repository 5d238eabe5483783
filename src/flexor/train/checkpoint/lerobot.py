"""A run's settings as LeRobot writes them, so that `lerobot-train` can resume from a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flexor.config.schedules import SCHEDULES
from flexor.config.schema import TrainConfig
from flexor.core.secrets import redacted_values
from flexor.core.typed import to_plain
from flexor.policies import REWARD_MODELS
from flexor.policies.pretrained import as_lerobot

SAME = """
rename_map output_dir job_name seed num_workers batch_size steps log_freq eval_steps save_checkpoint save_freq
""".split()  # noqa: SIM905  (settings of the same name and meaning; a list would take a line for each)


def train_config(config: TrainConfig) -> dict[str, Any]:
    """The contents of `train_config.json`: only settings that LeRobot has too, without passwords."""
    dataset = config.dataset
    settings: dict[str, Any] = {
        "dataset": {
            "repo_id": dataset.repo_id or str(dataset.root),
            "root": dataset.root,
            "episodes": dataset.episodes if isinstance(dataset.episodes, list) else None,
            "revision": dataset.revision,
            "use_imagenet_stats": dataset.use_imagenet_stats,
            "eval_split": dataset.eval_split,
            "image_transforms": to_plain(dataset.image_transforms),
        },
        ("reward_model" if config.policy.type in REWARD_MODELS else "policy"): as_lerobot(config.policy),
        **{name: getattr(config, name) for name in SAME},
        "optimizer": _optimizer(config),
        "scheduler": scheduler(config),
        "sample_weighting": _sample_weighting(config),
        "wandb": {"enable": config.wandb.enable, "project": config.wandb.project},
    }
    return {name: redacted_values(value) for name, value in settings.items()}


def _sample_weighting(config: TrainConfig) -> dict[str, Any] | None:
    """None where LeRobot has no such weights."""
    settings = config.sample_weighting
    if settings.resolved_type != "rabc":
        return None
    return {key: value for key, value in {**to_plain(settings), "type": "rabc"}.items() if key != "column"}


def _optimizer(config: TrainConfig) -> dict[str, Any]:
    settings = {key: value for key, value in to_plain(config.optimizer).items() if value is not None}
    if config.optimizer.type not in ("adamw", "adamw_8bit"):
        return settings
    return settings | {"type": "adamw", **config.policy.lerobot_optimizer()}


def scheduler(config: TrainConfig) -> dict[str, Any] | None:
    """None where LeRobot creates no scheduler."""
    kind = SCHEDULES[config.scheduler.type or "constant"]
    if kind.lerobot is None:
        return None
    return {**kind.lerobot, **{name: getattr(config.scheduler, name) or 0 for name in kind.settings}}


def optimizer_name(name: str, numbers: Mapping[str, int]) -> str:
    """LeRobot's name of PARAMETER.KEY in the optimizer's file, where parameters have numbers."""
    parameter, _, key = name.rpartition(".")
    return f"state/{numbers[parameter]}/{key}"
