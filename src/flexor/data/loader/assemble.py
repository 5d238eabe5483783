"""Assembles the frames and rows of steps into batches, on the CPU or for a GPU.

On the CPU, frames are already RGB, or the prefetch threads convert them here. For a GPU, planes are copied into
pinned memory, transferred on a separate stream, and converted to RGB on the GPU (see `to_gpu.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from flexor.core.batch import SAMPLE_WEIGHT, VALID_STEPS, Batch
from flexor.data.dataset import Dataset
from flexor.data.frames.features import FeatureFormat
from flexor.data.frames.slots import Buffers
from flexor.data.frames.store import FrameStore
from flexor.data.loader.decoded_frames import DecodedFrames
from flexor.data.loader.packed import Packed, pack
from flexor.data.loader.step import StepGroup
from flexor.data.loader.step_frames import FrameFinder, StepFrames
from flexor.data.loader.to_gpu import Job, Staged, Stager
from flexor.data.loader.work_time import work_clock
from flexor.data.video.planes import to_rgb

COLUMNS = "/columns"  # in a batch on its way to a GPU. No feature has this name: LeRobot allows no slash


class HostSteps(Protocol):
    """Processing of a batch in host memory, by several threads at once."""

    @property
    def uses_images(self) -> bool:
        """Whether it reads images, uint8 [b, (T,) C, H, W]; otherwise it gets `HeldBack` ones."""

    def __call__(self, batch: Batch, step: int) -> Batch: ...


@dataclass(frozen=True)
class HeldBack:
    """Images that host steps may rename, but not read: for a GPU, they are still planes."""

    images: Any


class Batcher:
    """Builds the micro-batches of a group of steps. The jobs may run in several threads at once."""

    def __init__(
        self,
        dataset: Dataset,
        deltas: Mapping[str, Sequence[int]],
        frames: DecodedFrames,
        *,
        batch_size: int,
        device: torch.device | None,
        host_steps: HostSteps | None = None,
        on_bad_frame: str,
        jobs: int,
        counters: Counter[str],
        valid_steps: Callable[[range], list[float] | None],
        weight_scale: Callable[[int], float],
        store: FrameStore | None = None,
    ):
        """`store`: what images are read from, instead of the dataset's."""
        self.dataset, self.deltas, self.store = dataset, dict(deltas), store or dataset.store
        self.batch_size, self.device, self.jobs = batch_size, device, max(1, jobs)
        self.host_steps = host_steps
        self.valid_steps, self.weight_scale = valid_steps, weight_scale
        self.frame_finder = FrameFinder(self.store, frames, on_bad_frame, counters)
        self.buffers = Buffers()
        cuda = device is not None and device.type == "cuda"
        self.stream = torch.cuda.Stream(device) if cuda else None
        planes = (cuda or device is None) and not (host_steps is not None and host_steps.uses_images)
        self.stager = Stager(self.store, self.stream, self.jobs) if planes else None

    def start(self, group: StepGroup) -> list[Job]:
        """Jobs that fill in the images of a group."""
        order, frames_of_cameras = self.frame_finder.find(group)
        group.rows = group.rows[order]
        jobs = [job for frames in frames_of_cameras for job in self._fill(group, frames)]
        return jobs or [lambda: None]

    def finish(self, group: StepGroup) -> list[list[Batch] | Exception]:
        """The micro-batches of each step, including images; for a GPU they still have to be transferred.

        The error of a step comes in its place, and ends the list.
        """
        columns = self._micro_batches(to_tensors(self.dataset.read(group.rows, self.deltas, [])))
        valid = self.valid_steps(group.steps)
        count = len(group.rows) // self.batch_size // len(group.steps)
        finished: list[list[Batch] | Exception] = []
        for place, step in enumerate(group.steps):
            rest: Batch = {} if valid is None else {VALID_STEPS: valid[place]}
            numbers = range(place * count, (place + 1) * count)
            try:
                finished.append(
                    [self._batch(group, columns[number], rest, step, number) for number in numbers]
                )
            except Exception as error:
                finished.append(error)
                break
        return finished

    def _micro_batches(self, columns: Batch) -> list[Batch]:
        """The columns of each micro-batch of a group."""
        parts = [
            column.split(self.batch_size) if isinstance(column, Tensor) else _split(column, self.batch_size)
            for column in columns.values()
        ]
        return [dict(zip(columns, values)) for values in zip(*parts)]

    def _batch(self, group: StepGroup, columns: Batch, rest: Batch, step: int, number: int) -> Batch:
        """A micro-batch of a group."""
        batch = columns | rest
        if SAMPLE_WEIGHT in batch:
            batch[SAMPLE_WEIGHT] = batch[SAMPLE_WEIGHT] * np.float32(self.weight_scale(step))
        images = {camera: parts[number] for camera, parts in group.images.items()}
        if self.host_steps is None:
            batch |= images
        else:
            started = work_clock()
            batch = self._process(self.host_steps, batch, images, step)
            group.processing = group.processing.plus(work_clock().since(started))
        return batch if self.stream is None else packed(batch)

    def _process(self, host_steps: HostSteps, batch: Batch, images: Mapping[str, Any], step: int) -> Batch:
        """The batch with its images, after the host steps."""
        if host_steps.uses_images:
            return host_steps({**batch, **images}, step)
        held_back = {camera: HeldBack(pixels) for camera, pixels in images.items()}
        processed = host_steps({**batch, **held_back}, step)
        return {k: value.images if isinstance(value, HeldBack) else value for k, value in processed.items()}

    def to_device(self, batch: Batch) -> Batch:
        """The batch on the device that uses it."""
        if self.stream is None or self.device is None:
            return batch
        with torch.cuda.stream(self.stream):
            moved: Batch = {}
            for key, value in batch.items():
                if isinstance(value, Packed):
                    moved |= value.on(self.device)
                else:
                    moved[key] = value.on(self.device) if isinstance(value, Staged) else value
        current = torch.cuda.current_stream(self.device)
        current.wait_stream(self.stream)
        for value in moved.values():
            if isinstance(value, Tensor) and value.is_cuda:
                value.record_stream(current)  # otherwise its memory could be reused while training reads it
        return moved

    def _fill(self, group: StepGroup, frames: StepFrames) -> list[Job]:
        if self.stager is None:
            return self._fill_on_cpu(group, frames, np.arange(len(frames.ids)))
        images, jobs = self.stager.stage(frames, self.batch_size)
        if frames.camera not in self.deltas:
            for staged in images:
                staged.index = staged.index[:, 0]
        format = self.store.stored_format(frames.camera)
        name = format.name if isinstance(format, FeatureFormat) else frames.camera
        group.images[name] = [*images]
        return jobs

    def _fill_on_cpu(self, group: StepGroup, frames: StepFrames, samples: np.ndarray) -> list[Job]:
        stored_format = self.store.stored_format(frames.camera)
        if isinstance(stored_format, FeatureFormat):
            return self._fill_features(group, frames, stored_format)
        format = self.store.format(frames.camera)
        shape = (*frames.ids.shape, format.height, format.width, format.channels)
        pixels = self.buffers.take(shape, format.dtype)
        images = torch.from_numpy(pixels).movedim(-1, -3)  # [b, T, C, H, W]
        images = images if frames.camera in self.deltas else images[:, 0]
        group.images[frames.camera] = list(images.split(self.batch_size))
        parts = np.array_split(samples, min(self.jobs, len(samples)))
        convert = [partial(self._convert, frames, part, pixels) for part in parts]
        return [partial(self.store.retry_if_truncated, frames.camera, job) for job in convert]

    def _fill_features(self, group: StepGroup, frames: StepFrames, format: FeatureFormat) -> list[Job]:
        count, steps = frames.ids.shape
        rows = self.buffers.take((count * steps, format.nbytes))
        features = format.tensors(torch.from_numpy(rows)).unflatten(0, (count, steps))  # [b, T, ...]
        features = features if frames.camera in self.deltas else features[:, 0]
        group.images[format.name] = list(features.split(self.batch_size))

        def copy() -> None:
            if frames.all_cached:
                self.store.gather(frames.camera, frames.ids.ravel(), rows)
                return
            for place, row in enumerate(rows):
                row[:] = np.asarray(frames.planes(self.store, *divmod(place, steps)))

        return [copy]

    def _convert(self, frames: StepFrames, samples: np.ndarray, out: np.ndarray) -> None:
        format = self.store.format(frames.camera)
        for i in samples.tolist():
            converted: dict[int, int] = {}  # padding repeats a frame
            for t, frame in enumerate(frames.ids[i].tolist()):
                if frame in converted and (i, t) not in frames.replacements:
                    out[i, t] = out[i, converted[frame]]
                    continue
                to_rgb(format, np.asarray(frames.planes(self.store, i, t)), out[i, t])
                converted[frame] = t


def to_tensors(batch: Mapping[str, Any]) -> Batch:
    """numpy arrays as tensors; everything else unchanged."""
    return {key: torch.from_numpy(value) if _is_numeric(value) else value for key, value in batch.items()}


def _split(values: Sequence[Any], size: int) -> list[Sequence[Any]]:
    return [values[first : first + size] for first in range(0, len(values), size)]


def packed(batch: Batch) -> Batch:
    """Tensors in one piece, for a GPU; everything else unchanged."""
    tensors = {key: value for key, value in batch.items() if isinstance(value, Tensor)}
    rest = {key: value for key, value in batch.items() if key not in tensors}
    return {COLUMNS: pack(tensors), **rest}


def _is_numeric(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype != object
