"""What LeRobot reads from a dataset: run where `lerobot` is installed, compare with compare_data.py.

    python tests/parity/data_lerobot.py --root DIR --out dump.json \
        [--episodes 2,0] [--deltas '{"action": [0, 0.1]}'] [--every 1] [--tolerance 1e-4]

Values are written as hashes, so that a dump of a whole dataset stays small; pictures also as thumbnails.
YUV to RGB depends on the version of FFmpeg and on the processor (on ARM, white is 253 with PyAV 15 and 255
with 18), so pixels can be compared bit by bit only where both sides use the same PyAV.
"""

import argparse
import hashlib
import json
import platform
import sys
from pathlib import Path

import av
import numpy as np
import torch


def digest(array: np.ndarray) -> str:
    array = np.ascontiguousarray(array)
    return hashlib.sha256(f"{array.dtype}{array.shape}".encode() + array.tobytes()).hexdigest()[:16]


def describe(value: object) -> object:
    """A hash of what an item holds; pictures as uint8, in which they were stored, with a thumbnail."""
    if not isinstance(value, torch.Tensor):
        return value
    array = value.numpy()
    if array.ndim >= 3 and array.dtype == np.float32 and array.shape[-3] in (1, 3, 4) and array.max() <= 1:
        scaled = array * 255
        if np.abs(scaled - scaled.round()).max() < 1e-3:
            array = scaled.round().astype(np.uint8)
    if array.dtype != np.uint8:
        return digest(array)
    return [digest(array), thumbnail(array).tolist()]


def thumbnail(pixels: np.ndarray) -> np.ndarray:
    """Mean colours of 8 horizontal and 8 vertical stripes of pictures [..., C, H, W], as whole numbers."""
    stripes = [
        np.stack([part.mean(axis=(-2, -1)) for part in np.array_split(pixels, 8, axis=axis)])
        for axis in (-2, -1)
    ]
    return np.concatenate(stripes).round().astype(int).ravel()


def dump(arguments: argparse.Namespace) -> dict:
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    episodes = [int(e) for e in arguments.episodes.split(",")] if arguments.episodes else None
    deltas = json.loads(arguments.deltas) if arguments.deltas else None
    dataset = LeRobotDataset(
        "parity/dataset",
        root=arguments.root,
        episodes=episodes,
        delta_timestamps=deltas,
        tolerance_s=arguments.tolerance,
        video_backend="pyav",
        return_uint8=True,
    )
    rows: dict[str, dict] = {}
    for row in range(0, len(dataset), arguments.every):
        try:
            item = dataset[row]
        except Exception as error:
            rows[str(row)] = {"error": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
            continue
        rows[str(row)] = {key: describe(value) for key, value in item.items()}
    stats = dataset.meta.stats or {}
    return {
        "pixels": f"PyAV {av.__version__} on {platform.machine()}",
        "episodes": episodes,
        "deltas": deltas,
        "length": len(dataset),
        "rows": rows,
        "stats": {k: {n: np.asarray(v).tolist() for n, v in group.items()} for k, group in stats.items()},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--episodes", default="")
    parser.add_argument("--deltas", default="")
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--tolerance", type=float, default=1e-4)
    arguments = parser.parse_args()
    Path(arguments.out).write_text(json.dumps(dump(arguments)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
