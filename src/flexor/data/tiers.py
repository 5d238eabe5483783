"""Where decoded frames stay and in which order samples come, chosen by what there is room for.

`open_loader` is the way from settings to batches. What `auto` chose goes back into the settings, because the
order of a run must not change when it is resumed on a machine with other room.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

import numpy as np
import torch

from flexor.data.cache import FrameCache
from flexor.data.caches import CacheKey, disk_folder, free_bytes, list_caches, make_room
from flexor.data.dataset import Dataset
from flexor.data.gpu import GPUFrames
from flexor.data.loader import Loader, sample_rows
from flexor.data.order import SampleOrder, StreamingOrder, StreamOnceOrder, UniformOrder
from flexor.data.planes import JPEG_QUALITY
from flexor.data.settings import CacheConfig, DatasetConfig
from flexor.data.units import Units, build_units
from flexor.errors import ConfigError, DatasetError
from flexor.log import log
from flexor.machine import free_memory

JPEG_SHARE = 0.2  # of the raw size, about
LEAST_POOL, MOST_POOL = 256 << 20, 2_000_000_000  # bytes, unless told
UNITS_WANTED = 4  # in the pool for every sample of a batch: shuffles nearly as well as drawing from all
UNITS_PER_LANE = 2  # in the pool at a time, at least
LANE_UNITS = 20  # of a lane in all, at least: the units where lanes meet are decoded twice
POOL_FILL = 1.25  # samples planned for, relative to the room: lanes let go of frames at different times
REMOTE_UNIT = 1 << 20  # bytes that a request over a network should be worth
INDEXERS = 8  # threads
NVDEC_MEMORY = 40 << 30  # bytes of a GPU that can spare what decoding and its pool take


def open_loader(
    dataset: Dataset,
    settings: DatasetConfig,
    deltas: Mapping[str, Sequence[int]],
    *,
    cameras: Sequence[str],
    batch_size: int,
    accumulation: int = 1,
    seed: int = 0,
    num_workers: int = 0,
    rank: int = 0,
    world_size: int = 1,
    device: torch.device | str | None = "cpu",
    drop_last_frames: int = 0,
    also: Sequence[Dataset] = (),
) -> Loader:
    """The batches of a run. `also` are selections of the same dataset whose frames are kept with these."""
    device = None if device is None else torch.device(device)
    cameras = list(cameras)
    dataset.store.rgb = device is not None and device.type != "cuda"
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    tier = open_tier(dataset, settings.cache, cameras, device, [dataset, *also], local) if cameras else "none"
    on_gpu = bool(cameras) and decodes_on_gpu(dataset, settings.decoder, cameras, device)
    order, pool = choose_order(
        dataset,
        settings,
        {camera: list(deltas.get(camera, [0])) for camera in cameras},
        drop_last_frames=drop_last_frames,
        batch=batch_size * accumulation * world_size,
        seed=seed,
        keeps=tier not in ("stream", "none"),
    )
    return Loader(
        dataset,
        deltas,
        cameras=cameras,
        batch_size=batch_size,
        accumulation=accumulation,
        seed=seed,
        drop_last_frames=drop_last_frames,
        num_workers=num_workers,
        rank=rank,
        world_size=world_size,
        device=device,
        order=order,
        pool_bytes=pool // local,
        on_bad_frame=settings.on_bad_frame,
        tier=tier,
        decoded_on_gpu=on_gpu,
    )


# Who decodes.


def decodes_on_gpu(
    dataset: Dataset, decoder: str, cameras: Sequence[str], device: torch.device | None
) -> bool:
    """Whether the GPU's decoder is used: if asked for, or if it can and the GPU has memory to spare."""
    if decoder == "cpu":
        return False
    why_not = (
        None if device is not None and device.type == "cuda" else f"frames are wanted on {device}, no GPU"
    )
    for camera in cameras:
        if why_not is None and device is not None:
            why_not = dataset.store.why_not_on_gpu(camera, device)
    if decoder == "nvdec":
        if why_not:
            raise ConfigError(f"dataset.decoder=nvdec: {why_not}. Leave it out, and the CPU decodes.")
        return True
    if why_not or torch.cuda.get_device_properties(device).total_memory < NVDEC_MEMORY:
        return False
    log.info("the GPU decodes the videos (--dataset.decoder=cpu would leave it to the CPU)")
    return True


# Where frames stay.


def open_tier(
    dataset: Dataset,
    cache: CacheConfig,
    cameras: list[str],
    device: torch.device | None,
    selections: Sequence[Dataset],
    local_ranks: int = 1,
) -> str:
    """Open the chosen tier, or what there is room for, and say why. A tier that can't be had is streaming."""
    store = dataset.store
    count = sum(len(selection) for selection in selections)
    sizes = {camera: store.format(camera).nbytes for camera in cameras}
    need = int(count * sum(sizes.values()) * (JPEG_SHARE if cache.format == "jpeg" else 1))
    wanted = _pick_tier(cache, need) if cache.tier == "auto" else cache.tier
    if wanted == "stream":
        return "stream"
    if wanted == "gpu" and (device is None or device.type != "cuda"):
        raise ConfigError(
            f"dataset.cache.tier=gpu needs a GPU to train on, not {device}. Choose ram or disk."
        )
    try:
        if wanted == "gpu":
            assert device is not None
            room = -(-count // local_ranks) + 1024
            store.caches = {c: GPUFrames(room, store.frames, n, device) for c, n in sizes.items()}
        else:
            caches = _open_caches(dataset, cache, sizes, in_ram=wanted == "ram", need=need)
            if wanted == "ram" and local_ranks > 1 and any(c.folder is None for c in caches.values()):
                log.warning("shared memory has no room for frames that %d ranks share: disk", local_ranks)
                wanted = "disk"
                caches = _open_caches(dataset, cache, sizes, in_ram=False, need=need)
            store.caches = caches
    except (DatasetError, torch.OutOfMemoryError, OSError) as error:
        store.caches = {}
        log.warning("frames (%s) can't be kept: %s. They are streamed instead", gigabytes(need), error)
        return "stream"
    have = min(cache.count for cache in store.caches.values())
    log.info(
        "%s of frames are kept %s; %s",
        gigabytes(need),
        {"ram": "in memory", "disk": f"in {disk_folder()}", "gpu": "on the GPU"}[wanted],
        "all are there" if have >= count else "each is decoded once, when it is first needed",
    )
    return wanted


def _pick_tier(cache: CacheConfig, need: int) -> str:
    memory, disk = _budget(cache, free_memory() // 4), _budget(cache, disk_budget())
    if need <= memory:
        return "ram"
    if need <= disk:
        log.info("frames take %s, memory has %s for them: disk", gigabytes(need), gigabytes(memory))
        return "disk"
    log.info(
        "frames take %s; memory has %s for them, the disk %s: streaming, each is decoded once per epoch. "
        "--dataset.cache.size=224x224 or --dataset.cache.format=jpeg would make them smaller",
        gigabytes(need),
        gigabytes(memory),
        gigabytes(disk),
    )
    return "stream"


def _budget(cache: CacheConfig, default: int) -> int:
    return default if cache.gb is None else int(cache.gb * 1e9)


def disk_budget() -> int:
    """Bytes on the disk for kept frames: a quarter of what is free or taken by them."""
    disk_folder().mkdir(parents=True, exist_ok=True)
    return (free_bytes(disk_folder()) + sum(info.nbytes for info in list_caches())) // 4


def _open_caches(
    dataset: Dataset, cache: CacheConfig, sizes: dict[str, int], in_ram: bool, need: int
) -> dict[str, FrameCache]:
    store, folder = dataset.store, None if in_ram else disk_folder()
    quality = JPEG_QUALITY if cache.format == "jpeg" else None
    content = dataset.content()
    keys = {
        camera: CacheKey(
            f"{content} {store.format(camera).layout}", camera, store.size, quality, dataset.repo_id
        )
        for camera in sizes
    }
    shares = {camera: need * size // sum(sizes.values()) for camera, size in sizes.items()}
    if folder is not None:
        limit = _budget(cache, max(need, disk_budget()))  # asked for by name, it may take all there is
        if not make_room(folder, {keys[camera]: share for camera, share in shares.items()}, limit):
            raise DatasetError(f"there is no room for {gigabytes(need)} in {folder}")
    return {
        camera: FrameCache.open(
            folder, key, store.frames, sizes[camera], asdict(store.format(camera)), shares[camera]
        )
        for camera, key in keys.items()
    }


def gigabytes(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"


# In which order samples come.


def choose_order(
    dataset: Dataset,
    settings: DatasetConfig,
    deltas: Mapping[str, list[int]],
    *,
    drop_last_frames: int,
    batch: int,
    seed: int,
    keeps: bool,
) -> tuple[SampleOrder, int]:
    """The order of a run, and the bytes for its pool; what `settings.order` left open is filled in."""
    order, rows = settings.order, sample_rows(dataset, drop_last_frames)
    if order.kind == "auto":
        order.kind = "uniform" if not deltas else "cached" if keeps else "streaming"
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
        " in the first epoch" if order.kind == "cached" else "",
        gigabytes(pool),
    )
    return (StreamOnceOrder(streaming, uniform) if order.kind == "cached" else streaming), pool


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
            log.warning("%s", error)
            return np.arange(episodes.start[i], episodes.end[i])

    with ThreadPoolExecutor(INDEXERS, thread_name_prefix="index") as threads:
        found = {
            camera: np.concatenate(list(threads.map(starts, [(camera, i) for i in range(len(episodes))])))
            for camera in deltas
        }
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
