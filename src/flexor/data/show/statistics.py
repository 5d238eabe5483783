"""Statistics and histograms of a dataset, computed from its rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from flexor.data.dataset import Dataset
from flexor.data.show.curves import CurveFeature

BINS = 40


def feature_statistics(features: Sequence[CurveFeature]) -> list[dict[str, Any]]:
    """Per feature and value: minimum, maximum, mean, deviation, quantiles, values that are not finite, histogram."""
    statistics = []
    for feature in features:
        columns = zip(feature.names, feature.values.T)
        values = [{"name": name} | value_statistics(column) for name, column in columns]
        statistics.append({"name": feature.name, "size": feature.size, "values": values})
    return statistics


def value_statistics(values: np.ndarray) -> dict[str, Any]:
    """Statistics of the finite values; None where there is none."""
    exact = values.astype(np.float64)
    finite = exact[np.isfinite(exact)]
    counts: dict[str, Any] = {"count": len(exact), "not_finite": len(exact) - len(finite)}
    if not len(finite):
        return counts | dict.fromkeys(("min", "max", "mean", "std", "q01", "q50", "q99", "histogram"))
    with np.errstate(over="ignore", invalid="ignore"):  # values near the limits of float64
        quantiles = np.quantile(finite, [0.01, 0.5, 0.99]).tolist()
        counts |= {name: float(getattr(finite, name)()) for name in ("min", "max", "mean", "std")}
    return {**counts, **dict(zip(("q01", "q50", "q99"), quantiles)), "histogram": histogram(finite)}


def histogram(finite: np.ndarray, bins: int = BINS) -> dict[str, Any] | None:
    """Counts of equal bins between the smallest and the largest value. Few different integers get a bin each."""
    low, high = float(finite.min()), float(finite.max())
    if not np.isfinite(high - low):
        return None
    if high == low:
        return {"low": low - 0.5, "high": high + 0.5, "counts": [len(finite)]}
    if high - low < bins and np.array_equal(finite, np.rint(finite)):
        low, high, bins = low - 0.5, high + 0.5, int(high - low) + 1
    try:
        counts, _ = np.histogram(finite, bins, (low, high))
    except ValueError:  # the values are too close together for so many bins
        counts = np.array([len(finite)])
    return {"low": low, "high": high, "counts": counts.tolist()}


def length_histogram(dataset: Dataset) -> dict[str, Any] | None:
    return histogram(dataset.episodes.length.astype(np.float64))


def task_counts(dataset: Dataset) -> list[dict[str, Any]]:
    """Every task with its number of episodes, the most frequent first."""
    counts = Counter(task for tasks in dataset.episodes.tasks for task in dict.fromkeys(tasks))
    return [{"text": text, "episodes": count} for text, count in counts.most_common()]
