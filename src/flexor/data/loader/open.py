"""Opens the loader from the settings: chooses the frame cache, the decoder and the order by the available memory."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from flexor.core.errors import ConfigError, DatasetError
from flexor.core.log import log
from flexor.core.machine import free_memory, gigabytes, usable_cores
from flexor.data.dataset import Dataset
from flexor.data.frames.cache import FrameCache
from flexor.data.frames.cache_folders import CacheKey, disk_folder, free_bytes, list_caches, make_room
from flexor.data.frames.decode_processes import processes_available
from flexor.data.frames.gpu_cache import GPUFrameCache
from flexor.data.loader.assemble import HostSteps
from flexor.data.loader.choose_order import choose_order
from flexor.data.loader.loader import Loader
from flexor.data.settings import CacheConfig, DatasetConfig
from flexor.data.video.planes import JPEG_QUALITY, PlaneFormat

JPEG_SHARE = 0.2  # of the raw size, about
ENOUGH_CORES = 12  # per GPU: they decode as fast as the GPU's decoder does during training
MANY_WORKERS = 3  # from which threads wait for each other, whatever the images
SMALL_FRAME = 150_000  # bytes: decoding it takes about as long as what Python does for it
LEAST_FRAMES = 10_000  # of a dataset: fewer are decoded sooner than processes start
AHEAD_BYTES = (
    24 << 20
)  # of frames for each decode process: its requests, and finished ones that wait for others
NVDEC_MEMORY = 40 << 30  # bytes of GPU memory from which a GPU has enough to spare for decoding and its pool


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
    host_steps: HostSteps | None = None,
    reads_frames: bool = True,
) -> Loader:
    """The batches of a run. `also` are selections of the same dataset whose frames are cached too.

    `reads_frames`: false if it will read features of them. The order of samples is the same.
    `host_steps` process batches before they go to the device; if they read images, frames stay in host memory.
    """
    device = None if device is None else torch.device(device)
    frame_device = torch.device("cpu") if host_steps is not None and host_steps.uses_images else device
    cameras = list(cameras)
    dataset.store.set_rgb(frame_device is not None and frame_device.type != "cuda")
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    tier, on_gpu, in_processes = "none", False, False
    if cameras:
        selections, reads_none = [dataset, *also], not reads_frames
        tier = open_tier(dataset, settings.cache, cameras, frame_device, selections, local, reads_none)
    if cameras and reads_frames:
        on_gpu = decodes_on_gpu(dataset, settings.decoder, cameras, frame_device, local)
        in_processes = decodes_in_processes(dataset, settings, cameras, tier, num_workers)
    camera_deltas = {camera: list(deltas.get(camera, [0])) for camera in cameras}
    samples: dict[str, Any] = {"drop_last_frames": drop_last_frames, "seed": seed, "tier": tier}
    batch = batch_size * accumulation * world_size
    order, order_config, pool = choose_order(dataset, settings, camera_deltas, batch=batch, **samples)
    return Loader(
        dataset,
        deltas,
        cameras=cameras,
        batch_size=batch_size,
        accumulation=accumulation,
        num_workers=num_workers,
        rank=rank,
        world_size=world_size,
        device=device,
        order=order,
        order_config=order_config,
        pool_bytes=pool // local + (ahead_bytes(settings.cache, num_workers) if in_processes else 0),
        on_bad_frame=settings.on_bad_frame,
        decoded_on_gpu=on_gpu,
        in_processes=in_processes,
        host_steps=host_steps,
        **samples,
    )


def ahead_bytes(cache: CacheConfig, workers: int) -> int:
    """Memory of a rank for what its decode processes work at, beside the frames that are shuffled; none if the settings
    say how much a pool may take."""
    return AHEAD_BYTES * workers if cache.pool_gb is None else 0


# The decoder.


def decodes_on_gpu(
    dataset: Dataset, decoder: str, cameras: Sequence[str], device: torch.device | None, local_ranks: int
) -> bool:
    """Whether to use the GPU's decoder: if requested; or if supported, with enough GPU memory and few CPU cores."""
    if decoder == "cpu":
        return False
    if device is None or device.type != "cuda":
        why_not: str | None = f"images go to {device}, not to a CUDA GPU"
    else:
        reasons = (dataset.store.why_not_on_gpu(camera, device) for camera in cameras)
        why_not = next(filter(None, reasons), None)
    if decoder == "nvdec":
        if why_not:
            raise ConfigError(
                f"dataset.decoder=nvdec can't be used: {why_not}. Leave it out to decode on the CPU."
            )
        return True
    if why_not or usable_cores() // local_ranks >= ENOUGH_CORES:
        return False
    if torch.cuda.get_device_properties(device).total_memory < NVDEC_MEMORY:
        return False
    log.info("decoding videos on the GPU (--dataset.decoder=cpu decodes on the CPU)")
    return True


def decodes_in_processes(
    dataset: Dataset, settings: DatasetConfig, cameras: Sequence[str], tier: str, workers: int
) -> bool:
    """Whether the workers are processes: if requested; or if threads would wait for each other in Python."""
    if settings.decode_in == "threads" or workers == 0:
        return False
    if not processes_available():
        if settings.decode_in == "processes":
            raise ConfigError("dataset.decode_in=processes needs Linux. Leave it out to decode in threads.")
        return False
    if settings.decode_in == "processes":
        return True
    videos = [camera for camera in cameras if dataset.store.is_video(camera)]
    if tier != "stream" or len(videos) * len(dataset) < LEAST_FRAMES:
        return False
    largest = max(dataset.store.format(camera).nbytes for camera in cameras)
    return workers >= MANY_WORKERS or largest <= SMALL_FRAME


# The frame cache.


def open_tier(
    dataset: Dataset,
    cache: CacheConfig,
    cameras: list[str],
    device: torch.device | None,
    selections: Sequence[Dataset],
    local_ranks: int = 1,
    choose_only: bool = False,
) -> str:
    """Open the chosen tier, or with auto the first with enough room, and log why. If it fails, stream frames.

    `choose_only`: just say which, for a run that reads no frames while it trains.
    """
    store = dataset.store
    count = sum(len(selection) for selection in selections)
    sizes = {camera: store.format(camera).nbytes for camera in cameras}
    keys = _keys(dataset, cache, cameras)
    need = int(count * sum(n * (1 if keys[c].jpeg is None else JPEG_SHARE) for c, n in sizes.items()))
    tier, why = _pick_tier(cache, need, keys, count) if cache.tier == "auto" else (cache.tier, None)
    if choose_only:
        return tier
    if why is not None:
        log.info(why)
    if tier == "stream":
        return "stream"
    if tier == "gpu" and (device is None or device.type != "cuda"):
        raise ConfigError(
            f"dataset.cache.tier=gpu needs a GPU to train on, not {device}. Choose ram or disk."
        )
    try:
        if tier == "gpu":
            assert device is not None
            room = -(-count // local_ranks) + 1024
            store.caches = {c: GPUFrameCache(room, store.frames, n, device) for c, n in sizes.items()}
        else:
            caches = _open_caches(dataset, cache, keys, None if tier == "ram" else disk_folder(), need)
            if tier == "ram" and local_ranks > 1 and any(c.folder is None for c in caches.values()):
                text = "shared memory is too small for a frame cache shared by %d ranks: using the disk"
                log.warning(text, local_ranks)
                tier = "disk"
                caches = _open_caches(dataset, cache, keys, disk_folder(), need)
            store.caches = caches
    except (DatasetError, torch.OutOfMemoryError, OSError) as error:
        store.caches = {}
        text = "can't open a cache for the frames (%s): %s. Streaming frames instead"
        log.warning(text, gigabytes(need), error)
        return "stream"
    where = {"ram": "in memory", "disk": f"in {disk_folder()}", "gpu": "on the GPU"}[tier]
    cached = all(cache.count >= count for cache in store.caches.values())
    when = "all are cached already" if cached else "each frame is decoded once, when it is first needed"
    log.debug("caching %s of frames %s; %s", gigabytes(need), where, when)
    return tier


def _pick_tier(
    cache: CacheConfig, need: int, keys: Mapping[str, CacheKey], count: int
) -> tuple[str, str | None]:
    """The first tier with enough room; why not an earlier one."""
    memory, disk = budget(cache, free_memory() // 4), budget(cache, disk_budget())
    ready = {info.folder: info.ready for info in list_caches()}
    if all(ready.get(disk_folder() / key.folder_name, 0) >= count for key in keys.values()):
        return "disk", None  # all frames are cached already
    if need <= memory:
        return "ram", None
    if need <= disk:
        more = f"frames take {gigabytes(need)}, more than the memory budget of {gigabytes(memory)}"
        return "disk", f"{more}: caching on disk"
    return "stream", (
        f"frames take {gigabytes(need)}, more than the budget in memory ({gigabytes(memory)}) and on disk "
        f"({gigabytes(disk)}): streaming, each frame is decoded once per epoch. --dataset.cache.size=224x224 or "
        "--dataset.cache.format=jpeg would make them smaller"
    )


def budget(cache: CacheConfig, default: int) -> int:
    """The bytes that a cache may take: `default`, unless the settings say otherwise."""
    return default if cache.gb is None else int(cache.gb * 1e9)


def disk_budget() -> int:
    """Disk budget for cached frames: a quarter of the sum of free space and existing caches."""
    disk_folder().mkdir(parents=True, exist_ok=True)
    return (free_bytes(disk_folder()) + sum(info.nbytes for info in list_caches())) // 4


def _keys(dataset: Dataset, cache: CacheConfig, cameras: Sequence[str]) -> dict[str, CacheKey]:
    content, quality = dataset.content(), JPEG_QUALITY if cache.format == "jpeg" else None
    store = dataset.store
    return {
        camera: CacheKey(
            f"{content} {store.format(camera).layout} {store.frame_by}",
            camera,
            store.size,
            None if store.format(camera).is_depth else quality,  # JPEG can't hold depth maps
            dataset.repo_id,
        )
        for camera in cameras
    }


def _open_caches(
    dataset: Dataset, cache: CacheConfig, keys: Mapping[str, CacheKey], folder: Path | None, need: int
) -> dict[str, FrameCache]:
    """Open a cache per camera in `folder`; None: in memory."""
    formats = {camera: dataset.store.format(camera) for camera in keys}
    total = sum(format.nbytes for format in formats.values())
    shares = {camera: need * format.nbytes // total for camera, format in formats.items()}
    if folder is not None:
        limit = budget(cache, max(need, disk_budget()))  # requested explicitly, it may take all free space
        if not make_room(folder, {keys[camera]: share for camera, share in shares.items()}, limit):
            raise DatasetError(f"{folder} has no room for {gigabytes(need)}")
    return {
        camera: FrameCache.open(
            folder, keys[camera], dataset.store.frames, format.nbytes, _layout(format), shares[camera]
        )
        for camera, format in formats.items()
    }


def _layout(format: PlaneFormat) -> dict[str, Any]:
    """What a cache records of its frames' format; only depth maps have a scale."""
    layout = asdict(format)
    return layout if format.is_depth else {key: value for key, value in layout.items() if key != "depth"}
