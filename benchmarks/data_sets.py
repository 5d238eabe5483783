"""The datasets of the data benchmark: cameras with moving things and a sensor's noise. Two of 480x640, as on a robot
arm, or one of 96x96 or 256x256, as in simulation.

    python benchmarks/data_sets.py av1_gop2 [--episodes 20] [--frames 300]

Noise decides how long a frame takes to decode, so a clean drawing would flatter everybody. There is a data
file per episode, because LeRobot's streaming shuffles over data files and is at its best with many; and one
video file per camera, because it reads wrong frames, or stops, from the second video file on.
"""

import argparse
import shutil
import sys
from pathlib import Path

import numpy as np

from flexor.data.format.writer import DatasetWriter

FOLDER = Path(__file__).parent / ".data"
HEIGHT, WIDTH, FPS = 480, 640, 30
CAMERAS = ("observation.images.top", "observation.images.wrist")
# LeRobot's default, and what people have who recorded with an ordinary encoder
ENCODINGS = {
    "av1_gop2": {"codec": "av1", "gop": 2, "crf": 30},
    "h264_gop250": {"codec": "h264", "gop": 250, "crf": 23},
    "av1_gop2_96": {"codec": "av1", "gop": 2, "crf": 30, "side": 96},
    "av1_gop2_256": {"codec": "av1", "gop": 2, "crf": 30, "side": 256},
}
MORE_EPISODES = 10  # of small images: an epoch of them would be over at once
NOISE = 5.0  # standard deviation in grey levels, as of a webcam in a room


def dataset(name: str, episodes: int = 20, frames: int = 300) -> Path:
    """The dataset's folder; it is written on the first call."""
    root = FOLDER / f"{name}_{episodes}x{frames}"
    if not (root / "meta/info.json").is_file():
        print(f"writing {root.name} ...", file=sys.stderr, flush=True)
        shutil.rmtree(root, ignore_errors=True)  # what a write that was cut short left
        write(root, episodes, frames, **ENCODINGS[name])
    return root


def write(
    root: Path, episodes: int, frames: int, codec: str, gop: int, crf: int, side: int | None = None
) -> None:
    """With `side`, one camera of square images, and more episodes."""
    cameras = CAMERAS if side is None else CAMERAS[:1]
    episodes = episodes if side is None else MORE_EPISODES * episodes
    size = (HEIGHT, WIDTH) if side is None else (side, side)
    camera = {"dtype": "video", "shape": (*size, 3), "names": ["height", "width", "channels"]}
    vector = {"dtype": "float32", "shape": (14,), "names": None}
    features = {**dict.fromkeys(cameras, camera), "observation.state": vector, "action": vector}
    files = {"data_files_mb": 1e-6, "video_files_mb": 1e6}
    with DatasetWriter(root, FPS, features, codec=codec, gop=gop, crf=crf, **files) as writer:
        for episode in range(episodes):
            scenes = {name: Scene(episode, number) for number, name in enumerate(cameras)}
            path = np.random.default_rng([2, episode]).normal(0, 0.05, (frames, 14)).cumsum(0)
            for number in range(frames):
                pictures = {name: resized(scene.picture(number), size) for name, scene in scenes.items()}
                state = path[number].astype(np.float32)
                writer.add_frame({**pictures, "observation.state": state, "action": state})
            writer.save_episode("put the block into the bowl" if episode % 2 else "open the drawer")


def resized(picture: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """The nearest pixels of a square in the middle: the noise stays."""
    if picture.shape[:2] == size:
        return picture
    side, left = HEIGHT, (WIDTH - HEIGHT) // 2
    rows, columns = (np.arange(n) * side // n for n in size)
    return np.ascontiguousarray(picture[:, left : left + side][rows][:, columns])


class Scene:
    """A textured table, things moving over it, and a camera that sways and is noisy."""

    def __init__(self, episode: int, camera: int):
        self.rng = np.random.default_rng([1, episode, camera])
        # from the light in the room to the grain of the wood: [576, 768, 3]
        self.table = (
            upsampled(self.rng.uniform(60, 190, (9, 12, 3)), 64)
            + upsampled(self.rng.normal(0, 12, (144, 192, 3)), 4)
            + upsampled(self.rng.normal(0, 8, (288, 384, 3)), 2)
        )
        self.noise = (self.rng.standard_normal((HEIGHT + 64, WIDTH + 64, 3), np.float32) * NOISE).astype(
            np.int16
        )
        self.things = self.rng.uniform(0.2, 0.8, (5, 6))
        self.colours = self.rng.integers(20, 235, (5, 3))

    def picture(self, number: int) -> np.ndarray:
        """uint8 [480, 640, 3]."""
        sway = 40 + 40 * np.sin(number / np.array([37.0, 53.0]))
        top, left = sway.astype(int)
        image = self.table[top : top + HEIGHT, left : left + WIDTH].astype(np.int16)
        for (x, y, dx, dy, speed, size), colour in zip(self.things, self.colours):
            column = int(WIDTH * (x + 0.3 * np.sin(number * speed / 12 + 6 * dx)))
            row = int(HEIGHT * (y + 0.3 * np.cos(number * speed / 15 + 6 * dy)))
            half = int(20 + 40 * size)
            image[max(row - half, 0) : max(row + half, 0), max(column - half, 0) : max(column + half, 0)] = (
                colour
            )
        down, right = self.rng.integers(0, 64, 2)
        return np.clip(image + self.noise[down : down + HEIGHT, right : right + WIDTH], 0, 255).astype(
            np.uint8
        )


def upsampled(field: np.ndarray, factor: int) -> np.ndarray:
    """[h, w, 3] -> [h * factor, w * factor, 3], bilinear."""
    for axis in (0, 1):
        length = field.shape[axis]
        at = np.linspace(0, length - 1, length * factor)
        low = np.minimum(at.astype(int), length - 2)
        weight = (at - low).reshape([-1 if a == axis else 1 for a in range(3)])
        field = field.take(low, axis) * (1 - weight) + field.take(low + 1, axis) * weight
    return field


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=ENCODINGS)
    parser.add_argument("--episodes", type=int, default=20)
    parser.add_argument("--frames", type=int, default=300)
    arguments = parser.parse_args()
    print(dataset(arguments.name, arguments.episodes, arguments.frames))
