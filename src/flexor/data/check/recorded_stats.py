"""The part of a check about statistics. Values are normalised with them, so a wrong one affects every sample."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from flexor.data.check.layout import Layout
from flexor.data.check.report import CheckReport
from flexor.data.check.tables import OWN_COLUMNS, Tables
from flexor.data.check.wrong_statistics import NARROW_RANGE
from flexor.data.format.metadata import Feature
from flexor.data.format.stats import NEEDED_STATS

COMPUTE = "compute them with `flexor data stats DIR --write`"
FLAT = 1e-8  # a standard deviation below the epsilon that normalisation adds
OTHER_STD = 2.0
"""From this factor on, a standard deviation is not that of the data."""
IMAGE_MEAN = 0.1  # of a range from 0 to 1
OTHER_MEAN = 1.0  # in standard deviations of the data


def check_recorded_stats(layout: Layout, tables: Tables, report: CheckReport) -> None:
    for name, feature in layout.features.items():
        if name in OWN_COLUMNS or not name.startswith(("action", "observation")):
            continue  # other features are not normalised
        if feature.is_video and not any(layout.path(file).is_file() for file in layout.camera_files(name)):
            continue  # a completely missing feature is reported elsewhere
        if not feature.is_camera and name not in tables.low:
            continue
        if name in layout.undeclared:
            continue  # training computes its statistics
        if feature.is_camera and len(feature.shape) != 3:
            continue  # a shape that can't be an image is also reported elsewhere
        stats = layout.stats.get(name) or {}
        lacking = [key for key in NEEDED_STATS if key not in stats]
        if lacking:
            # Cameras are often normalised with other statistics; vectors never are.
            add_finding = report.warning if feature.is_camera else report.error
            part = "no statistics" if len(lacking) == len(NEEDED_STATS) else f"no {', '.join(lacking)}"
            message = f"it has {part}, which policies normalise with"
            add_finding("stats-missing", message, COMPUTE, feature=name)
            continue
        try:
            values = {key: np.asarray(value, np.float64).reshape(-1) for key, value in stats.items()}
        except (TypeError, ValueError) as error:
            message = f"its statistics are not numbers ({error})"
            report.error("stats-unreadable", message, COMPUTE, feature=name)
            continue
        values.pop("count", None)
        if not _is_usable(feature, values, report) or not _is_possible(feature, values, report):
            continue
        low, high = tables.low.get(name), tables.high.get(name)
        if low is not None and high is not None:
            _check_range(name, values, low, high, report)
        if name in tables.parts and set(report.checked) == {episode.index for episode in layout.episodes}:
            rows = tables.rows(name)
            if _has_spread_of(name, values, rows, report):
                _check_limits(name, values, rows, report)


def _is_usable(feature: Feature, values: dict[str, np.ndarray], report: CheckReport) -> bool:
    """Whether the statistics are finite and match the feature's size."""
    bad = [key for key, value in values.items() if not np.isfinite(value).all()]
    if bad:
        message = f"{', '.join(bad)} are NaN or infinite, and so would be every loss"
        report.error("stats-not-finite", message, COMPUTE, feature=feature.name)
        return False
    # For a matrix, LeRobot stores only the statistics of its columns.
    expected = feature.chw[:1] if feature.is_camera else (int(np.prod(feature.shape)), feature.shape[-1])
    wrong = {key: value.size for key, value in values.items() if value.size not in expected}
    if wrong or len({value.size for value in values.values()}) > 1:
        sizes = wrong or {key: value.size for key, value in values.items()}
        message = f"the statistics have {sizes} values, but the feature has {expected[0]}"
        report.error("stats-shape", message, COMPUTE, feature=feature.name)
        return False
    return True


def _is_possible(feature: Feature, values: dict[str, np.ndarray], report: CheckReport) -> bool:
    """Whether any data can have these statistics. Some programs write placeholders for images."""
    span, std = values["max"] - values["min"], values["std"]
    size = np.maximum(np.abs(values["min"]), np.abs(values["max"]))
    changes = span > 1e-6 * np.maximum(size, 1e-3)
    wrong = (std > (0.5 + 1e-3) * span + 1e-6) | ((std < FLAT) & changes)
    if not wrong.any():
        return True
    i = int(np.argmax(wrong))
    message = (
        f"{_dimensions(np.flatnonzero(wrong), wrong.size)}: the standard deviation is {std[i]:.4g}, which values "
        f"from {values['min'][i]:.4g} to {values['max'][i]:.4g} can't have"
    )
    report.warning("stats-wrong", message, COMPUTE, feature=feature.name)
    return False


def _has_spread_of(name: str, values: dict[str, np.ndarray], rows: np.ndarray, report: CheckReport) -> bool:
    """Compare mean and standard deviation with those of the data."""
    finite = np.where(np.isfinite(rows), rows, np.nan).reshape(-1, values["mean"].size).astype(np.float64)
    with np.errstate(all="ignore"):  # of dimensions without a value, or near the limits of float64
        mean, std = np.nanmean(finite, axis=0), np.nanstd(finite, axis=0)
        factor = values["std"] / std
        off = np.abs(values["mean"] - mean) / std
        wrong = (factor > OTHER_STD) | (factor < 1 / OTHER_STD) | (off > OTHER_MEAN)
    wrong &= std > 1e-6 * np.maximum(np.abs(mean), 1e-3)
    if not wrong.any():
        return True
    i = int(np.argmax(np.where(wrong, np.maximum(np.abs(np.log(np.maximum(factor, 1e-12))), off), 0)))
    message = (
        f"{_dimensions(np.flatnonzero(wrong), wrong.size)} have other statistics than recorded: dimension {i} has a "
        f"mean of {mean[i]:.4g} and a standard deviation of {std[i]:.4g}, the statistics say {values['mean'][i]:.4g} "
        f"and {values['std'][i]:.4g}"
    )
    report.warning("stats-wrong", message, COMPUTE, feature=name)
    return False


def _check_limits(name: str, values: dict[str, np.ndarray], rows: np.ndarray, report: CheckReport) -> None:
    """Check whether the data reaches the smallest and largest recorded value, at least about."""
    finite = np.where(np.isfinite(rows), rows, np.nan).reshape(-1, values["min"].size).astype(np.float64)
    low, high = np.fmin.reduce(finite), np.fmax.reduce(finite)
    span = high - low
    changes = span > 1e-6 * np.maximum(np.maximum(np.abs(low), np.abs(high)), 1e-3)
    wrong = changes & (span < NARROW_RANGE * (values["max"] - values["min"]))
    if wrong.any():
        i = int(np.argmax(wrong))
        message = (
            f"{_dimensions(np.flatnonzero(wrong), wrong.size)} have a much smaller range than recorded: dimension {i} "
            f"ranges from {low[i]:.4g} to {high[i]:.4g}, the statistics say {values['min'][i]:.4g} to "
            f"{values['max'][i]:.4g}"
        )
        report.warning("stats-wrong", message, COMPUTE, feature=name)


def _check_range(
    name: str, values: dict[str, np.ndarray], low: np.ndarray, high: np.ndarray, report: CheckReport
) -> None:
    """Check whether the statistics belong to this data."""
    if low.size != values["min"].size:
        return
    slack = 1e-3 * (values["max"] - values["min"]) + 1e-6
    out = (low < values["min"] - slack) | (high > values["max"] + slack)
    if out.any():
        i = int(np.argmax(out))
        message = (
            f"the data exceeds the statistics in {_dimensions(np.flatnonzero(out), out.size)}: dimension "
            f"{i} ranges from {low[i]:.4g} to {high[i]:.4g}, the statistics say {values['min'][i]:.4g} to "
            f"{values['max'][i]:.4g}"
        )
        report.warning("stats-stale", message, COMPUTE, feature=name)


def check_image_levels(layout: Layout, levels: dict[str, np.ndarray], report: CheckReport) -> None:
    """Compare recorded statistics of images with those of images that were decoded. `levels`: see `ImageWatch`."""
    if set(report.checked) != {episode.index for episode in layout.episodes}:
        return
    named = {finding.feature for finding in report.findings if finding.name.startswith("stats-")}
    for name, (count, total, squares) in levels.items():
        stats = layout.stats.get(name, {})
        if name in named or not count.any() or not {"mean", "std"} <= stats.keys():
            continue
        mean, recorded = total / count, np.ravel(stats["mean"]).astype(np.float64)
        std = np.sqrt(np.maximum(squares / count - mean**2, 0))
        recorded_std = np.ravel(stats["std"]).astype(np.float64)
        if recorded.shape != (3,) or recorded_std.shape != (3,) or (std < IMAGE_MEAN / 10).any():
            continue
        factor = recorded_std / std
        wrong = (np.abs(recorded - mean) > IMAGE_MEAN) | (factor > OTHER_STD) | (factor < 1 / OTHER_STD)
        if wrong.any():
            message = (
                f"its images have a mean of {_figures(mean)} and a standard deviation of {_figures(std)} (red, green, "
                f"blue; from 0 to 1), the statistics say {_figures(recorded)} and {_figures(recorded_std)}"
            )
            report.warning("stats-wrong", message, COMPUTE, feature=name)


def _figures(values: np.ndarray) -> str:
    return ", ".join(f"{value:.3g}" for value in values)


def _dimensions(indices: Iterable[int], size: int) -> str:
    indices = list(indices)
    listing = ", ".join(str(i) for i in indices[:8]) + (" ..." if len(indices) > 8 else "")
    return f"{len(indices)} of {size} dimensions ({listing})"
