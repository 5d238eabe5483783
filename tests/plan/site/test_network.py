"""What a robot sends and how long it takes, with numbers worked by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexor.plan.site.network import exchange, jpeg_bytes

VGA = (480, 640)


def test_jpeg_goes_through_what_was_measured() -> None:
    assert jpeg_bytes(480, 640) == 128_000
    assert jpeg_bytes(224, 224) == pytest.approx(32_000, rel=0.01)


@given(st.integers(16, 4000), st.integers(16, 4000))
def test_jpeg_is_smaller_than_raw_from_small_pictures_on(height: int, width: int) -> None:
    assert 0 < jpeg_bytes(height, width) < 3 * height * width


def test_an_exchange() -> None:
    # two cameras, 14 numbers; 50 actions of 14 float32, 25 of them executed at 50 Hz: twice a second
    robot = exchange([VGA, VGA], state=14, actions=14, horizon=50, executed=25, rate_hz=50)
    assert robot.per_s == 2
    assert robot.raw == round((2 * 921_600 + 56) * 1.06)
    assert robot.jpeg == round((2 * 128_000 + 56) * 1.06)
    assert robot.answer == round(2800 * 1.06)
    assert robot.mbit_up(jpeg=False) == pytest.approx(31.27, abs=0.01)
    assert robot.mbit_up(jpeg=True) == pytest.approx(4.34, abs=0.01)
    assert robot.mbit_down == pytest.approx(0.0475, abs=0.001)


def test_without_cameras() -> None:
    robot = exchange([], state=7, actions=7, horizon=10, executed=1, rate_hz=100)
    assert robot.raw == robot.jpeg == 30
    assert robot.per_s == 100
