"""Processing steps of X-VLA, as LeRobot's checkpoints have them: images for Florence-2, domains, rotations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flexor.core.batch import ACTION, DATASET_NUMBER, Batch
from flexor.kernels.level_table import all_levels, as_table, can_look_up, look_up
from flexor.policies.processing.pipeline import ACTING, ProcessingStep, StepContext, processing_step
from flexor.policies.processing.rename_and_move import ToDevice, float_image

DOMAIN = "domain_id"  # [B], in a batch
IMAGES = "observation.images"  # how the names of cameras begin, if a step does not list them
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


@dataclass
class ImageStep(ProcessingStep):
    """A step that changes images. It computes on the policy's device, to which it moves them as bytes."""

    takes_bytes = True
    image_keys: list[str] | None = None
    """The cameras; None for all whose names begin as `IMAGES` says."""

    _mover = ToDevice()

    def to(self, device: str) -> None:
        self._mover = ToDevice(device)

    def config(self) -> dict[str, Any]:
        return {"image_keys": self.image_keys}

    def split_images(self) -> tuple[None, ImageStep]:
        return None, self

    def images(self, batch: Batch) -> Batch:
        """The images of the cameras, on the device."""
        names = self.image_keys or [name for name, value in batch.items() if _is_image(name, value)]
        images = {name: batch[name] for name in names if isinstance(batch.get(name), Tensor)}
        return self._mover(images, StepContext(keeps_bytes=True))


@processing_step("xvla_image_scale")
@dataclass
class ImageScale(ImageStep):
    """Images from 0 to 255 instead of 1."""

    def __call__(self, batch: Batch, context: StepContext = ACTING) -> Batch:
        return {**batch, **{name: _as_floats(image) * 255 for name, image in self.images(batch).items()}}


@processing_step("xvla_image_to_float")
@dataclass
class ImageToFloat(ImageStep):
    """Images from 0 to 1: bytes, and floats from 0 to 255, are divided by 255."""

    validate_range: bool = True
    """Part of LeRobot's settings, without an effect: nothing waits for a GPU to find out about values."""

    def config(self) -> dict[str, Any]:
        return {**super().config(), "validate_range": self.validate_range}

    def __call__(self, batch: Batch, context: StepContext = ACTING) -> Batch:
        images = self.images(batch)
        if context.keeps_bytes:  # the next step converts them, in one pass with what it does
            return {
                **batch,
                **{n: i if i.dtype == torch.uint8 else _from_0_to_1(i) for n, i in images.items()},
            }
        return {**batch, **{name: _from_0_to_1(image) for name, image in images.items()}}


@processing_step("xvla_imagenet_normalize")
@dataclass
class ImageNetNormalize(ImageStep):
    """Images as image encoders take them that were trained on ImageNet."""

    def __post_init__(self) -> None:
        self._tables: dict[torch.device, Tensor] = {}  # of what bytes become
        self._statistics: dict[torch.device, Tensor] = {}  # mean and standard deviation [2, 3, 1, 1]

    def __call__(self, batch: Batch, context: StepContext = ACTING) -> Batch:
        return {**batch, **{name: self._normalized(image) for name, image in self.images(batch).items()}}

    def _normalized(self, image: Tensor) -> Tensor:
        if image.dtype != torch.uint8 or image.shape[-3] != 3 or not can_look_up(image):
            return self._scaled(_as_floats(image))
        place = image.device
        if place not in self._tables:
            self._tables[place] = as_table(self._scaled(float_image(all_levels(3, place))))
        return look_up(image, self._tables[place])

    def _scaled(self, image: Tensor) -> Tensor:
        if image.device not in self._statistics:
            values = torch.tensor((IMAGENET_MEAN, IMAGENET_STD), device="cpu")[..., None, None]
            self._statistics[image.device] = values.to(image.device)
        mean, std = self._statistics[image.device]
        return (image - mean) / std


@processing_step("xvla_add_domain_id")
@dataclass
class AddDomainId(ProcessingStep):
    """Says which robot each sample is from."""

    uses_images = False
    domain_id: int = 0
    of_datasets: Sequence[int] | None = None
    """In training on several datasets: that of each. It is not saved: a robot has one."""
    keeps_column: bool = False
    """Leave the ids of a batch that has some. Not saved either."""

    _device = "cpu"

    def to(self, device: str) -> None:
        self._device = device

    def config(self) -> dict[str, Any]:
        return {"domain_id": self.domain_id}

    def __call__(self, batch: Batch, context: StepContext = ACTING) -> Batch:
        if self.keeps_column and DOMAIN in batch:
            return batch
        numbers = batch.get(DATASET_NUMBER)
        if self.of_datasets is None or numbers is None:
            tensor = next(
                (value for value in batch.values() if isinstance(value, Tensor) and value.ndim), None
            )
            count = 1 if tensor is None else len(tensor)
            device = self._device if tensor is None or not tensor.is_meta else tensor.device
            return {**batch, DOMAIN: torch.full((count,), self.domain_id, device=device)}
        domains = torch.zeros_like(numbers)
        for number, domain in enumerate(self.of_datasets):
            domains = torch.where(numbers == number, domain, domains)
        return {**batch, DOMAIN: domains}


@processing_step("xvla_rotation_6d_to_axis_angle")
@dataclass
class Rotation6DToAxisAngle(ProcessingStep):
    """Actions of one arm, [position, rotation as two columns of its matrix, gripper, ...] -> [position, axis times
    angle, gripper], which is 1 or -1."""

    uses_images = False
    expected_action_dim: int = 10

    def __call__(self, batch: Batch, context: StepContext = ACTING) -> Batch:
        action = batch.get(ACTION)
        if not isinstance(action, Tensor):
            return batch
        rotation = axis_angle(action[..., 3:9].double()).to(action.dtype)
        gripper = torch.where(action[..., 9:10] > 0.5, 1.0, -1.0).to(action.dtype)
        return {**batch, ACTION: torch.cat((action[..., :3], rotation, gripper), -1)}


def axis_angle(columns: Tensor) -> Tensor:
    """Two columns [..., 6] of rotation matrices, not quite orthogonal -> axes times angles [..., 3]."""
    first, second = columns[..., :3], columns[..., 3:]
    x = first / (first.norm(dim=-1, keepdim=True) + 1e-6)
    rest = second - (x * second).sum(-1, keepdim=True) * x
    y = rest / (rest.norm(dim=-1, keepdim=True) + 1e-6)
    matrix = torch.stack((x, y, torch.linalg.cross(x, y)), -1)
    w, vector = _quaternion(matrix)
    w = w.clamp(-1, 1)
    sine = (1 - w.square()).sqrt()
    scale = torch.where(sine == 0, 0.0, 2 * w.acos() / torch.where(sine == 0, 1.0, sine))
    return vector * scale[..., None]


def _quaternion(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """The real part [...], not negative, and the imaginary [..., 3] of rotation matrices [..., 3, 3].

    It is the eigenvector of a symmetric matrix (Bar-Itzhack 2000), which also suits matrices with rounding errors.
    """
    m = [[matrix[..., row, column] for column in range(3)] for row in range(3)]
    zero = torch.zeros_like(m[0][0])
    rows = (
        (m[0][0] - m[1][1] - m[2][2], zero, zero, zero),
        (m[0][1] + m[1][0], m[1][1] - m[0][0] - m[2][2], zero, zero),
        (m[0][2] + m[2][0], m[1][2] + m[2][1], m[2][2] - m[0][0] - m[1][1], zero),
        (m[2][1] - m[1][2], m[0][2] - m[2][0], m[1][0] - m[0][1], m[0][0] + m[1][1] + m[2][2]),
    )
    lower = torch.stack([torch.stack(row, -1) for row in rows], -2)
    largest = torch.linalg.eigh(lower).eigenvectors[
        ..., -1
    ]  # in ascending order; only the lower triangle is read
    sign = torch.where(largest[..., 3:] < 0, -1.0, 1.0)
    vector, w = (largest * sign).split((3, 1), -1)
    return w[..., 0], vector


def _is_image(name: str, value: Any) -> bool:
    is_number = isinstance(value, Tensor) and (value.dtype == torch.uint8 or value.is_floating_point())
    return name.startswith(IMAGES) and is_number and value.ndim >= 3


def _as_floats(image: Tensor) -> Tensor:
    return float_image(image) if image.dtype == torch.uint8 else image


def _from_0_to_1(image: Tensor) -> Tensor:
    if image.dtype == torch.uint8:
        return float_image(image)
    return torch.where(image.amax() > 1, image / 255, image)
