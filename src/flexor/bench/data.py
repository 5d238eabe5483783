"""`flexor bench data`: measures how fast batches are loaded, without a model, and compares it with the hardware limit.

Time counts from the moment the dataset is opened: a loader that had already filled its memory would seem faster
than it is. Each batch is dropped as soon as it is loaded. So the result is the rate at which the loader could feed
a training loop that takes no time itself.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from multiprocessing.synchronize import Barrier
from typing import Any

import torch

from flexor.bench.figures import LEVELS, EpochMeasurement, make_report
from flexor.bench.limits import is_remote, measure_limits
from flexor.bench.memory import PeakMemory
from flexor.config.schema import TrainConfig
from flexor.core.batch import Batch
from flexor.core.errors import ConfigError, FlexorError
from flexor.core.machine import usable_cores
from flexor.data.dataset import Dataset
from flexor.data.loader.loader import Loader
from flexor.data.loader.open import open_loader
from flexor.data.loader.to_gpu import Staged
from flexor.data.order.shuffle_quality import shuffle_quality
from flexor.policies.fit import fit_to_dataset, sample_of
from flexor.policies.processing.host_steps import HostPipeline, split_processing
from flexor.train.build import build_processing
from flexor.train.datasets import build_datasets

MODES = ("single", "sarm", "policy")
SARM_STEPS = 8
READ_AHEAD = 1000  # steps


@dataclass(frozen=True)
class Options:
    """What to measure, besides the settings of `flexor train`."""

    mode: str = "single"
    ranks: int = 1
    epochs: int = 1
    batches: int | None = None
    warmup: int = 0
    source: str = "disk"
    device: str = "host"

    def __post_init__(self) -> None:
        for name, minimum in (("ranks", 1), ("epochs", 1), ("batches", 1), ("warmup", 0)):
            value = getattr(self, name)
            if value is not None and value < minimum:
                raise ConfigError(f"{name}={value} must be at least {minimum}.")
        if self.batches is not None and self.epochs > 1:
            raise ConfigError("Give either --batches, to stop early, or --epochs, to measure whole epochs.")


@dataclass
class RankMeasurements:
    """The measurements of one rank."""

    first_batch_s: float
    stretches: list[EpochMeasurement]
    facts: dict[str, Any]


def bench_data(config: TrainConfig, options: Options) -> dict[str, Any]:
    """Measure, and report results per epoch and in total."""
    if config.dataset.cache.features not in ("auto", "off"):
        raise ConfigError(
            f"dataset.cache.features={config.dataset.cache.features}: `flexor bench data` has no model that encodes "
            "images. Leave it out; `flexor bench step` measures steps that read features."
        )
    threads = max(1, config.num_workers) * options.ranks
    with PeakMemory() as memory:
        at_start = memory.total
        alone = options.ranks == 1
        measured = [_measure(config, options, 0, None)] if alone else _measure_ranks(config, options)
    dataset, _ = build_datasets(config.dataset)
    cameras = _sample(config, options.mode, dataset)[1]
    limits = measure_limits(dataset, cameras, threads, options.device, config.batch_size)
    about = {
        "dataset": dataset.repo_id,
        "source": options.source,
        "mode": options.mode,
        "ranks": options.ranks,
        "threads": threads,
        "cores": usable_cores(),
        "device": options.device,
        "batch_size": config.batch_size,
        "seed": config.seed,
        "cameras": len(cameras),
        "episodes": len(dataset.episodes.index),
        "dataset_frames": len(dataset) * len(cameras),
        "remote": is_remote(dataset, cameras),
        **measured[0].facts,
        "memory_at_start_bytes": at_start,
        **memory.figures(),
    }
    first_batch_s = max(rank.first_batch_s for rank in measured)
    return make_report(about, first_batch_s, [rank.stretches for rank in measured], limits)


def bench_scaling(config: TrainConfig, options: Options, workers: Sequence[int]) -> dict[str, Any]:
    """The report for the largest number of workers, and a few figures for each number."""
    reports = [bench_data(replace(config, num_workers=count), options) for count in workers]
    for count, report in zip(workers, reports):
        report["num_workers"] = count
    names = (
        "num_workers",
        "frames_per_s_node",
        "limit_frames_per_s",
        "of_limit",
        "decode_in",
        "shares",
        "bound",
    )
    best = max(reports, key=lambda report: report["num_workers"])
    return {**best, "scaling": [{name: report[name] for name in names} for report in reports]}


def threads_per_rank(ranks: int) -> int:
    """A rank's share of the CPU cores, unless --num_workers is given."""
    return max(1, usable_cores() // ranks)


def _measure_ranks(config: TrainConfig, options: Options) -> list[RankMeasurements]:
    """One process per rank, as in training; they start together."""
    _open(config, options, 0).close()  # fixes the order: all ranks must use the same
    context = multiprocessing.get_context("spawn")
    start = context.Barrier(options.ranks)
    results: Any = context.Queue()
    ranks = [
        context.Process(target=_rank, args=(config, options, rank, start, results), daemon=True)
        for rank in range(options.ranks)
    ]
    for process in ranks:
        process.start()
    try:
        measured: dict[int, RankMeasurements] = {}
        while len(measured) < len(ranks):
            rank, result = _next_result(ranks, results)
            if isinstance(result, BaseException):
                raise result
            measured[rank] = result
    finally:
        for process in ranks:
            process.terminate()  # the finished ones have already sent their results
            process.join()
    return [measured[rank] for rank in range(options.ranks)]


def _next_result(ranks: Sequence[Any], results: Any) -> tuple[int, Any]:
    while results.empty():
        dead = [number for number, process in enumerate(ranks) if process.exitcode not in (None, 0)]
        if dead:
            raise FlexorError(
                f"Rank {dead[0]} ended with exit code {ranks[dead[0]].exitcode} and no error message."
            )
        time.sleep(0.05)
    return results.get()


def _rank(config: TrainConfig, options: Options, rank: int, start: Barrier, results: Any) -> None:
    try:
        results.put((rank, _measure(config, options, rank, start)))
    except BaseException as error:
        results.put((rank, error if isinstance(error, FlexorError) else FlexorError(repr(error))))


def _measure(config: TrainConfig, options: Options, rank: int, start: Barrier | None) -> RankMeasurements:
    """The measurements of one rank, starting with opening the dataset."""
    if start is not None:
        torch.set_num_threads(max(1, config.num_workers))
        start.wait()
    clock = Clock()
    loader = _open(config, options, rank)
    edges = _edges(loader, options)
    # with --batches, the loader must not know the early end: it would prefetch less towards it
    steps = loader.steps(0, edges[-1] + (READ_AHEAD if options.batches else 0))
    stretches = []
    for first, last in pairwise(edges):
        stretch = EpochMeasurement(clock.started)
        for _ in range(first, last):
            _take(steps, stretch, loader.frames_per_sample)
        if options.device.startswith("cuda"):
            torch.cuda.synchronize()
        clock.stop(stretch, loader.counters(), loader.in_processes)
        stretches.append(stretch)
    steps.close()  # type: ignore[attr-defined]
    decode_in = "processes" if loader.in_processes else "threads"
    facts = {"tier": loader.tier, "samples_per_epoch": loader.order.size, "decode_in": decode_in}
    if rank == 0:
        facts["shuffle"] = _shuffle(loader)
    first_batch_s = stretches[0].first_batch_at - stretches[0].started
    return RankMeasurements(first_batch_s, stretches[1 if options.warmup else 0 :], facts)


class Clock:
    """Time, CPU time and the loader's counters from one stretch to the next."""

    def __init__(self) -> None:
        self.started, self.cpu = time.perf_counter(), time.process_time()
        self.counters: dict[str, float] = {}

    def stop(self, stretch: EpochMeasurement, counters: dict[str, float], decode_processes: bool) -> None:
        stretch.ended = time.perf_counter()
        cpu = time.process_time() + (counters["decode_s"] if decode_processes else 0)
        stretch.cpu_s = cpu - self.cpu
        stretch.counters = {
            name: value if name in LEVELS else value - self.counters.get(name, 0)
            for name, value in counters.items()
        }
        self.started, self.cpu, self.counters = stretch.ended, cpu, counters


def _open(config: TrainConfig, options: Options, rank: int) -> Loader:
    dataset, _ = build_datasets(config.dataset)
    deltas, cameras, drop_last_frames = _sample(config, options.mode, dataset)
    device = None if options.device == "host" else torch.device(options.device)
    host_steps = _host_steps(config, dataset, device) if options.mode == "policy" else None
    return open_loader(
        dataset,
        config.dataset,
        deltas,
        cameras=cameras,
        batch_size=config.batch_size,
        accumulation=1,
        seed=config.seed,
        num_workers=config.num_workers,
        rank=rank,
        world_size=options.ranks,
        device=device,
        host_steps=host_steps,
        drop_last_frames=drop_last_frames,
    )


def _host_steps(config: TrainConfig, dataset: Dataset, device: torch.device | None) -> HostPipeline | None:
    """What the policy's processing does in the loader."""
    fitted = replace(config, policy=fit_to_dataset(config.policy, dataset, config.rename_map))
    before, _ = build_processing(fitted, dataset, device or torch.device("cpu"))
    return split_processing(before, config.seed)[0]


def _edges(loader: Loader, options: Options) -> list[int]:
    """The steps that separate measurements: 0, the end of the warm-up, the end of every epoch."""
    epochs = range(1, options.epochs + 1)
    # full batches of an epoch: one more would decode units of the next epoch
    ends = [max(epoch, epoch * loader.order.size // loader.global_batch) for epoch in epochs]
    if options.warmup >= ends[0]:
        raise ConfigError(
            f"warmup={options.warmup} is too long: an epoch has only {ends[0]} batches. Use a smaller --warmup."
        )
    if options.batches is not None:
        ends = [options.warmup + options.batches]
    return [0, *([options.warmup] if options.warmup else []), *ends]


def _shuffle(loader: Loader) -> dict[str, float]:
    """How well the first epoch is shuffled."""
    rows, dataset = loader.rows, loader.dataset
    episodes = dataset.episode_of(rows)
    quality = shuffle_quality(loader.order, episodes, rows, loader.global_batch, dataset.fps)
    return {**asdict(quality), "effective_batch": quality.effective_batch}


def _take(steps: Iterator[list[Batch]], stretch: EpochMeasurement, frames_per_sample: int) -> None:
    """Count the batches of one optimizer step and drop them."""
    started = time.perf_counter()
    batches = next(steps)
    now = time.perf_counter()
    stretch.first_batch_at = stretch.first_batch_at or now
    samples = sum(len(batch["index"]) for batch in batches)
    stretch.samples += samples
    stretch.frames += samples * frames_per_sample
    stretch.latencies.append((now - started, samples))
    for batch in batches:
        tensors = [v.host if isinstance(v, Staged) else v for v in batch.values()]
        stretch.bytes += sum(v.numel() * v.element_size() for v in tensors if torch.is_tensor(v))


def _sample(config: TrainConfig, mode: str, dataset: Dataset) -> tuple[dict[str, list[int]], list[str], int]:
    """A sample in this mode: steps of each feature, cameras, and the number of last frames that start no sample."""
    deltas: dict[str, list[int]] = {}
    cameras, drop_last_frames = list(dataset.cameras), 0
    if mode == "policy":
        policy = fit_to_dataset(config.policy, dataset, config.rename_map)
        cameras, deltas = sample_of(policy, config.rename_map)
        drop_last_frames = policy.drop_last_frames
    elif mode == "sarm":
        second = round(dataset.fps)
        deltas = {camera: [second * step for step in range(1 - SARM_STEPS, 1)] for camera in cameras}
    if not cameras:
        raise ConfigError(f"{dataset.repo_id}: a sample has no camera, so there are no frames to load.")
    return deltas, cameras, drop_last_frames
