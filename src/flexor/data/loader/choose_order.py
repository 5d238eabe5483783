"""Chooses the order of a run's samples, by the size of the pool.

The choice is returned as settings, to be saved with the run: its order must not change if it is resumed on a machine
with more or less memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from flexor.core.errors import DatasetError
from flexor.core.log import log
from flexor.core.machine import free_memory, gigabytes
from flexor.core.rng import key_of
from flexor.data.dataset import Dataset
from flexor.data.loader.loader import sample_rows
from flexor.data.mixture.mixed import MixedDataset
from flexor.data.order.decode_units import Units, build_units
from flexor.data.order.mixed import MixedOrder, OrderPart, Shares, share_counts
from flexor.data.order.order import SampleOrder, StreamingOrder, StreamOnceOrder, UniformOrder
from flexor.data.settings import CacheConfig, DatasetConfig, OrderConfig

# Cache tier -> order; "none" is a dataset without cameras.
KINDS: dict[str, Any] = {"none": "uniform", "stream": "streaming", "gpu": "resident"}
KINDS |= dict.fromkeys(("ram", "disk"), "cached")
LEAST_POOL, MOST_POOL = 256 << 20, 2_000_000_000  # bytes, unless pool_gb is given
TARGET_UNITS = 4  # units in the pool per sample of a batch: shuffles almost as well as a uniform order
UNITS_PER_LANE = 2  # minimum in the pool at a time
LANE_UNITS = 20  # minimum per lane: units at the border of two lanes are decoded twice
POOL_FILL = 1.25  # planned samples, relative to the pool's capacity: lanes release frames at different times
REMOTE_UNIT = 1 << 20  # minimum bytes per request over a network
UNIT_BYTES = 256 << 10  # of frames; what Python does for a unit costs as much as decoding some small frames
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
) -> tuple[SampleOrder, OrderConfig, int]:
    """The order of a run, its settings with all values filled in, and the bytes for its pool."""
    order, parts = settings.order, _parts(dataset, drop_last_frames)
    if order.kind == "auto":
        order = replace(order, kind=KINDS[tier])
    seeds = [seed] if len(parts) == 1 else [key_of("part", seed, number) for number in range(len(parts))]
    uniform = [UniformOrder(len(part.samples), part_seed) for part, part_seed in zip(parts, seeds)]
    if order.kind == "uniform" or not deltas:
        return _joined(dataset, parts, uniform), order, pool_budget(settings.cache, LEAST_POOL)
    unit = order.unit or _least_unit(dataset, list(deltas), batch)
    units = [units_of(part.dataset, deltas, drop_last_frames, unit, settings.on_bad_frame) for part in parts]
    total_weight = sum(part.weight for part in parts)
    shares = [part.weight / total_weight for part in parts]
    size = sum(
        share * bytes_per_sample(part.dataset, part_units, drop_last_frames, deltas)
        for part, part_units, share in zip(parts, units, shares)
    )
    count, samples = sum(map(len, units)), sum(part_units.size for part_units in units)
    lanes, pool_samples = order.lanes, order.pool
    if lanes is None or pool_samples is None:
        pool = pool_budget(settings.cache, TARGET_UNITS * batch * samples / count * size)
        fitted = fit_lanes(batch, samples, count, int(POOL_FILL * pool / size))
        lanes, pool_samples = lanes or fitted[0], pool_samples or fitted[1]
    else:
        pool = pool_budget(settings.cache, lanes * pool_samples * size / POOL_FILL)
    order = replace(order, unit=unit, lanes=lanes, pool=pool_samples)
    log.debug(
        "%d samples in %d decode units; shuffling %d lanes with a pool of %d samples each%s, %s",
        *(samples, count, lanes, pool_samples),
        *(" in the first epoch" if order.kind != "streaming" else "", gigabytes(pool)),
    )
    lanes_of = [_lanes_of(lanes, share, part, len(parts)) for part, share in zip(units, shares)]
    orders = [_order_of(order, *part) for part in zip(units, uniform, seeds, lanes_of)]
    return _joined(dataset, parts, orders), order, pool


@dataclass(frozen=True, eq=False)
class _Part:
    """Samples that are drawn from in a share of their own."""

    dataset: Dataset
    samples: np.ndarray  # their numbers in the whole dataset
    weight: float


def _parts(dataset: Dataset, drop_last_frames: int) -> list[_Part]:
    """The parts of a dataset: one, unless it has several members or weights of episodes."""
    samples = np.arange(len(sample_rows(dataset, drop_last_frames)))
    if not isinstance(dataset, MixedDataset):
        return [_Part(dataset, samples, len(samples))]
    mixed = dataset.parts()
    lengths = np.maximum(1, dataset.episodes.length - drop_last_frames)
    episode = np.repeat(dataset.episodes.index, lengths)  # of each sample
    samples_of_part = [samples[np.isin(episode, part.episodes)] for part in mixed]
    weighted_sizes = [part.weight * len(numbers) for part, numbers in zip(mixed, samples_of_part)]
    total = dict.fromkeys(range(len(dataset.members)), 0.0)
    for part, weight in zip(mixed, weighted_sizes):
        total[part.member] += weight
    shares = [dataset.members[part.member].weight for part in mixed]
    weights = [
        weight if share is None else share * weight / total[part.member]
        for part, weight, share in zip(mixed, weighted_sizes, shares)
    ]
    views = [dataset] if len(mixed) == 1 else [dataset.select(part.episodes) for part in mixed]
    return [_Part(view, numbers, weight) for view, numbers, weight in zip(views, samples_of_part, weights)]


def _joined(dataset: Dataset, parts: list[_Part], orders: Sequence[SampleOrder]) -> SampleOrder:
    if not isinstance(dataset, MixedDataset):
        return orders[0]
    shares = Shares(share_counts([part.weight for part in parts]))
    return MixedOrder([OrderPart(part.samples, order) for part, order in zip(parts, orders)], shares)


def _lanes_of(lanes: int, share: float, units: Units, parts: int) -> int:
    """The lanes of a part: its share of all, if each has enough units to shuffle."""
    return lanes if parts == 1 else max(1, min(round(lanes * share), len(units) // LANE_UNITS))


def _order_of(order: OrderConfig, units: Units, uniform: UniformOrder, seed: int, lanes: int) -> SampleOrder:
    assert order.pool is not None
    streaming = StreamingOrder(units, seed, lanes=lanes, pool=order.pool)
    if order.kind == "cached":
        return StreamOnceOrder(streaming, uniform)
    if order.kind == "resident":
        return StreamOnceOrder(streaming, StreamingOrder(units, seed, lanes=lanes, pool=units.size))
    return streaming


def pool_budget(cache: CacheConfig, needed: float) -> int:
    """Bytes on this node for frames that wait for their batch: what shuffling needs, within limits."""
    if cache.pool_gb is not None:
        return int(cache.pool_gb * 1e9)
    return int(min(max(needed, LEAST_POOL), MOST_POOL, free_memory() / 4))


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
        starts_of_camera = {
            camera: np.concatenate(list(threads.map(starts, [(camera, i) for i in range(len(episodes))])))
            for camera in deltas
        }
    store.repeats.tell()
    lengths = np.maximum(1, episodes.length - drop_last_frames)
    return build_units(
        lengths, list(starts_of_camera.values()), list(deltas.values()), rows=episodes.length, least=least
    )


def _least_unit(dataset: Dataset, cameras: Sequence[str], batch: int) -> int:
    """Minimum samples per unit. Several small images are decoded together, as long as there are enough units for a
    lane per sample of a batch. Over a network a unit must be large enough, unless all videos fit in the cache."""
    nbytes = sum(dataset.store.format(camera).nbytes for camera in cameras)
    small = min(UNIT_BYTES // nbytes, len(dataset) // (LANE_UNITS * batch))
    if dataset.stays_here:
        return max(1, small)
    return max(1, small, REMOTE_UNIT // max(1, dataset.video_bytes // len(dataset)))


def bytes_per_sample(
    dataset: Dataset, units: Units, drop_last_frames: int, deltas: Mapping[str, list[int]]
) -> float:
    """Memory of a unit's frames per sample, averaged over some units."""
    rows = sample_rows(dataset, drop_last_frames)
    trial_units = np.unique(np.linspace(0, len(units) - 1, 64).astype(int))
    total = 0
    for unit in trial_units.tolist():
        unit_rows = rows[units.samples(unit)]
        episode = dataset.episode_of(unit_rows)
        first, last = dataset.episodes.start[episode], dataset.episodes.end[episode] - 1
        for camera, steps in deltas.items():
            window = np.clip(unit_rows[:, None] + np.array(steps), first[:, None], last[:, None])
            total += len(np.unique(window)) * dataset.store.format(camera).nbytes
    return total / int(units.count[trial_units].sum())


def fit_lanes(batch: int, samples: int, units: int, capacity: int) -> tuple[int, int]:
    """Lanes, and samples in the pool of each, for `capacity` samples in memory.

    One lane per sample of the batch, so that each batch is spread over the whole dataset; or the largest
    divisor of the batch size that leaves each lane enough units to shuffle.
    """
    size = samples / units
    max_lanes = max(1, min(int(capacity / size / UNITS_PER_LANE), units // LANE_UNITS))
    lanes = max(n for n in range(1, batch + 1) if batch % n == 0 and n <= max_lanes)
    return lanes, max(1, min(capacity, samples) // lanes)
