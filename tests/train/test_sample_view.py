"""What people are shown of a sample is what the network gets."""

from pathlib import Path

import numpy as np
import pytest
import torch

from flexor.config.parse import build_config
from flexor.core.batch import ACTION, SAMPLE_ID
from flexor.core.rng import Noise
from flexor.data.dataset import open_dataset
from flexor.data.loader.loader import to_tensors
from flexor.policies import make_policy
from flexor.policies.nn.camera import RgbEncoder
from flexor.policies.processing.pipeline import StepContext
from flexor.train.sample_view import SampleViewer

IMAGE = "observation.image"
SMALL = {"vision_backbone": "resnet18", "pretrained_backbone_weights": None, "down_dims": [8], "n_groups": 1}
CROPPED = {"crop_shape": [28, 30], "horizon": 4, "n_action_steps": 2, "diffusion_step_embed_dim": 8}


def viewer(dataset: Path, policy: dict, **settings: object) -> SampleViewer:
    flat = {"dataset.root": str(dataset), **{f"policy.{name}": value for name, value in policy.items()}}
    return SampleViewer(build_config({**flat, **settings}), open_dataset(root=dataset))


def test_values_are_normalised_and_images_augmented(dataset: Path):
    augmented = viewer(dataset, {"type": "act"}, **{"dataset.image_transforms.enable": True})
    cameras, values = augmented.view(3, range(2))
    recorded, data = open_dataset(root=dataset).read([3]), augmented.dataset
    np.testing.assert_array_equal(cameras[IMAGE].recorded, recorded[IMAGE][0].transpose(1, 2, 0))
    first, second, acting = cameras[IMAGE].views
    np.testing.assert_array_equal(acting, cameras[IMAGE].recorded)  # augmented in training only
    assert (first != second).any() and "brightness" in augmented.describe()
    action = next(each for each in values if each.feature == ACTION)
    expected = (recorded[ACTION][0] - data.stats[ACTION]["mean"]) / data.stats[ACTION]["std"]
    np.testing.assert_allclose(action.recorded, recorded[ACTION][0], rtol=1e-6)
    np.testing.assert_allclose(action.processed, expected, rtol=1e-4, atol=1e-5)
    assert action.names == ["x", "y", "opening"]


def test_a_crop_is_that_of_the_training(dataset: Path):
    """The pixels that the first convolution gets in a step of the training, and those that are shown."""
    raw = {"normalization_mapping": {"VISUAL": "IDENTITY"}}
    cropping = viewer(dataset, {"type": "diffusion", **SMALL, **CROPPED, **raw})
    pixels, acting = cropping.view(5, range(7, 8))[0][IMAGE].views
    assert pixels.shape == acting.shape == (28, 30, 3)
    sample = to_tensors(cropping.dataset.read([5], cropping.deltas, cropping.cameras))
    noise = Noise(cropping.config.seed, 7, sample[SAMPLE_ID])
    policy, inputs = make_policy(cropping.config.policy).train(), []
    encoder = next(module for module in policy.modules() if isinstance(module, RgbEncoder))
    encoder.backbone.register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
    with torch.no_grad():
        policy.loss(cropping.processing(sample, StepContext(True, noise)), noise)
    newest = inputs[0][-1].permute(1, 2, 0).numpy()  # of the window's two images
    np.testing.assert_array_equal(pixels, np.round(newest * 255).astype(np.uint8))


@pytest.mark.parametrize(
    ("policy", "size"), [("pi0", (224, 224, 3)), ("smolvla", (512, 512, 3)), ("tdmpc", (32, 32, 3))]
)
def test_images_have_the_size_that_the_network_takes(dataset: Path, policy: str, size: tuple[int, ...]):
    cameras, _ = viewer(dataset, {"type": policy}).view(0, range(1))
    assert [view.shape for view in cameras[IMAGE].views] == [size, size]
