"""Finds unreadable episodes when a dataset is opened: raises an error that names them, or skips and counts them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial

from flexor.core.errors import DatasetError, SourceError
from flexor.core.log import warn_once, with_examples
from flexor.data.format.episode_list import write_episodes
from flexor.data.format.file_names import match_misplaced
from flexor.data.format.metadata import Feature, Metadata
from flexor.data.frames.clips import Clip
from flexor.data.storage.other_layouts import POINTER, how_to_pull, is_lfs_pointer
from flexor.data.storage.source import Source

READERS = 8  # files checked in parallel


class BadEpisodes:
    """The unreadable episodes found so far among the selected ones."""

    def __init__(self, dataset: str, selected: Sequence[int]):
        self.dataset, self.selected = dataset, selected
        self.reasons: dict[int, str] = {}

    @property
    def good(self) -> list[int]:
        """The readable episodes; raises an error if there are none."""
        good = [episode for episode in self.selected if episode not in self.reasons]
        if not good:
            raise self._refusal()
        return good

    def settle(self, on_bad_episode: str) -> None:
        """After all checks: log which episodes are skipped, or raise the error."""
        if self.reasons and on_bad_episode == "raise":
            raise self._refusal()
        if self.reasons:
            count = len(self.reasons)
            summary = f"{count} episode{'s' if count > 1 else ''} can't be read: skipped"
            warn_once("%s", with_examples(f"{self.dataset}: {summary}:", self._lines()))

    def _lines(self) -> list[str]:
        return [f"episode {episode}: {why}" for episode, why in sorted(self.reasons.items())]

    def _refusal(self) -> DatasetError:
        bad, total = len(self.reasons), len(self.selected)
        summary = with_examples(f"{self.dataset}: {bad} of {total} episodes can't be read:", self._lines())
        advice = f"`flexor data check {self.dataset}` shows more."
        if bad == total:
            return DatasetError(f"{summary}\n{advice}")
        return DatasetError(
            f"{summary}\n{advice}\nDownload the files again, or leave out these episodes:\n"
            f"  --dataset.exclude_episodes={write_episodes(self.reasons)}\n"
            "or skip every episode that can't be read:\n"
            "  --dataset.on_bad_episode=skip"
        )


def video_cameras(
    source: Source, meta: Metadata, selected: Sequence[int]
) -> tuple[list[str], dict[str, str]]:
    """The cameras that have videos, and why each of the others can't be read at all."""
    cameras, absent = [], {}
    for name, feature in meta.features.items():
        if not feature.is_camera:
            continue
        why = None
        if len(feature.shape) != 3:
            why = f"its shape is {list(feature.shape)}, not height, width and channels"
        if why is None and feature.depth is not None:
            why = _why_no_depth(feature)
        if why is None and feature.is_video:
            why = _why_no_video(source, meta, name, selected)
        if why is not None:
            absent[name] = why
        elif feature.is_video:
            cameras.append(name)
    return cameras, absent


def _why_no_depth(feature: Feature) -> str | None:
    assert feature.depth is not None
    if feature.chw[0] != 1:
        return f"it is a depth map of {feature.chw[0]} channels; a depth map has one"
    fault = feature.depth.fault()
    return fault and f"it is a depth map, but {fault} in meta/info.json"


def _why_no_video(source: Source, meta: Metadata, camera: str, selected: Sequence[int]) -> str | None:
    spans = meta.episodes.videos.get(camera)
    files = [spans.file[i] for i in selected if spans.file[i] is not None] if spans else []
    if not files:
        return "the episode metadata does not name its video files"
    if not any(source.exists(file) for file in dict.fromkeys(files) if file):
        missing = f"{files[0]} is missing{_elsewhere(source, files)}"
        return f"meta/info.json declares it, but it has no video files ({missing})"
    return None


def _elsewhere(source: Source, files: Iterable[str | None]) -> str:
    """Where the videos are instead, in words."""
    if source.kind != "disk":
        return ""
    present = [path.relative_to(source.root).as_posix() for path in source.root.rglob("*.mp4")]
    matches = match_misplaced([file for file in dict.fromkeys(files) if file], present)
    example = next(iter(matches.values()), None)
    return f"; {example} may be it: `flexor data repair` puts it in its place" if example else ""


def missing_files(
    source: Source, meta: Metadata, cameras: Iterable[str], selected: Iterable[int]
) -> dict[int, str]:
    """Episodes with a missing table or video file."""
    exists, is_pointer, reasons = cache(source.exists), cache(partial(_is_pointer, source)), {}
    for episode in selected:
        files = {camera: meta.episodes.videos[camera].file[episode] for camera in cameras}
        named = [meta.episodes.data_file[episode], *filter(None, files.values())]
        missing = [file for file in named if not exists(file)]
        unnamed = [camera for camera, file in files.items() if file is None]
        pointers = [file for file in named if is_pointer(file)]
        if missing:
            reasons[episode] = f"{missing[0]} is missing"
        elif pointers:
            reasons[episode] = f"{pointers[0]}: {POINTER}: {how_to_pull(source.root)}"
        elif unnamed:
            reasons[episode] = f"the metadata does not name its video file of {unnamed[0]}"
    return reasons


def _is_pointer(source: Source, file: str) -> bool:
    path = source.here(file)
    return path is not None and is_lfs_pointer(path)


def unreadable_clips(clips: Mapping[tuple[str, int], Clip]) -> dict[int, str]:
    """Episodes with a video that can't be opened or has no frame for some row. Nothing is decoded."""

    def look(clip: Clip) -> str | None:
        try:
            clip.starts()
        except SourceError:
            raise
        except DatasetError as error:
            return str(error)
        return None

    with ThreadPoolExecutor(READERS, thread_name_prefix="index") as threads:
        reasons = list(threads.map(look, clips.values()))
    return {episode: why for (_, episode), why in zip(clips, reasons) if why is not None}
