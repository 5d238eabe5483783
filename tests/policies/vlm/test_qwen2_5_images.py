"""Images for Qwen2.5-VL are those of its own processor, in `transformers`."""

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

from flexor.core.errors import ConfigError
from flexor.policies.vlm.qwen2_5_images import FACTOR, ImageGrid, QwenImages, choose_grid
from support.samples import picture

LIMITS = (64 * FACTOR**2, 128 * FACTOR**2)


@pytest.mark.parametrize("limits", [LIMITS, (4 * FACTOR**2, 16384 * FACTOR**2)])
@pytest.mark.parametrize("size", [(480, 640), (224, 224), (24, 32), (1080, 1920), (196, 252), (100, 900)])
def test_sizes(size, limits):
    assert choose_grid(*size, *limits).size == smart_resize(*size, FACTOR, *limits)


def test_an_image_that_is_a_line():
    with pytest.raises(ConfigError, match="2 x 500"):
        choose_grid(2, 500, *LIMITS)


@pytest.mark.parametrize("size", [(48, 64), (224, 308), (240, 320), (481, 75), (252, 333)])
def test_patches(size):
    """Every pixel is that of Pillow: smaller, larger, and of one axis only."""
    image = picture(2, 5, *size) ^ np.random.default_rng(0).integers(0, 99, (*size, 3), np.uint8)
    processor = Qwen2VLImageProcessorPil(min_pixels=LIMITS[0], max_pixels=LIMITS[1])
    expected = processor(images=[image], return_tensors="np")
    grid = choose_grid(*size, *LIMITS)
    assert expected["image_grid_thw"].tolist() == [[1, *grid]]
    frames = expected["pixel_values"].reshape(1, grid.patches, 3, 2, 196)  # of two equal frames
    pixels = torch.from_numpy(image).movedim(-1, 0)[None] / 255
    ours = QwenImages([size], [grid])([pixels]).unflatten(-1, (3, 196)).numpy()
    assert np.abs(ours - frames[:, :, :, 0]).max() < 1e-6


def test_images_of_two_sizes_follow_each_other():
    sizes, grids = [(50, 80), (28, 56)], [ImageGrid(4, 6), ImageGrid(2, 4)]
    images = [torch.rand(2, 3, *size) for size in sizes]
    both = QwenImages(sizes, grids)(images)
    assert torch.equal(both[:, grids[0].patches :], QwenImages(sizes[1:], grids[1:])(images[1:]))


def test_images_are_prepared_without_the_host():
    with FakeTensorMode():
        patches = QwenImages([(50, 80)], [ImageGrid(4, 6)])([torch.empty(2, 3, 50, 80)])
    assert patches.shape == (2, 24, 588)
