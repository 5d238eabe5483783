"""Numbers as people read them, and the marks of a plot."""

from __future__ import annotations

import pytest

from flexor.plan.show.as_json import _finite
from flexor.plan.show.html import Axes, thinned, ticks
from flexor.plan.show.report import duration, number, usd


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0123, "12.3 ms"),
        (0.9, "900 ms"),
        (0.9996, "1,000 ms"),
        (59, "59 s"),
        (600, "10 min"),
        (7200, "2.0 h"),
        (200_000, "2.3 days"),
    ],
)
def test_durations(seconds: float, text: str):
    assert duration(seconds) == text


def test_numbers_have_no_powers_of_ten():
    assert [number(x) for x in (0.1234, 17.82, 99.96, 1138.2)] == ["0.123", "17.8", "100", "1,138"]


def test_money():
    assert usd(0.5) == "0.50 USD" and usd(4000) == "4,000 USD"


def test_json_has_no_infinity():
    assert _finite({"a": [float("inf"), 1.0], "b": float("nan")}) == {"a": [None, 1.0], "b": None}


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0, 25.4), (-2.3, 1.1), (0, 0.003), (0, 4000)])
def test_marks_are_round_and_inside(low: float, high: float):
    marks = ticks(low, high)
    assert 2 <= len(marks) <= 7
    assert low - 1e-9 <= marks[0] and marks[-1] <= high + 1e-9


def test_a_thinned_curve_keeps_its_peak():
    curve = [(float(i), float(i % 97)) for i in range(5000)]
    curve[1234] = (1234.0, 1000.0)
    assert max(thinned(curve), key=lambda point: point[1]) == (1234.0, 1000.0)
    assert len(thinned(curve)) <= 600


def test_axes_go_up():
    axes = Axes((0, 10), (0, 5))
    assert axes.at(0, 0)[1] > axes.at(0, 5)[1] and axes.at(0, 0)[0] < axes.at(10, 0)[0]
