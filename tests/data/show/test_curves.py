"""Curves, statistics and shares of a page, without drawing one."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from flexor.data.dataset import Episodes, open_dataset
from flexor.data.show.budget import EPISODE_BYTES, PAGE_BYTES, page_budget, thumbnail_layout, thumbnail_width
from flexor.data.show.curves import (
    MISSING,
    STEPS,
    CurveFeature,
    curve_features,
    episode_curves,
    frames_per_point,
)
from flexor.data.show.statistics import histogram, task_counts, value_statistics
from flexor.data.show.strips import spread_frames


def feature(values: np.ndarray) -> CurveFeature:
    low, high = np.nanmin(values, axis=0), np.nanmax(values, axis=0)
    return CurveFeature("f", [str(i) for i in range(values.shape[1])], values.shape[1], values, low, high)


def test_every_frame_if_there_is_room():
    values = np.array([[0.0, 5.0], [1.0, 6.0], [0.25, np.nan]])
    codes = episode_curves([feature(values)], 0, 3, 1)
    assert codes.tolist() == [0, STEPS, round(STEPS / 4), 0, STEPS, MISSING]


def test_a_glitch_stays_visible():
    values = np.zeros((1000, 1))
    values[777] = 1.0
    every = frames_per_point(1000, 20)
    assert every == 100
    pairs = episode_curves([feature(values)], 0, 1000, every).reshape(-1, 2)
    assert pairs.tolist() == [[0, STEPS] if i == 7 else [0, 0] for i in range(10)]
    values[5] = np.nan
    assert episode_curves([feature(values)], 0, 1000, every)[:2].tolist() == [MISSING, MISSING]


def test_state_and_action_come_first(dataset: Path):
    features = curve_features(open_dataset(root=dataset))
    assert [f.name for f in features][:2] == ["observation.state", "action"]
    assert features[0].names == ["x", "y", "opening"]
    assert not {"timestamp", "index", "task_index"} & {f.name for f in features}


def test_statistics_are_those_of_the_finite_values():
    values = np.array([1.0, 2.0, 3.0, np.nan, np.inf], np.float32)
    statistics = value_statistics(values)
    assert (
        statistics["min"],
        statistics["max"],
        statistics["mean"],
        statistics["not_finite"],
        statistics["count"],
    ) == (1, 3, 2, 2, 5)
    assert (
        statistics["std"] == pytest.approx(np.std([1, 2, 3])) and sum(statistics["histogram"]["counts"]) == 3
    )
    assert value_statistics(np.full(3, np.nan))["min"] is None


@pytest.mark.parametrize("values", [[5.0], [0.0, 1e-320], [-1e308, 1e308], [1.0, np.nextafter(1.0, 2)]])
def test_histograms_of_odd_values(values: list[float]):
    statistics = histogram(np.array(values))
    assert statistics is None or sum(statistics["counts"]) == len(values)


def test_integers_get_a_bin_each():
    assert histogram(np.array([0.0, 1, 1, 3])) == {"low": -0.5, "high": 3.5, "counts": [1, 2, 0, 1]}


def test_tasks_are_counted_once_per_episode(dataset: Path):
    opened = open_dataset(root=dataset)
    index, length = opened.episodes.index, opened.episodes.length
    tasks = [["a", "a"], ["b"], ["a", "b"], []]
    counted = replace(opened, episodes=Episodes(index, length, tasks, opened.episodes.first_frame))
    assert task_counts(counted) == [{"text": "a", "episodes": 2}, {"text": "b", "episodes": 2}]


@pytest.mark.parametrize("episodes", [1, 1000, 100_000])
def test_shares_stay_within_the_page(episodes: int):
    budget = page_budget([300] * episodes)
    count = len(budget.episodes)
    each = 4 / 3 * (budget.curve_bytes + budget.image_bytes)
    assert count * each < PAGE_BYTES and 2 * 64 * budget.points(64) <= budget.curve_bytes
    assert count == min(episodes, count) and budget.episodes[-1] == episodes - 1
    assert episodes > 2000 or count == episodes
    assert count * EPISODE_BYTES <= PAGE_BYTES


def test_few_episodes_get_large_thumbnails():
    sizes = {"top": (480, 640), "wrist": (480, 640)}
    few, many = (thumbnail_layout(sizes, nbytes) for nbytes in (1_000_000, 10_000))
    assert few.height == 144 and few.most > 24 and few.widths["top"] == 192
    assert many.height == 40 and many.most >= 4
    assert thumbnail_width(10, 5000, 40) == 160 and thumbnail_width(5000, 10, 40) == 8


def test_frames_include_first_and_last():
    assert spread_frames(1, 12) == [0] and spread_frames(5, 12) == [0, 1, 2, 3, 4]
    assert spread_frames(300, 4) == [0, 100, 199, 299]
