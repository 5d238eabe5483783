"""Encodes each image of a run once, before its first step, if the policy's image encoder is frozen.

Every frame that the run will read is decoded once, processed as in training, and encoded. Its features are stored by
its id, as frames are (`data/frames/features.py`), and the loader hands them on instead of images.

Frames of an episode are encoded in chunks that begin at fixed frames, whatever else the run reads and on however many
ranks. So features follow from the frame alone, and a resumed run reads the same ones.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from flexor.core.console import progress
from flexor.core.errors import DatasetError, SourceError
from flexor.core.machine import usable_cores
from flexor.data.frames.features import FeatureStore
from flexor.data.frames.store import FrameStore
from flexor.data.video.on_device import rgb_on_device
from flexor.policies.image_encoder import encode
from flexor.policies.processing.pipeline import Pipeline
from flexor.train.checkpoint.state import TrainState
from flexor.train.compile import not_compiled

CHUNK = 32
"""Frames that are encoded together. Features depend on it, within rounding."""
AHEAD = 4  # decoded chunks that wait
LOOK_S = 0.2  # a thread that waits looks this often whether another one has failed


@dataclass(eq=False)
class Chunk:
    """Successive frames of an episode, the first of which has a multiple of CHUNK as its number there."""

    ids: np.ndarray  # [CHUNK], -1 for frames that are not needed
    planes: np.ndarray | None = None  # [CHUNK, nbytes]; None if none of them could be decoded
    decoded: np.ndarray = field(default_factory=lambda: np.zeros(CHUNK, bool))  # [CHUNK]

    @property
    def complete(self) -> bool:
        return bool((self.decoded == (self.ids >= 0)).all())


class ImageEncoding:
    """Encodes images on this rank's device, in the precision of the run."""

    def __init__(self, state: TrainState, processing: Pipeline, names: Mapping[str, str]):
        """`processing` of images; `names`: the policy's names of the dataset's cameras."""
        self.state, self.processing, self.names = state, processing, names

    def __call__(self, frames: FrameStore, camera: str, planes: np.ndarray | None) -> Tensor:
        """Planes [CHUNK, nbytes] -> features [CHUNK, ...]; None for frames that do not matter."""
        engine, format = self.state.engine, frames.format(camera)
        if planes is None:
            planes = np.zeros((CHUNK, format.nbytes), np.uint8)
        rows = torch.from_numpy(planes)
        if engine.device.type == "cuda":  # as in training, where it makes the images
            rows = rows.pin_memory().to(engine.device, non_blocking=True)
        name = self.names[camera]
        images = self.processing({name: rgb_on_device(format, rows)})[name]
        with engine.autocast(), self._not_compiled():
            return encode(self.state.policy.encode_images, images)

    def _not_compiled(self) -> AbstractContextManager[object]:
        return not_compiled() if self.state.config.compile else nullcontext()


class FeaturePass:
    """Fills a feature store with the features of some frames. All ranks call it together."""

    def __init__(self, encoding: ImageEncoding, store: FeatureStore, per_rank: bool):
        """`per_rank`: each rank has a store of its own; otherwise the ranks of a host share one."""
        self.encoding, self.store, self.per_rank = encoding, store, per_rank
        self.engine = encoding.state.engine
        self.ranks = self.engine.processes
        self.exchanges = per_rank and self.ranks.world_size > 1
        self.bar = progress("encoding images") if self.ranks.is_main else None

    def run(self, ids: Mapping[str, np.ndarray]) -> None:
        """Encode the frames `ids` of each camera that have no features yet, and note in `store.bad` what can't be."""
        absent = {camera: frames[~self.store.is_cached(camera, frames)] for camera, frames in ids.items()}
        self.ranks.barrier()  # before the first adds any
        episodes = {camera: self._episodes(camera, frames) for camera, frames in absent.items()}
        totals = {camera: sum(map(len, chunks)) for camera, chunks in episodes.items()}
        if self.exchanges or self.engine.sharded:  # then all ranks encode equally many
            counts = self.ranks.gather(totals)
            totals = {camera: max(count[camera] for count in counts) for camera in totals}
        done = 0
        for camera, chunks in episodes.items():
            self._encode_camera(camera, chunks, totals[camera], done, sum(totals.values()))
            done += totals[camera]
        for bad in self.ranks.gather(self.store.bad):
            for camera, reasons in bad.items():
                self.store.bad[camera] |= reasons
        self.ranks.barrier()

    def missing(self, ids: Mapping[str, np.ndarray]) -> int:
        """Frames that have no features although they can be decoded: there was no room for them."""
        return sum(
            len(np.setdiff1d(frames[~self.store.is_cached(camera, frames)], [*self.store.bad[camera]]))
            for camera, frames in ids.items()
        )

    def _episodes(self, camera: str, ids: np.ndarray) -> list[list[Chunk]]:
        """The chunks of this rank, episode by episode."""
        frames = self.store.frame_store
        edges = np.flatnonzero(np.diff(frames.episode_of(ids))) + 1
        rank, count = self.ranks.local_rank, self.ranks.local_world_size
        if self.per_rank:
            rank, count = self.ranks.rank, self.ranks.world_size
        episodes = [part for part in np.split(ids, edges) if len(part)]
        return [chunks_of(part, self._first_frame(part)) for part in episodes[rank::count]]

    def _first_frame(self, ids: np.ndarray) -> int:
        """Of the episode that these frames belong to."""
        frames = self.store.frame_store
        return frames.first_frame_of(int(frames.episode_of(ids[:1])[0]))

    def _encode_camera(
        self, camera: str, episodes: list[list[Chunk]], rounds: int, done: int, total: int
    ) -> None:
        threads = max(1, usable_cores() // self.ranks.local_world_size)
        decoding = ChunkDecoder(self.store.frame_store, camera, episodes, threads)
        with closing(decoding), ThreadPoolExecutor(1, "features-write") as writer:
            pending = None
            chunks = decoding.chunks()
            for number in range(rounds):
                part = self._encode(camera, next(chunks, None))
                if pending is not None:
                    pending.result()  # its error, if it failed
                pending = writer.submit(self._store, camera, *part)
                if self.bar is not None:
                    self.bar(done + number + 1, total)
            if pending is not None:
                pending.result()
        self.store.bad[camera] |= decoding.bad

    def _encode(self, camera: str, chunk: Chunk | None) -> tuple[np.ndarray, Tensor, torch.cuda.Event | None]:
        """The ids of decoded frames [n] and their features as bytes [n, nbytes], which are there after the event."""
        nothing = chunk is None or chunk.planes is None
        if nothing and not (self.exchanges or self.engine.sharded):
            return np.empty(0, np.int64), torch.empty(0), None
        planes = None if chunk is None else chunk.planes
        features = self.encoding(self.store.frame_store, camera, planes)
        rows = self.store.formats[camera].rows(features)
        ids = np.full(CHUNK, -1) if chunk is None else np.where(chunk.decoded, chunk.ids, -1)
        if self.exchanges:
            ids, rows = self._exchange(ids, rows)
        places = np.flatnonzero(ids >= 0)
        rows = rows[torch.from_numpy(places).to(rows.device)]
        if self.per_rank or not rows.is_cuda:
            return ids[places], rows, None
        on_host = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
        on_host.copy_(rows, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        return ids[places], on_host, copied

    def _exchange(self, ids: np.ndarray, rows: Tensor) -> tuple[np.ndarray, Tensor]:
        """What all ranks have."""
        parts = [torch.empty_like(rows) for _ in range(self.ranks.world_size)]
        dist.all_gather(parts, rows)
        return np.concatenate(self.ranks.gather(ids)), torch.cat(parts)

    def _store(self, camera: str, ids: np.ndarray, rows: Tensor, copied: torch.cuda.Event | None) -> None:
        if copied is not None:
            copied.synchronize()
        if len(ids):
            contents: Any = list(rows) if self.per_rank else rows.cpu().numpy()
            self.store.caches[camera].put(ids, contents)


class ChunkDecoder:
    """Decodes the chunks of one camera in threads, an episode in each."""

    def __init__(self, frames: FrameStore, camera: str, episodes: Sequence[list[Chunk]], threads: int):
        self.frames, self.camera = frames, camera
        self.bad: dict[int, str] = {}  # by id
        self.count = sum(map(len, episodes))
        self.closing = threading.Event()
        self.ready: queue.Queue[Chunk | BaseException] = queue.Queue(AHEAD + threads)
        self.pool = ThreadPoolExecutor(threads, "features-decode")
        for chunks in episodes:
            self.pool.submit(self._decode_episode, chunks)

    def chunks(self) -> Iterator[Chunk]:
        """All chunks, in the order in which they are decoded."""
        for _ in range(self.count):
            chunk = self.ready.get()
            if isinstance(chunk, BaseException):
                raise chunk
            yield chunk

    def close(self) -> None:
        self.closing.set()
        self.pool.shutdown(cancel_futures=True)

    def _decode_episode(self, chunks: list[Chunk]) -> None:
        try:
            places = [(chunk, row) for chunk in chunks for row in np.flatnonzero(chunk.ids >= 0).tolist()]
            self._decode(places)
            for chunk in chunks:
                if not chunk.complete:
                    self._put(chunk)
        except BaseException as error:
            self._put(error)

    def _decode(self, places: list[tuple[Chunk, int]]) -> None:
        nbytes = self.frames.format(self.camera).nbytes
        ids = np.array([chunk.ids[row] for chunk, row in places])

        def slot(i: int) -> np.ndarray:
            chunk, row = places[i]
            if chunk.planes is None:
                chunk.planes = np.zeros((CHUNK, nbytes), np.uint8)
            planes: np.ndarray = chunk.planes[row]
            return planes

        def decoded(i: int) -> None:
            chunk, row = places[i]
            chunk.decoded[row] = True
            if chunk.complete:
                self._put(chunk)

        self.frames.read_ahead(self.camera, ids)
        try:
            bad = self.frames.decode(self.camera, ids, slot, decoded)
        except SourceError:  # the data can't be reached: that is not a bad frame
            raise
        except DatasetError as error:
            bad = {i: str(error) for i, (chunk, row) in enumerate(places) if not chunk.decoded[row]}
        self.bad |= {int(ids[i]): reason for i, reason in bad.items()}

    def _put(self, chunk: Chunk | BaseException) -> None:
        while not self.closing.is_set():
            try:
                self.ready.put(chunk, timeout=LOOK_S)
                return
            except queue.Full:
                continue
        raise InterruptedError  # nobody takes it any more


def chunks_of(ids: np.ndarray, first: int) -> list[Chunk]:
    """The chunks of some frames of an episode, whose first frame is `first`."""
    number, row = np.divmod(ids - first, CHUNK)
    chunks = []
    for each in np.unique(number).tolist():
        places = np.full(CHUNK, -1, np.int64)
        places[row[number == each]] = ids[number == each]
        chunks.append(Chunk(places))
    return chunks
