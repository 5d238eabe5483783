"""Episodes in the terminal: a filmstrip per camera, and a line of blocks per value."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from flexor.core.console import print_text
from flexor.core.text import one_line
from flexor.data.dataset import Dataset, open_dataset
from flexor.data.show.budget import thumbnail_width
from flexor.data.show.curves import CurveFeature, curve_features
from flexor.data.show.strips import camera_thumbnails, spread_frames
from flexor.pages.terminal import find_way, has_true_colour, rendered

LEVELS = "▁▂▃▄▅▆▇█"
NOT_FINITE = "!"
HEIGHT = {"blocks": 48}  # pixels of a thumbnail
OTHER_HEIGHT = 120
FRAME_COLUMNS = {"blocks": 24}  # characters that a frame takes
OTHER_COLUMNS = 18


def show_in_terminal(root: str | Path, episodes: Sequence[int] | None, way: str) -> None:
    """Print these episodes, or the first one."""
    dataset = open_dataset(root=root, episodes=episodes, on_bad_episode="skip")
    way = find_way() if way == "auto" else way
    columns = shutil.get_terminal_size((100, 24)).columns
    features = curve_features(dataset)
    for position in range(len(dataset.episodes) if episodes is not None else 1):
        print_episode(dataset, position, features, way, columns)


def print_episode(
    dataset: Dataset, position: int, features: Sequence[CurveFeature], way: str, columns: int
) -> None:
    length = int(dataset.episodes.length[position])
    start = int(dataset.episodes.start[position])
    tasks = "; ".join(dataset.episodes.tasks[position])
    span = f"{length} frames, {length / dataset.fps:.1f} s"
    print_text(one_line(f"episode {dataset.episodes.index[position]}: {span}: {tasks}"))
    height = HEIGHT.get(way, OTHER_HEIGHT)
    frames = spread_frames(length, max(columns // FRAME_COLUMNS.get(way, OTHER_COLUMNS), 1))
    for camera in dataset.cameras:
        _, high, wide = dataset.features[camera].chw
        width = thumbnail_width(high, wide, height)
        images, why = camera_thumbnails(dataset, camera, start + np.array(frames), height, width)
        numbers = ", ".join(str(frame) for frame in frames)
        print_text(one_line(f"{camera}: {why or f'frames {numbers}'}"))
        print(rendered(np.concatenate(list(images), axis=1), columns, way, has_true_colour()))
    for line in curve_lines(features, start, length, columns):
        print_text(line)


def curve_lines(features: Sequence[CurveFeature], start: int, length: int, columns: int) -> Iterator[str]:
    """A line per value: its name, its curve, and its lowest and highest value in the dataset."""
    labels = [[label_of(feature, name) for name in feature.names] for feature in features]
    widest = min(max((len(label) for some in labels for label in some), default=0), columns // 3)
    for feature, some in zip(features, labels):
        for i, label in enumerate(some):
            values = feature.values[start : start + length, i].astype(np.float64)
            line = spark_line(values, feature.low[i], feature.high[i], max(columns - widest - 26, 8))
            yield f"{label[:widest].ljust(widest)} {line} {feature.low[i]:.4g} to {feature.high[i]:.4g}"


def label_of(feature: CurveFeature, name: str) -> str:
    return one_line(feature.name if name == feature.name else f"{feature.name} {name}")


def spark_line(values: np.ndarray, low: float, high: float, columns: int) -> str:
    """Values as blocks between the dataset's lowest and highest; ! where one is not finite."""
    line = ""
    for part in np.array_split(values, min(columns, len(values))):
        if not np.isfinite(part).all():
            line += NOT_FINITE
            continue
        place = (part.mean() - low) / (high - low) if high > low else 0.0
        line += LEVELS[int(np.clip(place * len(LEVELS), 0, len(LEVELS) - 1))]
    return line
