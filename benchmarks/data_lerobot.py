"""One measurement of LeRobot's data loading; runs in LeRobot's environment and prints one JSON object.

    python data_lerobot.py --root DATASET --kind map --mode single --workers 2 --uint8

Frames per second are counted from one whole round of the workers to another, since with workers batches come
in bursts: from batch `workers` on, for at least `seconds` and two rounds, if there is that much data.
"""

import argparse
import json
import resource
import time
from pathlib import Path

import torch
from lerobot.datasets.lerobot_dataset import LeRobotDataset, LeRobotDatasetMetadata
from lerobot.datasets.streaming_dataset import StreamingLeRobotDataset
from torch.utils.data import DataLoader

STEPS = 8  # of mode sarm, one second apart


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--kind", choices=("map", "stream"), required=True)
    parser.add_argument("--mode", choices=("single", "sarm"), required=True)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--buffer", type=int, default=1000, help="kind stream: samples to shuffle among")
    parser.add_argument("--uint8", action="store_true", help="pictures as bytes instead of float32")
    parser.add_argument("--backend", choices=("torchcodec", "pyav"), default="torchcodec")
    parser.add_argument("--seconds", type=float, default=20.0)
    args = parser.parse_args()
    print(json.dumps(measure(args)))


def measure(args: argparse.Namespace) -> dict[str, object]:
    imported = resident_bytes()
    opened = time.perf_counter()
    batches = iter(open_loader(args))
    first = next(batches)
    latency = time.perf_counter() - opened
    cameras = [
        key for key, value in first.items() if key.startswith("observation.images.") and value.ndim >= 4
    ]
    episodes = [len(first["episode_index"].unique())]

    one_round = max(args.workers, 1)
    counted = [len(first["index"])]
    times = [time.perf_counter()]
    for batch in batches:
        counted.append(len(batch["index"]))
        episodes.append(len(batch["episode_index"].unique()))
        times.append(time.perf_counter())
        rounds, within = divmod(len(times), one_round)
        if rounds >= 3 and within == 0 and times[-1] - times[one_round - 1] > args.seconds:
            break
    started = min(one_round, len(times)) - 1
    seconds = times[-1] - times[started]
    samples = sum(counted[started + 1 :])
    del batches  # ends the workers, whose time is counted once they have ended
    own, workers = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    per_sample = sum(
        first[key].numel() // (len(first["index"]) * picture_size(first[key])) for key in cameras
    )
    frames = per_sample * samples
    return {
        "frames_per_s": frames / seconds if seconds else None,
        "samples_per_s": samples / seconds if seconds else None,
        "first_batch_latency_s": latency,
        "batches": len(times),
        "seconds": seconds,
        "frames_per_sample": per_sample,
        "episodes_per_batch": sum(episodes) / len(episodes),
        "cpu_s": own.ru_utime + own.ru_stime + workers.ru_utime + workers.ru_stime,
        "imported_bytes": imported,
        "torch": torch.__version__,
    }


def open_loader(args: argparse.Namespace) -> DataLoader:
    name = args.root.name
    deltas = None
    if args.mode == "sarm":
        cameras = LeRobotDatasetMetadata(name, root=args.root).camera_keys
        deltas = {camera: [float(step) for step in range(1 - STEPS, 1)] for camera in cameras}
    options = {"root": args.root, "delta_timestamps": deltas, "return_uint8": args.uint8}
    workers = {"num_workers": args.workers, "batch_size": args.batch_size}
    if args.kind == "stream":
        return DataLoader(StreamingLeRobotDataset(name, buffer_size=args.buffer, **options), **workers)
    dataset = LeRobotDataset(name, video_backend=args.backend, **options)
    return DataLoader(dataset, shuffle=True, drop_last=True, **workers)


def picture_size(pictures: torch.Tensor) -> int:
    return pictures.shape[-3] * pictures.shape[-2] * pictures.shape[-1]


def resident_bytes() -> int:
    """Memory in use before a dataset is opened: the program's own."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0


if __name__ == "__main__":
    main()
