"""Small datasets and videos for tests."""

from fractions import Fraction
from pathlib import Path

import av
import numpy as np

from flexor.data.format.encode import ordinary_priority
from flexor.data.format.writer import DatasetWriter

FEATURES = {
    "observation.images.top": {
        "dtype": "video",
        "shape": [48, 64, 3],
        "names": ["height", "width", "channels"],
    },
    "observation.images.wrist": {
        "dtype": "image",
        "shape": [24, 32, 3],
        "names": ["height", "width", "channels"],
    },
    "observation.state": {"dtype": "float32", "shape": [3], "names": None},
    "observation.matrix": {"dtype": "float32", "shape": [2, 3], "names": None},
    "action": {"dtype": "float64", "shape": [2], "names": None},
    "next.done": {"dtype": "bool", "shape": [1], "names": None},
    "mode": {"dtype": "int32", "shape": [1], "names": None},
    "comment": {"dtype": "string", "shape": [1], "names": None},
}
LENGTHS = (7, 12, 9, 10)
LOW_DIM_LENGTHS = (11, 9, 13, 10)


def picture(episode: int, frame: int, height: int = 48, width: int = 64) -> np.ndarray:
    """A picture that no other frame has: where its bright bars are tells frame and episode."""
    image = np.full((height, width, 3), 30, np.uint8)
    image[:, :, 2] = np.linspace(0, 120, width, dtype=np.uint8)
    top, left = frame * (height - 4) // 13, episode * (width - 8) // 5
    image[top : top + 4, :, 0] = 220
    image[:, left : left + 8, 1] = 200
    return image


def write_sample(
    root: Path,
    fps: int = 10,
    features: dict | None = None,
    lengths: tuple[int, ...] = LENGTHS,
    **options: object,
) -> Path:
    """A v3.0 dataset; by default of four episodes in two data files and several video files."""
    features = features or FEATURES
    rng = np.random.default_rng(0)
    options = {
        "codec": "h264",
        "gop": 4,
        "crf": 20,
        "data_files_mb": 0.006,
        "video_files_mb": 0.004,
    } | options
    with DatasetWriter(root, fps, features, **options) as writer:  # type: ignore[arg-type]
        for episode, length in enumerate(lengths):
            for frame in range(length):
                values = {
                    "observation.images.top": picture(episode, frame),
                    "observation.images.wrist": picture(episode, frame, 24, 32),
                    "observation.state": rng.normal(size=3).astype(np.float32),
                    "observation.matrix": rng.normal(size=(2, 3)).astype(np.float32),
                    "action": rng.normal(size=2),
                    "next.done": np.array([frame == length - 1]),
                    "mode": np.array([frame % 3], np.int32),
                    "comment": f"episode {episode} frame {frame}",
                }
                writer.add_frame({name: values[name] for name in features})
            writer.save_episode("push" if episode % 2 else "pull")
    return root


def write_lowdim(root: Path, lengths: tuple[int, ...] = LOW_DIM_LENGTHS, reward: bool = True) -> Path:
    """Episodes without pictures, of two tasks."""
    vector = {"dtype": "float32", "names": None}
    features = {
        "observation.environment_state": {**vector, "shape": (4,)},
        "observation.state": {**vector, "shape": (2,)},
        "action": {**vector, "shape": (2,)},
    }
    if reward:
        features["next.reward"] = {**vector, "shape": (1,)}
    rng = np.random.default_rng(3)
    with DatasetWriter(root, 10, features) as writer:
        for episode, length in enumerate(lengths):
            for _ in range(length):
                values = rng.normal(size=4).astype(np.float32)
                frame = {
                    "observation.environment_state": values,
                    "observation.state": values[:2] * 2,
                    "action": values[2:] - values[:2],
                    "next.reward": values[:1] ** 2,
                }
                writer.add_frame({name: frame[name] for name in features})
            writer.save_episode("push" if episode % 2 else "pull")
    return root


@ordinary_priority()
def write_video(
    path: Path,
    pictures: list[np.ndarray],
    pts: list[int] | None = None,
    time_base: Fraction = Fraction(1, 10),
    codec: str = "libx264",
    pix_fmt: str = "yuv420p",
    container: dict[str, str] | None = None,
    **options: str,
) -> Path:
    """Encode pictures with any codec, presentation times and encoder options."""
    path.parent.mkdir(parents=True, exist_ok=True)
    height, width = pictures[0].shape[:2]
    with av.open(str(path), "w", options=container or {}) as writer:
        stream = writer.add_stream(codec, rate=1 / time_base, options=options)
        stream.width, stream.height, stream.pix_fmt = width, height, pix_fmt  # type: ignore[union-attr]
        stream.time_base = time_base
        stream.codec_context.time_base = time_base
        pts = list(range(len(pictures))) if pts is None else pts
        for number, image in enumerate(pictures):
            frame = av.VideoFrame.from_ndarray(image, format="rgb24").reformat(format=pix_fmt)
            frame.pts = pts[number]
            # Without a duration the muxer's edit list ends before the last frame, and hides it.
            frame.duration = pts[number + 1] - pts[number] if number + 1 < len(pts) else pts[-1] - pts[-2]
            frame.time_base = time_base
            writer.mux(stream.encode(frame))  # type: ignore[union-attr]
        writer.mux(stream.encode(None))  # type: ignore[union-attr]
    return path


def reencode(path: Path, fps: int, **options: str) -> None:
    """Encode a video file anew, with the same pictures at the same times."""
    with av.open(str(path)) as reader:
        frames = [(frame.time, frame.to_ndarray(format="rgb24")) for frame in reader.decode(video=0)]
    pts = [round((time or 0) * fps) for time, _ in frames]
    write_video(path, [image for _, image in frames], pts, Fraction(1, fps), **options)
