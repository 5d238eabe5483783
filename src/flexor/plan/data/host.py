"""What a run takes of the host: its memory and its cores.

All of it follows from settings by arithmetic: that of `data/loader/loader.py`, `data/loader/choose_order.py` and
`data/loader/to_gpu.py`, whose constants are used here. What no setting says (the size of a process, the cost of
decoding a frame) is a figure that was measured once; `flexor bench data` measures it on the machine and the data at
hand.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from flexor.data.loader.choose_order import LEAST_POOL, MOST_POOL, UNITS_WANTED
from flexor.data.loader.loader import PREFETCH_BYTES, PREFETCH_STEPS
from flexor.data.loader.open import JPEG_SHARE
from flexor.data.settings import CacheConfig, picture_size
from flexor.data.video.decode import KEPT_DECODERS
from flexor.data.video.planes import PlaneFormat

PROCESS = {True: 3_500_000_000, False: 600_000_000}
"""Bytes of the host that a training process takes by itself: with CUDA and its libraries, without."""
DECODER_FRAMES = 12  # that a decoder holds: references, and those it is working on
GPU_SPARE_FRAMES = 1024  # that each GPU has room for beyond its part: lanes are not equally long
GB = 1e9


@dataclass(frozen=True)
class Camera:
    """The pictures of one camera, as they are in the dataset and as they are trained on."""

    height: int
    width: int
    steps: int = 1
    """Pictures of it in one sample."""
    codec: str = "av1"
    gop: int = 2
    """Frames from one key frame to the next."""
    size: tuple[int, int] | None = None
    """Height and width that it is scaled to when decoded."""
    layout: str = "yuv420p"
    """How its frames are kept for a GPU (see `PlaneFormat`)."""

    @property
    def pixels(self) -> int:
        """Of a decoded frame."""
        return self.height * self.width

    def kept_bytes(self, rgb: bool = False) -> int:
        """A frame in memory: planes as decoded, or RGB."""
        height, width = self.size or (self.height, self.width)
        layout = self.layout
        if layout == "yuv420p" and (rgb or height % 2 or width % 2):
            layout = "rgb24"
        return PlaneFormat(height, width, layout).nbytes


@dataclass(frozen=True)
class Data:
    """A dataset, as far as memory, cores and disk depend on it."""

    frames: int
    """Moments: rows of its table. Each has a frame of every camera."""
    cameras: tuple[Camera, ...]
    row_bytes: int = 256
    """Of a row without its pictures, in memory."""
    file_bytes: int = 0
    """Of all its files."""

    def scaled(self, cache: CacheConfig) -> Data:
        """With the pictures that `dataset.cache.size` asks for."""
        size = picture_size(cache.size)
        return replace(self, cameras=tuple(replace(camera, size=size) for camera in self.cameras))

    def moment_bytes(self, rgb: bool = False) -> int:
        """One frame of every camera in memory."""
        return sum(camera.kept_bytes(rgb) for camera in self.cameras)

    def kept_bytes(self, cache: CacheConfig, rgb: bool = False) -> int:
        """All frames, kept."""
        share = JPEG_SHARE if cache.format == "jpeg" else 1
        return int(self.frames * self.moment_bytes(rgb) * share)

    @property
    def pictures(self) -> int:
        """In one sample."""
        return sum(camera.steps for camera in self.cameras)


@dataclass(frozen=True)
class Loading:
    """How samples are loaded on one machine."""

    batch_size: int
    accumulation: int = 1
    ranks: int = 1
    """Processes on this machine."""
    world_size: int | None = None
    """Processes on all machines; as many as ranks unless given."""
    workers: int = 4
    """Threads of each."""
    tier: str = "stream"
    """stream, ram, disk or gpu: see `choose_tier` for what auto becomes."""
    gpu: bool = True
    """Training is on a GPU: frames stay planes, batches are pinned."""
    gpu_decoder: bool = False

    @property
    def global_batch(self) -> int:
        return self.batch_size * self.accumulation * (self.world_size or self.ranks)


def choose_tier(data: Data, cache: CacheConfig, free_memory: int, free_disk: int, rgb: bool = False) -> str:
    """What `dataset.cache.tier=auto` becomes on a machine with so much room."""
    if not data.cameras or cache.tier != "auto":
        return cache.tier if data.cameras else "stream"
    need, given = data.kept_bytes(cache, rgb), None if cache.gb is None else int(cache.gb * GB)
    if need <= (free_memory // 4 if given is None else given):
        return "ram"
    return "disk" if need <= (free_disk // 4 if given is None else given) else "stream"


# The host's memory.


@dataclass(frozen=True)
class HostMemory:
    """Bytes of one machine's memory, by what they are for."""

    processes: int
    decoders: int
    table: int
    pool: int
    """Frames on their way into batches."""
    batches: int
    """Batches that are ready, and the one in use."""
    cache: int
    """Frames that stay."""
    checkpoint: int
    """A copy of what is being saved beside the training."""

    @property
    def total(self) -> int:
        return sum(getattr(self, f.name) for f in fields(self))


def host_memory(data: Data, loading: Loading, cache: CacheConfig, saved_beside: int = 0) -> HostMemory:
    """What one machine needs. `saved_beside`: bytes of its share of a checkpoint with checkpoint.async, else 0."""
    data, rgb = data.scaled(cache), not loading.gpu
    kinds = {(c.codec, c.height, c.width): c.pixels * 3 // 2 for c in data.cameras}
    largest = sorted(kinds.values())[-KEPT_DECODERS:]
    decoders = (
        0 if loading.gpu_decoder else loading.ranks * max(1, loading.workers) * sum(largest) * DECODER_FRAMES
    )
    return HostMemory(
        processes=loading.ranks * PROCESS[loading.gpu],
        decoders=decoders,
        table=loading.ranks * data.frames * data.row_bytes,
        pool=0 if loading.gpu_decoder or not data.cameras else pool_bytes(data, loading, cache),
        batches=loading.ranks * (prefetched_steps(data, loading) + 1) * step_bytes(data, loading),
        cache=data.kept_bytes(cache, rgb) if loading.tier == "ram" else 0,
        checkpoint=saved_beside,
    )


def pool_bytes(data: Data, loading: Loading, cache: CacheConfig) -> int:
    """The budget of the loader's pools on this machine: what shuffling wants, within bounds."""
    if cache.pool_gb is not None:
        return int(cache.pool_gb * GB)
    unit = max(camera.gop for camera in data.cameras)
    around = sum(
        c.kept_bytes(not loading.gpu) * (unit + c.steps - 1) for c in data.cameras
    )  # frames of a unit
    return int(min(max(UNITS_WANTED * loading.global_batch * around, LEAST_POOL), MOST_POOL))


def prefetched_steps(data: Data, loading: Loading) -> int:
    """Optimizer steps whose batches may wait."""
    rgb = sum(camera.kept_bytes(rgb=True) * camera.steps for camera in data.cameras)
    step = max(1, rgb * loading.batch_size * loading.accumulation)
    return max(1, min(PREFETCH_STEPS, PREFETCH_BYTES // step))


def step_bytes(data: Data, loading: Loading) -> int:
    """The pictures of an optimizer step of one rank, as they wait in memory."""
    sizes = [c.kept_bytes(not loading.gpu) * c.steps * loading.batch_size for c in data.cameras]
    return loading.accumulation * sum(pinned(size) if loading.gpu else size for size in sizes)


def pinned(size: int) -> int:
    """Bytes that torch takes for so many pinned ones: the next power of two."""
    return 1 << (size - 1).bit_length() if size else 0


def gpu_cache_bytes(data: Data, loading: Loading, cache: CacheConfig) -> int:
    """What frames that stay on the GPU (`dataset.cache.tier=gpu`) take of each GPU's memory."""
    if loading.tier != "gpu":
        return 0
    return (-(-data.frames // loading.ranks) + GPU_SPARE_FRAMES) * data.scaled(cache).moment_bytes()


# Cores.

VGA = 480 * 640
PICTURES = "pictures"  # a camera that is no video: PNG or JPEG in the dataset's tables
LONG_GOP = 16  # frames; beyond it, key frames hardly count
DECODE_S: Mapping[str, tuple[float, float]] = {
    "av1": (3.0e-3, 0.5e-3),
    "h264": (4.0e-3, 2.0e-3),
    "hevc": (3.3e-3, 1.65e-3),
    "vp9": (8.0e-3, 4.0e-3),
    PICTURES: (7.0e-3, 7.0e-3),
}
"""Seconds of one core for a frame of 480x640 with a camera's noise, where every second frame is a key frame and where
few are. AV1 on an ARM core, the others on an x86 core (benchmarks/results, 2026-11-15); HEVC and VP9 with many key
frames and single pictures are estimates."""
GATHER_S = 0.1e-3  # seconds of one core to put such a frame into a batch, likewise
REACHED = 0.8  # of what decoding alone would do, that loading does
TWICE = 1.1  # decoded frames per frame where windows overlap: units share a few
GPU_DECODER = 3500.0  # such frames/s of one GPU's decoder beside training; an H200's


@dataclass(frozen=True)
class Speed:
    """How fast a machine loads this data, in seconds of one core."""

    decode_s: float
    """To decode one frame of each camera."""
    gather_s: float
    """To put the pictures of one sample into a batch."""
    reached: float = REACHED
    source: str = "expected"


def expected_speed(data: Data) -> Speed:
    """From figures measured elsewhere, by pixels."""
    decode = 0.0
    for camera in data.cameras:
        often, rarely = DECODE_S.get(camera.codec, DECODE_S["h264"])
        decode += (rarely if camera.gop >= LONG_GOP else often) * camera.pixels / VGA
    kept = sum(camera.kept_bytes() * camera.steps for camera in data.cameras)
    return Speed(decode, GATHER_S * kept / (VGA * 3 // 2))


def measured_speed(data: Data, report: Mapping[str, Any]) -> Speed:
    """From what `flexor bench data` wrote about this data on this machine."""
    threads = report["threads"]
    expected = expected_speed(data)
    decoding, memory = report.get("decode_limit_frames_per_s"), report.get("memory_limit_frames_per_s")
    return Speed(
        decode_s=len(data.cameras) * threads / decoding if decoding else expected.decode_s,
        gather_s=data.pictures * threads / memory if memory else expected.gather_s,
        reached=min(1.0, report.get("of_limit") or REACHED),
        source="measured",
    )


@dataclass(frozen=True)
class Supply:
    """Samples that a machine can load, against those that it would train on."""

    wanted: float
    """Samples per second of all its GPUs, if they never waited."""
    loaded: float
    """Samples per second that its cores can bring."""
    threads: int
    """Threads that would bring what is wanted, for all ranks."""
    cores: int
    """Cores that those threads and the training processes need."""

    @property
    def bound(self) -> bool:
        """Whether training waits for data."""
        return self.loaded < self.wanted

    @property
    def stretch(self) -> float:
        """Times as long as a step takes for waiting."""
        return max(1.0, self.wanted / self.loaded) if self.loaded else math.inf


def supply(
    data: Data, speed: Speed, loading: Loading, wanted: float, cores: int, *, kept: bool = False
) -> Supply:
    """Loading on a machine with so many cores. `kept`: frames are there from an earlier epoch."""
    if not data.cameras:
        return Supply(wanted, math.inf, 0, loading.ranks)
    again = TWICE if any(camera.steps > 1 for camera in data.cameras) else 1.0
    decode_s = 0.0 if kept or loading.gpu_decoder else speed.decode_s * again
    per_sample = (decode_s + speed.gather_s) / speed.reached  # core seconds
    free = max(1, cores - loading.ranks) if loading.workers else loading.ranks
    working = min(free, max(1, loading.workers) * loading.ranks)
    loaded = working / per_sample
    if loading.gpu_decoder and not kept:
        frames = sum(camera.pixels for camera in data.cameras) / VGA * again
        loaded = min(loaded, loading.ranks * GPU_DECODER / frames)
    threads = max(loading.ranks, math.ceil(wanted * per_sample - 1e-9))
    return Supply(wanted, loaded, threads, threads + loading.ranks)


def loading_seconds(samples: float, per_epoch: int, first: Supply, later: Supply) -> float:
    """Seconds until so many samples were trained on: the first epoch may be slower than those from a cache."""
    fresh = min(samples, per_epoch)
    return fresh / min(first.wanted, first.loaded) + (samples - fresh) / min(later.wanted, later.loaded)


# Several runs on one GPU.


@dataclass(frozen=True)
class HostResources:
    """What a machine has for experiments, or what one of them takes."""

    gpu_memory: int
    host_memory: int
    cores: int


@dataclass(frozen=True)
class Together:
    """Experiments that run on one GPU at the same time."""

    fit: int
    limit: str
    """What there is no more of: GPU memory, memory, cores."""
    useful: int
    """More than so many only wait for each other."""
    faster: float
    """Times as much work per hour as one after the other, at best."""


def experiments_at_once(machine: HostResources, one: HostResources, busy: float) -> Together:
    """How many runs fit on a GPU, and how many are worth it: one that keeps it `busy` half of the time leaves
    room for a second. All figures of `machine` are what it has for this one GPU."""
    assert 0 < busy <= 1
    fits = {
        "GPU memory": machine.gpu_memory // max(1, one.gpu_memory),
        "memory": machine.host_memory // max(1, one.host_memory),
        "cores": machine.cores // max(1, one.cores),
    }
    limit = min(fits, key=lambda name: fits[name])
    fit = fits[limit]
    return Together(fit, limit, min(fit, math.ceil(1 / busy - 1e-9)), max(1.0, min(fit, 1 / busy)))
