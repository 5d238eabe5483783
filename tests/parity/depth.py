"""Depth maps: datasets that LeRobot writes, what it reads of them, and what Flexor reads.

    python tests/parity/depth.py write FOLDER      # where lerobot is installed (0.6.1)

`write` makes small datasets under FOLDER and keeps beside each what LeRobot reads, in both units, and its statistics,
as .npz. Those in tests/golden/depth were made so, and packed with data_golden.py's `pack`. `rows` compares.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

DEPTH = "observation.images.depth"
SIZE = (24, 40)
LENGTHS = (4, 3)
CASES = {
    "video": {"videos": True},
    "linear": {"videos": True, "kind": "float32", "encoder": {"use_log": False, "depth_max": 4.0}},
    "uint16": {"videos": False},
    "float32": {"videos": False, "kind": "float32"},
}


def depth_map(episode: int, frame: int) -> np.ndarray:
    """Millimetres: a slope, a corner where nothing was measured, and one that is too far for a video."""
    y, x = np.mgrid[0 : SIZE[0], 0 : SIZE[1]]
    depths = 300 + 60 * x + 25 * y + 90 * frame + 500 * episode
    depths[:4, :4], depths[-4:, -4:] = 0, 12_000
    return depths[:, :, None]


def write(folder: Path) -> None:
    from lerobot.configs import DepthEncoderConfig
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    for name, case in CASES.items():
        root, videos = folder / name, case["videos"]
        axes = ["height", "width", "channels"]
        dtype = "video" if videos else "image"
        features = {
            "action": {"dtype": "float32", "shape": (2,), "names": ["x", "y"]},
            DEPTH: {"dtype": dtype, "shape": (*SIZE, 1), "names": axes, "info": {"is_depth_map": True}},
        }
        encoder = {"depth_encoder": DepthEncoderConfig(**case["encoder"])} if "encoder" in case else {}
        made = LeRobotDataset.create("some/depth", 10, features, root=root, use_videos=videos, **encoder)
        for episode, length in enumerate(LENGTHS):
            for frame in range(length):
                depths = depth_map(episode, frame)
                kind = case.get("kind", "uint16")
                depths = depths.astype(np.uint16) if kind == "uint16" else (depths / 1000).astype(np.float32)
                action = np.array([episode, frame], np.float32)
                made.add_frame({"action": action, DEPTH: depths, "task": "measure"})
            made.save_episode()
        made.finalize()
        values = {}
        for unit in ("mm", "m"):
            opened = LeRobotDataset("some/depth", root=root, depth_output_unit=unit)
            values[unit] = np.stack([opened[row][DEPTH].numpy() for row in range(len(opened))])
            stats = opened.meta.stats[DEPTH].items()
            values |= {f"{unit}_{key}": np.asarray(value, np.float64) for key, value in stats}
        np.savez_compressed(folder / f"{name}.npz", **values)


def rows(folder: Path) -> Iterator[tuple[str, float]]:
    """What was compared, and the largest difference, relative to the largest depth."""
    from flexor.data.dataset import open_dataset

    for name in CASES:
        theirs = np.load(folder / f"{name}.npz")
        for unit in ("mm", "m"):
            dataset = open_dataset(root=folder / name, depth_unit=unit)
            ours = dataset.read(np.arange(len(dataset)))[DEPTH]
            assert ours.dtype == theirs[unit].dtype and ours.shape == theirs[unit].shape
            yield f"depth maps {name} in {unit}", float(abs(ours - theirs[unit]).max() / theirs[unit].max())
            stats = dataset.stats[DEPTH]
            for key, value in stats.items():
                assert value.size == theirs[f"{unit}_{key}"].size
                far = float(abs(value - theirs[f"{unit}_{key}"]).max()) / float(stats["max"].max())
                yield f"statistics of depth maps {name} in {unit}", far


if __name__ == "__main__":
    assert sys.argv[1] == "write"
    write(Path(sys.argv[2]))
