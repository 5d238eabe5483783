"""Videos and images of a run, embedded as far as there is room; the others are named."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flexor.core.log import log
from flexor.core.paths import UnsafePath, inside
from flexor.core.run_files import CHECKPOINTS, VIDEOS
from flexor.pages.images import as_base64
from flexor.runs.state import relative

IMAGES = {
    ".png": "image/png",
    ".jpg": "image/jpeg",
    ".jpeg": "image/jpeg",
    ".webp": "image/webp",
    ".gif": "image/gif",
}
MOST = 200  # files of each kind that are named


@dataclass
class MediaFile:
    """A file of a run; `data` is null if there is no room for it on the page."""

    name: str
    kind: str
    bytes: int
    step: int | None
    data: str | None = None


def videos_of(folder: Path, videos: Sequence[Path]) -> list[MediaFile]:
    """The newest first: those of the last evaluation say most. A video's folder is the step that it is from."""
    files = [file for path in videos if (file := _media(folder, path, "video/mp4"))]
    files.sort(key=lambda file: (-(1 << 60 if file.step is None else file.step), file.name))
    return files[:MOST]


def images_of(folder: Path) -> list[MediaFile]:
    """Images in the folder or in folders below, except those of checkpoints."""
    skipped = {CHECKPOINTS, VIDEOS, "wandb"}
    paths = [
        path
        for path in sorted(folder.rglob("*"))
        if path.suffix.lower() in IMAGES and path.relative_to(folder).parts[0] not in skipped
    ]
    files = [_media(folder, path, IMAGES[path.suffix.lower()]) for path in paths[:MOST]]
    return [file for file in files if file]


def _media(folder: Path, path: Path, kind: str) -> MediaFile | None:
    try:
        size = inside(folder, relative(path, folder)).stat().st_size
    except UnsafePath as error:  # a page is shown to others
        log.warning("left out of the page: %s", error)
        return None
    except OSError:  # removed meanwhile
        return None
    step = re.fullmatch(r"\d+", path.parent.name)
    return MediaFile(relative(path, folder), kind, size, int(step[0]) if step else None)


def embed(folders: Sequence[Path], files: Sequence[Sequence[MediaFile]], room: int) -> int:
    """Read files into the page while there is room, one of each run in turn; returns how many bytes are left."""
    for number in range(max(map(len, files), default=0)):
        for folder, run_files in zip(folders, files):
            if number >= len(run_files) or (run_files[number].bytes + 2) // 3 * 4 > room:
                continue
            try:
                run_files[number].data = as_base64((folder / run_files[number].name).read_bytes())
            except OSError:
                continue
            room -= len(run_files[number].data or "")
    return room
