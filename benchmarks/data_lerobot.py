"""One measurement of LeRobot's data loading; runs in LeRobot's environment and prints one JSON object.

    python data_lerobot.py --root DATASET --kind map --mode single --workers 2 --uint8

Frames per second are counted from one whole round of the workers to another, since with workers batches come
in bursts: from batch `workers` on, for at least `seconds` and two rounds, if there is that much data. A stream
fills its buffer before the first batch; where little is left after that, all of it counts, from opening on.
"""

import argparse
import json
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
    loader = open_loader(args)
    batches = iter(loader)
    first = next(batches)
    times, sizes = [time.perf_counter()], [len(first["index"])]
    episodes = [len(first["episode_index"].unique())]
    one_round = max(args.workers, 1)
    buffered = args.buffer * one_round if args.kind == "stream" else 0
    left = loader.dataset.num_frames - buffered  # when that many have come, a stream only empties its buffer
    for batch in batches:
        times.append(time.perf_counter())
        sizes.append(len(batch["index"]))
        episodes.append(len(batch["episode_index"].unique()))
        rounds, within = divmod(len(times), one_round)
        enough = rounds >= 3 and times[-1] - times[one_round - 1] > args.seconds
        if within == 0 and left > buffered and (enough or sum(sizes) >= left):
            break
    del batches  # ends the workers

    if len(times) <= one_round or left <= buffered:
        seconds, samples = times[-1] - opened, sum(sizes)
    else:
        seconds, samples = times[-1] - times[one_round - 1], sum(sizes[one_round:])
    frames_per_sample = pictures(first) / sizes[0]
    return {
        "frames_per_s": frames_per_sample * samples / seconds,
        "samples_per_s": samples / seconds,
        "first_batch_latency_s": times[0] - opened,
        "batches": len(times),
        "seconds": seconds,
        "frames_per_sample": frames_per_sample,
        "episodes_per_batch": sum(episodes) / len(episodes),
        "imported_bytes": imported,
        "torch": torch.__version__,
    }


def pictures(batch: dict[str, torch.Tensor]) -> int:
    """How many there are in a batch: cameras are [B, (T,) C, H, W], and so is nothing else."""
    cameras = [value for value in batch.values() if torch.is_tensor(value) and value.ndim >= 4]
    return sum(camera.shape[:-3].numel() for camera in cameras)


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


def resident_bytes() -> int:
    """Memory in use before a dataset is opened: the program's own."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0


if __name__ == "__main__":
    main()
