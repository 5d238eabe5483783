"""Images for Qwen2.5-VL are those of its own processor, in `transformers`."""

import numpy as np
import pytest
import torch
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

from flexor.core.errors import ConfigError
from flexor.policies.vlm.qwen2_5_images import FACTOR, ImageGrid, choose_grid, prepare_images
from support.samples import picture

LIMITS = (64 * FACTOR**2, 128 * FACTOR**2)


@pytest.mark.parametrize("limits", [LIMITS, (4 * FACTOR**2, 16384 * FACTOR**2)])
@pytest.mark.parametrize("size", [(480, 640), (224, 224), (24, 32), (1080, 1920), (196, 252), (100, 900)])
def test_sizes(size, limits):
    assert choose_grid(*size, *limits).size == smart_resize(*size, FACTOR, *limits)


def test_an_image_that_is_a_line():
    with pytest.raises(ConfigError, match="2 x 500"):
        choose_grid(2, 500, *LIMITS)


@pytest.mark.parametrize("size", [(48, 64), (224, 308), (240, 320)])
def test_patches(size):
    image = picture(2, 5, *size)
    processor = Qwen2VLImageProcessorPil(min_pixels=LIMITS[0], max_pixels=LIMITS[1])
    expected = processor(images=[image], return_tensors="np")
    grid = choose_grid(*size, *LIMITS)
    assert expected["image_grid_thw"].tolist() == [[1, *grid]]
    frames = expected["pixel_values"].reshape(1, grid.patches, 3, 2, 196)  # of two equal frames
    pixels = torch.from_numpy(image).movedim(-1, 0)[None] / 255
    ours = prepare_images([pixels], [grid]).unflatten(-1, (3, 196)).numpy()
    difference = np.abs(ours - frames[:, :, :, 0])
    level = 1 / 255 / 0.26  # Pillow computes with integers, so a few values round to the next byte
    assert difference.max() < 1.01 * level and (difference > 1e-5).mean() < 0.005


def test_images_of_two_sizes_follow_each_other():
    grids = [ImageGrid(4, 6), ImageGrid(2, 4)]
    images = [torch.rand(2, 3, *grid.size) for grid in grids]
    both = prepare_images(images, grids)
    assert torch.equal(both[:, grids[0].patches :], prepare_images(images[1:], grids[1:]))
