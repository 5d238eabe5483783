"""Hashes of a dataset's files, which tell whether a file is still the one that a run was trained on.

Tables and metadata are hashed completely, videos by their size and sampled blocks. Times do not count: a copy of a
dataset is the same dataset. A hash is remembered in the cache folder until the file is written to or replaced, so a
large dataset is read once and not at each start.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from flexor.core.log import log
from flexor.core.machine import cache_folder
from flexor.core.output_paths import make_parents, replacing
from flexor.data.storage.source import TABLES

BLOCK = 16 << 10  # bytes
BLOCKS = 8  # of a video, evenly spaced from its beginning to its end
MANY = 5000  # files, which take seconds
THREADS = 8  # each waits for the disk most of the time
SETTLED_NS = 2_000_000_000  # a file written to less than this ago may be written to again in the same instant

Stamp = tuple[int, int, int, int]  # size, mtime, ctime, inode: each write to a file changes one of them


def file_digest(path: Path) -> str:
    """A hash of a table's content, or of a video's size and sampled blocks."""
    with path.open("rb") as file:
        if path.name.endswith(TABLES):
            return hashlib.file_digest(file, "sha256").hexdigest()
        size = os.fstat(file.fileno()).st_size
        content = hashlib.sha256(str(size).encode())
        for start in _sampled(size):
            content.update(os.pread(file.fileno(), BLOCK, start))
        return content.hexdigest()


def _sampled(size: int) -> list[int]:
    """Where the sampled blocks start; of a small file they are all of it."""
    if size <= BLOCK * BLOCKS:
        return list(range(0, size, BLOCK))
    return [number * (size - BLOCK) // (BLOCKS - 1) for number in range(BLOCKS)]


def digests(root: Path, paths: Mapping[str, Path]) -> dict[str, str]:
    """The hash of each file {name: path} of the dataset in `root`."""
    name = hashlib.sha256(str(root.absolute()).encode()).hexdigest()[:20]
    memory = cache_folder() / "digests" / f"{name}.json"
    remembered = _read(memory)
    stamps = {name: _stamp(path) for name, path in paths.items()}
    result = {
        name: digest
        for name, (digest, *stamp) in remembered.items()
        if name in stamps and tuple(stamp) == stamps[name]
    }
    missing = [name for name in paths if name not in result]
    if missing:
        if len(missing) >= MANY:
            log.info("hashing %d files of %s once, to notice later if they change", len(missing), root)
        with ThreadPoolExecutor(THREADS, thread_name_prefix="digest") as pool:
            result |= zip(missing, pool.map(file_digest, (paths[name] for name in missing)))
        settled = _settled(missing, stamps)
        _remember(memory, remembered, {name: (result[name], *stamps[name]) for name in settled})
    return {name: result[name] for name in paths}


def _stamp(path: Path) -> Stamp:
    status = path.stat()
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def _settled(names: Iterable[str], stamps: Mapping[str, Stamp]) -> list[str]:
    latest = time.time_ns() - SETTLED_NS
    return [name for name in names if max(stamps[name][1:3]) < latest]


def _read(memory: Path) -> dict[str, tuple]:
    try:
        entries = json.loads(memory.read_text())
        return {name: entry for name, entry in entries.items() if len(entry) == 5}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def _remember(memory: Path, earlier: Mapping[str, tuple], new: Mapping[str, tuple]) -> None:
    if not new:
        return
    # if that fails, the files are hashed again next time
    with suppress(OSError), replacing(make_parents(memory)) as aside:
        aside.write_text(json.dumps({**earlier, **new}))
