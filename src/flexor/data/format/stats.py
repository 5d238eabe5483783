"""Dataset statistics, computed as in LeRobot.

Policies normalise with these, so they must match what LeRobot computes on the same data: first the
statistics of each episode, with quantiles from a histogram of 5000 bins, then a merge of all episodes
weighted by frame count. So merged quantiles are an average of the episodes' quantiles, as in LeRobot,
not the quantiles of the whole dataset. There is one deliberate difference: Flexor sums means and
deviations in float64, LeRobot in the data's type. Only the last digits differ.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flexor.core.errors import DatasetError

Stats = dict[str, np.ndarray]
"""One feature's statistics: min, max, mean, std, count and q01 .. q99."""

NEEDED_STATS = ("mean", "std", "min", "max")
QUANTILES = {"q01": 0.01, "q10": 0.10, "q50": 0.50, "q90": 0.90, "q99": 0.99}
BINS = 5000
BACKUP = ".bak-"  # in the names of copies of meta/stats.json
PIXELS_FROM, PIXELS_TO = 300, 150  # a longer side than the first is subsampled to about the second


class RunningStats:
    """Statistics of vectors that arrive in batches; the vectors are not stored."""

    def __init__(self) -> None:
        self.count = 0

    def update(self, values: np.ndarray) -> None:
        """Add `values` [..., D]: every dimension except the last one is a batch dimension."""
        values = np.asarray(values)
        values = values.reshape(-1, values.shape[-1])  # [N, D]
        if len(values) == 0:
            return
        values = values.astype(np.result_type(values.dtype, np.float32), copy=False)
        low, high = values.min(axis=0), values.max(axis=0)
        if not (np.isfinite(low).all() and np.isfinite(high).all()):
            raise DatasetError(
                f"{np.count_nonzero(~np.isfinite(values))} of {values.size} values are NaN or infinite, so "
                "statistics can't be computed. `flexor data check` names the episodes; exclude or repair them."
            )
        if self.count == 0:
            self._start(low, high)
        elif values.shape[1] != len(self.min):
            raise DatasetError(
                f"can't add vectors of length {values.shape[1]} to statistics of vectors of length "
                f"{len(self.min)}: every frame of a feature must have the same shape"
            )
        elif np.any(low < self.min) or np.any(high > self.max):
            self._widen(np.minimum(low, self.min), np.maximum(high, self.max))
        self._add(values)

    def result(self) -> Stats:
        """The statistics so far, each an array [D], and the number of vectors, [1]."""
        if self.count == 0:
            raise DatasetError("can't compute statistics without frames. Add at least one frame.")
        stats = {
            "min": self.min.copy(),
            "max": self.max.copy(),
            "mean": self.mean.copy(),
            "std": np.sqrt(self._squared / self.count),
            "count": np.array([self.count]),
        }
        for name, q in QUANTILES.items():
            # One vector gives no useful histogram; LeRobot uses the mean.
            stats[name] = self.mean.copy() if self.count < 2 else self._quantile(q)
        return stats

    def _start(self, low: np.ndarray, high: np.ndarray) -> None:
        self.min, self.max = low, high
        self.mean = np.zeros(len(low), np.float64)
        self._squared = np.zeros(len(low), np.float64)  # sum of squared distances from the mean
        self._histogram = np.zeros((len(low), BINS))
        self._edges = [np.linspace(lo - 1e-10, hi + 1e-10, BINS + 1) for lo, hi in zip(low, high)]

    def _add(self, values: np.ndarray) -> None:
        # Chan's update: accurate where E[x^2] - E[x]^2 would suffer from cancellation.
        mean = values.mean(axis=0, dtype=np.float64)
        total = self.count + len(values)
        shift = mean - self.mean
        self._squared += ((values - mean) ** 2).sum(axis=0) + shift**2 * self.count * len(values) / total
        self.mean += shift * (len(values) / total)
        self.count = total
        for column, edges, histogram in zip(values.T, self._edges, self._histogram):
            histogram += np.histogram(column, bins=edges)[0]

    def _widen(self, low: np.ndarray, high: np.ndarray) -> None:
        """Extend every histogram to the new range; a bin's count moves to the new bin at its centre."""
        self.min, self.max = low, high
        for i, old in enumerate(self._edges):
            padding = (high[i] - low[i]) * 1e-10
            edges = np.linspace(low[i] - padding, high[i] + padding, BINS + 1)
            bins = np.searchsorted(edges, (old[:-1] + old[1:]) / 2) - 1
            self._histogram[i] = np.bincount(bins.clip(0, BINS - 1), self._histogram[i], BINS)
            self._edges[i] = edges

    def _quantile(self, q: float) -> np.ndarray:
        return np.array([_quantile(h, e, q * self.count) for h, e in zip(self._histogram, self._edges)])


def _quantile(histogram: np.ndarray, edges: np.ndarray, target: float) -> float:
    """The value with `target` samples below it; linear interpolation inside a bin."""
    cumulative = np.cumsum(histogram)
    bin_ = int(np.searchsorted(cumulative, target))
    if bin_ == 0:
        return edges[0]
    if bin_ >= len(cumulative):
        return edges[-1]
    before = cumulative[bin_ - 1]
    inside = cumulative[bin_] - before
    fraction = (target - before) / inside if inside else 0.0
    return edges[bin_] + fraction * (edges[bin_ + 1] - edges[bin_])


def vector_stats(values: np.ndarray) -> Stats:
    """Statistics of one feature over one episode: `values` is [T] or [T, ..., D]."""
    running = RunningStats()
    running.update(values[:, None] if values.ndim == 1 else values)
    # `count` is the number of frames, even if a frame is a matrix and each of its rows is a vector.
    return running.result() | {"count": np.array([len(values)])}


def sample_indices(length: int) -> np.ndarray:
    """The frames LeRobot uses for image statistics: all of up to 100, then a decreasing fraction."""
    samples = max(min(length, 100), min(int(length**0.75), 10_000))
    return np.round(np.linspace(0, length - 1, samples)).astype(int)


def pixel_counts(image: np.ndarray) -> np.ndarray:
    """How often each of the 256 values occurs in each channel: [H, W, C] uint8 -> [C, 256].

    Large images are subsampled to about 150 pixels on the long side, as in LeRobot. These few kilobytes
    are all that the statistics need of a frame, so frames are not stored.
    """
    height, width, channels = image.shape
    if max(height, width) >= PIXELS_FROM:
        step = int(max(height, width) / PIXELS_TO)
        image = image[::step, ::step]
    flat = image.reshape(-1, channels)
    return np.stack([np.bincount(flat[:, c], minlength=256) for c in range(channels)])


def image_stats(counts: np.ndarray, images: int) -> Stats:
    """Statistics in [0, 1], each [C, 1, 1], from summed `pixel_counts` [C, 256] of `images` frames."""
    values = np.arange(256, dtype=np.float64)
    total = counts.sum(axis=1)  # [C]
    mean = counts @ values / total
    variance = (counts * (values - mean[:, None]) ** 2).sum(axis=1) / total
    low = np.array([np.flatnonzero(channel)[0] for channel in counts])
    high = np.array([np.flatnonzero(channel)[-1] for channel in counts])
    stats = {"min": low, "max": high, "mean": mean, "std": np.sqrt(variance)}
    pixels = np.arange(256, dtype=np.float32)  # float32 because LeRobot's bins are, for uint8 images
    ends = zip(low.astype(np.float32), high.astype(np.float32))
    edges = [np.linspace(lo - 1e-10, hi + 1e-10, BINS + 1) for lo, hi in ends]
    histograms = [np.histogram(pixels, bins=e, weights=c)[0] for e, c in zip(edges, counts)]
    for name, q in QUANTILES.items():
        stats[name] = np.array([_quantile(h, e, q * n) for h, e, n in zip(histograms, edges, total)])
    scaled = {name: (value / 255.0).reshape(-1, 1, 1) for name, value in stats.items()}
    return scaled | {"count": np.array([images])}


def aggregate_stats(per_episode: Sequence[Mapping[str, Stats]]) -> dict[str, Stats]:
    """Merge the statistics of episodes (or of datasets), weighted by their counts."""
    features = list(dict.fromkeys(name for stats in per_episode for name in stats))
    return {name: _aggregate([stats[name] for stats in per_episode if name in stats]) for name in features}


def _aggregate(parts: Sequence[Stats]) -> Stats:
    def stack(name: str) -> np.ndarray:
        return np.stack([np.asarray(part[name], np.float64) for part in parts])

    means = stack("mean")  # [E, ...]
    counts = np.array([int(np.asarray(part["count"]).reshape(-1)[0]) for part in parts])
    weights = (counts / counts.sum()).reshape(-1, *[1] * (means.ndim - 1))
    mean = (weights * means).sum(axis=0)
    variance = (weights * (stack("std") ** 2 + (means - mean) ** 2)).sum(axis=0)
    merged = {"min": stack("min").min(axis=0), "max": stack("max").max(axis=0)}
    merged |= {"mean": mean, "std": np.sqrt(variance), "count": np.array([counts.sum()])}
    for name in QUANTILES:
        if all(name in part for part in parts):
            merged[name] = (weights * stack(name)).sum(axis=0)
    return merged


def to_json(stats: Mapping[str, Stats]) -> dict[str, dict[str, Any]]:
    """The content of `meta/stats.json`: nested lists."""
    return {name: {key: np.asarray(v).tolist() for key, v in part.items()} for name, part in stats.items()}


def from_json(data: Mapping[str, Mapping[str, Any]]) -> dict[str, Stats]:
    """The arrays in `meta/stats.json`, a scalar read as an array of one."""
    return {name: {key: np.atleast_1d(v) for key, v in part.items()} for name, part in data.items()}


def write_stats(root: Path, stats: Mapping[str, Stats]) -> Path | None:
    """Write statistics into a dataset's folder, atomically. Returns the copy of the earlier ones, if they differ."""
    path = root / "meta" / "stats.json"
    content = json.dumps(to_json(stats), indent=4).encode()
    try:
        earlier = path.read_bytes()
    except FileNotFoundError:
        earlier = content
    backup = None if earlier == content else _back_up(path, earlier)
    aside = path.with_name(".stats.json")
    aside.unlink(missing_ok=True)  # a link, perhaps: the dataset may be a stranger's
    with aside.open("xb") as file:
        file.write(content)
    aside.rename(path)
    return backup


def _back_up(path: Path, content: bytes) -> Path:
    """A copy beside the file, under the first free number: no earlier copy is overwritten."""
    for number in itertools.count(1):
        backup = path.with_name(f"{path.name}{BACKUP}{number}")
        with contextlib.suppress(FileExistsError), backup.open("xb") as file:
            file.write(content)
            return backup
    raise AssertionError("there is always a free number")
