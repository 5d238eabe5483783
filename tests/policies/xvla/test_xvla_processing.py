"""Processing steps of X-VLA: images, domains, rotations."""

import numpy as np
import pytest
import torch

from flexor.core.batch import DATASET_NUMBER
from flexor.policies.processing.pipeline import STEPS, StepContext
from flexor.policies.xvla.processing import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    AddDomainId,
    ImageNetNormalize,
    ImageScale,
    ImageToFloat,
    Rotation6DToAxisAngle,
)

TOP, SIDE = "observation.images.top", "observation.images.side"


def images() -> torch.Tensor:
    return torch.randint(256, (2, 3, 6, 8), dtype=torch.uint8)


def normalized(pixels: torch.Tensor) -> torch.Tensor:
    mean, std = (torch.tensor(values)[:, None, None] for values in (IMAGENET_MEAN, IMAGENET_STD))
    return (pixels.float() / 255 - mean) / std


@pytest.mark.parametrize("keeps_bytes", [False, True])
def test_bytes_and_floats_become_the_same(keeps_bytes):
    pixels = images()
    for given in (pixels, pixels.float() / 255, pixels.float()):
        batch = {TOP: given, f"{TOP}_padding_mask": torch.tensor([True, False]), "task": ["a", "b"]}
        done = ImageNetNormalize()(ImageToFloat()(batch, StepContext(keeps_bytes=keeps_bytes)))
        torch.testing.assert_close(done[TOP], normalized(pixels))
        assert done[f"{TOP}_padding_mask"].dtype == torch.bool and done["task"] == ["a", "b"]


def test_scaled_images_are_divided_again():
    pixels = images()
    scaled = ImageScale()({TOP: pixels})[TOP]
    torch.testing.assert_close(scaled, pixels.float())
    torch.testing.assert_close(ImageToFloat()({TOP: scaled})[TOP], pixels.float() / 255)


def test_only_named_cameras_are_changed():
    batch = {TOP: images(), SIDE: images()}
    done = ImageNetNormalize(image_keys=[SIDE])(ImageToFloat(image_keys=[SIDE])(batch))
    assert torch.equal(done[TOP], batch[TOP]) and done[SIDE].is_floating_point()


def test_domains_of_a_mixture():
    batch = {"observation.state": torch.zeros(4, 2), DATASET_NUMBER: torch.tensor([1, 0, 1, 2])}
    step = AddDomainId(5, [19, 20, 7])
    assert step(batch)["domain_id"].tolist() == [20, 19, 20, 7]
    acting = step({"observation.state": torch.zeros(2, 2)})
    assert acting["domain_id"].tolist() == [5, 5] and acting["domain_id"].dtype == torch.int64
    assert step.config() == {"domain_id": 5}


def test_a_column_of_this_name_counts_only_if_it_is_asked_for():
    batch = {"observation.state": torch.zeros(2, 2), "domain_id": torch.tensor([1, 2])}
    assert AddDomainId(5)(batch)["domain_id"].tolist() == [5, 5]
    assert AddDomainId(5, keeps_column=True)(batch)["domain_id"].tolist() == [1, 2]


def rotation(axis: np.ndarray, angle: float) -> np.ndarray:
    """Rodrigues' formula."""
    x, y, z = axis / np.linalg.norm(axis)
    cross = np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]])
    return np.eye(3) + np.sin(angle) * cross + (1 - np.cos(angle)) * cross @ cross


@pytest.mark.parametrize("angle", [0.0, 1e-3, 0.5, 2.0, 3.1])
def test_rotations_as_axis_and_angle(angle):
    axis = np.array([0.3, -0.8, 0.5])
    matrix = rotation(axis, angle)
    action = np.concatenate(
        [[1, 2, 3], 1.7 * matrix[:, 0], matrix[:, 1] + 0.2 * matrix[:, 0], [0.6], np.zeros(10)]
    )
    step = Rotation6DToAxisAngle()
    done = step({"action": torch.from_numpy(np.stack([action, action]))[None]})["action"]
    expected = angle * axis / np.linalg.norm(axis)
    assert done.shape == (1, 2, 7)
    np.testing.assert_allclose(done[0, 1, 3:6], expected, atol=2e-5)
    assert done[0, 0, :3].tolist() == [1, 2, 3] and done[0, 0, 6] == 1
    assert step({"action": torch.zeros(1, 20)})["action"][0, 6] == -1


@pytest.mark.parametrize(
    "name", ["xvla_image_scale", "xvla_image_to_float", "xvla_imagenet_normalize", "xvla_add_domain_id"]
)
def test_settings_are_those_of_lerobot(name):
    step = STEPS[name].from_config(STEPS[name]().config())
    assert step.config() == STEPS[name]().config()
