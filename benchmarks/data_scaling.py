"""Streaming with 1, 4 and 15 workers and as several ranks, beside what decoding alone reaches with as many processes.

    python benchmarks/data_scaling.py [--workers 1 4 15] [--ranks 1 2 4] [--seconds 3] [--root FOLDER ...]

Without --root it takes the datasets of `data_sets.py`: 96x96, 256x256, and two cameras of 480x640, all AV1 with a key
frame every second frame. A measurement starts when the pool is full: it is the speed of a long run. With several ranks,
each has its share of the cores.
"""

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import data_sets
import measuring
from flexor.bench import limits
from flexor.bench.data import Options, bench_data
from flexor.config.schema import DatasetConfig, TrainConfig
from flexor.core.machine import usable_cores
from flexor.data.dataset import open_dataset
from flexor.data.settings import CacheConfig

BATCH = 64
MADE = {"av1_gop2_96": (20, 300), "av1_gop2_256": (6, 300), "av1_gop2": (6, 240)}
POOL_BYTES = 2_000_000_000  # the most that streaming takes by itself
RATES = ("threads", "frames_per_s_node", "decode_limit_frames_per_s", "memory_limit_frames_per_s", "of_limit")
COSTS = ("shares", "cpu_s_per_frame", "frames_decoded_per_frame_delivered", "peak_memory_bytes")


def main() -> None:
    args = parse()
    limits.SECONDS, limits.PASSES = args.seconds / 2, 2
    roots = args.root or [data_sets.dataset(name, *size) for name, size in MADE.items()]
    results: dict[str, list[dict[str, Any]]] = {}
    print(f"{'dataset':28} workers ranks  frames/s     limit   share  us/frame  busy", flush=True)
    for root in roots:
        results[root.name] = measure_dataset(root, args)
    if args.output:
        about = {"date": time.strftime("%Y-%m-%d"), "batch_size": BATCH, **measuring.machine()}
        args.output.write_text(json.dumps({**about, "results": results}, indent=1) + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 4, 15])
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement, about")
    parser.add_argument("--root", type=Path, nargs="*", help="these datasets instead of made ones")
    parser.add_argument("--output", type=Path, help="a file for the results, as JSON")
    return parser.parse_args()


def measure_dataset(root: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    """One measurement for each number of workers, then one for each number of ranks."""
    dataset = open_dataset(root=root)
    cameras = dataset.cameras
    alone = limits.decode_limit(dataset, cameras, 1, 1.0)
    cores = usable_cores()
    pool = POOL_BYTES // max(dataset.store.format(camera).nbytes for camera in cameras)
    counts = [(workers, 1) for workers in args.workers]
    counts += [(max(1, cores // ranks - 1), ranks) for ranks in args.ranks if ranks > 1]
    measured = []
    for workers, ranks in counts:
        frames = alone * workers * ranks * args.seconds
        steps = max(20, int(frames / (BATCH * ranks * len(cameras))))
        epoch = len(dataset) // (BATCH * ranks)
        warmup = min(max(10, min(steps, pool // (BATCH * ranks * len(cameras)))), epoch - 1)
        cache = CacheConfig(tier="stream")
        settings = DatasetConfig(root=str(root), cache=cache, decode_in="processes", on_bad_frame="skip")
        config = replace(TrainConfig(), dataset=settings, batch_size=BATCH, num_workers=workers)
        report = bench_data(config, Options(ranks=ranks, batches=steps, warmup=warmup))
        measured.append({"ranks": ranks, **{name: report[name] for name in (*RATES, *COSTS)}})
        print(line(root.name, measured[-1]), flush=True)
    return measured


def line(name: str, figures: dict[str, Any]) -> str:
    rate, limit = figures["frames_per_s_node"], figures["decode_limit_frames_per_s"]
    interpreter = 1e6 * figures["shares"]["interpreter"] * figures["ranks"] / rate
    busy = ", ".join(f"{name} {share:.0%}" for name, share in figures["shares"].items())
    memory = figures["peak_memory_bytes"] / 1e9
    return (
        f"{name:28} {figures['threads']:7} {figures['ranks']:5} {rate:9,.0f} {limit:9,.0f} {rate / limit:6.0%} "
        f"{interpreter:9.1f}  {busy}; {memory:.2f} GB"
    )


if __name__ == "__main__":
    main()
