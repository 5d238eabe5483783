"""Files that Git LFS has not downloaded: named once, instead of everything that is wrong with their content."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from flexor.data.check.layout import EpisodeEntry, Layout
from flexor.data.check.report import CheckReport
from flexor.data.storage.other_layouts import POINTER, how_to_pull, is_lfs_pointer


def name_pointers(layout: Layout, episodes: Iterable[EpisodeEntry], report: CheckReport) -> None:
    """Report the pointers among the metadata and the files of these episodes, and drop other findings about them."""
    fix = how_to_pull(layout.root)
    metadata = [path for path in (layout.root / "meta").rglob("*") if is_lfs_pointer(path)]
    pointers = {path.relative_to(layout.root).as_posix() for path in metadata}
    for file in sorted(pointers):
        report.error("lfs-pointer", POINTER, fix, file=file)
    is_pointer = cache(lambda file: is_lfs_pointer(layout.path(file)))
    for episode in episodes:
        files = {None: episode.data_file} | {camera: span.file for camera, span in episode.videos.items()}
        for camera, file in files.items():
            if is_pointer(file):
                pointers.add(file)
                report.error("lfs-pointer", POINTER, fix, episode=episode.index, feature=camera, file=file)
    report.findings = [f for f in report.findings if f.name == "lfs-pointer" or f.file not in pointers]
