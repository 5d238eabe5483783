"""Scans a video file that may be damaged: reads its packets, and finds which frames can be decoded.

`data/video/decode.py` raises an error for a damaged file. A check must know the extent of the damage, so this
module returns everything that can be read, and where reading stopped.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import av
import numpy as np

from flexor.core.errors import DatasetError
from flexor.data.storage.ranges import LocalRanges
from flexor.data.video.mp4 import Unsupported, read_packets
from flexor.data.video.open_file import open_video


@dataclass
class VideoScan:
    """One file. Arrays have one entry per packet, in decode order."""

    path: Path
    width: int = 0
    height: int = 0
    codec: str = ""
    pix_fmt: str = ""
    times: np.ndarray = field(default_factory=lambda: np.empty(0))  # [P] display time of the frame in seconds
    key: np.ndarray = field(default_factory=lambda: np.empty(0, bool))  # [P]
    declared: int = 0
    """Number of frames in the file's header; 0 if the header does not give it."""

    error: str | None = None
    """Why reading stopped, if it stopped early."""

    decodes: np.ndarray | None = None  # [P] bool; None if nothing was decoded

    def gops(self) -> np.ndarray:
        """The number of frames from each key frame to the next."""
        return np.diff(np.append(np.flatnonzero(self.key), len(self.key)))


def scan_video(path: Path, decode: bool = False, threads: int = 1) -> VideoScan:
    """Read the packets of a file; with `decode`, also decode them all."""
    scan = VideoScan(path)
    ticks: list[int] = []
    keys: list[bool] = []
    decoded: set[int] = set()
    step, hidden = 0.0, 0
    try:
        with open_video(str(path)) as container:
            if not container.streams.video:
                scan.error = "the file contains no video stream"
                return scan
            stream = container.streams.video[0]
            if stream.codec_context is None:
                scan.error = "its codec is unknown"
                return scan
            stream.thread_type, stream.codec_context.thread_count = "AUTO", threads
            step = float(stream.time_base or 0)
            scan.width, scan.height = stream.codec_context.width, stream.codec_context.height
            scan.codec, scan.pix_fmt = stream.codec.canonical_name, stream.codec_context.pix_fmt or ""
            scan.declared = stream.frames
            for packet in container.demux(stream):
                if packet.is_corrupt:
                    scan.error = "a packet is truncated"
                elif packet.size and packet.pts is not None and packet.is_discard:
                    hidden += 1
                elif packet.size and packet.pts is not None:
                    ticks.append(packet.pts)
                    keys.append(packet.is_keyframe)
                if decode:
                    decoded |= _decode(packet)
    except (av.FFmpegError, OSError, ValueError) as error:  # ValueError: text in the file that is not UTF-8
        scan.error = str(error).split(":")[0].strip() or type(error).__name__
    scan.times = np.array(ticks, np.float64) * step
    scan.key = np.array(keys, bool)
    if decode:
        scan.decodes = _intact(np.isin(ticks, list(decoded)), scan.key)
    if not scan.error and len(ticks) + hidden < scan.declared - _cut_off(path, scan.declared):
        scan.error = "the file ends early"
    return scan


def _cut_off(path: Path, declared: int) -> int:
    """How many of the declared packets are never shown because an edit list cuts them off."""
    try:
        return declared - len(read_packets(LocalRanges(path)))
    except (Unsupported, DatasetError):
        return 0


def _decode(packet: av.Packet) -> set[int]:
    """The times of the undamaged frames that a packet decodes to."""
    try:
        frames = packet.decode()
    except av.FFmpegError:
        return set()
    return {f.pts for f in frames if isinstance(f, av.VideoFrame) and f.pts is not None and not f.is_corrupt}


def _intact(decodes: np.ndarray, key: np.ndarray) -> np.ndarray:
    """A frame is intact if it and all frames since its key frame can be decoded; others build on damaged frames."""
    intact = decodes.copy()
    for first, after in zip(np.flatnonzero(key), np.append(np.flatnonzero(key)[1:], len(key))):
        intact[first:after] = np.logical_and.accumulate(decodes[first:after])
    return intact
