"""Statistics that are not those of the values: of another dataset, older than the data, or placeholders."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flexor.data.check.values import EpisodeValues, ValueFault
from flexor.runs.text import figure

FAR_MEAN, FAR_STD = 3.0, 4.0  # of normalised values of a whole dataset, which are near 0 and 1
NARROW_STD, NARROW_RANGE = 0.25, 0.1  # the same, and their range, if the statistics are much too wide


@dataclass(frozen=True, eq=False)
class Scale:
    """How values are normalised: what is subtracted, and what they are divided by. [D] each"""

    shift: np.ndarray
    span: np.ndarray
    is_mean_std: bool
    """Otherwise the smallest and largest values become -1 and 1."""


def wrong_statistics(values: EpisodeValues, scale: Scale) -> list[ValueFault]:
    """Statistics in use that are not those of the values: of another dataset, or older than the data."""
    if scale.shift.size not in (1, values.low.shape[1]):
        return []
    shift, span = (np.broadcast_to(part, values.low.shape[1:]) for part in (scale.shift, scale.span))
    mean, std = (np.nanmean(values.sample, axis=0) - shift) / span, np.nanstd(values.sample, axis=0) / span
    reached = (values.highest - values.lowest) / (2 * span)
    narrow = std < NARROW_STD if scale.is_mean_std else reached < NARROW_RANGE
    wrong = (np.abs(mean) > FAR_MEAN) | (std > FAR_STD) | narrow
    wrong &= ~values.is_constant
    if not wrong.any():
        return []
    extent = np.where(wrong, np.maximum(np.abs(mean), std), 0.0)
    too_narrow = wrong & narrow & (extent <= FAR_MEAN)
    worst = int(np.argmax(np.where(too_narrow, 1 / np.maximum(std, 1e-12), extent)))
    reach = np.maximum(np.abs(values.low - shift), np.abs(values.high - shift))[:, worst] / span[worst]
    far = np.flatnonzero(reach > FAR_MEAN) if extent[worst] > FAR_MEAN else np.arange(len(reach))
    expected = "about 0 and 1" if scale.is_mean_std else "values between -1 and 1"
    fix = "the statistics are those of other data: compute them with `flexor data stats DIR --write`"
    evidence = (
        f"{values.dimensions(np.flatnonzero(wrong).tolist())}: normalised, {values.dimension(worst)} "
        f"has a mean of {figure(float(mean[worst]))} and a standard deviation of {figure(float(std[worst]))} "
        f"instead of {expected}, in {values.names.at(far)}"
    )
    return [ValueFault("wrong statistics", evidence, fix)]
