"""Encodes images as video and as PNG, with PyAV.

Each episode is encoded separately, into packets in memory, and then appended to an mp4 file that
holds many episodes. So every episode starts with a key frame, an episode can be discarded, its size
is known before a file is chosen for it, and data that is already written is never copied again.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Protocol

import av
import numpy as np
from av.codec.context import Flags
from av.video.reformatter import VideoReformatter

from flexor.core.errors import DatasetError

# SVT-AV1 prints a banner to standard error for every encoder it opens: once per episode and camera.
os.environ.setdefault("SVT_LOG", "1")

ENCODERS = {"av1": "libsvtav1", "h264": "libx264"}
# 4:2:0 stores colour at half the resolution, as cameras and LeRobot do; 4:4:4 at full resolution.
PIX_FMTS = {"av1": ("yuv420p",), "h264": ("yuv420p", "yuv444p")}


def frame_rate(fps: float) -> Fraction:
    """The frame rate as a fraction, since an mp4 file counts time in whole ticks."""
    return Fraction(fps).limit_denominator(1001)


@dataclass(frozen=True)
class VideoSettings:
    """How the frames of one camera are encoded."""

    codec: str
    width: int
    height: int
    fps: float
    gop: int = 2
    crf: int = 30
    pix_fmt: str = "yuv420p"

    def options(self) -> dict[str, str]:
        """The encoder's own options; the preset for AV1 is LeRobot's."""
        options = {"g": str(self.gop), "crf": str(self.crf)}
        if self.codec == "av1":
            return options | {"preset": "12"}
        # No B-frames and no key frames at scene cuts: packets are in display order, and key frames
        # are exactly where the GOP size puts them.
        return options | {"bf": "0", "sc_threshold": "0"}

    def check(self, where: str) -> None:
        """Raise an error for settings that the encoder would reject later with a less clear message."""
        if self.codec not in ENCODERS:
            raise DatasetError(f"{where}: unknown codec {self.codec!r}. Choose one of {', '.join(ENCODERS)}.")
        if self.gop < 1:
            raise DatasetError(f"{where}: gop={self.gop} is not a valid number of frames. Use 1 or more.")
        if not 0 <= self.crf <= (63 if self.codec == "av1" else 51):
            raise DatasetError(f"{where}: crf={self.crf} is out of range for {self.codec}. Use 0 to 51.")
        if self.pix_fmt not in PIX_FMTS[self.codec]:
            raise DatasetError(
                f"{where}: Flexor does not write {self.codec} with pix_fmt={self.pix_fmt!r}. "
                f"Choose one of {', '.join(PIX_FMTS[self.codec])}."
            )
        odd = self.width % 2 or self.height % 2
        if self.codec == "h264" and self.pix_fmt == "yuv420p" and odd:
            raise DatasetError(
                f"{where}: H.264 with 4:2:0 colour needs an even width and height, got "
                f"{self.height}x{self.width} (height x width). Use codec='av1', which supports odd sizes, or "
                "crop a row or column."
            )

    def add_to(self, container: Any) -> Any:
        """Add such a stream to a container opened for writing."""
        rate = frame_rate(self.fps)
        stream: Any = container.add_stream(ENCODERS[self.codec], rate, options=self.options())
        stream.width, stream.height, stream.pix_fmt = self.width, self.height, self.pix_fmt
        return stream

    def info(self) -> dict[str, Any]:
        """The `info` block of a video feature in meta/info.json, as LeRobot writes it."""
        rate = frame_rate(self.fps)
        info: dict[str, Any] = {
            **{f"video.{name}": getattr(self, name) for name in ("height", "width", "codec", "pix_fmt")},
            "video.is_depth_map": False,
            "video.fps": int(rate) if rate.denominator == 1 else float(rate),
            "video.channels": 3,
            "has_audio": False,
            "video.g": self.gop,
            "video.crf": self.crf,
        }
        if self.codec == "av1":
            info["video.preset"] = 12
        return info | {"is_depth_map": False}


@contextmanager
def ordinary_priority() -> Iterator[None]:
    """Undo a side effect of SVT-AV1: opened by root, it gives the calling thread and its own real-time priority.

    The caller would keep that priority, and all threads and processes it starts would inherit it. Code that polls
    at that priority (collectives between ranks do) can block a whole machine forever.
    """
    if not sys.platform.startswith("linux"):
        yield
        return
    before = _policies()
    caller_policy = before[threading.get_native_id()]
    yield
    for thread, policy in _policies().items():
        if policy != before.get(thread, caller_policy):
            with suppress(ProcessLookupError):
                os.sched_setscheduler(thread, *before.get(thread, caller_policy))


def _policies() -> dict[int, tuple[int, os.sched_param]]:
    """How each thread of this process is scheduled."""
    policies = {}
    for name in os.listdir("/proc/self/task"):  # noqa: PTH208
        with suppress(ProcessLookupError):  # the thread has ended in the meantime
            policies[int(name)] = os.sched_getscheduler(int(name)), os.sched_getparam(int(name))
    return policies


class EpisodeEncoder:
    """Encodes one episode of one camera; its packets are small enough to keep in memory."""

    def __init__(self, settings: VideoSettings) -> None:
        self.packets: list[av.Packet] = []
        self.frames = 0
        context: Any = av.CodecContext.create(ENCODERS[settings.codec], "w")
        context.width, context.height, context.pix_fmt = settings.width, settings.height, settings.pix_fmt
        context.framerate = frame_rate(settings.fps)
        context.time_base = 1 / frame_rate(settings.fps)
        context.flags |= Flags.global_header  # mp4 stores the parameter sets once, at the start
        context.options = settings.options()
        with ordinary_priority():
            context.open()
        self._context = context
        self._reformatter = VideoReformatter()  # reused: a new one would rebuild its tables for every frame

    def add(self, image: np.ndarray) -> None:
        """Encode one more frame, [H, W, 3] uint8."""
        frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(image), format="rgb24")
        frame = self._reformatter.reformat(frame, format=self._context.pix_fmt)
        frame.pts, frame.time_base = self.frames, self._context.time_base
        self.frames += 1
        self.packets += self._context.encode(frame)

    def finish(self) -> list[av.Packet]:
        """The packets of the episode, one per frame, times counted in frames from its start."""
        self.packets += self._context.encode(None)
        assert len(self.packets) == self.frames and self.packets[0].is_keyframe
        return self.packets


class VideoStream(Protocol):
    """The kind of packets in a file. Packets of equal streams may be stored in one file."""

    def add_to(self, container: Any) -> Any:
        """Add such a stream to a container opened for writing."""


class VideoWriter:
    """An mp4 file that episodes are appended to. It is playable only after it is closed."""

    def __init__(self, path: Path, fps: float, stream: VideoStream) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.frames, self.bytes, self.stream = 0, 0, stream
        self._time_base = 1 / frame_rate(fps)
        # faststart puts the index at the start of the file: reading over a network starts with one request.
        self._container = av.open(str(path), "w", options={"movflags": "faststart"})
        self._stream = stream.add_to(self._container)
        self._stream.time_base = self._time_base
        with ordinary_priority():
            self._container.start_encoding()  # this opens an encoder too, although the packets are already encoded

    def append(
        self, packets: list[av.Packet], lead: int = 0, count: int | None = None
    ) -> tuple[float, float]:
        """Append an episode; returns its start time and end time in the file.

        The episode is `count` frames after the first `lead`, by default all: decoding them may take more.
        """
        start = self.frames
        first = start + lead
        end = first + (len(packets) - lead if count is None else count)
        for packet in packets:
            assert packet.pts is not None and packet.dts is not None
            copy = av.Packet(bytes(packet))
            copy.stream, copy.time_base, copy.duration = self._stream, self._time_base, 1
            copy.pts, copy.dts = start + packet.pts, start + packet.dts
            copy.is_keyframe = packet.is_keyframe
            self._container.mux(copy)
        self.frames += len(packets)
        self.bytes += sum(packet.size for packet in packets)
        return float(first * self._time_base), float(end * self._time_base)

    def close(self) -> None:
        """Write the index. Without it the file cannot be read."""
        self._container.close()
