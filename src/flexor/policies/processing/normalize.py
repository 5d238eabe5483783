"""Normalisation and its inverse. To add a mode: add a line in BOUNDS, and its name in `policies/features.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from flexor.core.batch import DATASET_NUMBER, Batch
from flexor.core.errors import ConfigError
from flexor.core.typed import coerce
from flexor.kernels.level_table import all_levels, as_table, can_look_up, look_up
from flexor.policies.features import Kind, Normalization, PolicyFeature
from flexor.policies.processing.pipeline import ACTING, ProcessingStep, Stats, StepContext, processing_step
from flexor.policies.processing.rename_and_move import float_image, is_byte_image, with_float_images

# the statistics that are mapped to -1 and 1; MEAN_STD is handled separately
BOUNDS = {"MIN_MAX": ("min", "max"), "QUANTILES": ("q01", "q99"), "QUANTILE10": ("q10", "q90")}

TYPES = {
    "features": dict[str, PolicyFeature],
    "norm_map": dict[Kind, Normalization],
    "eps": float,
    "normalize_observation_keys": list[str] | None,
}


def required_statistics(mode: str) -> tuple[str, ...]:
    """The statistics that a mode uses."""
    return {"IDENTITY": (), "MEAN_STD": ("mean", "std"), **BOUNDS}[mode]


class NormalizationStep(ProcessingStep):
    """Statistics per feature and how they are applied to each kind of feature."""

    inverse: ClassVar[bool]

    def __init__(
        self,
        features: Mapping[str, PolicyFeature],
        norm_map: Mapping[Kind, Normalization] | Mapping[str, str],
        stats: Stats | None = None,
        eps: float = 1e-8,
        normalize_observation_keys: Sequence[str] | None = None,
    ):
        """`normalize_observation_keys`: all other observations stay as they are; None: none do."""
        self.features = dict(features)
        self.normalize_observation_keys = normalize_observation_keys
        self.norm_map: dict[str, str] = {str(kind): mode for kind, mode in norm_map.items()}
        self.eps = eps
        self._tables: dict[tuple[str, torch.device], Tensor] = {}  # of what bytes become, by key and device
        self.stats = {
            key: {name: _as_tensor(value) for name, value in values.items()}
            for key, values in (stats or {}).items()
        }
        self._check()

    def missing(self) -> dict[str, list[str]]:
        """By feature, the statistics that its normalisation uses and that are not there."""
        return {
            key: names
            for key in self.features
            if (names := [name for name in self._required(key) if name not in self.stats.get(key, {})])
        }

    def mode(self, key: str) -> str:
        """How a feature is normalised."""
        kind, keys = self.features[key].type, self.normalize_observation_keys
        if keys is not None and key not in keys and kind is not Kind.ACTION:
            return "IDENTITY"
        return self.norm_map.get(kind, "IDENTITY")

    def _required(self, key: str) -> tuple[str, ...]:
        return required_statistics(self.mode(key))

    def _check(self) -> None:
        """Refuse now what would otherwise fail during a run."""
        for key, names in self.missing().items() if self.stats else ():
            kind = self.features[key].type
            raise ConfigError(
                f"{key} is normalised by {self.norm_map[kind]}, but the dataset's statistics lack {', '.join(names)}: "
                f"recompute them with `flexor data stats DIR`, or choose another mode with "
                f"--policy.normalization_mapping.{kind}=..."
            )

    def __call__(self, batch: Batch, context: StepContext = ACTING) -> Batch:
        out = dict(batch)
        for key, feature in self.features.items():
            if is_byte_image(key, out.get(key)):
                out[key] = self._from_bytes(out[key], key, feature)
            elif isinstance(out.get(key), Tensor):
                out[key] = self._apply(out[key], key, feature)
        return with_float_images(out)

    def _from_bytes(self, images: Tensor, key: str, feature: PolicyFeature) -> Tensor:
        """Converted to floats and normalised; on an NVIDIA GPU in one pass, with the same results."""
        if not can_look_up(images):
            return self._apply(float_image(images), key, feature)
        place = key, images.device
        if place not in self._tables:
            levels = all_levels(images.shape[-3], images.device)
            self._tables[place] = as_table(self._apply(float_image(levels), key, feature))
        return look_up(images, self._tables[place])

    def _apply(self, x: Tensor, key: str, feature: PolicyFeature) -> Tensor:
        mode = self.mode(key)
        if mode == "IDENTITY" or key not in self.stats:
            return x
        if (
            x.dtype == torch.uint8 and feature.type is Kind.VISUAL
        ):  # not yet on the device, which makes it a float
            x = torch.div(x, 255)
        return self._scaled(x, mode, *self._statistics(key, feature, x, *required_statistics(mode)))

    def _scaled(self, x: Tensor, mode: str, first: Tensor, second: Tensor) -> Tensor:
        """`first` and `second`: the statistics that the mode uses."""
        if mode == "MEAN_STD":
            return x * second + first if self.inverse else (x - first) / (second + self.eps)
        span = torch.where(second == first, self.eps, second - first)
        return (x + 1) / 2 * span + first if self.inverse else 2 * (x - first) / span - 1

    def _statistics(self, key: str, feature: PolicyFeature, like: Tensor, *names: str) -> list[Tensor]:
        tensors = []
        for name in names:
            value = self.stats[key][name]
            if value.device != like.device:
                value = self.stats[key][name] = value.to(like.device)
            if feature.type is Kind.VISUAL:
                value = value.reshape(-1, 1, 1)
            tensors.append(value.to(like.dtype))
        return tensors

    def config(self) -> dict[str, Any]:
        config: dict[str, Any] = {
            "eps": self.eps,
            "features": {k: {"type": f.type.value, "shape": list(f.shape)} for k, f in self.features.items()},
            "norm_map": self.norm_map,
        }
        if self.normalize_observation_keys is not None:
            config["normalize_observation_keys"] = sorted(self.normalize_observation_keys)
        return config

    @classmethod
    def from_config(cls, settings: dict[str, Any]) -> ProcessingStep:
        typed = {key: coerce(settings[key], TYPES[key], key) for key in TYPES.keys() & settings.keys()}
        return cls(**{**settings, **typed})

    def state(self) -> dict[str, Tensor]:
        return {
            f"{key}.{name}": value.cpu().contiguous()
            for key, values in self.stats.items()
            for name, value in values.items()
        }

    def load_state(self, state: dict[str, Tensor]) -> None:
        self.stats = {}
        self._tables = {}
        for flat, value in state.items():
            key, name = flat.rsplit(".", 1)
            self.stats.setdefault(key, {})[name] = value.float()
        for key, names in self.missing().items():
            if key in self.stats:
                raise ValueError(f"{', '.join(names)} of {key} is missing")
        self.sizes()  # refuses those that do not agree

    def sizes(self) -> dict[str, int]:
        """By feature, the number of values that its statistics are for. Images, and one value for all, do not count."""
        sizes: dict[str, int] = {}
        for key, feature in self.features.items():
            for name in self._required(key):
                if key not in self.stats or feature.type is Kind.VISUAL:
                    continue
                shape = tuple(self.stats[key][name].shape)
                if shape in ((), (1,)):
                    continue
                if len(shape) > 1 or sizes.setdefault(key, shape[0]) != shape[0]:
                    raise ValueError(f"{name} of {key} has the shape {list(shape)}, which fits no other")
        return sizes


@processing_step("normalizer_processor")
class Normalize(NormalizationStep):
    inverse = False
    takes_bytes = True

    def split_images(self) -> tuple[Normalize, Normalize]:
        visual = {key: feature for key, feature in self.features.items() if feature.type is Kind.VISUAL}
        images = Normalize(visual, self.norm_map, None, self.eps, self.normalize_observation_keys)
        images.stats = {key: dict(values) for key, values in self.stats.items() if key in visual}
        return self, images


class NormalizeByDataset(Normalize):
    """In training on several datasets: states and actions by the statistics of the sample's own dataset.

    Saved is the normalisation of one of them, which is also used for a batch that does not say where it is from.
    """

    def __init__(self, saved: Normalize, each: Sequence[Normalize]):
        super().__init__(
            saved.features, saved.norm_map, saved.stats, saved.eps, saved.normalize_observation_keys
        )
        self.stats_by_dataset: dict[str, list[Tensor]] = {}
        for key, feature in self.features.items():
            names = self._required(key)
            if names and feature.type is not Kind.VISUAL:
                self.stats_by_dataset[key] = [
                    torch.stack([normalize.stats[key][name] for normalize in each]) for name in names
                ]

    def __call__(self, batch: Batch, context: StepContext = ACTING) -> Batch:
        dataset_numbers = batch.get(DATASET_NUMBER)
        if dataset_numbers is None:
            return super().__call__(batch, context)
        keys = {key for key in self.stats_by_dataset if isinstance(batch.get(key), Tensor)}
        out = super().__call__({key: value for key, value in batch.items() if key not in keys}, context)
        return {**out, **{key: self._by_dataset(batch[key], key, dataset_numbers) for key in keys}}

    def state_by_dataset(self) -> dict[str, Tensor]:
        """The statistics of all datasets, [M, D] each, for a run that resumes. A robot gets those of `state`."""
        return {
            f"{key}.{number}": value.cpu().contiguous()
            for key, values in self.stats_by_dataset.items()
            for number, value in enumerate(values)
        }

    def load_by_dataset(self, state: Mapping[str, Tensor]) -> None:
        self.stats_by_dataset = {
            key: [state[f"{key}.{number}"] for number in range(len(values))]
            for key, values in self.stats_by_dataset.items()
        }

    def _by_dataset(self, x: Tensor, key: str, dataset_numbers: Tensor) -> Tensor:
        """x [B, ...] of the datasets `dataset_numbers` [B]."""
        statistics = []
        for number, values in enumerate(self.stats_by_dataset[key]):  # [M, D]
            if values.device != x.device:
                values = self.stats_by_dataset[key][number] = values.to(x.device)
            of_sample = values.to(x.dtype)[dataset_numbers]
            statistics.append(of_sample.reshape(len(x), *[1] * (x.ndim - values.ndim), *values.shape[1:]))
        return self._scaled(x, self.norm_map[self.features[key].type], *statistics)


@processing_step("unnormalizer_processor")
class Unnormalize(NormalizationStep):
    inverse = True

    def _apply(self, x: Tensor, key: str, feature: PolicyFeature) -> Tensor:
        """Numbers of an action beyond those of the feature are no quantities, but choices: they stay as they are."""
        continuous = feature.shape[-1]
        if feature.type is not Kind.ACTION or x.shape[-1] <= continuous:
            return super()._apply(x, key, feature)
        return torch.cat([super()._apply(x[..., :continuous], key, feature), x[..., continuous:]], -1)


def _as_tensor(value: Any) -> Tensor:
    return torch.as_tensor(np.asarray(value), dtype=torch.float32)
