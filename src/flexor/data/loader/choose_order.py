"""The order of a run's samples, chosen by what the pool can hold.

What is chosen goes back into the settings: the order of a run must not change when it is resumed on a machine
with other room.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from flexor.core.errors import DatasetError
from flexor.core.log import log
from flexor.core.machine import free_memory, gigabytes
from flexor.data.dataset import Dataset
from flexor.data.loader.loader import sample_rows
from flexor.data.order.decode_units import Units, build_units
from flexor.data.order.order import SampleOrder, StreamingOrder, StreamOnceOrder, UniformOrder
from flexor.data.settings import CacheConfig, DatasetConfig

# What suits frames that stay there: "none" is a dataset without cameras.
KINDS: dict[str, Any] = {
    "none": "uniform",
    "stream": "streaming",
    "ram": "cached",
    "disk": "cached",
    "gpu": "resident",
}
LEAST_POOL, MOST_POOL = 256 << 20, 2_000_000_000  # bytes, unless told
UNITS_WANTED = 4  # in the pool for every sample of a batch: shuffles nearly as well as drawing from all
UNITS_PER_LANE = 2  # in the pool at a time, at least
LANE_UNITS = 20  # of a lane in all, at least: the units where lanes meet are decoded twice
POOL_FILL = 1.25  # samples planned for, relative to the room: lanes let go of frames at different times
REMOTE_UNIT = 1 << 20  # bytes that a request over a network should be worth
INDEXERS = 8  # threads


def choose_order(
    dataset: Dataset,
    settings: DatasetConfig,
    deltas: Mapping[str, list[int]],
    *,
    drop_last_frames: int,
    batch: int,
    seed: int,
    tier: str,
) -> tuple[SampleOrder, int]:
    """The order of a run, and the bytes for its pool; what `settings.order` left open is filled in."""
    order, rows = settings.order, sample_rows(dataset, drop_last_frames)
    if order.kind == "auto":
        order.kind = KINDS[tier]
    uniform = UniformOrder(len(rows), seed)
    if order.kind == "uniform" or not deltas:
        return uniform, pool_budget(settings.cache, LEAST_POOL)
    order.unit = order.unit or _least_unit(dataset)
    units = units_of(dataset, deltas, drop_last_frames, order.unit, settings.on_bad_frame)
    size = bytes_per_sample(dataset, units, rows, deltas)
    if order.lanes is None or order.pool is None:
        pool = pool_budget(settings.cache, UNITS_WANTED * batch * units.size / len(units) * size)
        lanes, held = fit_lanes(batch, units, int(POOL_FILL * pool / size))
        order.lanes, order.pool = order.lanes or lanes, order.pool or held
    else:
        pool = pool_budget(settings.cache, order.lanes * order.pool * size / POOL_FILL)
    streaming = StreamingOrder(units, seed, lanes=order.lanes, pool=order.pool)
    log.info(
        "%d samples in %d units; %d lanes of pools of %d samples%s, %s",
        units.size,
        len(units),
        order.lanes,
        order.pool,
        " in the first epoch" if order.kind != "streaming" else "",
        gigabytes(pool),
    )
    if order.kind == "cached":
        return StreamOnceOrder(streaming, uniform), pool
    if order.kind == "resident":
        return StreamOnceOrder(
            streaming, StreamingOrder(units, seed, lanes=order.lanes, pool=units.size)
        ), pool
    return streaming, pool


def pool_budget(cache: CacheConfig, wanted: float) -> int:
    """Bytes on this node for frames on their way into batches: what shuffling wants, within bounds."""
    if cache.pool_gb is not None:
        return int(cache.pool_gb * 1e9)
    return int(min(max(wanted, LEAST_POOL), MOST_POOL, free_memory() / 4))


def units_of(
    dataset: Dataset, deltas: Mapping[str, list[int]], drop_last_frames: int, least: int, on_bad_frame: str
) -> Units:
    """What is decoded together, from where the videos' groups of pictures begin."""
    episodes, store = dataset.episodes, dataset.store

    def starts(job: tuple[str, int]) -> np.ndarray:
        camera, i = job
        try:
            return episodes.start[i] + store.starts(camera, int(episodes.index[i]))
        except DatasetError as error:
            if on_bad_frame == "raise":
                raise
            store.repeats.add("%d clips can't be read, and their samples are left out:", str(error))
            return np.arange(episodes.start[i], episodes.end[i])

    with ThreadPoolExecutor(INDEXERS, thread_name_prefix="index") as threads:
        found = {
            camera: np.concatenate(list(threads.map(starts, [(camera, i) for i in range(len(episodes))])))
            for camera in deltas
        }
    store.repeats.tell()
    lengths = np.maximum(1, episodes.length - drop_last_frames)
    return build_units(
        lengths, list(found.values()), list(deltas.values()), rows=episodes.length, least=least
    )


def _least_unit(dataset: Dataset) -> int:
    """Samples per unit: one over a network must be worth a request, if what is fetched can't stay here."""
    if dataset.stays_here:
        return 1
    return max(1, REMOTE_UNIT // max(1, dataset.video_bytes // len(dataset)))


def bytes_per_sample(
    dataset: Dataset, units: Units, rows: np.ndarray, deltas: Mapping[str, list[int]]
) -> float:
    """Memory that a unit's frames take per sample of it, on average over some units."""
    some = np.unique(np.linspace(0, len(units) - 1, 64).astype(int))
    total = 0
    for unit in some.tolist():
        at = rows[units.samples(unit)]
        which = dataset.episode_of(at)
        first, last = dataset.episodes.start[which], dataset.episodes.end[which] - 1
        for camera, steps in deltas.items():
            window = np.clip(at[:, None] + np.array(steps), first[:, None], last[:, None])
            total += len(np.unique(window)) * dataset.store.format(camera).nbytes
    return total / int(units.count[some].sum())


def fit_lanes(batch: int, units: Units, room: int) -> tuple[int, int]:
    """Lanes, and samples in the pool of each, for `room` samples in memory.

    As many lanes as the batch has samples, so that each batch is spread over all of the data, or the
    largest part of that which leaves each lane some units to shuffle.
    """
    size = units.size / len(units)
    most = max(1, min(int(room / size / UNITS_PER_LANE), len(units) // LANE_UNITS))
    lanes = max(n for n in range(1, batch + 1) if batch % n == 0 and n <= most)
    return lanes, max(1, min(room, units.size) // lanes)
