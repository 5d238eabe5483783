"""Chooses the order of a run's samples, by the size of the pool.

The choice is written back into the settings: the order must not change if the run is resumed on a machine
with more or less memory.
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

# Cache tier -> order; "none" is a dataset without cameras.
KINDS: dict[str, Any] = {
    "none": "uniform",
    "stream": "streaming",
    "ram": "cached",
    "disk": "cached",
    "gpu": "resident",
}
LEAST_POOL, MOST_POOL = 256 << 20, 2_000_000_000  # bytes, unless pool_gb is given
UNITS_WANTED = 4  # units in the pool per sample of a batch: shuffles almost as well as a uniform order
UNITS_PER_LANE = 2  # minimum in the pool at a time
LANE_UNITS = 20  # minimum per lane: units at the border of two lanes are decoded twice
POOL_FILL = 1.25  # planned samples, relative to the pool's capacity: lanes release frames at different times
REMOTE_UNIT = 1 << 20  # minimum bytes per request over a network
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
    """The order of a run, and the bytes for its pool; fills in missing values of `settings.order`."""
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
        "%d samples in %d decode units; shuffling %d lanes with a pool of %d samples each%s, %s",
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
    """Bytes on this node for frames that wait for their batch: what shuffling needs, within limits."""
    if cache.pool_gb is not None:
        return int(cache.pool_gb * 1e9)
    return int(min(max(wanted, LEAST_POOL), MOST_POOL, free_memory() / 4))


def units_of(
    dataset: Dataset, deltas: Mapping[str, list[int]], drop_last_frames: int, least: int, on_bad_frame: str
) -> Units:
    """The decode units, computed from the GOP starts of the videos."""
    episodes, store = dataset.episodes, dataset.store

    def starts(job: tuple[str, int]) -> np.ndarray:
        camera, i = job
        try:
            return episodes.start[i] + store.starts(camera, int(episodes.index[i]))
        except DatasetError as error:
            if on_bad_frame == "raise":
                raise
            store.repeats.add("%d clips can't be read; their samples are skipped:", str(error))
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
    """Minimum samples per unit: over a network a unit must be large enough, unless all videos fit in the cache."""
    if dataset.stays_here:
        return 1
    return max(1, REMOTE_UNIT // max(1, dataset.video_bytes // len(dataset)))


def bytes_per_sample(
    dataset: Dataset, units: Units, rows: np.ndarray, deltas: Mapping[str, list[int]]
) -> float:
    """Memory of a unit's frames per sample, averaged over some units."""
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

    One lane per sample of the batch, so that each batch is spread over the whole dataset; or the largest
    divisor of the batch size that leaves each lane enough units to shuffle.
    """
    size = units.size / len(units)
    most = max(1, min(int(room / size / UNITS_PER_LANE), len(units) // LANE_UNITS))
    lanes = max(n for n in range(1, batch + 1) if batch % n == 0 and n <= most)
    return lanes, max(1, min(room, units.size) // lanes)
