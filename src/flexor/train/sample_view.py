"""A sample as a policy sees it in training: its images augmented, resized and cropped, its values normalised.

Nothing of a network is needed for it, so no weights are loaded and no tokenizer is downloaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flexor.config.schema import TrainConfig
from flexor.core.batch import ACTION, ENV_STATE, SAMPLE_ID, STATE, Batch
from flexor.core.rng import Noise
from flexor.data.dataset import Dataset
from flexor.data.format.flat_names import flat_names
from flexor.data.loader.loader import to_tensors
from flexor.policies.augment.operations import describe_transforms
from flexor.policies.augment.step import AugmentImages, augmented
from flexor.policies.fit import fit_to_dataset, sample_of, statistics
from flexor.policies.processing.pipeline import Pipeline, StepContext
from flexor.policies.processing.rename_and_move import float_image
from flexor.train.build import build_augmentation

CPU = torch.device("cpu")


@dataclass(frozen=True)
class CameraView:
    """What becomes of a camera's image."""

    recorded: np.ndarray
    """uint8 [H, W, 3]."""
    views: list[np.ndarray]
    """As the network gets it in some steps of training, and at last when it acts; uint8 [h, w, 3]."""
    low: float
    """The smallest and the largest value of the image after the processing."""
    high: float


@dataclass(frozen=True)
class ValuesView:
    """What becomes of the state, or of the first action of a chunk."""

    feature: str
    names: list[str]
    recorded: list[float]
    processed: list[float]


class SampleViewer:
    """Samples of a dataset in a training with these settings."""

    def __init__(self, config: TrainConfig, dataset: Dataset):
        policy = fit_to_dataset(config.policy, dataset, config.rename_map)
        self.config, self.dataset = replace(config, policy=policy), dataset
        stats = statistics(dataset, policy, config.dataset.use_imagenet_stats, config.rename_map)
        before, _ = policy.pipelines(stats, "cpu", config.rename_map)
        before = replace(before, steps=[step for step in before.steps if not step.on_host])  # those of words
        self.augmentation: AugmentImages | None = build_augmentation(self.config, CPU, dataset)
        self.names: Pipeline = before
        self.processing = augmented(before, self.augmentation)
        self.cameras, self.deltas = sample_of(policy, config.rename_map)

    def describe(self) -> str:
        if self.augmentation is None:
            return "not augmented"
        return f"augmented: {describe_transforms(self.config.dataset.image_transforms)}"

    @torch.no_grad()
    def view(self, row: int, steps: range) -> tuple[dict[str, CameraView], list[ValuesView]]:
        """The sample of a row as in these steps of a training, and as the policy acts on it."""
        sample = to_tensors(self.dataset.read([row], self.deltas, self.cameras))
        noise = {step: Noise(self.config.seed, step, sample[SAMPLE_ID]) for step in steps}
        processed = self.processing(dict(sample), StepContext(True, noise[steps[0]]))
        renamed = self.names.renamed(dict(sample))
        pixels = {step: self._augmented(renamed, each) for step, each in noise.items()}
        cameras = {}
        for camera in self.config.policy.images:
            views = [self._view(pixels[step][camera], camera, noise[step]) for step in steps]
            views.append(self._view(float_image(renamed[camera]), camera, None))
            values = processed[camera].float()
            ends = float(values.min()), float(values.max())
            cameras[camera] = CameraView(_picture(float_image(self._now(renamed[camera]))), views, *ends)
        return cameras, self._values(renamed, processed)

    def _augmented(self, batch: Batch, noise: Noise) -> Batch:
        images = {name: batch[name] for name in self.config.policy.images}
        if self.augmentation is not None:
            images = self.augmentation(images, StepContext(True, noise))
        return {name: float_image(x) if x.dtype == torch.uint8 else x for name, x in images.items()}

    def _view(self, images: Tensor, camera: str, noise: Noise | None) -> np.ndarray:
        return _picture(self._now(self.config.policy.view_images(images, camera, noise)))

    def _now(self, images: Tensor) -> Tensor:
        """The image [C, H, W] of the present, of one sample's [1, (T,) C, H, W]."""
        deltas = self.config.policy.observation_deltas
        return images[0] if images.dim() == 4 else images[0, deltas.index(0) if deltas else -1]

    def _values(self, recorded: Batch, processed: Batch) -> list[ValuesView]:
        features = [name for name in (STATE, ENV_STATE, ACTION) if _is_vector(recorded, processed, name)]
        return [self._values_of(name, recorded, processed) for name in features]

    def _values_of(
        self, feature: str, recorded: Mapping[str, Any], processed: Mapping[str, Any]
    ) -> ValuesView:
        first, second = (self._present(feature, batch[feature]) for batch in (recorded, processed))
        declared = self.dataset.features.get(feature)
        names = flat_names(declared.names, len(first)) if declared is not None else None
        return ValuesView(feature, names or [str(n) for n in range(len(first))], first, second)

    def _present(self, feature: str, values: Tensor) -> list[float]:
        policy = self.config.policy
        deltas = policy.action_deltas if feature == ACTION else policy.observation_deltas
        vector = values[0, deltas.index(0) if deltas else -1] if values.dim() == 3 else values[0]
        return [float(value) for value in vector]


def _is_vector(recorded: Batch, processed: Batch, name: str) -> bool:
    """Whether it is numbers before and after the processing: some policies turn a state into words."""
    values = [batch.get(name) for batch in (recorded, processed)]
    return all(isinstance(value, Tensor) and value.dim() in (2, 3) for value in values)


def _picture(image: Tensor) -> np.ndarray:
    """An image [C, H, W] in 0..1 as uint8 [H, W, 3]; a depth map over its own range."""
    if image.shape[0] == 1:
        low, high = image.min(), image.max()
        image = ((image - low) / (high - low).clamp(min=1e-6)).expand(3, -1, -1)
    levels = (image.clamp(0, 1) * 255).round().to(torch.uint8)
    return np.ascontiguousarray(levels.permute(1, 2, 0).numpy())
