"""Resizing without distortion. Pixels are compared with LeRobot's in tests/parity/processing."""

import pytest
import torch

from flexor.policies.nn.resize import resize_with_padding


@pytest.mark.parametrize(
    ("where", "inside"),
    [("centre", (slice(7, 21), slice(0, 28))), ("left-top", (slice(14, 28), slice(0, 28)))],
)
def test_the_border_is_filled_where_it_should_be(where, inside):
    image = torch.full((3, 10, 20), 0.25)
    out = resize_with_padding(image, 28, 28, where, fill=-1)
    expected = torch.full((3, 28, 28), -1.0)
    expected[(..., *inside)] = 0.25
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("lead", [(), (2,), (2, 3)])
@pytest.mark.parametrize("where", ["centre", "left-top"])
def test_any_leading_dimensions(where, lead):
    images = torch.rand(*lead, 3, 30, 20)
    out = resize_with_padding(images, 16, 24, where)
    assert out.shape == (*lead, 3, 16, 24)
    single = resize_with_padding(images.reshape(-1, 3, 30, 20)[-1], 16, 24, where)
    torch.testing.assert_close(out.reshape(-1, 3, 16, 24)[-1], single)


def test_an_image_of_that_size_is_not_touched():
    image = torch.full((1, 3, 8, 8), 3.0)
    assert resize_with_padding(image, 8, 8) is image


def test_a_line_of_pixels_does_not_vanish():
    assert resize_with_padding(torch.ones(3, 1, 500), 8, 8).sum() == 3 * 8
