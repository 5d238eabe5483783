"""Everything a run is at one step, to a checkpoint folder and back.

Files and names in `training_state/` are LeRobot's as far as they go; `flexor.json`, the raw weights
and the moving average are what LeRobot has no place for.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch.optim.lr_scheduler import LambdaLR

from flexor.config import TrainConfig
from flexor.errors import CheckpointError
from flexor.policies.base import Policy
from flexor.policies.pretrained import FOLDER, load_weights, save_pretrained
from flexor.policies.processing import Pipeline
from flexor.train import lerobot
from flexor.train.engine import Engine
from flexor.train.optim import EMA


@dataclass
class TrainState:
    """What changes while training, and what is needed to save it."""

    config: TrainConfig
    fingerprint: str
    engine: Engine
    policy: Policy
    preprocessor: Pipeline
    postprocessor: Pipeline
    optimizer: torch.optim.Optimizer
    scheduler: LambdaLR
    ema: EMA | None
    step: int = 0

    def save(self, folder: Path) -> None:
        """Write the checkpoint's two folders."""
        weights = self.policy.state_dict()
        exported = self.ema.average if self.ema else weights
        model = folder / FOLDER
        save_pretrained(model, self.policy.config, exported, self.preprocessor, self.postprocessor)
        (model / "train_config.json").write_text(json.dumps(lerobot.train_config(self.config), indent=4))

        state = folder / "training_state"
        if self.ema:
            save_file(
                {k: v.detach().cpu().contiguous() for k, v in weights.items()},
                state / "raw_model.safetensors",
            )
            save_file({k: v.cpu() for k, v in self.ema.state().items()}, state / "ema_state.safetensors")
        self._save_optimizer(state)
        save_file(rng_state(), state / "rng_state.safetensors")
        _write_json(state / "scheduler_state.json", _plain_scheduler(self.scheduler))
        _write_json(state / "training_step.json", self._position())
        _write_json(
            state / "flexor.json",
            {
                "config": self.config.to_dict(),
                "dataset_fingerprint": self.fingerprint,
                "scaler": self.engine.scaler.state_dict(),
            },
        )

    def _position(self) -> dict[str, int]:
        config = self.config
        samples = config.batch_size * config.gradient_accumulation_steps * self.engine.world_size
        return {
            "step": self.step,
            "num_processes": self.engine.world_size,
            "batch_size": config.batch_size,
            "samples_seen": self.step * samples,
        }

    def _save_optimizer(self, folder: Path) -> None:
        state = self.optimizer.state_dict()
        flat = {
            f"state/{index}/{name}": torch.as_tensor(value).cpu().contiguous()
            for index, values in state["state"].items()
            for name, value in values.items()
            if value is not None  # SGD without momentum keeps a None
        }
        save_file(flat, folder / "optimizer_state.safetensors")
        _write_json(folder / "optimizer_param_groups.json", self._plain_groups(state["param_groups"]))

    def _plain_groups(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The groups as LeRobot's optimizer has them: it refuses any other key, or value of another type."""
        plain = [{**group, "fused": None} for group in groups]  # how to compute a step is not state
        if lerobot.scheduler(self.config) is None:
            for group in plain:
                group.pop("initial_lr")  # what a scheduler leaves there; LeRobot makes none then
        return plain

    def load(self, folder: Path) -> None:
        """Become what the checkpoint holds."""
        state = folder / "training_state"
        try:
            self._load(folder, state)
        except (OSError, KeyError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"Can't go on from {folder}: {error}") from error

    def _load(self, folder: Path, state: Path) -> None:
        if self.ema:
            self.policy.load_state_dict(load_file(state / "raw_model.safetensors"))
            self.ema.load_state(load_file(state / "ema_state.safetensors"))
        else:
            load_weights(self.policy, folder / FOLDER)
        self.optimizer.load_state_dict(_optimizer_state(state, self.optimizer.param_groups))
        self.scheduler.load_state_dict(json.loads((state / "scheduler_state.json").read_text()))
        for group, rate in zip(self.optimizer.param_groups, self.scheduler.base_lrs):
            group.setdefault("initial_lr", rate)
        saved = json.loads((state / "flexor.json").read_text())
        if self.engine.scaler.is_enabled():
            self.engine.scaler.load_state_dict(saved["scaler"])
        self.step = json.loads((state / "training_step.json").read_text())["step"]
        restore_rng(load_file(state / "rng_state.safetensors"))


def _optimizer_state(folder: Path, own: list[dict[str, Any]]) -> dict[str, Any]:
    state: dict[int, dict[str, Any]] = {}
    for key, value in load_file(folder / "optimizer_state.safetensors").items():
        _, index, name = key.split("/")
        state.setdefault(int(index), {})[name] = value
    groups = json.loads((folder / "optimizer_param_groups.json").read_text())
    for group, current in zip(groups, own):
        group["fused"] = current["fused"]
        if "betas" in group:
            group["betas"] = tuple(group["betas"])
    return {"state": state, "param_groups": groups}


def _plain_scheduler(scheduler: LambdaLR) -> dict[str, Any]:
    # the factors are functions, rebuilt from the config; everything else is numbers
    return {**scheduler.state_dict(), "lr_lambdas": [None] * len(scheduler.lr_lambdas)}


def rng_state() -> dict[str, torch.Tensor]:
    """Python's, numpy's and torch's generators under LeRobot's names.

    Training itself draws nothing from them that is not seeded by the step; user code may.
    """
    version, values, _ = random.getstate()
    _, keys, index, has_gauss, gauss = np.random.get_state()  # noqa: NPY002
    state = {
        "py_rng_version": torch.tensor([version]),
        "py_rng_state": torch.tensor(values),
        "np_rng_state_values": torch.tensor(np.asarray(keys), dtype=torch.int64),
        "np_rng_state_index": torch.tensor([index]),
        "np_rng_has_gauss": torch.tensor([has_gauss]),
        "np_rng_cached_gaussian": torch.tensor([gauss], dtype=torch.float32),
        "torch_rng_state": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["torch_cuda_rng_state"] = torch.cuda.get_rng_state()
    return state


def restore_rng(state: dict[str, torch.Tensor]) -> None:
    random.setstate((int(state["py_rng_version"]), tuple(state["py_rng_state"].tolist()), None))
    np.random.set_state(  # noqa: NPY002
        (
            "MT19937",
            state["np_rng_state_values"].numpy().astype(np.uint32),
            int(state["np_rng_state_index"]),
            int(state["np_rng_has_gauss"]),
            float(state["np_rng_cached_gaussian"]),
        )
    )
    torch.set_rng_state(state["torch_rng_state"])
    if torch.cuda.is_available() and "torch_cuda_rng_state" in state:
        torch.cuda.set_rng_state(state["torch_cuda_rng_state"])


def _write_json(path: Path, data: Any) -> None:
    path.write_text(json.dumps(data, indent=2))
