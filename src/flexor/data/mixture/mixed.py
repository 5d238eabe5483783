"""Several datasets that look like one: rows, episodes and frames are numbered through, in the order of the datasets.

    dataset = join_datasets([Member("lab/a", open_dataset("lab/a")), Member("lab/b", open_dataset("lab/b"))])

What brings their features into one form is in `shared_schema.py`, in which shares they are used in `order/mixed.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import torch

from flexor.core.batch import DATASET_NUMBER
from flexor.core.digest import hash_json
from flexor.core.errors import DatasetError
from flexor.core.log import Repeats
from flexor.data.dataset import Dataset, Episodes
from flexor.data.format.stats import Stats
from flexor.data.frames.clips import BlankClip, Clip
from flexor.data.frames.store import FrameStore
from flexor.data.mixture.shared_schema import (
    RenamedDataset,
    SharedSchema,
    aligned_columns,
    build_schema,
    merged_stats,
)
from flexor.data.video.planes import PlaneFormat

__all__ = ["Member", "MixedDataset", "MixedPart", "join_datasets", "without_padding"]


@dataclass(frozen=True, eq=False)
class Member:
    """One of the datasets. `episode_weights` by its own numbers of episodes."""

    name: str
    dataset: Dataset
    weight: float | None = None
    rename_map: dict[str, str] = field(default_factory=dict)
    episode_weights: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class MixedPart:
    """Episodes of one dataset that have the same weight."""

    member: int
    episodes: list[int]
    weight: float


@dataclass(eq=False)
class MixedDataset(Dataset):
    """Several datasets as one. Episode e of member m is episode first_episode[m] + e."""

    members: list[Member]
    schema: SharedSchema
    first_episode: np.ndarray  # [M + 1]

    @property
    def names(self) -> list[str]:
        return [member.name for member in self.members]

    def member_of(self, episodes: np.ndarray) -> np.ndarray:
        """Which dataset each episode is from."""
        return np.searchsorted(self.first_episode, episodes, side="right") - 1

    def only(self, member: int) -> Dataset:
        """The episodes of one dataset, in the form of all, with its own statistics."""
        episodes = self.episodes.index[self.member_of(self.episodes.index) == member]
        return replace(self.select(episodes.tolist()), stats=self.stats_of(member))

    def stats_of(self, member: int) -> dict[str, Stats]:
        return self.schema.stats[member]

    def parts(self) -> list[MixedPart]:
        """The episodes by dataset and by how often they are used."""
        by_weight: dict[tuple[int, float], list[int]] = {}
        for episode, number in zip(
            self.episodes.index.tolist(), self.member_of(self.episodes.index).tolist()
        ):
            local_episode = episode - int(self.first_episode[number])
            by_weight.setdefault(
                (number, self.members[number].episode_weights.get(local_episode, 1.0)), []
            ).append(episode)
        return [MixedPart(number, by_weight[number, weight], weight) for number, weight in sorted(by_weight)]

    def fingerprint(self) -> str:
        identity: list[object] = [super().fingerprint()]
        for number, member in enumerate(self.members):
            local_episodes = self.episodes.index[self.member_of(self.episodes.index) == number]
            local_episodes = local_episodes - self.first_episode[number]
            content = (
                member.dataset.select(local_episodes.tolist()).fingerprint() if len(local_episodes) else None
            )
            weights = sorted(member.episode_weights.items())
            identity += [[content, member.weight, sorted(member.rename_map.items()), weights]]
        return hash_json(identity)

    def content(self) -> str:
        if len(self.members) == 1 and not self.members[0].rename_map:
            return self.members[0].dataset.content()
        blank = sorted(self.schema.blank)
        return hash_json([[[m.dataset.content(), sorted(m.rename_map.items())] for m in self.members], blank])

    @property
    def source_kind(self) -> str:
        """The slowest kind of its members."""
        kinds = {member.dataset.source_kind for member in self.members}
        return next(kind for kind in ("hub", "bucket", "disk") if kind in kinds)

    @property
    def stays_here(self) -> bool:
        return all(member.dataset.stays_here for member in self.members)


def join_datasets(
    members: Sequence[Member], *, on_missing_camera: str = "raise", allow_different_fps: bool = False
) -> MixedDataset:
    """Several datasets as one. Features that differ are brought into one form, or an error says why not."""
    renamed = [RenamedDataset(member.name, member.dataset, member.rename_map) for member in members]
    schema = build_schema(renamed, on_missing_camera, allow_different_fps)
    datasets = [member.dataset for member in members]
    stores = [dataset.store for dataset in datasets]
    first_episode = np.cumsum([0] + [len(store.ends) for store in stores])
    first_frame = np.cumsum([0] + [store.frames for store in stores])
    tasks = list(dict.fromkeys(task for dataset in datasets for task in dataset.tasks))
    columns = [aligned_columns(each, schema) for each in renamed]
    for number, (dataset, member_columns) in enumerate(zip(datasets, columns)):
        member_columns["index"] = dataset.frame_ids(np.arange(len(dataset))) + first_frame[number]
        member_columns["episode_index"] = member_columns["episode_index"] + first_episode[number]
        member_columns["task_index"] = _renumbered(member_columns["task_index"], dataset.tasks, tasks)
        member_columns[DATASET_NUMBER] = np.full(len(dataset), number, np.int64)
    first = datasets[0]
    return MixedDataset(
        repo_id=" + ".join(member.name for member in members),
        root=first.root,
        version=first.version,
        fps=first.fps,
        robot_type=first.robot_type,
        features=schema.features,
        cameras=schema.cameras,
        absent={},
        tasks=tasks,
        stats=merged_stats(schema),
        columns={name: np.concatenate([part[name] for part in columns]) for name in columns[0]},
        strings={name: [text for part in datasets for text in part.strings[name]] for name in schema.strings},
        episodes=_joined_episodes([dataset.episodes for dataset in datasets], first_episode, first_frame),
        skipped={
            int(first_episode[number]) + episode: f"{members[number].name}: {reason}"
            for number, dataset in enumerate(datasets)
            for episode, reason in dataset.skipped.items()
        },
        store=MixedStore(members, schema, first_episode),
        source=first.source,
        files=[],
        layout="",
        _file_sizes={
            int(first_episode[number]) + episode: {f"{number}/{file}": size for file, size in sizes.items()}
            for number, dataset in enumerate(datasets)
            for episode, sizes in dataset._file_sizes.items()
        },
        members=list(members),
        schema=schema,
        first_episode=first_episode,
    )


def without_padding(dataset: Dataset, name: str) -> np.ndarray:
    """A column, with nan where some of several datasets are padded because they have shorter vectors."""
    column = dataset.columns[name]
    if not isinstance(dataset, MixedDataset) or name not in dataset.schema.padded:
        return column
    lengths = np.array(dataset.schema.lengths[name])[dataset.columns[DATASET_NUMBER]]  # [N]
    return np.where(np.arange(column.shape[1]) < lengths[:, None], column, np.nan)


def _renumbered(column: np.ndarray, local_tasks: list[str], tasks: list[str]) -> np.ndarray:
    """Numbers of tasks in the list of all of them; -1 for those that have no text."""
    number = {task: i for i, task in enumerate(tasks)}
    table = np.array([*(number[task] for task in local_tasks), -1], np.int64)
    column = column.astype(np.int64)
    return table[np.where((column >= 0) & (column < len(local_tasks)), column, len(local_tasks))]


def _joined_episodes(members: list[Episodes], first_episode: np.ndarray, first_frame: np.ndarray) -> Episodes:
    return Episodes(
        np.concatenate([member.index + first for member, first in zip(members, first_episode)]),
        np.concatenate([member.length for member in members]),
        [tasks for member in members for tasks in member.tasks],
        np.concatenate([member.first_frame + first for member, first in zip(members, first_frame)]),
    )


class _AllRepeats(Repeats):
    """Warnings of several stores, told together."""

    def __init__(self, parts: Sequence[Repeats]) -> None:
        super().__init__()
        self._parts = parts

    def tell(self, last: bool = False) -> None:
        for each in self._parts:
            each.tell(last)
        super().tell(last)


class MixedStore(FrameStore):
    """The frames of several datasets. Those of a camera that a dataset lacks are black."""

    def __init__(self, members: Sequence[Member], schema: SharedSchema, first_episode: np.ndarray):
        stores = [member.dataset.store for member in members]
        clips: dict[tuple[str, int], Clip] = {}
        for member, store, first in zip(members, stores, first_episode.tolist()):
            for (camera, episode), clip in store.clips.items():
                name = member.rename_map.get(camera, camera)
                if name in schema.cameras:
                    clips[name, first + episode] = clip
        # last: the first clip of a camera tells its format
        for camera, members_without in schema.blank.items():
            for number in members_without:
                lengths = np.diff(stores[number].ends, prepend=0)
                for episode, length in enumerate(lengths.tolist()):
                    key = camera, int(first_episode[number]) + episode
                    clips[key] = BlankClip(schema.features[camera], length)
        lengths = np.concatenate([np.diff(store.ends, prepend=0) for store in stores])
        remote = any(store.remote for store in stores)
        super().__init__(clips, lengths, stores[0].size, remote, depth_unit=stores[0].depth_unit)
        self.frame_by = stores[0].frame_by
        self.repeats = _AllRepeats([store.repeats for store in stores])
        self._names = [member.name for member in members]
        self._first = first_episode
        self._schema = schema

    def where(self, camera: str, frame: int) -> str:
        number, _ = self._local_episode(int(self.episode_of(np.array([frame]))[0]))
        return f"{self._names[number]}, {super().where(camera, frame)}"

    def describe_episode(self, episode: int) -> str:
        number, local_number = self._local_episode(episode)
        return f"episode {local_number} of {self._names[number]}"

    def exclusion_hint(self, episode: int) -> str:
        number, local_number = self._local_episode(episode)
        return f"exclude_episodes: {local_number} of {self._names[number]} in dataset.mix"

    def why_not_on_gpu(self, camera: str, device: torch.device) -> str | None:
        if camera in self._schema.blank:
            return f"some of the datasets have no {camera}"
        if len({*self._formats_of(camera)}) > 1:
            return f"the datasets store {camera} in different formats"
        return super().why_not_on_gpu(camera, device)

    def _probe(self, camera: str) -> PlaneFormat:
        """The format of all datasets, or RGB if theirs differ: from one to the other, colours would be rounded."""
        formats = list(dict.fromkeys(self._formats_of(camera)))
        first = formats[0]
        if len(formats) == 1:
            return first
        if any(each.channels != first.channels for each in formats):
            raise DatasetError(
                f"camera {camera}: the datasets have images with different numbers of channels"
            )
        return PlaneFormat(first.height, first.width, "rgb24") if first.channels == 3 else first

    def _formats_of(self, camera: str) -> list[PlaneFormat]:
        """Of each dataset that has the camera."""
        formats = []
        for number, (first, end) in enumerate(pairwise(self._first.tolist())):
            if number not in self._schema.blank.get(camera, []):
                clips = {
                    (c, e): clip for (c, e), clip in self.clips.items() if c == camera and first <= e < end
                }
                store = FrameStore(clips, np.diff(self.ends, prepend=0), self.size)
                store.rgb = self.rgb
                formats.append(store.format(camera))
        return formats

    def _local_episode(self, episode: int) -> tuple[int, int]:
        """The dataset of an episode, and its number there."""
        number = int(np.searchsorted(self._first, episode, side="right")) - 1
        return number, episode - int(self._first[number])
