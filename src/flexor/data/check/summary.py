"""A short description of a dataset, which a policy keeps of the data that it was trained on.

With it, other data can be compared with it later, when the dataset is far away: names and values of joints, what each
camera sees, frame rate, kind of actions, tasks.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from flexor.core.batch import ACTION, STATE
from flexor.core.errors import ConfigError, DatasetError
from flexor.core.typed import from_plain
from flexor.data.check.action_kind import find_action_kind
from flexor.data.check.images import spread
from flexor.data.check.paired_joints import paired_joints, value_names
from flexor.data.dataset import Dataset
from flexor.data.mixture.mixed import without_padding

GRID = 6  # rows and columns of the picture that is kept of a camera
LOOKED_AT = 24  # frames of a camera, each of another episode
LOOKED_AT_IN_TABLES = 8  # of images in tables, which are slow to read
MOST_TASKS = 1000
ROWS = 100_000


@dataclass(frozen=True)
class ValueSummary:
    """States or actions, a number for each joint."""

    names: list[str]
    mean: list[float]
    std: list[float]
    low: list[float]  # 1 % of the values are lower
    high: list[float]
    change: list[float]
    """The mean absolute change from frame to frame."""


@dataclass(frozen=True)
class CameraSummary:
    """What a camera sees, in levels from 0 to 255."""

    mean: list[list[list[float]]]  # [GRID, GRID, 3] over frames of several episodes
    std: list[list[list[float]]]


@dataclass(frozen=True)
class DataSummary:
    fps: float
    robot_type: str | None = None
    tasks: dict[str, int] = field(default_factory=dict)
    """The number of episodes of each."""
    values: dict[str, ValueSummary] = field(default_factory=dict)
    action_kind: str | None = None
    cameras: dict[str, CameraSummary] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of_json(cls, data: Mapping[str, Any]) -> DataSummary:
        """Of what `to_json` gave. Anything else is an error."""
        summary = from_plain(cls, dict(data), "training data")
        for name, values in summary.values.items():
            parts = (values.mean, values.std, values.low, values.high)
            if len({len(part) for part in parts}) > 1 or len(values.names) not in (0, len(values.mean)):
                raise ConfigError(f"training data: the values of {name} have different lengths.")
        for name, look in summary.cameras.items():
            if (
                not {len(colour) for row in look.mean for colour in row} <= {3}
                or len({*map(len, look.mean)}) != 1
            ):
                raise ConfigError(f"training data: the picture of {name} has no rows of three colours.")
        return summary


def summarise_data(dataset: Dataset, names: Mapping[str, str] | None = None) -> DataSummary:
    """`names`: of the policy's inputs, by the dataset's; default: the dataset's own. Nothing is downloaded for it."""
    names = {name: name for name in (*dataset.cameras, STATE)} if names is None else names
    state = next((name for name, target in names.items() if target == STATE), STATE)
    values = {
        target: summarise_values(dataset, name)
        for name, target in ((state, STATE), (ACTION, ACTION))
        if name in dataset.columns
    }
    cameras = {
        names[camera]: look
        for camera in dataset.cameras
        if camera in names and (look := summarise_camera(dataset, camera)) is not None
    }
    tasks = Counter(task for tasks in dataset.episodes.tasks for task in dict.fromkeys(tasks))
    return DataSummary(
        fps=float(dataset.fps),
        robot_type=dataset.robot_type,
        tasks=dict(tasks.most_common(MOST_TASKS)),
        values=values,
        action_kind=kind_of_actions(dataset, state),
        cameras=cameras,
    )


def kind_of_actions(dataset: Dataset, state: str = STATE) -> str | None:
    """None if the data does not say."""
    if state not in dataset.columns or ACTION not in dataset.columns:
        return None
    actions, states = (without_padding(dataset, name).reshape(len(dataset), -1) for name in (ACTION, state))
    pairs = paired_joints(value_names(dataset, ACTION), value_names(dataset, state))
    kind = find_action_kind(actions, states, dataset.episodes.start, pairs)
    return None if kind is None else kind.name


def summarise_values(dataset: Dataset, name: str) -> ValueSummary:
    rows = without_padding(dataset, name).reshape(len(dataset), -1)
    step = -(-len(rows) // ROWS)
    some = np.where(np.isfinite(rows[::step]), rows[::step], np.nan).astype(np.float64)
    follows = np.ones(len(rows), bool)
    follows[dataset.episodes.start] = False  # the first frame of an episode
    places = np.flatnonzero(follows)[::step]
    change = np.abs(rows[places].astype(np.float64) - rows[places - 1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of values that are never finite
        low, high = np.nanquantile(some, [0.01, 0.99], axis=0)
        parts = (np.nanmean(some, 0), np.nanstd(some, 0), low, high)
        changes = np.nanmean(change, 0) if len(change) else np.zeros(rows.shape[1])
    figures = [[float(value) for value in np.nan_to_num(part)] for part in (*parts, changes)]
    return ValueSummary(value_names(dataset, name), *figures)


def summarise_camera(dataset: Dataset, camera: str) -> CameraSummary | None:
    """From some frames; None if they can't be read, are far away or are depth maps."""
    feature = dataset.features[camera]
    if dataset.source_kind != "disk" or feature.depth is not None:
        return None
    limit = LOOKED_AT_IN_TABLES if feature.is_image else LOOKED_AT
    episodes = spread(len(dataset.episodes), limit)
    share = (np.arange(len(episodes)) + 0.5) / len(episodes)  # early in some episodes, late in others
    rows = dataset.episodes.start[episodes] + (share * dataset.episodes.length[episodes]).astype(int)
    try:
        images = dataset.read(rows, cameras=[camera])[camera]
    except (DatasetError, OSError, ValueError):  # who reads the frame says why
        return None
    return look_of(images)


def look_of(images: np.ndarray) -> CameraSummary | None:
    """Of uint8 [N, 3, H, W], or [N, T, 3, H, W]."""
    images = images.reshape(-1, *images.shape[-3:])
    if images.shape[1] != 3:
        return None
    grids = np.stack([_small(image) for image in images])  # [N, GRID, GRID, 3]
    return CameraSummary(_rounded(grids.mean(0)), _rounded(grids.std(0)))


def _small(image: np.ndarray) -> np.ndarray:
    """The mean colours of an image [3, H, W] in a grid."""
    height, width = image.shape[1:]
    rows, columns = (np.linspace(0, size, GRID + 1).astype(int)[:-1] for size in (height, width))
    sums = np.add.reduceat(np.add.reduceat(image.astype(np.float64), rows, axis=1), columns, axis=2)
    counts = np.diff([*rows, height])[:, None] * np.diff([*columns, width])[None]
    return np.moveaxis(sums / np.maximum(counts, 1), 0, -1)


def _rounded(values: np.ndarray) -> list[Any]:
    rounded: list[Any] = values.round(2).tolist()
    return rounded


def distance_of_looks(first: CameraSummary, second: CameraSummary) -> float:
    """The mean difference of two cameras' pictures, in levels; of their mean colours if one is all that is known."""
    pictures = [np.array(look.mean, np.float64) for look in (first, second)]
    if pictures[0].shape != pictures[1].shape:
        pictures = [picture.mean((0, 1)) for picture in pictures]
    return float(np.abs(pictures[0] - pictures[1]).mean())


def swapped_looks(
    here: Mapping[str, CameraSummary], trained: Mapping[str, CameraSummary], pair: Sequence[str]
) -> tuple[float, float] | None:
    """The differences of two cameras as they are named, and the other way round; None if one is unknown."""
    a, b = pair
    if not all(name in looks for name in pair for looks in (here, trained)):
        return None
    straight = distance_of_looks(here[a], trained[a]) + distance_of_looks(here[b], trained[b])
    crossed = distance_of_looks(here[a], trained[b]) + distance_of_looks(here[b], trained[a])
    return straight, crossed
