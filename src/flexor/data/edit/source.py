"""A dataset that is edited: its episodes with their rows and frames, and what the metadata says of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from flexor.core.errors import ConfigError, DatasetError
from flexor.data.check.layout import Layout, read_layout
from flexor.data.check.report import CheckReport, counted, ranges
from flexor.data.dataset import Dataset, open_dataset
from flexor.data.format.episode_list import parse_episodes
from flexor.data.format.metadata import read_episode_stats
from flexor.data.format.stats import NEEDED_STATS, QUANTILES, Stats
from flexor.data.repair.account import EpisodePlan
from flexor.data.repair.columns import episode_columns
from flexor.data.repair.plan import RepairPlan, make_plan
from flexor.data.repair.videos import read_index
from flexor.data.storage.source import find_source
from flexor.data.video.decode import VideoIndex

REPAIR = "`flexor data repair` makes a dataset of the good episodes"

FLAGS_AT_END = ("next.done", "next.truncated")
"""What marks the last frame of an episode; the new last frame of a cut one gets it."""


@dataclass(eq=False)
class EditSource:
    """A readable dataset."""

    root: Path
    layout: Layout
    check: CheckReport
    plan: RepairPlan | None = None
    """The selected episodes, once they are selected."""

    _tables: dict[tuple[str, tuple[str, ...]], pa.Table] = field(default_factory=dict)

    @property
    def episodes(self) -> list[int]:
        return sorted({episode.index for episode in self.layout.episodes})

    @cached_property
    def dataset(self) -> Dataset:
        """The selected episodes, opened for reading frames."""
        assert self.plan is not None
        return open_dataset(root=self.root, episodes=[plan.episode.index for plan in self.plan.included])

    def parse(self, text: str, flag: str) -> list[int]:
        """The episodes of a list such as 0,1,5:9, once each and in order."""
        present = self.episodes
        listed = sorted(set(parse_episodes(text, flag, present[-1] + 1)))
        missing = sorted(set(listed) - set(present))
        if missing:
            raise ConfigError(
                f"{flag}={text}: {self.root} has no episodes {ranges(missing)}. It has {len(present)} episodes: "
                f"{ranges(present)}."
            )
        return listed

    def select(self, episodes: Sequence[int] | None = None) -> RepairPlan:
        """Find the rows and frames of these episodes, by default of all. One that can't be copied is an error."""
        self.plan = plan = make_plan(self.layout, self.check, episodes)
        bad = [episode for episode in plan.episodes if episode.reason is not None]
        if bad:
            listing = ranges(sorted(episode.episode.index for episode in bad))
            raise DatasetError(
                f"{self.root}: {counted(len(bad), 'episode')} can't be copied ({listing}). The first: "
                f"{bad[0].reason}. {REPAIR}; "
                "`flexor data delete` leaves out the episodes that you name."
            )
        return plan

    def index(self, file: str) -> VideoIndex:
        index = self._index(self.layout.path(file))
        if isinstance(index, str):
            raise DatasetError(f"{self.root}: {file}: {index}. {REPAIR}.")
        return index

    @cached_property
    def _index(self) -> Any:
        return lru_cache(32)(read_index)

    def columns(self, plan: EpisodePlan, names: Iterable[str]) -> dict[str, Any]:
        """Columns of an episode in recording order: arrays [T, ...], lists of text or encoded images, annotations."""
        assert self.plan is not None
        selected = tuple(names)
        rows = self._table(plan.episode.data_file, selected).take(plan.rows)
        place = f"{self.root}: {plan.episode.data_file}"
        try:
            columns = episode_columns(self.layout, self.plan.columns, rows)
        except ValueError as error:
            raise DatasetError(f"{place}: {error}. {REPAIR}.") from error
        for name, cells in columns.items():
            if self.plan.columns.feature(name).is_image and None in cells:
                missing = f"the image of row {cells.index(None)} is not in the table"
                raise DatasetError(f"{place}: {name}: {missing}. {REPAIR}.")
        return columns

    def _table(self, file: str, names: tuple[str, ...]) -> pa.Table:
        """Columns of a data file. The latest one is kept: episodes of a file follow each other."""
        if (file, names) not in self._tables:
            self._tables.clear()
            try:
                self._tables[file, names] = pq.read_table(self.layout.path(file), columns=list(names))
            except (pa.ArrowException, OSError) as error:
                reason = str(error).splitlines()[0][:100]
                raise DatasetError(f"{self.root}: {file} can't be read ({reason}). {REPAIR}.") from error
        return self._tables[file, names]

    @cached_property
    def recorded_stats(self) -> dict[str, dict[int, Stats]]:
        """The statistics of each camera that the metadata has of each episode, if they can be used."""
        assert self.plan is not None
        source = find_source(None, str(self.root), None)
        names = [
            name for name, spec in self.plan.columns.features.items() if spec["dtype"] in ("image", "video")
        ]
        keys = (*NEEDED_STATS, "count", *QUANTILES)
        return {
            name: _by_episode({key: read_episode_stats(source, name, key) for key in keys}) for name in names
        }


def _by_episode(columns: dict[str, dict[int, np.ndarray]]) -> dict[int, Stats]:
    """Usable statistics, by episode: complete, finite, a value for each channel."""
    result = {}
    for episode in columns["count"]:
        stats = {key: values[episode] for key, values in columns.items() if episode in values}
        sizes = {stats[key].size for key in stats if key != "count"}
        complete = {*NEEDED_STATS} <= stats.keys() and len(sizes) == 1
        if complete and all(np.isfinite(value).all() for value in stats.values()):
            channels = {key: value.reshape(-1, 1, 1) for key, value in stats.items() if key != "count"}
            result[episode] = channels | {"count": stats["count"].reshape(-1)[:1].astype(np.int64)}
    return result


@dataclass(frozen=True, eq=False)
class Part:
    """An episode of the new dataset: rows `first` to `end` of an episode of a source."""

    source: EditSource
    plan: EpisodePlan
    first: int
    end: int
    texts: Sequence[str]
    """The text of each task of the source."""

    task: str | None = None
    """The task of all its frames; None: as in the source."""

    @property
    def length(self) -> int:
        return self.end - self.first

    @property
    def is_complete(self) -> bool:
        return self.length == self.plan.length

    def task_texts(self) -> list[str]:
        """The task of each frame."""
        if self.task is not None:
            return [self.task] * self.length
        assert self.plan.task_index is not None
        return [self.texts[i] for i in self.plan.task_index[self.first : self.end].tolist()]

    def listed_tasks(self) -> list[str]:
        """The tasks that the metadata lists: those of the source, if its frames have no other."""
        used = list(dict.fromkeys(self.task_texts()))
        assert self.source.plan is not None
        new_text = dict(zip(self.source.plan.tasks, self.texts))
        listed = list(dict.fromkeys(new_text.get(task, task) for task in self.plan.episode.tasks))
        return listed if self.task is None and set(used) <= set(listed) else used

    def cut(self, first: int, end: int) -> Part:
        return replace(self, first=first, end=end)


def open_source(root: str | Path) -> EditSource:
    """Read the metadata of a dataset. What can't be read is an error."""
    check = CheckReport(Path(root), deep=False)
    layout = read_layout(root, check)
    faults = [finding for finding in check.errors if not finding.name.startswith("stats")]
    if faults:
        where = faults[0].file or "meta/"
        raise DatasetError(
            f"{root}: {where}: {faults[0].evidence}. Run `flexor data check {root}`; {REPAIR}."
        )
    if not layout.episodes:
        raise DatasetError(f"{root} has no episodes.")
    return EditSource(Path(root), layout, check)


def parts_of(source: EditSource, episodes: Sequence[int] | None = None) -> list[Part]:
    """These episodes, complete and with their tasks."""
    plan = source.select(episodes)
    return [Part(source, episode, 0, episode.length, plan.tasks) for episode in plan.included]
