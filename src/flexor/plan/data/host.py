"""Host memory and cores that a run needs.

They are computed from the settings in the same way as in `data/loader/loader.py`, `data/loader/choose_order.py` and
`data/loader/to_gpu.py`, with the constants of these files. What does not follow from a setting (the memory of a
process, the time to decode a frame) is a constant that was measured once. `flexor bench data` measures the loading
speed for your machine and data.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from flexor.core.machine import pinned_bytes
from flexor.data.loader.choose_order import LEAST_POOL, MOST_POOL, TARGET_UNITS
from flexor.data.loader.loader import prefetched_groups, steps_of_group
from flexor.data.loader.open import JPEG_SHARE, MANY_WORKERS, ahead_bytes
from flexor.data.settings import CacheConfig, parse_image_size
from flexor.data.video.decode import MAX_DECODERS
from flexor.data.video.planes import PlaneFormat

PROCESS = {True: 3_500_000_000, False: 600_000_000}
"""Bytes of host memory of a training process without data: with CUDA and its libraries, and without."""
DECODE_PROCESS = 45_000_000  # bytes of a process that decodes, without frames: many workers are processes
DECODER_FRAMES = 12  # in a decoder's memory: reference frames and frames in progress
GPU_SPARE_FRAMES = 1024  # extra frames cached per GPU: lanes differ in length
GB = 1e9


@dataclass(frozen=True)
class Camera:
    """The images of one camera, as stored in the dataset and as used in training."""

    height: int
    width: int
    steps: int = 1
    """Number of its images in one sample."""
    codec: str = "av1"
    gop: int = 2
    """Frames from one key frame to the next."""
    size: tuple[int, int] | None = None
    """Height and width that images are scaled to after decoding."""
    layout: str = "yuv420p"
    """How its frames are stored for a GPU (see `PlaneFormat`)."""

    @property
    def pixels(self) -> int:
        """Pixels of a decoded frame."""
        return self.height * self.width

    def frame_bytes(self, rgb: bool = False) -> int:
        """Bytes of a frame in memory: planes as decoded, or RGB."""
        height, width = self.size or (self.height, self.width)
        layout = self.layout
        if layout == "yuv420p" and (rgb or height % 2 or width % 2):
            layout = "rgb24"
        return PlaneFormat(height, width, layout).nbytes


@dataclass(frozen=True)
class Data:
    """A dataset, as far as memory, cores and disk depend on it."""

    frames: int
    """Time steps: rows of its table. Each has one frame of every camera."""
    cameras: tuple[Camera, ...]
    row_bytes: int = 256
    """Bytes of a row in memory, without its images."""
    file_bytes: int = 0
    """Bytes of all its files."""
    fps: float | None = None
    """Its time steps per second, if it was recorded already."""

    def scaled(self, cache: CacheConfig) -> Data:
        """The same data with the image size of `dataset.cache.size`."""
        size = parse_image_size(cache.size)
        return replace(self, cameras=tuple(replace(camera, size=size) for camera in self.cameras))

    def bytes_per_row(self, rgb: bool = False) -> int:
        """Bytes in memory of one frame of every camera."""
        return sum(camera.frame_bytes(rgb) for camera in self.cameras)

    def cache_bytes(self, cache: CacheConfig, rgb: bool = False) -> int:
        """Bytes of all frames in the cache."""
        return int(self.frames * self.bytes_per_row(rgb) * (JPEG_SHARE if cache.format == "jpeg" else 1))

    @property
    def pictures(self) -> int:
        """Number of images in one sample."""
        return sum(camera.steps for camera in self.cameras)


@dataclass(frozen=True)
class Loading:
    """How samples are loaded on one machine."""

    batch_size: int
    accumulation: int = 1
    ranks: int = 1
    """Processes on this machine."""
    world_size: int | None = None
    """Processes on all machines (default: `ranks`)."""
    workers: int = 4
    """Loading threads per process."""
    tier: str = "stream"
    """stream, ram, disk or gpu; `choose_tier` resolves auto."""
    gpu: bool = True
    """Training is on a GPU: frames stay in planes, and batches are in pinned memory."""
    gpu_decoder: bool = False
    features: int = 0
    """Bytes of the features of one image of every camera, which steps read instead of images; 0: they read images."""

    @property
    def global_batch(self) -> int:
        return self.batch_size * self.accumulation * (self.world_size or self.ranks)


def choose_tier(data: Data, cache: CacheConfig, free_memory: int, free_disk: int, rgb: bool = False) -> str:
    """Resolve `dataset.cache.tier=auto` for a machine with this free memory and disk space."""
    if not data.cameras or cache.tier != "auto":
        return cache.tier if data.cameras else "stream"
    need, budget = data.cache_bytes(cache, rgb), None if cache.gb is None else int(cache.gb * GB)
    if need <= (free_memory // 4 if budget is None else budget):
        return "ram"
    return "disk" if need <= (free_disk // 4 if budget is None else budget) else "stream"


# The host's memory.


@dataclass(frozen=True)
class HostMemory:
    """Bytes of one machine's memory by purpose."""

    processes: int
    decoders: int
    table: int
    pool: int
    """Decoded frames that wait to be put into batches."""
    batches: int
    """Prefetched batches, and the one in use."""
    cache: int
    """Cached frames."""
    checkpoint: int
    """A copy of the state that is saved in the background."""
    weights: int = 0
    """Frozen weights in float32, if the GPU has them in bfloat16."""
    features: int = 0
    """Features of images, which steps read instead of them."""

    @property
    def total(self) -> int:
        return sum(getattr(self, f.name) for f in fields(self))


def host_memory(
    data: Data,
    loading: Loading,
    cache: CacheConfig,
    checkpoint: int = 0,
    weights: int = 0,
    features: int = 0,
) -> HostMemory:
    """What one machine needs; `checkpoint`, `weights` and `features` as in `HostMemory`."""
    data, ranks, on_cpu = data.scaled(cache), loading.ranks, not loading.gpu_decoder
    frames = {(c.codec, c.height, c.width): c.pixels * 3 // 2 for c in data.cameras}
    per_thread = sum(sorted(frames.values())[-MAX_DECODERS:]) * DECODER_FRAMES
    in_processes = bool(data.cameras) and loading.tier == "stream" and loading.workers >= MANY_WORKERS
    process = DECODE_PROCESS + ahead_bytes(cache, 1) if in_processes else 0
    return HostMemory(
        processes=ranks * PROCESS[loading.gpu],
        decoders=ranks * max(1, loading.workers) * (per_thread + process) if on_cpu else 0,
        table=ranks * data.frames * data.row_bytes,
        pool=pool_bytes(data, loading, cache) if on_cpu and data.cameras and not loading.features else 0,
        batches=ranks * steps_in_memory(data, loading) * step_bytes(data, loading),
        cache=data.cache_bytes(cache, not loading.gpu) if loading.tier == "ram" else 0,
        checkpoint=checkpoint,
        weights=weights,
        features=features,
    )


def pool_bytes(data: Data, loading: Loading, cache: CacheConfig) -> int:
    """The budget of the loader's pools on this machine: what shuffling needs, within limits."""
    if cache.pool_gb is not None:
        return int(cache.pool_gb * GB)
    unit = max(camera.gop for camera in data.cameras)
    unit_bytes = sum(c.frame_bytes(not loading.gpu) * (unit + c.steps - 1) for c in data.cameras)
    return int(min(max(TARGET_UNITS * loading.global_batch * unit_bytes, LEAST_POOL), MOST_POOL))


def steps_in_memory(data: Data, loading: Loading) -> int:
    """Optimizer steps whose batches may be in memory: the group of steps in use, and those that wait."""
    rgb = loading.features * _steps(data) or sum(
        camera.frame_bytes(rgb=True) * camera.steps for camera in data.cameras
    )
    step = max(1, rgb * loading.batch_size * loading.accumulation)
    grouped = steps_of_group(loading.batch_size * loading.accumulation, step)
    return grouped * (1 + prefetched_groups(grouped * step))


def step_bytes(data: Data, loading: Loading) -> int:
    """Bytes of the images of one optimizer step of one rank, or their features, as prefetched in memory."""
    if loading.features:
        each = loading.features * _steps(data) * loading.batch_size
        return loading.accumulation * (pinned_bytes(each) if loading.gpu else each)
    sizes = [c.frame_bytes(not loading.gpu) * c.steps * loading.batch_size for c in data.cameras]
    return loading.accumulation * sum(pinned_bytes(size) if loading.gpu else size for size in sizes)


def _steps(data: Data) -> int:
    """Images of a camera in one sample, at most."""
    return max((camera.steps for camera in data.cameras), default=1)


def gpu_cache_bytes(data: Data, loading: Loading, cache: CacheConfig) -> int:
    """Bytes of each GPU's memory for cached frames (`dataset.cache.tier=gpu`)."""
    if loading.tier != "gpu":
        return 0
    return (-(-data.frames // loading.ranks) + GPU_SPARE_FRAMES) * data.scaled(cache).bytes_per_row()


# Cores.

VGA = 480 * 640
PICTURES = "pictures"  # a camera without video: PNG or JPEG images in the dataset's tables
LONG_GOP = 16  # frames; above this, the cost of key frames is small
DECODE_S: Mapping[str, tuple[float, float]] = {
    "av1": (3.0e-3, 0.5e-3),
    "h264": (4.0e-3, 2.0e-3),
    "hevc": (3.3e-3, 1.65e-3),
    "vp9": (8.0e-3, 4.0e-3),
    PICTURES: (7.0e-3, 7.0e-3),
}
"""Core seconds to decode a frame of 480x640 with camera noise: if every second frame is a key frame, and if few are.
AV1 on an ARM core, the others on an x86 core (benchmarks/results, 2026-11-15); HEVC and VP9 with many key frames and
single images are estimates."""
FRAME_S = 30e-6  # core seconds of a worker for any frame, however small
PYTHON_S = 10e-6
"""Seconds of a rank's interpreter for each frame: planning, requests and bookkeeping. All else is done by workers."""
GATHER_S = 0.1e-3  # core seconds to copy such a frame into a batch
REACHED = 0.8  # share of the pure decoding speed that loading reaches
OVERLAP = 1.1  # decoded frames per frame if windows overlap: neighbouring units share frames
GPU_DECODER = 3500.0  # such frames/s of one GPU's decoder during training; measured on an H200


@dataclass(frozen=True)
class Speed:
    """How fast a machine loads this data, in core seconds."""

    decode_s: float
    """To decode one frame of each camera."""
    gather_s: float
    """To copy the images of one sample into a batch."""
    reached: float = REACHED
    source: str = "expected"
    python_s: float = 0.0
    """Of a rank's interpreter, for one sample. More cores do not help it."""


def expected_speed(data: Data) -> Speed:
    """From reference measurements, scaled by the number of pixels."""
    decode = 0.0
    for camera in data.cameras:
        often, rarely = DECODE_S.get(camera.codec, DECODE_S["h264"])
        decode += FRAME_S + (rarely if camera.gop >= LONG_GOP else often) * camera.pixels / VGA
    sample_bytes = sum(camera.frame_bytes() * camera.steps for camera in data.cameras)
    return Speed(decode, GATHER_S * sample_bytes / (VGA * 3 // 2), python_s=PYTHON_S * data.pictures)


def measured_speed(data: Data, report: Mapping[str, Any]) -> Speed:
    """From the report of `flexor bench data` for this data on this machine."""
    threads = report["threads"]
    expected = expected_speed(data)
    decoding, memory = report.get("decode_limit_frames_per_s"), report.get("memory_limit_frames_per_s")
    return Speed(
        decode_s=len(data.cameras) * threads / decoding if decoding else expected.decode_s,
        gather_s=data.pictures * threads / memory if memory else expected.gather_s,
        reached=min(1.0, report.get("of_limit") or REACHED),
        source="measured",
        python_s=expected.python_s,
    )


@dataclass(frozen=True)
class DataSupply:
    """Samples that a machine can load, and those that it could train on."""

    demand: float
    """Samples per second that all its GPUs could train on without waiting."""
    loaded: float
    """Samples per second that it can load."""
    threads: int
    """Threads that can meet the demand, for all ranks together."""
    cores: int
    """Cores for those threads and the training processes."""
    most: float = math.inf
    """Samples per second that the interpreters of all ranks can hand on, with any number of cores."""

    @property
    def bound(self) -> bool:
        """Whether training waits for data."""
        return self.loaded < self.demand

    @property
    def stretch(self) -> float:
        """Factor on the step time from waiting for data."""
        return max(1.0, self.demand / self.loaded) if self.loaded else math.inf


def supply(
    data: Data, speed: Speed, loading: Loading, demand: float, cores: int, *, cached: bool = False
) -> DataSupply:
    """Loading on a machine with this number of cores. `cached`: frames are cached from an earlier epoch."""
    if not data.cameras:
        return DataSupply(demand, math.inf, 0, loading.ranks)
    repeats = OVERLAP if any(camera.steps > 1 for camera in data.cameras) else 1.0
    decode_s = 0.0 if cached or loading.gpu_decoder else speed.decode_s * repeats
    per_sample = (decode_s + speed.gather_s) / speed.reached  # core seconds
    free = max(1, cores - loading.ranks) if loading.workers else loading.ranks
    working = min(free, max(1, loading.workers) * loading.ranks)
    loaded = working / per_sample
    if loading.gpu_decoder and not cached:
        frames = sum(camera.pixels for camera in data.cameras) / VGA * repeats
        loaded = min(loaded, loading.ranks * GPU_DECODER / frames)
    most = loading.ranks / speed.python_s if speed.python_s else math.inf
    threads = max(loading.ranks, math.ceil(demand * per_sample - 1e-9))
    return DataSupply(demand, min(loaded, most), threads, threads + loading.ranks, most)


def loading_seconds(samples: float, per_epoch: int, first: DataSupply, later: DataSupply) -> float:
    """Seconds to train on these samples. The first epoch may be slower than later ones, which use the cache."""
    fresh = min(samples, per_epoch)
    return fresh / min(first.demand, first.loaded) + (samples - fresh) / min(later.demand, later.loaded)


# Several runs on one GPU.


@dataclass(frozen=True)
class Resources:
    """What a machine has for experiments, or what one experiment needs."""

    gpu_memory: int
    host_memory: int
    cores: int


@dataclass(frozen=True)
class ConcurrentRuns:
    """Experiments that run on one GPU at the same time."""

    fit: int
    limit: str
    """The resource that limits their number: GPU memory, memory or cores."""
    useful: int
    """With more than this number, they only wait for each other."""
    faster: float
    """Work per hour at best, relative to running them one after the other."""


def concurrent_runs(machine: Resources, run: Resources, busy: float) -> ConcurrentRuns:
    """How many runs fit on a GPU, and how many are useful: a run that keeps the GPU `busy` half of the time leaves
    time for a second one. `machine` holds the resources for this one GPU."""
    assert 0 < busy <= 1
    fits = {
        "GPU memory": machine.gpu_memory // max(1, run.gpu_memory),
        "memory": machine.host_memory // max(1, run.host_memory),
        "cores": machine.cores // max(1, run.cores),
    }
    limit, fit = min(fits.items(), key=lambda resource: resource[1])
    return ConcurrentRuns(fit, limit, min(fit, math.ceil(1 / busy - 1e-9)), max(1.0, min(fit, 1 / busy)))
