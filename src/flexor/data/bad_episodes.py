"""Episodes that can't be read: found when a dataset is opened, and refused by name or left out and counted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from flexor.data.clips import Clip
from flexor.data.metadata import Metadata
from flexor.data.source import Source
from flexor.errors import DatasetError, SourceError
from flexor.log import warn_once, with_examples

READERS = 8  # files looked at together


class BadEpisodes:
    """Those found so far. With `skip` they are left out, otherwise the first ones found end it."""

    def __init__(self, dataset: str, on_bad_episode: str):
        self.dataset, self.on_bad_episode = dataset, on_bad_episode
        self.reasons: dict[int, str] = {}

    def add(self, found: Mapping[int, str], of: Sequence[int]) -> list[int]:
        """The good ones of some episodes."""
        self.reasons |= found
        good = [episode for episode in of if episode not in found]
        if found and (self.on_bad_episode == "raise" or not good):
            raise self._refusal(len(found), len(of))
        return good

    def tell(self) -> None:
        """Say what is left out."""
        if self.reasons:
            what = (
                f"{len(self.reasons)} episodes can't be read and are left out (--dataset.on_bad_episode=skip)"
            )
            warn_once("%s", with_examples(f"{self.dataset}: {what}:", self._lines()))

    def _lines(self) -> list[str]:
        return [f"episode {episode}: {why}" for episode, why in sorted(self.reasons.items())]

    def _refusal(self, bad: int, among: int) -> DatasetError:
        what = with_examples(f"{self.dataset}: {bad} of {among} episodes can't be read:", self._lines())
        if bad == among:
            return DatasetError(f"{what}\nRun `flexor data check {self.dataset}`.")
        numbers = ",".join(map(str, sorted(self.reasons)))
        return DatasetError(
            f"{what}\nFetch the files again, or train without these episodes:\n"
            f"  --dataset.exclude_episodes=[{numbers}]\n"
            f"or have all that can't be read left out: --dataset.on_bad_episode=skip. "
            f"`flexor data check {self.dataset}` says more."
        )


def video_cameras(
    source: Source, meta: Metadata, selected: Sequence[int]
) -> tuple[list[str], dict[str, str]]:
    """The cameras that have videos, and why each of the others can't be read at all."""
    cameras, absent = [], {}
    for name, feature in meta.features.items():
        if not feature.is_camera:
            continue
        why = "it is a depth map, which Flexor does not read yet" if feature.is_depth else None
        if why is None and len(feature.shape) != 3:
            why = f"its shape is {list(feature.shape)}, not height, width and channels"
        if why is None and feature.is_video:
            why = _why_no_video(source, meta, name, selected)
        if why is not None:
            absent[name] = why
        elif feature.is_video:
            cameras.append(name)
    return cameras, absent


def _why_no_video(source: Source, meta: Metadata, camera: str, selected: Sequence[int]) -> str | None:
    spans = meta.episodes.videos.get(camera)
    files = [spans.file[i] for i in selected if spans.file[i] is not None] if spans else []
    if not files:
        return "the episode metadata does not say where its videos are"
    if not any(source.exists(file) for file in dict.fromkeys(files) if file):
        return f"it is declared but has no video files ({files[0]} is missing)"
    return None


def missing_files(
    source: Source, meta: Metadata, cameras: Iterable[str], selected: Iterable[int]
) -> dict[int, str]:
    """Episodes whose table or one of whose videos is not there."""
    there: dict[str | None, bool] = {}

    def lacks(file: str | None) -> bool:
        if file not in there:
            there[file] = file is not None and source.exists(file)
        return not there[file]

    found = {}
    for episode in selected:
        files = {camera: meta.episodes.videos[camera].file[episode] for camera in cameras}
        data_file = meta.episodes.data_file[episode]
        missing = [name for name in (data_file, *(file for file in files.values() if file)) if lacks(name)]
        unnamed = [camera for camera, file in files.items() if file is None]
        if missing:
            found[episode] = f"{missing[0]} is missing"
        elif unnamed:
            found[episode] = f"the metadata does not say where its video of {unnamed[0]} is"
    return found


def unreadable_clips(clips: Mapping[tuple[str, int], Clip]) -> dict[int, str]:
    """Episodes one of whose videos can't be opened, or has no frame for some row. Nothing is decoded."""

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
