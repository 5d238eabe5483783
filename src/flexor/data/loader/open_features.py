"""Where features of images are kept: in memory, on disk or on the GPU, by the space that there is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod

import torch

from flexor.core.errors import ConfigError, DatasetError
from flexor.core.machine import free_memory, gigabytes
from flexor.data.dataset import Dataset
from flexor.data.frames.cache import FrameCache
from flexor.data.frames.cache_folders import CacheKey, disk_folder, list_caches, make_room
from flexor.data.frames.features import FeatureFormat
from flexor.data.frames.gpu_cache import GPUFrameCache
from flexor.data.frames.store import CameraCache
from flexor.data.loader.open import budget, disk_budget
from flexor.data.settings import CacheConfig

GPU_SHARE = 0.5  # of the free memory of a GPU that features may take: the step needs the rest
WHERE = {"ram": "in memory", "disk": "on disk", "gpu": "on the GPU"}


class NoRoom(DatasetError):
    """Features do not fit."""


@dataclass(frozen=True)
class FeaturePlan:
    """Features of a dataset's frames: what they are, and how many."""

    formats: Mapping[str, FeatureFormat]
    """By camera."""
    keys: Mapping[str, CacheKey]
    count: int
    """Frames of each camera, at most."""

    @property
    def nbytes(self) -> int:
        return self.count * sum(format.nbytes for format in self.formats.values())

    @property
    def complete_on_disk(self) -> bool:
        """Whether an earlier run has left all of them there."""
        ready = {info.folder: info.ready for info in list_caches()}
        return all(ready.get(disk_folder() / key.folder_name, 0) >= self.count for key in self.keys.values())


def feature_keys(dataset: Dataset, cameras: Sequence[str], digest: str) -> dict[str, CacheKey]:
    """What features of each camera are of; `digest`: a hash of all that made them of images."""
    content, store = dataset.content(), dataset.store
    return {
        camera: CacheKey(
            f"{content} {store.frame_by} {sorted(asdict(store.format(camera)).items())}",
            camera,
            store.size,
            features=digest,
            dataset=dataset.repo_id,
        )
        for camera in cameras
    }


def pick_feature_tier(plan: FeaturePlan, cache: CacheConfig, device: torch.device) -> str:
    """The tier that is asked for, or the first of ram and disk that has enough room. Raises NoRoom if none has."""
    tier, need = cache.features, plan.nbytes
    if tier == "gpu":
        if device.type != "cuda":
            raise ConfigError(
                f"dataset.cache.features=gpu needs a GPU to train on, not {device}. Choose ram or disk."
            )
        room = int(GPU_SHARE * torch.cuda.mem_get_info(device)[0])
        if need > room:
            raise NoRoom(
                f"they take {gigabytes(need)}, and half of the GPU's free memory is {gigabytes(room)}"
            )
    if tier in ("ram", "disk", "gpu"):
        return tier
    tiers = (cache.tier,) if cache.tier in ("ram", "disk") else ("ram", "disk")
    memory, disk = budget(cache, free_memory() // 4), budget(cache, disk_budget())
    if "disk" in tiers and plan.complete_on_disk:
        return "disk"
    rooms = {"ram": memory, "disk": disk}
    for name in tiers:
        if need <= rooms[name]:
            return name
    budgets = " and ".join(f"{gigabytes(rooms[name])} {WHERE[name]}" for name in tiers)
    raise NoRoom(f"they take {gigabytes(need)}, and the budget is {budgets}")


def open_feature_caches(
    plan: FeaturePlan, cache: CacheConfig, tier: str, frames: int, device: torch.device, local_ranks: int
) -> dict[str, CameraCache]:
    """A cache for the features of each camera. `frames`: of the dataset as published."""
    if tier == "gpu":
        try:
            return {
                camera: GPUFrameCache(plan.count, frames, format.nbytes, device)
                for camera, format in plan.formats.items()
            }
        except torch.OutOfMemoryError as error:
            raise NoRoom(f"the GPU has no room for {gigabytes(plan.nbytes)}") from error
    folder = disk_folder() if tier == "disk" else None
    shares = {plan.keys[camera]: plan.count * format.nbytes for camera, format in plan.formats.items()}
    if folder is not None and not make_room(folder, shares, budget(cache, max(plan.nbytes, disk_budget()))):
        raise NoRoom(f"{folder} has no room for {gigabytes(plan.nbytes)}")
    caches: dict[str, CameraCache] = {}
    for camera, format in plan.formats.items():
        layout = {"shape": list(format.shape), "dtype": str(format.dtype).removeprefix("torch.")}
        key = plan.keys[camera]
        opened = FrameCache.open(
            folder, key, frames, prod(format.shape) * format.dtype.itemsize, layout, shares[key]
        )
        caches[camera] = opened
        if opened.folder is None and local_ranks > 1:
            for each in caches.values():
                each.close()
            raise NoRoom(
                f"shared memory has no room for {gigabytes(plan.nbytes)}, which {local_ranks} ranks share"
            )
    return caches
