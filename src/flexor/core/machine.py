"""This machine's memory, CPU cores and cache folder."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path

from flexor.core import cgroups


def total_memory() -> int:
    """Bytes of RAM."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def free_memory() -> int:
    """Bytes of RAM that are free now, within the limit of this container or job if it has one."""
    import psutil

    free = int(psutil.virtual_memory().available)
    limited = cgroups.memory_limit(total_memory())
    return min(free, max(limited[0] - limited[1], 0)) if limited else free


def pinned_bytes(size: int) -> int:
    """Bytes of RAM that torch takes for a pinned tensor of this size: the next power of two."""
    return 1 << (size - 1).bit_length() if size else 0


def usable_cores() -> int:
    """Cores this process may use, within the limit of this container or job if it has one."""
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    limit = cgroups.cores_limit()
    return min(cores, max(math.ceil(limit), 1)) if limit else cores


def cache_folder() -> Path:
    """Folder for files that Flexor can recreate: $FLEXOR_CACHE, by default ~/.cache/flexor."""
    return Path(os.environ.get("FLEXOR_CACHE") or "~/.cache/flexor").expanduser()


def flush_to_disk(path: Path) -> None:
    """Wait until a file, or a folder's directory entries, would survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def gigabytes(count: int) -> str:
    """Bytes in human-readable form."""
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"


def let_gpu_memory_grow() -> None:
    """Call before CUDA starts: expandable segments waste less GPU memory. The user's own setting is kept."""
    set_by_user = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys()
    if sys.platform.startswith("linux") and not set_by_user:
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def keep_compiled_code() -> None:
    """Call before torch compiles: later runs find the code, also after a reboot. The user's own setting is kept."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    name = "TORCHINDUCTOR_CACHE_DIR"
    # torch sets the variable itself when its compiler is imported, to a temporary folder
    if os.environ.get(name) in (None, default_cache_dir()):
        os.environ[name] = str(cache_folder() / "compiled")
