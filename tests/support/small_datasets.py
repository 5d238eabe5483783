"""Small datasets made with our own writer, for the tests of writer, check and info."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from flexor.data.format.writer import DatasetWriter
from support.samples import reencode

LENGTHS = (12, 9, 7, 10)
TASKS = ("push", "pull", "push", "lift")
FPS = 10
TOP, SIDE, STILL = "observation.images.top", "observation.images.side", "observation.images.still"


def features(height: int = 32, width: int = 48, still: bool = False) -> dict:
    axes = ["height", "width", "channels"]
    result = {
        "observation.state": {"dtype": "float32", "shape": (3,), "names": ["x", "y", "z"]},
        "action": {"dtype": "float32", "shape": (2,), "names": ["u", "v"]},
        "next.done": {"dtype": "bool", "shape": (1,), "names": None},
        TOP: {"dtype": "video", "shape": (height, width, 3), "names": axes},
        SIDE: {"dtype": "video", "shape": (height, width, 3), "names": axes},
    }
    if still:
        result[STILL] = {"dtype": "image", "shape": (height, width, 3), "names": axes}
    return result


def picture(episode: int, frame: int, camera: int = 0, height: int = 32, width: int = 48) -> np.ndarray:
    """Smooth, so that it survives encoding, and so different from its neighbours that none is mistaken."""
    y, x = np.mgrid[0:height, 0:width].astype(np.float32)
    waves = [np.sin(x / 9 + frame / 3 + c + camera) + np.cos(y / 8 - frame / 2 + episode) for c in range(3)]
    return (127 + 55 * np.stack(waves, -1)).astype(np.uint8)


def frame(episode: int, number: int, still: bool = False) -> dict:
    rng = np.random.default_rng([episode, number])
    values = {
        "observation.state": rng.normal(size=3).astype(np.float32),
        "action": rng.normal(size=2).astype(np.float32),
        "next.done": np.array([number == LENGTHS[episode] - 1]),
        TOP: picture(episode, number),
        SIDE: picture(episode, number, camera=2),
    }
    return values | ({STILL: picture(episode, number, camera=4)} if still else {})


def write(root: Path, still: bool = False, codec: str = "h264", **options: object) -> Path:
    with DatasetWriter(root, FPS, features(still=still), codec=codec, **options) as writer:  # type: ignore[arg-type]
        for episode, (length, task) in enumerate(zip(LENGTHS, TASKS)):
            for number in range(length):
                writer.add_frame(frame(episode, number, still))
            writer.save_episode(task)
    return root


def encoded(**options: str) -> Callable[[Path], None]:
    """Something to do to a dataset: its videos are encoded again, with options of FFmpeg's encoder."""

    def change(root: Path) -> None:
        for path in sorted(root.rglob("*.mp4")):
            reencode(path, FPS, **options)

    return change
