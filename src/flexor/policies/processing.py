"""What happens to a batch before the policy sees it and to actions before the robot does.

A pipeline is a list of steps, saved with the weights in LeRobot's format and loaded back by training,
evaluation and serving alike: what was trained is what runs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from flexor.core.batch import ACTION, IMAGE_PREFIX, Batch
from flexor.core.errors import CheckpointError, ConfigError, FlexorError
from flexor.policies.base import Kind, Normalization, PolicyConfig, PolicyFeature
from flexor.policies.hf_transformers import fetch

Stats = Mapping[str, Mapping[str, Any]]

TASK_TOKENS = "observation.language.tokens"
TASK_MASK = "observation.language.attention_mask"

PREPROCESSOR = "policy_preprocessor"
POSTPROCESSOR = "policy_postprocessor"

# what each normalisation needs to know: the statistics that become -1 and 1, or mean and spread
BOUNDS = {"MIN_MAX": ("min", "max"), "QUANTILES": ("q01", "q99"), "QUANTILE10": ("q10", "q90")}


class Step:
    """One step of a pipeline. `config` and `state` are what is saved."""

    name: ClassVar[str]

    def __call__(self, batch: Batch) -> Batch:
        raise NotImplementedError

    def config(self) -> dict[str, Any]:
        return {}

    def state(self) -> dict[str, Tensor]:
        return {}

    def load_state(self, state: dict[str, Tensor]) -> None:
        pass


@dataclass
class RenameObservations(Step):
    name: ClassVar[str] = "rename_observations_processor"
    rename_map: dict[str, str] = field(default_factory=dict)

    def __call__(self, batch: Batch) -> Batch:
        return {self.rename_map.get(key, key): value for key, value in batch.items()}

    def config(self) -> dict[str, Any]:
        return {"rename_map": self.rename_map}


@dataclass
class ToBatch(Step):
    """A single observation becomes a batch of one; a batch stays as it is."""

    name: ClassVar[str] = "to_batch_processor"

    def __call__(self, batch: Batch) -> Batch:
        out = dict(batch)
        for key, value in batch.items():
            single = 3 if key.startswith(IMAGE_PREFIX) else 1
            if isinstance(value, Tensor) and value.dim() == single and _is_vector(key):
                out[key] = value[None]
        if isinstance(batch.get("task"), str):
            out["task"] = [batch["task"]]
        return out


def _is_vector(key: str) -> bool:
    return (key.startswith("observation.") and not key.endswith("_is_pad")) or key == ACTION


@dataclass
class Tokenize(Step):
    """The task, a sentence per sample, becomes tokens and a mask that is true where there are some."""

    name: ClassVar[str] = "tokenizer_processor"
    tokenizer_name: str
    max_length: int = 512
    task_key: str = "task"
    padding_side: str = "right"
    padding: str = "max_length"
    truncation: bool = True

    def __post_init__(self) -> None:
        # now, so that what is missing is missed before a run starts
        self._tokenizer = fetch("AutoTokenizer", self.tokenizer_name)

    def __call__(self, batch: Batch) -> Batch:
        tasks = batch.get(self.task_key)
        if not tasks:
            raise FlexorError(f"The policy is told what to do in words, but there is no {self.task_key!r}.")
        distinct = list(dict.fromkeys(tasks))  # a batch has few, and a tokenizer is slow
        found = self._tokenizer(
            distinct,
            max_length=self.max_length,
            truncation=self.truncation,
            padding=self.padding,
            padding_side=self.padding_side,
            return_tensors="pt",
        )
        which = torch.tensor([distinct.index(task) for task in tasks])
        return {
            **batch,
            TASK_TOKENS: found["input_ids"][which],
            TASK_MASK: found["attention_mask"][which].bool(),
        }

    def config(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass
class ToDevice(Step):
    """Move a batch, then widen it there: pictures travel as bytes and become floats in [0, 1] on arrival."""

    name: ClassVar[str] = "device_processor"
    device: str = "cpu"
    float_dtype: str | None = None

    def __call__(self, batch: Batch) -> Batch:
        dtype = getattr(torch, self.float_dtype) if self.float_dtype else torch.float32
        return {key: self._move(key, value, dtype) for key, value in batch.items()}

    def _move(self, key: str, value: Any, dtype: torch.dtype) -> Any:
        if not isinstance(value, Tensor):
            return value
        # Without waiting only from pinned memory. Otherwise an action could be read before it has arrived, and an
        # observation be overwritten before it has left.
        value = value.to(self.device, non_blocking=value.device.type == "cpu" and value.is_pinned())
        if key.startswith(IMAGE_PREFIX) and value.dtype == torch.uint8:
            return value.to(dtype) / 255
        return value.to(dtype) if value.is_floating_point() else value

    def config(self) -> dict[str, Any]:
        return {"device": self.device, "float_dtype": self.float_dtype}


class _Normalization(Step):
    """Statistics per feature and how they are applied to each kind of feature."""

    inverse: ClassVar[bool]

    def __init__(
        self,
        features: Mapping[str, PolicyFeature],
        norm_map: Mapping[Kind, Normalization] | Mapping[str, str],
        stats: Stats | None = None,
        eps: float = 1e-8,
    ):
        self.features = dict(features)
        self.norm_map: dict[str, str] = {str(kind): mode for kind, mode in norm_map.items()}
        self.eps = eps
        self.stats = {
            key: {name: _as_tensor(value) for name, value in values.items()}
            for key, values in (stats or {}).items()
        }
        self._check()

    def _check(self) -> None:
        """Refuse now what would fail in the middle of a run."""
        for key, feature in self.features.items():
            mode = self.norm_map.get(feature.type, "IDENTITY")
            if mode == "IDENTITY" or not self.stats:
                continue
            needed = ("mean", "std") if mode == "MEAN_STD" else BOUNDS[mode]
            missing = [name for name in needed if name not in self.stats.get(key, {})]
            if missing:
                raise ConfigError(
                    f"{key} is normalised by {mode}, but the dataset's statistics lack {', '.join(missing)}: "
                    f"recompute them with `flexor data stats DIR`, or choose another mode with "
                    f"--policy.normalization_mapping.{feature.type}=..."
                )

    def __call__(self, batch: Batch) -> Batch:
        out = dict(batch)
        for key, feature in self.features.items():
            if isinstance(out.get(key), Tensor):
                out[key] = self._apply(out[key], key, feature)
        return out

    def _apply(self, x: Tensor, key: str, feature: PolicyFeature) -> Tensor:
        mode = self.norm_map.get(feature.type, "IDENTITY")
        if mode == "IDENTITY" or key not in self.stats:
            return x
        if mode == "MEAN_STD":
            mean, std = self._statistics(key, feature, x, "mean", "std")
            return x * std + mean if self.inverse else (x - mean) / (std + self.eps)
        low, high = self._statistics(key, feature, x, *BOUNDS[mode])
        span = torch.where(high == low, self.eps, high - low)
        return (x + 1) / 2 * span + low if self.inverse else 2 * (x - low) / span - 1

    def _statistics(self, key: str, feature: PolicyFeature, like: Tensor, *names: str) -> list[Tensor]:
        found = []
        for name in names:
            value = self.stats[key][name]
            if value.device != like.device:
                value = self.stats[key][name] = value.to(like.device)
            if feature.type is Kind.VISUAL:
                value = value.reshape(-1, 1, 1)
            found.append(value.to(like.dtype))
        return found

    def config(self) -> dict[str, Any]:
        return {
            "eps": self.eps,
            "features": {k: {"type": f.type.value, "shape": list(f.shape)} for k, f in self.features.items()},
            "norm_map": self.norm_map,
        }

    def state(self) -> dict[str, Tensor]:
        return {
            f"{key}.{name}": value.cpu().contiguous()
            for key, values in self.stats.items()
            for name, value in values.items()
        }

    def load_state(self, state: dict[str, Tensor]) -> None:
        self.stats = {}
        for flat, value in state.items():
            key, name = flat.rsplit(".", 1)
            self.stats.setdefault(key, {})[name] = value.float()


class Normalize(_Normalization):
    name = "normalizer_processor"
    inverse = False


class Unnormalize(_Normalization):
    name = "unnormalizer_processor"
    inverse = True


STEPS: dict[str, type[Step]] = {
    step.name: step for step in (RenameObservations, ToBatch, Tokenize, ToDevice, Normalize, Unnormalize)
}


@dataclass
class Pipeline:
    """Named steps applied one after the other."""

    name: str
    steps: list[Step]

    def __call__(self, batch: Batch) -> Batch:
        for step in self.steps:
            batch = step(batch)
        return batch

    def to(self, device: str) -> Pipeline:
        """Send batches to another device than the one the pipeline was saved with."""
        for step in self.steps:
            if isinstance(step, ToDevice):
                step.device = device
        return self

    def save(self, folder: Path) -> None:
        described = []
        for index, step in enumerate(self.steps):
            entry: dict[str, Any] = {"registry_name": step.name, "config": step.config()}
            state = step.state()
            if state:
                entry["state_file"] = f"{self.name}_step_{index}_{step.name}.safetensors"
                save_file(state, folder / entry["state_file"])
            described.append(entry)
        text = json.dumps({"name": self.name, "steps": described}, indent=2)
        (folder / f"{self.name}.json").write_text(text)

    @classmethod
    def load(cls, folder: Path, name: str) -> Pipeline:
        file = folder / f"{name}.json"
        if not file.is_file():
            raise CheckpointError(
                f"{folder} has no {name}.json, which says how its inputs are normalised. Checkpoints of "
                "LeRobot before 0.4 lack it: convert them with its migrate_policy_normalization script."
            )
        steps = [_load_step(folder, file, entry) for entry in json.loads(file.read_text())["steps"]]
        return cls(name, steps)


def _load_step(folder: Path, file: Path, entry: dict[str, Any]) -> Step:
    name = entry.get("registry_name")
    if name not in STEPS:
        raise CheckpointError(
            f"{file} has a step {name!r} that is not known here; known: {', '.join(STEPS)}."
        )
    settings = dict(entry.get("config", {}))
    if issubclass(STEPS[name], _Normalization):
        settings.pop("normalize_observation_keys", None)
        settings["features"] = {
            key: PolicyFeature(Kind(value["type"]), tuple(value["shape"]))
            for key, value in settings["features"].items()
        }
    try:
        step = STEPS[name](**settings)
    except TypeError as error:
        raise CheckpointError(f"{file}: no step {name!r} can be made of {settings}: {error}") from error
    if "state_file" in entry:
        step.load_state(load_file(folder / entry["state_file"]))
    return step


def default_pipelines(config: PolicyConfig, stats: Stats, device: str) -> tuple[Pipeline, Pipeline]:
    """The pair most policies use: normalise what goes in, undo it for what comes out."""
    features = {**config.input_features, **config.output_features}
    words = getattr(config, "tokenizer", None)
    before = [
        RenameObservations(),
        ToBatch(),
        *([Tokenize(**words)] if words else []),
        ToDevice(device),
        Normalize(features, config.normalization_mapping, stats),
    ]
    after = [Unnormalize(config.output_features, config.normalization_mapping, stats), ToDevice("cpu")]
    return Pipeline(PREPROCESSOR, before), Pipeline(POSTPROCESSOR, after)


def _as_tensor(value: Any) -> Tensor:
    return torch.as_tensor(np.asarray(value), dtype=torch.float32)
