"""`flexor data cache`: fills a dataset's frame caches before training, so that the first epoch decodes nothing.

It can be stopped and started again: cached frames are not decoded again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from flexor.core.console import Progress
from flexor.core.errors import DatasetError
from flexor.core.machine import usable_cores
from flexor.data.dataset import Dataset
from flexor.data.frames.cache_folders import disk_folder
from flexor.data.frames.store import fill_cache
from flexor.data.loader.open import open_tier
from flexor.data.settings import CacheConfig


def precache(
    dataset: Dataset,
    *,
    cameras: Sequence[str] | None = None,
    format: str = "raw",
    workers: int | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Cache all frames of a dataset on disk, at the size it was opened with; default: all cameras."""
    selected = _checked_cameras(dataset, cameras)
    settings = CacheConfig(tier="disk", format=format)  # type: ignore[arg-type]
    started = time.monotonic()
    dataset.store.set_rgb(not torch.cuda.is_available())  # the format that training on this machine uses
    if open_tier(dataset, settings, selected, None, [dataset]) != "disk":
        raise DatasetError(
            f"{dataset.repo_id}: its frames could not be cached, see the warning above. Free space with `flexor data "
            f"cache --prune`, set FLEXOR_CACHE to another disk, or make frames smaller with --size or --format=jpeg"
        )
    caches = dataset.store.caches
    ids = dataset.frame_ids(np.arange(len(dataset)))
    try:
        broken = fill_cache(dataset.store, selected, ids, workers or usable_cores(), progress)
        cached = {camera: int(cache.has(ids).sum()) for camera, cache in caches.items()}
    finally:
        for cache in caches.values():
            cache.close()
    return {
        "dataset": dataset.repo_id,
        "complete": all(cached[camera] + broken[camera] == len(ids) for camera in selected),
        "cameras": {c: {"frames": len(ids), "kept": cached[c], "broken": broken[c]} for c in selected},
        "folder": str(disk_folder()),
        "wall_clock_s": round(time.monotonic() - started, 3),
    }


def render(result: dict[str, Any]) -> str:
    """The summary that the command prints."""
    lines = []
    for camera, counts in result["cameras"].items():
        broken = f", {counts['broken']} can't be decoded" if counts["broken"] else ""
        lines.append(f"{camera}: {counts['kept']} of {counts['frames']} frames in the cache{broken}")
    return "\n".join([*lines, f"cached in {result['folder']}"])


def _checked_cameras(dataset: Dataset, cameras: Sequence[str] | None) -> list[str]:
    for camera in cameras or []:
        if camera not in dataset.cameras:
            names = ", ".join(dataset.cameras) or "none"
            raise DatasetError(f"{dataset.repo_id} has no camera {camera!r}. Its cameras are: {names}")
    if not dataset.cameras:
        raise DatasetError(f"{dataset.repo_id} has no readable camera, so there is nothing to cache")
    return list(cameras or dataset.cameras)
