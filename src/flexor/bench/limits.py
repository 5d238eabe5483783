"""Measures the hardware limits: decoding alone, and memory alone.

*Decoding*: videos are decoded from start to end. Each process has its own demuxer and decoder, as FFmpeg opens them,
and drops every image; threads would wait for each other in Python. Only what is not a video file on this machine is
decoded in threads. It uses none of the loader's code, so that a bug in the loader can't lower the limit it is compared
with. *Memory*: images in the delivered format are copied from random places into a batch.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import numpy as np
import torch
from av.container import InputContainer

from flexor.core.child_python import module_command, module_environment
from flexor.core.errors import FlexorError
from flexor.data.dataset import Dataset
from flexor.data.frames.clips import Clip, VideoClip
from flexor.data.storage.ranges import Ranges
from flexor.data.video.decode import RangesFile
from flexor.data.video.open_file import open_video

PASSES = 2  # the better one counts: other load on the machine can only make it slower
SECONDS = 4.0  # per pass, at most
RUN = 128  # frames that a thread decodes from one place before it moves to another
MOST_STRETCHES = 1000  # that a process decodes, again and again
OPEN_FILES = 16  # per thread
GATHERED = 512 << 20  # bytes copied from: more than any processor's cache


@dataclass(frozen=True)
class Limits:
    """Frames per second."""

    decode: float
    memory: float

    def frames_per_s(self, delivered: float, decoded: float) -> float:
        """The highest delivery rate if this many frames have to be decoded for it."""
        return min(self.memory, self.decode * delivered / decoded) if decoded else self.memory


def measure_limits(dataset: Dataset, cameras: Sequence[str], threads: int, device: str, batch: int) -> Limits:
    decode = decode_limit(dataset, cameras, threads)
    return Limits(decode, memory_limit(dataset, cameras, threads, device, batch))


def is_remote(dataset: Dataset, cameras: Sequence[str]) -> bool:
    """Whether videos are read over the network."""
    clips = (dataset.store.clips[camera, int(dataset.episodes.index[0])] for camera in cameras)
    return any(isinstance(c, VideoClip) and not Path(c.file.index.ranges.name).is_file() for c in clips)


def decode_limit(
    dataset: Dataset, cameras: Sequence[str], threads: int, seconds: float | None = None
) -> float:
    """Frames per second of decoding with this many threads; frames are dropped."""
    seconds = seconds or SECONDS
    runs = _runs(dataset, cameras)
    # a pass that ends early must not use only one camera
    order = np.random.default_rng(0).permutation(len(runs))
    runs = [runs[i] for i in order]
    stretches = [_stretch(*run) for run in runs]
    if None in stretches:
        return max(_decode_pass(runs, threads, seconds) for _ in range(PASSES))
    return max(_process_pass(stretches, threads, seconds) for _ in range(PASSES))


Run = tuple[Clip, np.ndarray]  # frames of one episode, one after the other


def _runs(dataset: Dataset, cameras: Sequence[str]) -> list[Run]:
    runs = []
    for camera in cameras:
        for episode in dataset.episodes.index.tolist():
            clip = dataset.store.clips[camera, episode]
            frames = np.arange(len(clip.starts()))
            runs += [(clip, frames[first : first + RUN]) for first in range(0, len(frames), RUN)]
    return runs


def _stretch(clip: Clip, frames: np.ndarray) -> tuple[str, int, int] | None:
    """A run as another process can decode it; None if only this one can."""
    if not isinstance(clip, VideoClip) or not Path(clip.file.index.ranges.name).is_file():
        return None
    pts = clip.file.index.frame_pts[clip.numbers[frames]]
    return clip.file.index.ranges.name, int(pts[0]), int(pts[-1])


def _process_pass(stretches: Sequence[tuple[str, int, int] | None], processes: int, seconds: float) -> float:
    """Each process decodes videos, again and again, until the time is over."""
    command, pipe = module_command("flexor.bench.decode_alone"), subprocess.PIPE
    running = [
        subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=module_environment())
        for _ in range(processes)
    ]
    try:
        for number, process in enumerate(running):
            begin = number * len(stretches) // processes  # elsewhere than the others
            part = [*stretches[begin:], *stretches[:begin]][:MOST_STRETCHES]
            _tell(process, json.dumps(part))
        for process in running:
            _answer(process)
        for process in running:
            _tell(process, str(seconds))
        answers = [_answer(process).split() for process in running]
        return sum(int(frames) / float(elapsed) for frames, elapsed in answers)
    finally:
        for process in running:
            process.kill()
            process.communicate()


def _tell(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{line}\n")
    process.stdin.flush()


def _answer(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise FlexorError(f"a process that decodes alone ended with code {process.wait()} and no result.")
    return line


def _decode_pass(runs: Sequence[Run], threads: int, seconds: float) -> float:
    started = time.perf_counter()
    numbers = count()  # next() on it is atomic

    def work(_: int) -> float:
        frames, player = 0, Player()
        while (number := next(numbers)) < len(runs) and time.perf_counter() - started < seconds:
            frames += player.decode(*runs[number])
        player.keep(0)
        return frames / (time.perf_counter() - started)  # until this thread is done, not until all are

    with ThreadPoolExecutor(threads) as pool:
        return sum(pool.map(work, range(threads)))


class Player:
    """One thread's open files."""

    def __init__(self) -> None:
        self.open: dict[str, InputContainer] = {}

    def decode(self, clip: Clip, frames: np.ndarray) -> int:
        """The number of decoded frames: for a video including those between the key frame and the first frame."""
        if not isinstance(clip, VideoClip):
            _, decode, numbers = clip.request(frames)
            return len(frames) - len(decode(numbers, lambda *_: None))
        index, numbers = clip.file.index, clip.numbers[frames]
        container = self._container(index.ranges)
        stream = container.streams.video[0]
        container.seek(int(index.frame_pts[numbers[0]]), stream=stream)
        stop, decoded = int(index.frame_pts[numbers[-1]]), 0
        for frame in container.decode(stream):
            decoded += 1
            if frame.pts is None or frame.pts >= stop:
                break
        return decoded

    def _container(self, ranges: Ranges) -> InputContainer:
        if ranges.name not in self.open:
            file = ranges.name if Path(ranges.name).is_file() else RangesFile(ranges)
            container = open_video(file)
            container.streams.video[0].thread_type = "NONE"
            container.streams.video[0].codec_context.thread_count = 1
            self.keep(OPEN_FILES - 1)
            self.open[ranges.name] = container
        return self.open[ranges.name]

    def keep(self, files: int) -> None:
        """Close all except the most recently opened files."""
        while len(self.open) > files:
            self.open.pop(next(iter(self.open))).close()


def memory_limit(
    dataset: Dataset,
    cameras: Sequence[str],
    threads: int,
    device: str,
    batch: int,
    seconds: float | None = None,
) -> float:
    """Frames per second of copying images of the cameras' sizes from random places into a batch."""
    seconds = seconds or SECONDS / 4
    host = device == "host"  # planes, as they are transferred to a GPU
    formats, features = dataset.store.format, dataset.features
    sizes = [formats(c).nbytes if host else int(np.prod(features[c].chw)) for c in cameras]
    size, device = max(1, sum(sizes) // max(1, len(sizes))), "cpu" if host else device
    frames = max(batch, GATHERED // size)
    source = torch.zeros(frames, size, dtype=torch.uint8, device=device)
    source.fill_(1)  # pages that were never written all map to the same page
    out = torch.empty(batch, size, dtype=torch.uint8, device=device)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return max(_gather_pass(source, out, seconds / PASSES) for _ in range(PASSES))
    finally:
        torch.set_num_threads(before)


def _gather_pass(source: torch.Tensor, out: torch.Tensor, seconds: float) -> float:
    picks = torch.randint(len(source), (64, len(out)), device=source.device)
    torch.index_select(source, 0, picks[0], out=out)
    started, copied = time.perf_counter(), 0
    while time.perf_counter() - started < seconds:
        for pick in picks:
            torch.index_select(source, 0, pick, out=out)
            copied += len(out)
            if source.device.type == "cpu" and time.perf_counter() - started > seconds:
                break
        if source.device.type == "cuda":
            torch.cuda.synchronize(source.device)
    return copied / (time.perf_counter() - started)
