"""Augmented images of a dataset as one picture, for people."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from flexor.core.batch import SAMPLE_ID
from flexor.core.console import Progress
from flexor.core.errors import ConfigError
from flexor.core.rng import Noise
from flexor.data.dataset import Dataset
from flexor.data.settings import ImageTransformsConfig
from flexor.policies.augment.step import augmentation
from flexor.policies.features import Kind, PolicyFeature
from flexor.policies.processing.pipeline import StepContext

SMALLEST, WIDEST = 128, 320  # pixels of one image across; a smaller one is enlarged by a whole factor
GAP = 4  # pixels between two


def augmented_grid(
    dataset: Dataset,
    settings: ImageTransformsConfig,
    *,
    seed: int,
    samples: int = 4,
    steps: int = 6,
    progress: Progress | None = None,
) -> np.ndarray:
    """A picture uint8 [H, W, 3]: a row for each camera and sample, first as recorded, then as in the first steps.

    Samples are spread evenly over the dataset. Each image is what a run with this seed makes of the sample at that
    step.
    """
    cameras = {
        name: PolicyFeature(Kind.VISUAL, tuple(feature.chw))
        for name, feature in dataset.features.items()
        if feature.is_camera and feature.depth is None
    }
    step = augmentation(settings, cameras)
    if step is None:
        raise ConfigError(
            f"{dataset.repo_id} has no cameras to augment."
            if not cameras
            else "No image transform has a weight above 0: see --dataset.image_transforms.tfs."
        )
    rows = np.unique(np.linspace(0, len(dataset) - 1, samples).astype(int))
    lines = []
    for done, row in enumerate(rows, 1):
        batch = dataset.read([row], cameras=list(cameras))
        images = {name: torch.as_tensor(np.ascontiguousarray(batch[name])) for name in cameras}
        ids = torch.as_tensor(batch[SAMPLE_ID]).reshape(-1)
        augmented = [step(images, StepContext(True, Noise(seed, number, ids))) for number in range(steps)]
        lines += [[images[name] / 255, *(each[name] for each in augmented)] for name in cameras]
        if progress:
            progress(done, len(rows))
    return _arranged([[_cell(image[0]) for image in line] for line in lines])


def _cell(image: Tensor) -> np.ndarray:
    """An image [C, H, W] in [0, 1] as uint8 [h, w, 3], at a size at which it can be seen."""
    height, width = image.shape[-2:]
    if width > WIDEST:
        small = max(1, round(height * WIDEST / width)), WIDEST
        image = F.interpolate(image[None], small, mode="area")[0]
    levels = (image.clamp(0, 1) * 255).round().to(torch.uint8)
    factor = max(1, SMALLEST // width)
    cell = levels.expand(3, -1, -1).permute(1, 2, 0).numpy()
    return cell.repeat(factor, axis=0).repeat(factor, axis=1)


def _arranged(lines: list[list[np.ndarray]]) -> np.ndarray:
    """Rows of images, on white. Images of a row have one size."""
    width = max(len(line) * (line[0].shape[1] + GAP) for line in lines) + GAP
    height = sum(line[0].shape[0] + GAP for line in lines) + GAP
    out = np.full((height, width, 3), 255, np.uint8)
    top = GAP
    for line in lines:
        tall, wide = line[0].shape[:2]
        for place, image in enumerate(line):
            left = GAP + place * (wide + GAP)
            out[top : top + tall, left : left + wide] = image
        top += tall + GAP
    return out
