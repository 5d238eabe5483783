"""Are our colours LeRobot's? Clips of many kinds, read there and here.

    python tests/parity/colour.py write FOLDER    # where flexor is installed: encode the clips
    python tests/parity/colour.py read FOLDER     # where lerobot is installed: keep what it reads of them
    python tests/parity/colour.py keep FOLDER     # commit both as tests/golden/colour.npz (torchcodec only)

LeRobot reads with torchcodec, or with PyAV where that does not load. PyAV 15 ignores the tags of a file and
interpolates chroma in another way, so without torchcodec only the clips in which both agree are compared.
"""

import platform
import sys
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import av
import numpy as np

GOLDEN = Path(__file__).parents[1] / "golden" / "colour.npz"
FRAMES = 3
WORST, MEAN = 2, 0.5  # levels of 255


class Clip(NamedTuple):
    codec: str
    size: tuple[int, int]  # height, width
    pix_fmt: str = "yuv420p"
    matrix: int = 2  # AVColorSpace: 1 BT.709, 2 not tagged, 6 BT.601, 9 BT.2020
    range: int = 0  # AVColorRange: 0 not tagged, 1 limited, 2 full
    pyav_agrees: bool = True


CLIPS = {
    "h264": Clip("libx264", (48, 64)),
    "h264, width not of 16": Clip("libx264", (46, 76)),
    "h264, bt601": Clip("libx264", (48, 64), matrix=6, range=1),
    "h264, bt709": Clip("libx264", (48, 64), matrix=1, range=1, pyav_agrees=False),
    "h264, bt2020": Clip("libx264", (48, 64), matrix=9, range=1, pyav_agrees=False),
    "h264, full range": Clip("libx264", (48, 64), "yuvj420p", range=2),
    "h264, bt709, full range": Clip("libx264", (46, 76), "yuvj420p", 1, 2, pyav_agrees=False),
    "h264, 4:4:4": Clip("libx264", (48, 64), "yuv444p"),
    "h264, 4:4:4, bt709, odd": Clip("libx264", (33, 51), "yuv444p", 1, 1, pyav_agrees=False),
    "h264, rgb": Clip("libx264rgb", (48, 64), "rgb24"),
    "av1": Clip("libsvtav1", (64, 96)),
    "av1, bt709": Clip("libsvtav1", (64, 96), matrix=1, range=1, pyav_agrees=False),
    "av1, full range": Clip("libsvtav1", (64, 96), range=2),
    "av1, full range, width not of 32": Clip("libsvtav1", (64, 72), range=2, pyav_agrees=False),
    "av1, 10 bit": Clip("libsvtav1", (64, 96), "yuv420p10le", 1, 1, pyav_agrees=False),
    "mpeg4": Clip("mpeg4", (48, 64)),
    "mpeg4, odd": Clip("mpeg4", (33, 51), pyav_agrees=False),
    "hevc, 10 bit": Clip("libx265", (64, 96), "yuv420p10le", pyav_agrees=False),
    "vp9, full range": Clip("libvpx-vp9", (48, 64), matrix=1, range=2, pyav_agrees=False),
}


def picture(size: tuple[int, int], step: int) -> np.ndarray:
    """Every colour there is, in waves that a video codec keeps."""
    y, x = np.mgrid[0 : size[0], 0 : size[1]].astype(np.float32)
    waves = [np.sin(x / (5 + c) + step / 3 + c) + np.cos(y / (4 + c) - c) for c in range(3)]
    return (127 + 90 * np.stack(waves, -1)).clip(0, 255).astype(np.uint8)


def write(folder: Path) -> None:
    for name, clip in CLIPS.items():
        with av.open(str(folder / f"{name}.mp4"), "w") as container:
            quiet = {"x265-params": "log-level=none"} if clip.codec == "libx265" else {}
            stream = container.add_stream(clip.codec, rate=10, options=quiet)
            stream.height, stream.width = clip.size
            stream.pix_fmt = clip.pix_fmt
            context = stream.codec_context
            context.colorspace, context.color_range = clip.matrix, clip.range
            for step in range(FRAMES):
                frame = av.VideoFrame.from_ndarray(picture(clip.size, step), format="rgb24")
                frame = frame.reformat(format=clip.pix_fmt)
                frame.colorspace, frame.color_range = clip.matrix, clip.range
                frame.pts, frame.time_base = step, Fraction(1, 10)
                container.mux(stream.encode(frame))
            container.mux(stream.encode(None))


def read(folder: Path) -> None:
    from lerobot.datasets.video_utils import decode_video_frames

    try:
        from torchcodec.decoders import VideoDecoder  # noqa: F401

        backend = "torchcodec"
    except (ImportError, RuntimeError):
        backend = "pyav"
    times = [step / 10 for step in range(FRAMES)]
    for name in CLIPS:
        path = folder / f"{name}.mp4"
        frames = decode_video_frames(path, times, 0.04, backend=backend, return_uint8=True)
        np.save(folder / f"{name}.npy", frames.permute(0, 2, 3, 1).numpy())
    (folder / "backend").write_text(backend)


def ours(path: str | Path) -> np.ndarray:
    """All frames [n, H, W, 3] of a file, through planes."""
    from flexor.data.video.planes import format_of, pack, to_rgb

    pictures = []
    with av.open(str(path)) as container:
        for frame in container.decode(video=0):
            format = format_of(frame)
            planes = np.empty(format.nbytes, np.uint8)
            pictures.append(np.empty((format.height, format.width, 3), np.uint8))
            pack(frame, format, planes)
            to_rgb(format, planes, pictures[-1])
    return np.stack(pictures)


def rows(folder: Path) -> Iterator[tuple[str, float]]:
    """A line per clip, with 0 if our colours are near enough to LeRobot's, else the largest difference."""
    backend = (folder / "backend").read_text()
    for name, clip in CLIPS.items():
        if backend == "torchcodec" or clip.pyav_agrees:
            far = np.abs(ours(folder / f"{name}.mp4").astype(int) - np.load(folder / f"{name}.npy"))
            near = far.max() <= WORST and far.mean() < MEAN
            yield f"{name} ({backend}): worst {far.max()}, mean {far.mean():.2f}", 0.0 if near else far.max()


def keep(folder: Path) -> None:
    assert (folder / "backend").read_text() == "torchcodec"
    arrays = {"machine": np.array(platform.machine())}
    for name in CLIPS:
        arrays[f"{name}.mp4"] = np.frombuffer((folder / f"{name}.mp4").read_bytes(), np.uint8)
        arrays[name] = np.load(folder / f"{name}.npy")[-1]
    np.savez_compressed(GOLDEN, **arrays)


if __name__ == "__main__":
    {"write": write, "read": read, "keep": keep}[sys.argv[1]](Path(sys.argv[2]))
