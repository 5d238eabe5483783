"""The complete state of a run at one step: saved to a checkpoint folder, and loaded from it.

Files and names in `training_state/` are LeRobot's where it has them. It has none for `flexor.json`, the raw weights,
the moving average (EMA) and the random generators of other ranks. A sharded run stores its tensors in
`training_state/sharded/` instead; each rank writes its own shard.
"""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from flexor.config.schema import TrainConfig
from flexor.core.errors import CheckpointError
from flexor.core.foreign_files import MALFORMED
from flexor.core.rng import key_of, seed_everything
from flexor.core.run_files import PRETRAINED, SHARDS, TRAINING_DATA, TRAINING_STATE
from flexor.data.check.summary import DataSummary
from flexor.data.identity import DataIdentity
from flexor.monitor.step_times import StepTimes
from flexor.policies.adapter_files import save_adapter
from flexor.policies.adapters import merged
from flexor.policies.augment.step import AugmentImages, augmented
from flexor.policies.base import Policy
from flexor.policies.frozen_in_bf16 import float32_state, round_frozen
from flexor.policies.pretrained import base_policy, save_pretrained
from flexor.policies.processing.host_steps import HostPipeline, split_processing
from flexor.policies.processing.normalize import NormalizeByDataset
from flexor.policies.processing.pipeline import Pipeline
from flexor.policies.weight_names import unique_parameters
from flexor.train.checkpoint import lerobot
from flexor.train.checkpoint.folder import read_state
from flexor.train.checkpoint.tensors import EMA_STATE, OPTIMIZER, RAW_MODEL, ShardedTensors, open_tensors
from flexor.train.engine.base import Engine
from flexor.train.optim.ema import EMA
from flexor.train.ranks.split import Split

STATISTICS = "statistics_by_dataset.safetensors"


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
    split: Split
    identity: DataIdentity | None = None  # of the data; None: not a run, such as a plan
    data_summary: DataSummary | None = None  # of the data, saved beside the policy
    augmentation: AugmentImages | None = None  # only of training samples, so no checkpoint has it
    step: int = 0
    times: StepTimes = field(default_factory=StepTimes)  # off; a run measures

    @property
    def host_steps(self) -> HostPipeline | None:
        """The processing of training samples in the loader's threads; None if all of it is done on the device."""
        return self._processing[0]

    @property
    def device_preprocessor(self) -> Pipeline:
        """The rest of it, which is part of a step."""
        return self._processing[1]

    @cached_property
    def _processing(self) -> tuple[HostPipeline | None, Pipeline]:
        """The processing of training samples: `preprocessor`, with augmented images."""
        return split_processing(augmented(self.preprocessor, self.augmentation), self.config.seed)

    def tensors(self) -> dict[str, Tensor]:
        """All tensors that training changes, by name; this rank's shards if the run is sharded."""
        named = {f"model.{name}": tensor for name, tensor in float32_state(self.policy).items()}
        if self.ema:
            named |= {f"ema.{name}": tensor for name, tensor in self.ema.average.items()}
        names, state = self.parameter_names(), self.optimizer.state_dict()["state"]
        for index, values in state.items():
            for key, value in values.items():
                if value is not None:  # SGD without momentum keeps a None
                    named[f"optimizer.{names[index]}.{key}"] = torch.as_tensor(value)
        return named

    def parameter_names(self) -> list[str]:
        """The names of the optimizer's parameters. Its state is numbered in this order."""
        names = {id(p): name for name, p in unique_parameters(self.policy).items()}
        return [names[id(p)] for group in self.optimizer.param_groups for p in group["params"]]

    def names_in_file(self) -> list[str]:
        """The same as LeRobot numbers them: there may be more, which have no state."""
        return self.policy.weight_names.optimizer_names(self.parameter_names())

    def snapshot(self, export: bool) -> Snapshot:
        """The contents of a checkpoint. All ranks must call this. `export`: include the weights for inference."""
        random_states = self.engine.processes.gather(rng_state())
        saved = self._json(self.engine.world_size)
        return Snapshot(self, self.tensors(), self.names_in_file(), random_states, saved, export)

    def _json(self, world_size: int) -> dict[str, Any]:
        state = self.optimizer.state_dict()
        return {
            "optimizer_param_groups.json": self._plain_groups(state["param_groups"]),
            "scheduler_state.json": _plain_scheduler(self.scheduler),
            "training_step.json": {
                "step": self.step,
                "num_processes": world_size,
                "batch_size": self.split.batch_size,
                "samples_seen": self.step * self.split.global_batch,
            },
            "flexor.json": {
                "config": self.config.to_saved(),
                "dataset_fingerprint": self.fingerprint,
                "dataset_content": self.identity.summary() if self.identity else None,
                "scaler": self.engine.scaler.state_dict(),
                "strategy": self.engine.strategy,
                "ema_updates": self.ema.updates if self.ema else None,
            },
        }

    def _plain_groups(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The groups as in LeRobot's optimizer, which refuses any other key and values of another type."""
        plain = [{k: None if k == "fused" else v for k, v in g.items()} for g in groups]  # fused is no state
        for group, numbers in zip(plain, self._numbers_in_file(groups)):
            group["params"] = numbers
        if lerobot.scheduler(self.config) is None:
            for group in plain:
                group.pop("initial_lr")  # set by our scheduler; LeRobot creates none here
        return plain

    def _numbers_in_file(self, groups: list[dict[str, Any]]) -> list[list[int]]:
        """The numbers of each group's parameters. One that is not in ours joins the group of the one before it."""
        names = self.parameter_names()
        group_of = {names[index]: place for place, group in enumerate(groups) for index in group["params"]}
        numbers: list[list[int]] = [[] for _ in groups]
        place = 0
        for number, name in enumerate(self.names_in_file()):
            place = group_of.get(name, place)
            numbers[place].append(number)
        return numbers

    def load(self, folder: Path) -> None:
        """Load a checkpoint, sharded or not, that any number of ranks saved."""
        try:
            self._load(folder, folder / TRAINING_STATE)
        except (*MALFORMED, OSError, RuntimeError, SafetensorError) as error:
            raise CheckpointError(f"Can't resume from {folder}: {error!r}") from error

    def _load(self, folder: Path, state: Path) -> None:
        saved = read_state(folder, "flexor.json")
        self._load_tensors(folder)
        if self.ema:
            self.ema.updates = saved["ema_updates"]
        schedule = read_state(folder, "scheduler_state.json")
        _check_like(schedule, _plain_scheduler(self.scheduler), "scheduler_state.json")
        self.scheduler.load_state_dict(schedule)
        for group, rate in zip(self.optimizer.param_groups, self.scheduler.base_lrs):
            group.setdefault("initial_lr", rate)
        if self.engine.scaler.is_enabled():
            self.engine.scaler.load_state_dict(saved["scaler"])
        self.step = int(read_state(folder, "training_step.json")["step"])
        self._restore_rng(state)

    def _load_tensors(self, folder: Path) -> None:
        names = self.parameter_names()
        groups = read_state(folder, "optimizer_param_groups.json")
        numbered = sum(len(group["params"]) for group in groups)
        # earlier runs number only our parameters, not all of LeRobot's
        saved_tensors = open_tensors(folder, names if numbered == len(names) else self.names_in_file())
        tensors = {f"model.{name}": tensor for name, tensor in float32_state(self.policy).items()}
        if self.ema:
            tensors |= {f"ema.{name}": tensor for name, tensor in self.ema.average.items()}
        parameters = unique_parameters(self.policy)
        state: dict[int, dict[str, Tensor]] = {}
        for name, saved in saved_tensors.described().items():
            if name.startswith("optimizer."):
                parameter, _, key = name.removeprefix("optimizer.").rpartition(".")
                target = _allocate(saved, parameters[parameter].detach())
                tensors[name] = state.setdefault(names.index(parameter), {})[key] = target
        saved_tensors.fill(tensors)
        round_frozen(self.policy)
        for group, current in zip(groups, self.optimizer.state_dict()["param_groups"]):
            group["params"] = current["params"]
            # how it computes (fused, maximize, ...) is this run's; numbers are the checkpoint's
            group |= {key: value for key, value in current.items() if isinstance(value, bool | None)}
            if "betas" in group:
                group["betas"] = tuple(group["betas"])
            _check_like(group, {**current, "initial_lr": 0.0}, "optimizer_param_groups.json")
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})

    def _restore_rng(self, state: Path) -> None:
        """Restore this rank's random generators. A rank that did not exist before keeps those from the run's seed."""
        if self.engine.rank == 0:
            restore_rng(load_file(state / "rng_state.safetensors"))
        elif (file := state / "rng_state_ranks.safetensors").is_file():
            prefix = f"{self.engine.rank}/"
            saved = {k.removeprefix(prefix): v for k, v in load_file(file).items() if k.startswith(prefix)}
            if saved:
                restore_rng(saved)


@dataclass
class Snapshot:
    """The state of a run at one step, to be written to disk."""

    state: TrainState
    tensors: dict[str, Tensor]
    names: list[str]
    """Of the optimizer's parameters. A thread writes, and must not ask the policy: it computes the next step."""
    random_states: list[dict[str, Tensor]]
    json: dict[str, Any]
    export: bool

    def write(self, folder: Path) -> None:
        """Write all files except the shards, which are already there. Rank 0 calls this."""
        state, config = self.state, self.state.config
        training, model = folder / TRAINING_STATE, folder / PRETRAINED
        raw, lora = self._weights(training), config.lora
        weights = merged(raw, lora) if raw is not None and lora.r else raw
        save_pretrained(model, state.policy.config, weights, state.preprocessor, state.postprocessor)
        if raw is not None and lora.r:
            save_adapter(model, raw, lora, base_policy(config.policy_path))
        (model / "train_config.json").write_text(json.dumps(lerobot.train_config(config), indent=4))
        if state.data_summary is not None:
            (model / TRAINING_DATA).write_text(json.dumps(state.data_summary.to_json(), indent=1))
        if not state.engine.sharded:
            self._write_tensors(training)
        save_file(self.random_states[0], training / "rng_state.safetensors")
        if ranks := [*enumerate(self.random_states)][1:]:
            named = {f"{rank}/{name}": value for rank, values in ranks for name, value in values.items()}
            save_file(named, training / "rng_state_ranks.safetensors")
        if by_dataset := statistics_by_dataset(state.preprocessor):
            save_file(by_dataset, training / STATISTICS)
        for name, content in self.json.items():
            (training / name).write_text(json.dumps(content, indent=2))

    def _weights(self, training: Path) -> dict[str, Tensor] | None:
        """The weights for inference: the moving average (EMA) if there is one, adapters apart."""
        if self.state.engine.sharded and not self.export:
            return None
        kind = "ema." if self.state.ema else "model."
        if self.state.engine.sharded:
            # from the disk, where all ranks have just written them: no GPU has to gather anything
            return ShardedTensors(training / SHARDS).read(kind)
        return {k.removeprefix(kind): v for k, v in self.tensors.items() if k.startswith(kind)}

    def _write_tensors(self, folder: Path) -> None:
        """Write LeRobot's files. If the exported weights are an average or merged, write the raw weights too."""
        numbers = {name: i for i, name in enumerate(self.names)}
        kinds: dict[str, dict[str, Tensor]] = {"model": {}, "ema": {}, "optimizer": {}}
        for name, tensor in self.tensors.items():
            kind, _, name = name.partition(".")
            name = lerobot.optimizer_name(name, numbers) if kind == "optimizer" else name
            kinds[kind][name] = tensor.detach().cpu().contiguous()
        if self.state.ema or self.state.config.lora.r:
            save_file(kinds["model"], folder / RAW_MODEL)
        if self.state.ema:
            save_file(kinds["ema"], folder / EMA_STATE)
        save_file(kinds["optimizer"], folder / OPTIMIZER)


def statistics_by_dataset(preprocessor: Pipeline) -> dict[str, Tensor]:
    """The statistics of each dataset, which `pretrained_model` does not have, if each is normalised by its own."""
    steps = [step for step in preprocessor.steps if isinstance(step, NormalizeByDataset)]
    return {name: value for step in steps for name, value in step.state_by_dataset().items()}


def _check_like(saved: Any, current: Any, where: str) -> None:
    """Refuse values of another form than the current ones: training would fail on them later, or go on wrongly."""
    if isinstance(current, dict):
        for key, value in current.items():
            if key in saved or key != "initial_lr":
                _check_like(saved[key], value, f"{where}: {key}")
    elif isinstance(current, list | tuple):
        if not isinstance(saved, list | tuple) or len(saved) != len(current):
            raise ValueError(f"{where} is {saved!r}, not a list of {len(current)}")
        for number, pair in enumerate(zip(saved, current)):
            _check_like(*pair, f"{where}[{number}]")
    elif _is_number(current) and not _is_number(saved):
        raise ValueError(f"{where} is {saved!r}, not a number")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _allocate(saved: Tensor, parameter: Tensor) -> Tensor:
    """A tensor for the optimizer's state: sharded like the parameter if it has its shape."""
    if saved.shape == parameter.shape and saved.ndim:
        return torch.zeros_like(parameter, dtype=saved.dtype)
    return torch.zeros_like(saved, device=parameter.device if saved.ndim else "cpu")


def _plain_scheduler(scheduler: LambdaLR) -> dict[str, Any]:
    # the factors are functions, rebuilt from the config; all other values are numbers
    return {**scheduler.state_dict(), "lr_lambdas": [None] * len(scheduler.lr_lambdas)}


def rng_state() -> dict[str, torch.Tensor]:
    """The states of Python's, numpy's and torch's random generators, under LeRobot's names.

    Training seeds by the step whatever it draws from them; user code may draw without seeding.
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


def seed_rng(seed: int, rank: int) -> None:
    """Seed the generators that user code may draw from, at the start of a run."""
    seed_everything("run", seed, rank)
    random.seed(key_of("run", seed, rank))
    np.random.seed(key_of("run", seed, rank) % (1 << 32))  # noqa: NPY002


def restore_rng(state: dict[str, torch.Tensor]) -> None:
    random.setstate((int(state["py_rng_version"]), tuple(state["py_rng_state"].tolist()), None))
    keys = state["np_rng_state_values"].numpy().astype(np.uint32)
    index, has_gauss = int(state["np_rng_state_index"]), int(state["np_rng_has_gauss"])
    gauss = float(state["np_rng_cached_gaussian"])
    np.random.set_state(("MT19937", keys, index, has_gauss, gauss))  # noqa: NPY002
    torch.set_rng_state(state["torch_rng_state"])
    if torch.cuda.is_available() and "torch_cuda_rng_state" in state:
        torch.cuda.set_rng_state(state["torch_cuda_rng_state"])
