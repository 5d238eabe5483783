"""A step's frames and rows put together into batches, on the CPU or for a GPU.

On the CPU frames become RGB here, by the threads that read ahead. For a GPU each distinct frame of a batch is
copied once, as planes, into pinned memory, goes over on a stream of its own, and becomes RGB and windows there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flexor.batch import VALID_STEPS, Batch
from flexor.data.dataset import Dataset
from flexor.data.feed import Piece, Step
from flexor.data.gpu import GPUFrames
from flexor.data.planes import rgb_on_device, to_rgb
from flexor.data.pool import Buffers, Slot
from flexor.errors import DatasetError
from flexor.log import log

TOLD = 10  # broken clips that are named in the log; the rest are counted


@dataclass(eq=False)
class Window:
    """Where a batch reads its frames: which piece, which number."""

    ids: np.ndarray  # [b, T]
    pieces: list[Piece | None]
    planes: dict[tuple[int, int], np.ndarray]
    """Stand-ins for frames that do not decode, by sample and step of its window."""


class Batcher:
    """Makes the micro-batches of a step. The jobs may run on many threads at once."""

    def __init__(
        self,
        dataset: Dataset,
        deltas: Mapping[str, Sequence[int]],
        cameras: Sequence[str],
        *,
        accumulation: int,
        device: torch.device | None,
        on_bad_frame: str,
        jobs: int,
        decoded_on_gpu: bool,
        counters: Counter[str],
        valid_steps: Callable[[int], float | None],
    ):
        self.dataset, self.deltas, self.cameras = dataset, dict(deltas), list(cameras)
        self.accumulation, self.device, self.on_bad_frame = accumulation, device, on_bad_frame
        self.jobs, self.counters, self.valid_steps = max(1, jobs), counters, valid_steps
        self.decoded_on_gpu = decoded_on_gpu
        self.buffers = Buffers()
        self.staged = device is None or device.type == "cuda"
        self.stream = torch.cuda.Stream(device) if device is not None and self.staged else None
        self._told: set[str] = set()

    def start(self, step: Step) -> list[Callable[[], None]]:
        """Jobs that fill the pictures of a step."""
        order, windows = self._sound(step)
        step.rows = step.rows[order]
        fill = self._fill_staging if self.staged else self._fill_cpu
        return fill(step, windows) or [lambda: None]

    def finish(self, step: Step) -> list[Batch]:
        """The micro-batches, pictures included; for a GPU they still have to go there."""
        batches = []
        parts = np.split(np.arange(len(step.rows)), self.accumulation)
        valid = self.valid_steps(step.number)
        for number, part in enumerate(parts):
            batch = to_tensors(self.dataset.read(step.rows[part], self.deltas, []), self.stream is not None)
            if valid is not None:
                batch[VALID_STEPS] = valid
            for camera, pictures in step.pictures.items():
                batch[camera] = pictures[number]
            batches.append(batch)
        return batches

    def to_device(self, batch: Batch) -> Batch:
        """A batch where it will be used."""
        if self.stream is None:
            return batch
        assert self.device is not None
        with torch.cuda.stream(self.stream):
            moved = {k: v.on(self.device) if isinstance(v, Staged) else v for k, v in batch.items()}
            moved = {
                k: v.to(self.device, non_blocking=True) if isinstance(v, Tensor) else v
                for k, v in moved.items()
            }
        current = torch.cuda.current_stream(self.device)
        current.wait_stream(self.stream)
        for value in moved.values():
            if isinstance(value, Tensor):
                value.record_stream(current)  # or its memory could be used again while training reads it
        return moved

    # On the CPU.

    def _fill_cpu(self, step: Step, windows: dict[str, Window]) -> list[Callable[[], None]]:
        jobs: list[Callable[[], None]] = []
        for camera, window in windows.items():
            format = self.dataset.store.format(camera)
            shape = (*window.ids.shape, format.height, format.width, format.channels)
            pixels = self.buffers.take(shape)  # [b, T, H, W, C]
            pictures = torch.from_numpy(pixels).movedim(-1, -3)
            pictures = pictures if camera in self.deltas else pictures[:, 0]
            step.pictures[camera] = list(pictures.chunk(self.accumulation))
            for part in np.array_split(np.arange(len(window.ids)), min(self.jobs, len(window.ids))):
                jobs.append(partial(self._convert, camera, window, part, pixels))
        return jobs

    def _convert(self, camera: str, window: Window, samples: np.ndarray, out: np.ndarray) -> None:
        format = self.dataset.store.format(camera)
        for i in samples.tolist():
            seen: dict[int, int] = {}  # padding repeats a frame
            for t, frame in enumerate(window.ids[i].tolist()):
                if frame in seen and (i, t) not in window.planes:
                    out[i, t] = out[i, seen[frame]]
                    continue
                to_rgb(format, np.asarray(self._planes(camera, window, i, t)), out[i, t])
                seen[frame] = t

    def _planes(self, camera: str, window: Window, i: int, t: int) -> Slot:
        if (i, t) in window.planes:
            return window.planes[i, t]
        piece, frame = window.pieces[i], int(window.ids[i, t])
        found = piece.find(camera, frame) if piece is not None else None
        return self.dataset.store.view(camera, frame) if found is None else found

    # For a GPU.

    def _fill_staging(self, step: Step, windows: dict[str, Window]) -> list[Callable[[], None]]:
        jobs: list[Callable[[], None]] = []
        for camera, window in windows.items():
            format, cache = self.dataset.store.format(camera), self.dataset.store.caches.get(camera)
            resident = cache if isinstance(cache, GPUFrames) else None
            step.pictures[camera] = []
            for part in np.split(np.arange(len(window.ids)), self.accumulation):
                # each distinct frame once; a stand-in is a frame of its own
                slots: dict[tuple, int] = {}
                source: list[tuple[int, int]] = []
                index = np.empty((len(part), window.ids.shape[1]), np.int64)
                for row, i in enumerate(part.tolist()):
                    for t, frame in enumerate(window.ids[i].tolist()):
                        key = (i, t, -1) if (i, t) in window.planes else (frame,)
                        if key not in slots:
                            slots[key] = len(source)
                            source.append((i, t))
                        index[row, t] = slots[key]
                on_gpu = np.array([self._resident(resident, camera, window, i, t) for i, t in source])
                host = np.flatnonzero(on_gpu < 0)
                rows = [source[k] for k in host.tolist()]
                at = index if camera in self.deltas else index[:, 0]
                staged = Staged(format, torch.empty(0), host, on_gpu, resident, at)
                step.pictures[camera].append(staged)
                if self.decoded_on_gpu:
                    jobs.append(partial(self._gather, camera, window, rows, staged))
                    continue
                # as large as it may ever be, so that the next batch can have it again
                staged.planes = self._host_memory(index.size, format.nbytes)[: len(host)]
                for some in np.array_split(np.arange(len(rows)), self.jobs):
                    jobs.append(partial(self._copy, camera, window, some, rows, staged.planes.numpy()))
        return jobs

    def _host_memory(self, rows: int, nbytes: int) -> Tensor:
        if self.stream is None:
            return torch.from_numpy(self.buffers.take((rows, nbytes)))
        return torch.empty((rows, nbytes), dtype=torch.uint8, pin_memory=True)

    def _copy(
        self, camera: str, window: Window, some: np.ndarray, source: list[tuple[int, int]], out: np.ndarray
    ) -> None:
        for k in some.tolist():
            np.copyto(out[k], np.asarray(self._planes(camera, window, *source[k])))

    def _gather(self, camera: str, window: Window, source: list[tuple[int, int]], staged: Staged) -> None:
        """Frames that the GPU decoded, brought together there before their slots are used again."""
        assert self.stream is not None and self.device is not None
        with torch.cuda.stream(self.stream):
            self.stream.wait_stream(torch.cuda.default_stream(self.device))
            planes = [torch.as_tensor(self._planes(camera, window, i, t)) for i, t in source]
            planes = [p.to(self.device) for p in planes]
            staged.planes = torch.stack(planes) if planes else torch.empty((0, staged.format.nbytes))
            self.stream.synchronize()

    @staticmethod
    def _resident(frames: GPUFrames | None, camera: str, window: Window, i: int, t: int) -> int:
        """The row of a frame that is on the GPU already; -1 if it has to go there."""
        piece, frame = window.pieces[i], int(window.ids[i, t])
        if frames is None or (i, t) in window.planes:
            return -1
        if piece is not None and piece.find(camera, frame) is not None:
            return -1
        return frames.row(frame)

    # Frames that do not decode.

    def _sound(self, step: Step) -> tuple[np.ndarray, dict[str, Window]]:
        """Which sample stands at each place of the step [b], and where its frames are."""
        order = np.arange(len(step.rows))
        planes: dict[str, dict[tuple[int, int], np.ndarray]] = {camera: {} for camera in step.ids}
        broken: set[int] = set()
        for i, piece in enumerate(step.pieces):
            for camera, bad in piece.bad.items() if piece is not None else ():
                for t, frame in enumerate(step.ids[camera][i].tolist()):
                    if frame in bad:
                        self._stand_in(planes[camera], (i, t), camera, frame, bad[frame], piece)
                        broken.add(i)
        if step.waits:  # what was to be kept may not have been: the disk is full, or the frame is broken
            broken |= self._late(step, planes)
        if broken and self.on_bad_frame == "skip":
            good = [i for i in range(len(order)) if i not in broken]
            if not good:
                raise DatasetError(
                    f"step {step.number}: none of its {len(order)} samples decodes. Run `flexor data check` on "
                    "the dataset, and leave the bad episodes out with --dataset.episodes."
                )
            for i in broken:  # the next good sample of the batch stands in, so that batches stay full
                order[i] = next((g for g in good if g > i), good[0])
            self.counters["skipped_samples"] += len(broken)
        elif broken:
            self.counters["substituted_samples"] += len(broken)
        pieces = [step.pieces[i] for i in order]
        return order, {c: Window(ids[order], pieces, planes[c]) for c, ids in step.ids.items()}

    def _stand_in(
        self,
        planes: dict[tuple[int, int], np.ndarray],
        place: tuple[int, int],
        camera: str,
        frame: int,
        reason: str,
        piece: Piece | None,
    ) -> None:
        self._tell(camera, frame, reason)
        if self.on_bad_frame == "nearest":
            planes[place] = self._nearest(camera, frame, piece)

    def _late(self, step: Step, planes: dict[str, dict[tuple[int, int], np.ndarray]]) -> set[int]:
        """Decode what is neither in a piece nor kept, here and now; returns samples that are broken."""
        broken, store = set(), self.dataset.store
        for camera, ids in step.ids.items():
            for i, t in zip(*np.nonzero(~store.kept(camera, ids.ravel()).reshape(ids.shape))):
                piece, frame = step.pieces[i], int(ids[i, t])
                if (piece is not None and frame in piece.uses[camera]) or (i, t) in planes[camera]:
                    continue
                slot = np.empty(store.format(camera).nbytes, np.uint8)
                bad = store.decode(camera, np.array([frame]), [slot].__getitem__)
                if bad:
                    self._stand_in(planes[camera], (int(i), int(t)), camera, frame, bad[0], piece)
                    broken.add(int(i))
                else:
                    planes[camera][int(i), int(t)] = slot
        return broken

    def _tell(self, camera: str, frame: int, reason: str) -> None:
        store = self.dataset.store
        where = store.where(camera, frame)
        if self.on_bad_frame == "raise":
            raise DatasetError(
                f"{where}: {reason}. Leave the episode out, or choose --dataset.on_bad_frame=skip"
            )
        clip = where.rpartition(",")[0]
        if clip not in self._told and len(self._told) < TOLD:
            self._told.add(clip)
            done = (
                "its samples are left out" if self.on_bad_frame == "skip" else "the nearest frame stands in"
            )
            more = "; more of this is only counted" if len(self._told) == TOLD else ""
            log.warning("%s does not decode: %s; %s%s", where, reason, done, more)

    def _nearest(self, camera: str, frame: int, piece: Piece | None) -> np.ndarray:
        """The nearest frame of the same episode that decodes."""
        store = self.dataset.store
        episode = int(store.episode_of(np.array([frame]))[0])
        first, end = store.first_of(episode), int(store.ends[episode])
        planes = np.empty(store.format(camera).nbytes, np.uint8)
        known = piece.bad.get(camera, {}) if piece is not None else {}
        for candidate in sorted(range(first, end), key=lambda other: abs(other - frame)):
            if candidate == frame or candidate in known:
                continue
            found = piece.find(camera, candidate) if piece is not None else None
            if found is not None:
                return found.cpu().numpy() if isinstance(found, Tensor) else found.copy()
            if store.kept(camera, np.array([candidate]))[0]:
                return store.view(camera, candidate)
            if not store.decode(camera, np.array([candidate]), lambda _: planes):
                return planes
        raise DatasetError(f"{store.where(camera, frame)}: no frame of its episode decodes.")


@dataclass(eq=False)
class Staged:
    """Pictures of one camera on their way to a GPU."""

    format: Any
    planes: Tensor  # uint8 [h, nbytes], pinned
    host: np.ndarray  # [h] places of those among the distinct frames
    on_gpu: np.ndarray  # [u] rows of the others in `resident`, -1 for those in `planes`
    resident: GPUFrames | None
    index: np.ndarray  # [b] or [b, T] which distinct frame

    def on(self, device: torch.device) -> Tensor:
        """RGB uint8 [b, (T,) C, H, W] on the device."""
        planes = self.planes.to(device, non_blocking=True)
        if self.resident is not None and len(self.host) < len(self.on_gpu):
            known = torch.from_numpy(np.flatnonzero(self.on_gpu >= 0)).to(device)
            rows = torch.from_numpy(self.on_gpu[self.on_gpu >= 0]).to(device)
            gathered = torch.empty((len(self.on_gpu), planes.shape[1]), dtype=torch.uint8, device=device)
            gathered[torch.from_numpy(self.host).to(device)] = planes
            gathered[known] = self.resident.planes[rows]
            planes = gathered
        pictures = rgb_on_device(self.format, planes)
        return pictures[torch.from_numpy(self.index).to(device)]


def to_tensors(batch: Mapping[str, Any], pin_memory: bool = False) -> Batch:
    """numpy arrays as tensors (in pinned memory for a GPU); everything else as it is."""
    out: Batch = {}
    for key, value in batch.items():
        if isinstance(value, np.ndarray) and value.dtype != object:
            value = torch.from_numpy(value)
            if pin_memory:
                value = value.pin_memory()
        out[key] = value
    return out
