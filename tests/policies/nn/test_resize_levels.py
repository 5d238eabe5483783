"""Images are resized as Pillow resizes them, to the last bit."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from flexor.policies.nn.resize_levels import ResizeLevels

SIZES = [  # in all of which every version of Pillow begins with the columns
    ((48, 64), (20, 30)),
    ((48, 64), (100, 90)),
    ((31, 77), (31, 20)),
    ((31, 77), (64, 77)),
    ((240, 320), (7, 9)),
    ((5, 3), (11, 13)),
]


@pytest.mark.parametrize(("size", "resized"), SIZES)
def test_every_pixel_is_that_of_pillow(size, resized):
    image = np.random.default_rng(0).integers(0, 256, (*size, 3), np.uint8)
    image[: size[0] // 2] = np.where(image[: size[0] // 2] > 127, 255, 0)  # overshoots, which is cut off
    expected = np.asarray(Image.fromarray(image).resize(resized[::-1], Image.Resampling.BICUBIC))
    pixels = torch.from_numpy(image).movedim(-1, 0)[None] / 255
    levels = ResizeLevels(size, resized)(pixels) * 255
    assert np.array_equal(levels.round()[0].movedim(0, -1).numpy(), expected)


@pytest.mark.parametrize(("size", "resized"), [*SIZES, ((480, 640), (256, 256)), ((230, 230), (256, 256))])
def test_every_pixel_is_that_of_torch(size, resized):
    image = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (1, 3, *size), np.uint8))
    expected = F.interpolate(image, resized, mode="bicubic", antialias=True, align_corners=False)
    levels = ResizeLevels(size, resized, like_torch=True)(image / 255) * 255
    assert torch.equal(levels.round().to(torch.uint8), expected)


def test_an_image_of_the_right_size_stays_as_it_is():
    resize = ResizeLevels((4, 6), (4, 6))
    image = torch.tensor([0.0, 1.0, 0.5, -0.2, 1.2]).expand(1, 3, 4, 5)
    assert not list(resize.buffers())
    assert resize(image)[0, 0, 0].mul(255).round().tolist() == [0, 255, 128, 0, 255]
