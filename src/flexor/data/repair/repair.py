"""Repairs what `flexor data check` finds, as far as possible without guessing, into a new v3.0 dataset.

    report = repair_dataset("path/to/dataset", "path/to/new")
    print(report)

Videos are copied packet by packet, never re-encoded. The original is only read. Episodes that can't be repaired
are left out, with the reason. A valid v2.0 or v2.1 dataset is converted to v3.0 with the same content.
"""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from flexor.core.console import Progress
from flexor.core.errors import DatasetError
from flexor.core.output_paths import check_output_folder
from flexor.core.paths import inside
from flexor.data.check.check import check_dataset, check_episodes, check_stray_files, check_totals
from flexor.data.check.layout import EpisodeEntry, Layout, read_layout
from flexor.data.check.pointers import name_pointers
from flexor.data.check.report import CheckReport, group_findings, ranges
from flexor.data.format.common_names import checked_names, rename_flag, suggested_names
from flexor.data.format.dataset_files import DatasetFiles, FileClip, PacketClip, check_new_folder
from flexor.data.format.metadata import Feature
from flexor.data.format.stats import Stats, image_stats, pixel_counts, sample_indices
from flexor.data.frames.clips import decode_image
from flexor.data.repair.account import EpisodePlan, RepairClip, RepairReport
from flexor.data.repair.columns import episode_columns
from flexor.data.repair.plan import RepairPlan, make_plan
from flexor.data.repair.rebuild import rebuild_metadata
from flexor.data.repair.remux import DecodedEpisode, copy_clip, decode_episode
from flexor.data.repair.videos import read_index
from flexor.data.storage.other_layouts import how_to_pull
from flexor.data.video.decode import VideoIndex
from flexor.data.video.depth_planes import decode_depth_image
from flexor.data.video.open_file import open_video

__all__ = ["RepairReport", "repair_dataset"]

T = TypeVar("T")

FORMAT_FILES = {"info.json", "stats.json", "tasks.parquet"}
FORMAT_FILES |= {f"{name}.jsonl" for name in ("tasks", "episodes", "episodes_stats")}
OLD_INFO = ("total_videos", "total_chunks")  # fields of v2 that v3.0 does not have

REPAIRS = {
    "totals": "recomputed",
    "splits": "set to all episodes",
    "stray-files": "not copied",
    "misplaced": "moved to its place",
    "episode-missing": "episodes renumbered",
    "episodes-unreadable": "left out",
    "tasks-missing": "texts taken from the episodes",
    "tasks-unreadable": "texts taken from the episodes",
    "task-empty": "left unchanged",
    "info-field": "its declaration is left out",
}
"""How findings about the whole dataset are repaired. Statistics are always recomputed."""

UNREPAIRED = (
    *("blank-camera", "frozen-camera", "mixed-units", "values-out-of-range"),
    *("dead-action-dimension", "state-never-changes"),
)
"""Faults of values and images, which only the people who recorded them can put right."""


def repair_dataset(
    root: str | Path,
    out: str | Path,
    *,
    episodes: Sequence[int] | None = None,
    exclude: Sequence[int] = (),
    decode: bool = True,
    dry_run: bool = False,
    rename_map: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> RepairReport:
    """Write the good and the repairable episodes of the dataset in `root` into the new folder `out`.

    `episodes`: only these; `exclude`: not these. `rename_map`: names of features -> their new names.
    Without `decode`, only the frames used for statistics are decoded, and damage in other frames is not
    found. A `dry_run` writes nothing. `progress(done, total)` counts rows.
    """
    root, out = Path(root), Path(out)
    _check_folders(root, out)
    check = CheckReport(root, deep=False)
    layout, rebuilt = rebuild_metadata(read_layout(root, check), check)
    selected = _selected(layout, episodes, exclude)
    _refuse_pointers(layout, selected, check)
    plan = make_plan(layout, check, selected)
    report = RepairReport(root, out, layout.version, plan.episodes, plan.notes, dry_run=dry_run)
    report.notes[:0] = rebuilt
    report.not_selected = 0 if selected is None else len({e.index for e in layout.episodes} - set(selected))
    _note_findings(layout, check, report)
    cameras = {name: spec["dtype"] in ("image", "video") for name, spec in plan.columns.features.items()}
    names = checked_names(cameras, rename_map or {}, str(root))
    report.notes += [f"{old} renamed to {new}" for old, new in names.items()]
    with _Repair(plan, out, decode, dry_run, names) as repair:
        repair.run(progress)
    report.notes += repair.notes
    if not report.included:
        raise DatasetError(f"{root}: no episode can be kept, so nothing was written.\n{report}")
    if dry_run:
        included = [plan.episode.index for plan in report.included]
        report.notes += [] if rebuilt else _unrepaired(check_dataset(root, deep=False, episodes=included))
    else:
        report.check = check_dataset(out, deep=False)
    return report


def _unrepaired(check: CheckReport) -> list[str]:
    """What stays as it is in the values and images. The check of a repaired dataset says it too."""
    notes = []
    for group in group_findings([finding for finding in check.findings if finding.name in UNREPAIRED]):
        episodes = sorted({finding.episode for finding in group if finding.episode is not None})
        where = (
            f" in {'episode' if len(episodes) == 1 else 'episodes'} {ranges(episodes)}" if episodes else ""
        )
        notes.append(f"{group[0].feature}{where}: {group[0].evidence}: not repaired ({group[0].name})")
    return notes


def repair_advice(report: CheckReport) -> str:
    """What `flexor data repair` would do about the errors of a dataset; empty if it would not help."""
    check = CheckReport(report.root, deep=False)
    try:
        layout, _ = rebuild_metadata(read_layout(report.root, check), check)
        _refuse_pointers(layout, None, check)
        plan = make_plan(layout, check)
    except DatasetError:
        return ""
    undecodable = {f.episode for f in report.errors if f.name in ("video-undecodable", "image-undecodable")}
    good = [episode for episode in plan.included if episode.episode.index not in undecodable]
    names = suggested_names(layout.features)
    repairable = [f for f in report.errors if names or f.name != "feature-names"]
    if not good or not repairable:
        return ""
    flag = f" {rename_flag(names)}" if names else ""
    command = f"flexor data repair {shlex.quote(str(report.root))} NEW_FOLDER{flag}"
    return f"`{command}` repairs what it can, and keeps {len(good)} of {len(plan.episodes)} episodes"


def _check_folders(root: Path, out: Path) -> None:
    check_output_folder(out, "root")
    source, target = (Path(os.path.realpath(folder)) for folder in (root, out))
    if source == target or source in target.parents or target in source.parents:
        raise DatasetError(
            f"{out} and {root}: one folder is inside the other. Choose an output folder elsewhere."
        )
    check_new_folder(out)


def _refuse_pointers(layout: Layout, selected: list[int] | None, check: CheckReport) -> None:
    """Raise an error if data is still to be downloaded: leaving it out would lose it."""
    episodes = [e for e in layout.episodes if selected is None or e.index in selected]
    name_pointers(layout, episodes, check)
    files = sorted({f.file for f in check.findings if f.name == "lfs-pointer" and f.file})
    if files:
        fix = how_to_pull(layout.root)
        raise DatasetError(
            f"{layout.root}: {len(files)} files are Git LFS pointers, such as {files[0]}: their data was not "
            f"downloaded. First {fix}."
        )


def _selected(layout: Layout, episodes: Sequence[int] | None, exclude: Sequence[int]) -> list[int] | None:
    present = {episode.index for episode in layout.episodes}
    wrong = sorted(({*(episodes or ()), *exclude}) - present)
    if wrong and present:
        raise DatasetError(
            f"{layout.root} has no episodes {wrong[:10]}: it has {len(present)} episodes, {min(present)} to "
            f"{max(present)}. Correct --episodes or --exclude_episodes."
        )
    if episodes is None and not exclude:
        return None
    selected = sorted((present if episodes is None else set(episodes)) - set(exclude))
    if present and not selected:
        raise DatasetError("--episodes and --exclude_episodes leave no episode. Choose at least one.")
    return selected


def _note_findings(layout: Layout, check: CheckReport, report: RepairReport) -> None:
    """Add findings about the metadata to the report, as notes about the dataset or its episodes."""
    check_episodes(layout, check)
    check_totals(layout, check)
    check_stray_files(layout, check)
    notes = [] if layout.version == "v3.0" else [f"converted from {layout.version} to v3.0"]
    for finding in check.findings:
        if finding.episode is None and finding.name in REPAIRS:
            where = ", ".join(part for part in (finding.feature, finding.file) if part)
            notes.append(f"{where or 'meta/'}: {finding.evidence}: {REPAIRS[finding.name]}")
    report.notes[:0] = notes
    plans = {plan.episode.index: plan for plan in report.episodes}
    for finding in check.findings:
        if finding.name == "row-range" and finding.episode in plans:
            plans[finding.episode].repairs.append("its row range recomputed")
        if finding.name == "episode-metadata":
            index = finding.episode if isinstance(finding.episode, int) else -1
            report.episodes.append(EpisodePlan(EpisodeEntry(index, 0, [], "", 0), reason=finding.evidence))


class _Repair:
    """Executes a plan. Several threads decode frames ahead of the writing."""

    def __init__(
        self, plan: RepairPlan, out: Path, decode: bool, dry_run: bool, names: Mapping[str, str]
    ) -> None:
        self.names = names
        self.plan, self.out, self.decode, self.dry_run = plan, out, decode, dry_run
        self.root, self.layout = plan.layout.root, plan.layout
        self.notes: list[str] = []
        self._pool = ThreadPoolExecutor(os.cpu_count() or 1)
        self._index = lru_cache(32)(read_index)  # an index is small; episodes of one file follow each other
        self._files: DatasetFiles | None = None
        self._more = self._plain_metadata()
        self._table: tuple[str, pa.Table] | None = None  # the most recently read data file

    def __enter__(self) -> _Repair:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def run(self, progress: Progress | None) -> None:
        delays = {camera: self.plan.delay(camera) for camera in self.plan.cameras}
        plans = self.plan.included
        decoded = [self._decode_clips(plan) for plan in plans]
        total, done = sum(plan.length for plan in plans), 0
        try:
            for plan, futures in zip(plans, decoded):
                self._process(plan, {camera: future.result() for camera, future in futures.items()}, delays)
                done += plan.length
                if progress:
                    progress(done, total)
            self._finish()
        except (OSError, OverflowError, pa.ArrowException, av.FFmpegError) as error:
            raise DatasetError(
                f"{self.out} could not be written: {error}. The folder is not a complete dataset: free some disk "
                "space, delete the folder and start again."
            ) from error
        finally:
            if self._files is not None:
                with suppress(OSError, pa.ArrowException, av.FFmpegError):  # the first error is reported
                    self._files.close()

    def _plain_metadata(self) -> list[str]:
        """Other fields of the episode metadata that a table can store: text, numbers, booleans."""
        values: dict[str, list[Any]] = {}
        for plan in self.plan.included:
            for key, value in plan.episode.other_fields.items():
                values.setdefault(key, []).append(value)
        plain = [key for key, column in values.items() if _is_plain(column)]
        for key in values.keys() - set(plain):
            self.notes.append(f"{key!r} in the metadata of episodes is not copied")
        return plain

    def _decode_clips(self, plan: EpisodePlan) -> dict[str, Future[DecodedEpisode]]:
        return {c: self._pool.submit(self._decode_clip, c, clip) for c, clip in plan.clips.items()}

    def _decode_clip(self, camera: str, clip: RepairClip) -> DecodedEpisode:
        index = self._index(self.layout.path(clip.file))
        if isinstance(index, str):
            return DecodedEpisode(None, index)
        pixels = not _is_depth(self.plan.columns.features[camera])
        try:
            return decode_episode(index, clip.first, clip.length, self.decode, pixels)
        except (DatasetError, OSError, ValueError, av.FFmpegError) as error:
            return DecodedEpisode(None, f"its video can't be read: {error}")

    def _process(
        self, plan: EpisodePlan, decoded: Mapping[str, DecodedEpisode], delays: Mapping[str, int]
    ) -> None:
        bad = [f"{camera}: {episode.fault}" for camera, episode in decoded.items() if episode.fault]
        if bad:
            plan.reason = bad[0]
            return
        count = len(sample_indices(plan.length))
        pixels = {camera: episode.pixels for camera, episode in decoded.items()}
        stats = {camera: image_stats(p, count) for camera, p in pixels.items() if p is not None}
        columns = self._columns(plan)
        if isinstance(columns, str):
            plan.reason = columns
            return
        for name in self.plan.columns.stored:
            if self.plan.columns.feature(name).is_image:
                stats_or_fault = self._image_column_stats(self.plan.columns.feature(name), columns[name])
                if isinstance(stats_or_fault, str):
                    plan.reason = f"{name}: {stats_or_fault}"
                    return
                if not _is_depth(self.plan.columns.features[name]):
                    stats[name] = stats_or_fault
        if self.dry_run:
            return
        clips = {camera: self._clip(clip, delays[camera]) for camera, clip in plan.clips.items()}
        files = self._open()
        plan.new = files.total_episodes
        assert plan.task_index is not None
        more = {key: plan.episode.other_fields.get(key) for key in self._more}
        columns, clips, stats = self._renamed(columns), self._renamed(clips), self._renamed(stats)
        files.append(columns, plan.task_index, clips, stats, plan.episode.tasks or None, more)

    def _renamed(self, values: Mapping[str, T]) -> dict[str, T]:
        return {self.names.get(name, name): value for name, value in values.items()}

    def _columns(self, plan: EpisodePlan) -> dict[str, Any] | str:
        """The episode's rows in recording order, or why they can't be read."""
        file, stored = plan.episode.data_file, self.plan.columns.stored
        if self._table is None or self._table[0] != file:
            try:
                self._table = file, pq.read_table(self.layout.path(file), columns=stored)
            except (pa.ArrowException, OSError) as error:
                return f"its data file {file} is damaged ({str(error).splitlines()[0][:100]})"
        return episode_columns(self.layout, self.plan.columns, self._table[1].take(plan.rows))

    def _image_column_stats(self, feature: Feature, images: list[bytes | None]) -> Stats | str:
        """Statistics of the images in the table, or the fault of one of them."""
        sampled = sample_indices(len(images)).tolist()
        shapes, counts = set(), []
        frames = range(len(images)) if self.decode else sorted(set(sampled))
        for frame, counted_image in zip(frames, self._pool.map(_count_image, (images[i] for i in frames))):
            if isinstance(counted_image, str):
                return f"image {frame} of the episode is unusable: {counted_image}"
            shapes.add(counted_image[0])
            counts += [counted_image[1]] * sampled.count(frame)
        if len(shapes) > 1 or next(iter(shapes))[:2] != feature.chw[1:]:
            sizes = ", ".join(f"{height}x{width}x{channels}" for height, width, channels in sorted(shapes))
            return f"its images are {sizes}, but {list(feature.shape)} is declared"
        counted = np.sum(counts, axis=0)
        return image_stats(counted, len(sampled)) if counted.any() else {}

    def _clip(self, clip: RepairClip, delay: int) -> PacketClip | FileClip:
        path = self.layout.path(clip.file)
        if clip.copied_whole:
            return FileClip(path, clip.start, clip.start + clip.length / self.plan.fps)
        index = self._index(path)
        assert isinstance(index, VideoIndex), index
        return copy_clip(index, path, clip.first, clip.length, delay)

    def _open(self) -> DatasetFiles:
        if self._files is None:
            features = {
                name: self._described(name) if spec["dtype"] == "video" else spec
                for name, spec in self.plan.columns.features.items()
            }
            robot = self.layout.info.get("robot_type")
            self._files = DatasetFiles(
                self.out, self.plan.fps, self._renamed(features), robot, tasks=self.plan.tasks
            )
        return self._files

    def _described(self, camera: str) -> dict[str, Any]:
        """A camera's declaration, with the properties of its files."""
        spec = dict(self.plan.columns.features[camera])
        clip = next(plan.clips[camera] for plan in self.plan.included)
        with open_video(str(self.layout.path(clip.file))) as container:
            context = container.streams.video[0].codec_context
            codec, pix_fmt = context.codec.canonical_name, context.pix_fmt
            if container.streams.audio and not clip.copied_whole:
                self.notes.append(f"camera {camera}: the audio in its videos is not copied")
        depth, (height, width) = _is_depth(spec), clip.size
        declared = {**(spec.pop("video_info", None) or {}), **(spec.get("info") or {})}
        facts = {"height": height, "width": width, "codec": codec, "pix_fmt": pix_fmt, "fps": self.plan.fps}
        spec["info"] = declared | {f"video.{key}": value for key, value in facts.items()}
        spec["info"] |= {"video.is_depth_map": depth, "is_depth_map": depth, "has_audio": False}
        return spec

    def _finish(self) -> None:
        if self._files is None:
            return
        self._files.close()
        (self.out / "meta").mkdir(exist_ok=True)
        for path in sorted((self.root / "meta").glob("*")):
            if path.is_file() and path.name not in FORMAT_FILES and not path.name.startswith("."):
                name = f"meta/{path.name}"
                shutil.copyfile(inside(self.root, name), inside(self.out, name))
                self.notes.append(f"meta/{path.name} copied unchanged")
        more = {key: value for key, value in self.layout.info.items() if key not in OLD_INFO}
        self._files.write_metadata(more)
        self.notes.append("statistics recomputed")


def _is_plain(values: list[Any]) -> bool:
    kinds = {type(value) for value in values if value is not None}
    return len(kinds) == 1 and kinds <= {str, bool, int, float}


def _count_image(data: bytes | None) -> tuple[tuple[int, ...], np.ndarray] | str:
    """An image's shape and pixel counts, or its fault."""
    if not data:
        return "the image is empty"
    try:
        if data[:4] in (b"II*\0", b"MM\0*"):  # a depth map, without pixel counts
            frame = decode_depth_image(data)
            return (frame.height, frame.width, 1), np.zeros((1, 256), np.int64)
        image = decode_image(data)
    except (av.FFmpegError, ValueError) as error:
        return str(error)[:100]
    return image.shape, pixel_counts(image)


def _is_depth(spec: Mapping[str, Any]) -> bool:
    declared = {**(spec.get("video_info") or {}), **(spec.get("info") or {})}
    return bool(declared.get("is_depth_map") or declared.get("video.is_depth_map"))
