"""The frame store: any camera's frames by id, from a cache or from the videos.

A frame's id is its row in the dataset as published, so that all selections of episodes share cached
frames. Frames are stored as planes, as the decoder outputs them (see `planes.py`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from typing import Any, Protocol

import av
import numpy as np
import torch
from torch import Tensor

from flexor.core.console import Progress
from flexor.core.errors import DatasetError, SourceError
from flexor.core.log import Repeats
from flexor.data.frames.cache import FrameCache
from flexor.data.frames.clips import Clip, FrameRule, VideoClip
from flexor.data.frames.frame_places import FramePlaces
from flexor.data.frames.gpu_cache import GPUFrameCache
from flexor.data.frames.slots import Slot
from flexor.data.video import nvdec
from flexor.data.video.decode import Sink, read_ahead
from flexor.data.video.decode_request import DecodeRequest
from flexor.data.video.planes import (
    PlaneFormat,
    decode_jpeg,
    depth_format,
    encode_jpeg,
    format_of,
    pack,
    resized,
    to_rgb,
)

PROBED = 16  # frames tried to find a camera's format, if the first ones can't be decoded


class CameraCache(Protocol):
    """A cache of one camera's decoded frames: a `FrameCache`, or GPU memory."""

    jpeg: bool

    @property
    def count(self) -> int: ...
    def has(self, ids: np.ndarray) -> np.ndarray: ...
    def view(self, frame: int) -> np.ndarray | None: ...
    def put(self, ids: np.ndarray, frames: Sequence[Any]) -> None: ...
    def sync(self) -> None: ...
    def close(self) -> None: ...


class StoredFormat(Protocol):
    """How one frame of a camera is stored, as bytes."""

    @property
    def nbytes(self) -> int: ...
    @property
    def picture_bytes(self) -> int: ...


class FrameStore:
    """Frames of all cameras. Safe to use from many threads at once."""

    def __init__(
        self,
        clips: Mapping[tuple[str, int], Clip],
        lengths: np.ndarray,
        size: tuple[int, int] | None = None,
        remote: bool = False,
        rule: FrameRule | None = None,
        depth_unit: str = "mm",
    ):
        """`clips` by camera and episode; `lengths` of all published episodes; `size` to scale frames to;
        `remote` if videos are read over a network; `rule` of the clips; `depth_unit` of depth maps, mm or m."""
        self.clips = clips
        self.ends = np.cumsum(lengths)
        self.size = size
        self.remote = remote
        self.frame_by = rule.frame_by if rule else "auto"
        self.repeats = rule.repeats if rule else Repeats()
        self.depth_unit = depth_unit
        self.rgb = False
        self.caches: Mapping[str, CameraCache] = {}
        self._formats: dict[str, PlaneFormat] = {}
        self._lock = threading.Lock()

    @property
    def frames(self) -> int:
        """Frames per camera in the dataset as published."""
        return int(self.ends[-1])

    def format(self, camera: str) -> PlaneFormat:
        """The memory layout of this camera's frames."""
        with self._lock:
            if camera not in self._formats:
                self._formats[camera] = self._probe(camera)
            return self._formats[camera]

    def stored_format(self, camera: str) -> StoredFormat:
        """What caches and slots hold of a frame: its planes, or something that was made of it."""
        return self.format(camera)

    def image_ids(self, camera: str, ids: np.ndarray) -> np.ndarray:
        """The same frames by the ids under which they are stored."""
        return ids

    def set_rgb(self, rgb: bool) -> None:
        """Whether frames are converted to RGB right after decoding. Training on a CPU needs that, because windows
        would convert the same frame repeatedly. Do not change it while caches are open: they hold frames in the
        old format."""
        assert not self.caches or rgb == self.rgb
        with self._lock:
            if rgb != self.rgb:
                self.rgb = rgb
                self._formats.clear()

    def get(self, camera: str, ids: np.ndarray) -> np.ndarray:
        """Any frames -> RGB uint8 [n, H, W, C], or depths float32 [n, H, W, 1].

        A frame that can't be decoded raises an error.
        """
        format = self.format(camera)
        out = np.empty((len(ids), format.height, format.width, format.channels), format.dtype)
        distinct, slot = np.unique(ids, return_inverse=True)
        cached = self.is_cached(camera, distinct)

        def convert_cached() -> None:
            for i in np.flatnonzero(cached[slot]):
                to_rgb(format, self.view(camera, int(ids[i])), out[i])

        self.retry_if_truncated(camera, convert_cached)
        missing = distinct[~cached]
        planes = np.empty((min(len(missing), 1), format.nbytes), np.uint8)
        positions = {int(frame): np.flatnonzero(ids == frame) for frame in missing}

        def show(i: int) -> None:
            first, *repeats = positions[int(missing[i])]
            to_rgb(format, planes[0], out[first])
            out[repeats] = out[first]

        self._raise_bad(camera, missing, self.decode(camera, missing, lambda i: planes[0], show))
        self.repeats.tell()
        return out

    def is_cached(self, camera: str, ids: np.ndarray) -> np.ndarray:
        """Which of these frames need no decoding. bool [n]"""
        cache = self.caches.get(camera)
        return np.zeros(len(ids), bool) if cache is None else cache.has(ids)

    def view(self, camera: str, frame: int) -> np.ndarray:
        """The planes of a cached frame, uint8 [nbytes]; read-only. Use it inside `retry_if_truncated`."""
        cache = self.caches[camera]
        data = cache.view(frame)
        if data is not None and not cache.jpeg:
            return data
        planes = np.empty(self.stored_format(camera).nbytes, np.uint8)
        if data is None:
            self._decode_again(camera, np.array([frame]), planes[None])
        else:
            decode_jpeg(self.format(camera), data, planes)
        return planes

    def gather(self, camera: str, ids: np.ndarray, out: np.ndarray) -> None:
        """Copy the planes of cached frames to `out`, uint8 [n, nbytes]."""
        cache = self.caches[camera]
        if isinstance(cache, FrameCache) and not cache.jpeg:
            damaged = np.flatnonzero(~cache.gather(ids, out))
            if len(damaged):
                planes = np.empty((len(damaged), out.shape[1]), np.uint8)
                self._decode_again(camera, ids[damaged], planes)
                out[damaged] = planes
            return
        for row, frame in zip(out, ids.tolist()):
            row[:] = self.view(camera, frame)

    def retry_if_truncated(self, camera: str, work: Callable[[], None]) -> None:
        """Do work that uses views of cached frames; again, if their file was truncated meanwhile."""
        cache = self.caches.get(camera)
        careful = isinstance(cache, FrameCache) and not cache.lost
        work()
        if careful and not cache.intact():  # type: ignore[union-attr]
            work()

    def _decode_again(self, camera: str, ids: np.ndarray, planes: np.ndarray) -> None:
        """Frames that were in the cache, and are damaged there."""
        self._raise_bad(camera, ids, self.decode(camera, ids, planes.__getitem__))
        self.add_to_cache(camera, ids, list(planes))

    def _raise_bad(self, camera: str, ids: np.ndarray, bad: dict[int, str]) -> None:
        if bad:
            first = min(bad)
            raise DatasetError(f"{self.where(camera, int(ids[first]))}: {bad[first]}")

    def add_to_cache(self, camera: str, ids: np.ndarray, planes: Sequence[Slot]) -> None:
        """Cache decoded frames, if there is a cache."""
        cache = self.caches.get(camera)
        if cache is None:
            return
        if cache.jpeg:
            format = self.format(camera)
            cache.put(ids, [encode_jpeg(format, np.asarray(_on_host(p))) for p in planes])
        else:
            cache.put(ids, planes if isinstance(cache, GPUFrameCache) else [_on_host(p) for p in planes])

    def decode(
        self,
        camera: str,
        ids: np.ndarray,
        slot: Callable[[int], np.ndarray],
        then: Callable[[int], None] | None = None,
    ) -> dict[int, str]:
        """Decode frames: the planes of ids[i] go to slot(i), then `then(i)` is called.

        Returns {i: reason} for frames that can't be decoded. Frames of one file are decoded together.
        """
        format = self.format(camera)
        bad: dict[int, str] = {}
        for decode, frames, places in self._requests(camera, ids, bad):
            users = _users(frames, places)
            failed = decode(np.unique(frames), partial(_deliver, format, users, slot, then))
            bad |= {place: reason for i, reason in failed.items() for place in users(i)}
        return bad

    def is_video(self, camera: str) -> bool:
        """Whether a camera is stored as video in all episodes."""
        return all(isinstance(clip, VideoClip) for (name, _), clip in self.clips.items() if name == camera)

    def decode_request(
        self, camera: str, ids: np.ndarray, offsets: np.ndarray
    ) -> tuple[DecodeRequest, dict[int, str]]:
        """Like `decode`, in another process: the planes of ids[i] go to offsets[i] of shared memory.

        Returns {i: reason} for frames that can't be read at all. What is on a server is read here.
        """
        files, frames = self.places.find(camera, ids)
        bad = {i: self.places.why(camera, int(ids[i])) for i in np.flatnonzero(files < 0).tolist()}
        packets, reasons = self.places.packets(files, frames)
        for file, reason in reasons.items():
            bad |= dict.fromkeys(np.flatnonzero(files == file).tolist(), reason)
        if bad:
            files[[*bad]] = -1
        request = DecodeRequest(self.format(camera), np.stack([files, frames, offsets]), packets)
        return request, bad

    @cached_property
    def places(self) -> FramePlaces:
        """Where frames are, for other processes."""
        return FramePlaces(self.clips, self.ends)

    def read_ahead(self, camera: str, ids: np.ndarray) -> None:
        """Prefetch the video data of these frames, if it is read over a network."""
        if not self.remote:
            return
        for _, frames, places in self._requests(camera, ids, {}):
            clip = self.clips[camera, int(self.episode_of(ids[places[:1]])[0])]
            if isinstance(clip, VideoClip):
                read_ahead(clip.file.index, np.unique(frames))

    def decode_on_gpu(self, camera: str, ids: np.ndarray, slots: Sequence[Tensor]) -> dict[int, str]:
        """Like `decode`, with the GPU's decoder, into slots on the GPU."""
        bad: dict[int, str] = {}
        for _, frames, places in self._requests(camera, ids, bad):
            clip = self.clips[camera, int(self.episode_of(ids[places[:1]])[0])]
            assert isinstance(clip, VideoClip)
            failed = nvdec.decode_into(clip.file.index, frames, [slots[i] for i in places])
            bad |= {places[i]: reason for i, reason in failed.items()}
        return bad

    def why_not_on_gpu(self, camera: str, device: torch.device) -> str | None:
        """Why this GPU can't decode a camera's videos; None if it can."""
        clip = next(clip for (name, _), clip in self.clips.items() if name == camera)
        if not isinstance(clip, VideoClip):
            return f"{camera} is stored as single images, not as video"
        if self.size:
            return "dataset.cache.size scales the images, which the GPU's decoder does not support"
        return nvdec.supported(clip.file.index.packets.codec, self.format(camera), device)

    def starts(self, camera: str, episode: int) -> np.ndarray:
        """For every frame of an episode, the first one that is decoded to get it. [length]"""
        return self.clips[camera, episode].starts()

    def episode_of(self, ids: np.ndarray) -> np.ndarray:
        return np.searchsorted(self.ends, ids, side="right")

    def first_frame_of(self, episode: int) -> int:
        """The first frame of an episode."""
        return int(self.ends[episode - 1]) if episode else 0

    def where(self, camera: str, frame: int) -> str:
        """The location of a frame, for messages."""
        episode = int(self.episode_of(np.array([frame]))[0])
        return f"{self.clips[camera, episode].where}, frame {frame - self.first_frame_of(episode)}"

    def describe_episode(self, episode: int) -> str:
        """An episode, for messages."""
        return f"episode {episode}"

    def exclusion_hint(self, episode: int) -> str:
        """What leaves out an episode, for messages."""
        return f"--dataset.exclude_episodes={episode}"

    def _requests(
        self, camera: str, ids: np.ndarray, bad: dict[int, str]
    ) -> list[tuple[Callable[[np.ndarray, Sink], dict[int, str]], np.ndarray, list[int]]]:
        """Decode requests, file by file: (decode function, frame numbers in the file, their positions in ids).

        Positions of episodes that can't be read at all go to `bad`.
        """
        files: dict[object, tuple[Any, list[np.ndarray], list[int]]] = {}
        for episode, places in self._by_episode(ids):
            clip, frames = self.clips[camera, episode], ids[places] - self.first_frame_of(episode)
            try:
                file, decode, numbers = clip.request(frames)
            except SourceError:
                raise
            except DatasetError as error:
                bad |= dict.fromkeys(places.tolist(), str(error))
                continue
            _, frame_numbers, positions = files.setdefault(file, (decode, [], []))
            frame_numbers.append(numbers)
            positions += places.tolist()
        return [(decode, np.concatenate(parts), positions) for decode, parts, positions in files.values()]

    def _by_episode(self, ids: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """The positions in ids of frames of each episode; an episode may come several times."""
        episodes = self.episode_of(ids)
        first = np.flatnonzero(np.append(True, episodes[1:] != episodes[:-1])) if len(ids) else np.arange(0)
        for begin, end in zip(first.tolist(), [*first[1:].tolist(), len(ids)]):
            yield int(episodes[begin]), np.arange(begin, end)

    def _format(self, clip: Clip, frame: av.VideoFrame) -> PlaneFormat:
        depth = clip.feature.depth
        if depth is None:
            return format_of(frame)
        return depth_format(frame, depth.reading(self.depth_unit), coded=clip.feature.is_video)

    def _probe(self, camera: str) -> PlaneFormat:
        """The format of the first frame that can be decoded; all other frames are converted to it."""
        reason, decoded = "it has no frames", []
        for (name, _), clip in self.clips.items():
            if name != camera:
                continue
            try:
                for frame in range(min(len(clip.starts()), PROBED)):
                    _, decode, numbers = clip.request(np.array([frame]))
                    bad = decode(numbers, lambda _, picture: decoded.append(picture))
                    if decoded:
                        format = self._format(clip, decoded[0])
                        format = resized(format, *self.size) if self.size else format
                        if self.rgb and format.layout == "yuv420p":
                            return PlaneFormat(format.height, format.width, "rgb24")
                        return format
                    reason = bad[0]
            except DatasetError as error:
                reason = str(error)
        raise DatasetError(f"camera {camera}: none of its frames can be decoded: {reason}")


def _deliver(
    format: PlaneFormat,
    users: Callable[[int], Sequence[int]],
    slot: Callable[[int], np.ndarray],
    then: Callable[[int], None] | None,
    i: int,
    frame: av.VideoFrame,
) -> None:
    for place in users(i):
        pack(frame, format, slot(place))
        if then:
            then(place)


def _users(frames: np.ndarray, places: list[int]) -> Callable[[int], Sequence[int]]:
    """A function: i -> the positions that use the i-th distinct frame."""
    order = np.argsort(frames, kind="stable")
    ordered = frames[order]
    ranked = [places[k] for k in order.tolist()]
    if (ordered[1:] != ordered[:-1]).all():
        return lambda i: ranked[i : i + 1]
    edges = [*np.flatnonzero(np.diff(ordered, prepend=-1)).tolist(), len(ranked)]
    return lambda i: ranked[edges[i] : edges[i + 1]]


def _on_host(planes: Slot) -> np.ndarray:
    return planes.cpu().numpy() if isinstance(planes, Tensor) else planes


def fill_cache(
    store: FrameStore, cameras: list[str], ids: np.ndarray, workers: int, progress: Progress | None = None
) -> dict[str, int]:
    """Decode every frame of `ids` that is not cached yet, in threads. Returns {camera: number of bad frames}."""
    jobs = []
    for camera in cameras:
        missing = ids[~store.is_cached(camera, ids)]
        by_episode = np.split(missing, np.flatnonzero(np.diff(store.episode_of(missing))) + 1)
        jobs += [(camera, part) for part in by_episode if len(part)]
    total, done = sum(len(part) for _, part in jobs), 0
    broken = dict.fromkeys(cameras, 0)

    def work(job: tuple[str, np.ndarray]) -> tuple[str, int, int]:
        camera, part = job
        planes = np.empty(store.format(camera).nbytes, np.uint8)
        bad = store.decode(
            camera, part, lambda _: planes, lambda i: store.add_to_cache(camera, part[i : i + 1], [planes])
        )
        return camera, len(part), len(bad)

    with ThreadPoolExecutor(workers, thread_name_prefix="cache") as pool:
        for camera, count, bad in pool.map(work, jobs):
            broken[camera] += bad
            done += count
            if progress:
                progress(done, total)
    store.repeats.tell()
    return broken
