"""What a robot sends and how long it takes, with numbers worked by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexor.plan.site.network import Exchange, delay, exchange, jpeg_bytes

VGA = (480, 640)


def test_jpeg_goes_through_what_was_measured() -> None:
    assert jpeg_bytes(480, 640) == 128_000
    assert jpeg_bytes(224, 224) == pytest.approx(32_000, rel=0.01)


@given(st.integers(16, 4000), st.integers(16, 4000))
def test_jpeg_is_smaller_than_raw_from_small_pictures_on(height: int, width: int) -> None:
    assert 0 < jpeg_bytes(height, width) < 3 * height * width


def test_an_exchange() -> None:
    # two cameras, 14 numbers; 50 actions of 14 float32, 25 of them executed at 50 Hz: twice a second
    one = exchange([VGA, VGA], state=14, actions=14, horizon=50, executed=25, rate_hz=50)
    assert one.per_s == 2
    assert one.raw == round((2 * 921_600 + 56) * 1.06)
    assert one.jpeg == round((2 * 128_000 + 56) * 1.06)
    assert one.answer == round(2800 * 1.06)
    assert one.mbit_up(jpeg=False) == pytest.approx(31.27, abs=0.01)
    assert one.mbit_up(jpeg=True) == pytest.approx(4.34, abs=0.01)
    assert one.mbit_down == pytest.approx(0.0475, abs=0.001)


def test_history_is_sent_each_time() -> None:
    one = exchange([VGA], state=2, actions=2, horizon=8, executed=8, rate_hz=10)
    two = exchange([VGA], state=2, actions=2, horizon=8, executed=8, rate_hz=10, history=2)
    assert two.raw == pytest.approx(2 * one.raw, abs=1)
    assert two.answer == one.answer


def test_delay() -> None:
    one = Exchange(raw=1_250_000, jpeg=125_000, answer=1_250, per_s=1)  # 10 Mbit, 1 Mbit, 10 kbit
    raw = delay(one, up_mbit=100, down_mbit=10, round_trip_s=0.02, inference_s=0.05, jpeg=False)
    assert raw.upload == pytest.approx(0.1)
    assert raw.download == pytest.approx(0.001)
    assert raw.total == pytest.approx(0.171)
    assert raw.steps(rate_hz=50) == pytest.approx(8.55)
    assert delay(
        one, up_mbit=100, down_mbit=10, round_trip_s=0.02, inference_s=0.05, jpeg=True
    ).upload == pytest.approx(0.01)


def test_without_cameras() -> None:
    one = exchange([], state=7, actions=7, horizon=10, executed=1, rate_hz=100)
    assert one.raw == one.jpeg == 30
    assert one.per_s == 100
