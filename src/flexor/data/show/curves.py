"""Curves of states, actions and other numbers, with fewer points where an episode is long.

A long curve keeps the smallest and the largest value of every few frames, so that a glitch of one frame stays visible.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flexor.core.batch import ACTION, STATE
from flexor.data.check.tables import OWN_COLUMNS
from flexor.data.dataset import Dataset
from flexor.data.format.flat_names import flat_names

MAX_FEATURE_CURVES = 32  # curves of one feature
MAX_CURVES = 64  # of an episode
STEPS = 65_534  # of a code, from the feature's smallest to its largest value
MISSING = 65_535  # the code of a value that is not finite


@dataclass(frozen=True, eq=False)
class CurveFeature:
    """A feature that is drawn as curves."""

    name: str
    names: list[str]  # of the values that are drawn
    size: int  # values that the feature has
    values: np.ndarray  # [N, len(names)]
    low: np.ndarray  # [len(names)] the smallest finite value, nan if there is none
    high: np.ndarray


def curve_features(dataset: Dataset) -> list[CurveFeature]:
    """State and action first, then the other columns of numbers."""
    names = [name for name in dataset.columns if name not in OWN_COLUMNS]
    names.sort(key=lambda name: (name != STATE, name != ACTION, not name.startswith(("obs", "act"))))
    features, remaining = [], MAX_CURVES
    for name in names:
        feature = _curve_feature(dataset, name, min(remaining, MAX_FEATURE_CURVES))
        if feature.names:
            features.append(feature)
            remaining -= len(feature.names)
    return features


def _curve_feature(dataset: Dataset, name: str, limit: int) -> CurveFeature:
    column = dataset.columns[name]
    flat = column.reshape(len(column), -1)
    size = flat.shape[1]
    visible = flat[:, :limit]
    numbered = [name] if size == 1 else [str(i) for i in range(size)]
    labels = flat_names(dataset.features[name].names, size) or numbered
    ends = [extent(column_values) for column_values in visible.T]
    low, high = (np.array([end[i] for end in ends]) for i in (0, 1))
    return CurveFeature(name, labels[:limit], size, visible, low, high)


def extent(values: np.ndarray) -> tuple[float, float]:
    """The smallest and the largest finite value; nan if there is none."""
    finite = values[np.isfinite(values)] if values.dtype.kind == "f" else values
    return (float(finite.min()), float(finite.max())) if len(finite) else (np.nan, np.nan)


def frames_per_point(length: int, points: int) -> int:
    """1 if the points suffice for all frames; otherwise the number of frames that a pair of points covers."""
    return 1 if length <= points else -(-length // max(points // 2, 1))


def episode_curves(features: list[CurveFeature], start: int, length: int, every: int) -> np.ndarray:
    """The codes of all curves of an episode, uint16: curve after curve, each [low, high] per `every` frames.

    With `every` 1, there is one value per frame. A code is a position between the feature's low and high.
    """
    parts = []
    for feature in features:
        codes = _codes(feature, start, length)  # [length, D]
        parts.append(codes.T.ravel() if every == 1 else _thinned(codes, every).ravel())
    return np.concatenate(parts) if parts else np.empty(0, np.uint16)


def _codes(feature: CurveFeature, start: int, length: int) -> np.ndarray:
    values = feature.values[start : start + length].astype(np.float64)
    span = np.where(feature.high > feature.low, feature.high - feature.low, 1.0)
    finite = np.isfinite(values)
    place = np.where(finite, (values - feature.low) / span, 0.0)
    return np.where(finite, np.rint(place * STEPS), MISSING).astype(np.uint16)


def _thinned(codes: np.ndarray, every: int) -> np.ndarray:
    """[length, D] -> [D, buckets, 2]; a bucket with a missing value is missing, so that it is seen."""
    edges = np.arange(0, len(codes), every)
    high = np.maximum.reduceat(codes, edges)
    low = np.where(high == MISSING, MISSING, np.minimum.reduceat(codes, edges))
    return np.stack([low, high], axis=-1).transpose(1, 0, 2).astype(np.uint16)
