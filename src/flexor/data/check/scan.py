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
from flexor.data.check.images import ImageWatch
from flexor.data.storage.ranges import LocalRanges
from flexor.data.video.mp4 import Unsupported, read_packets
from flexor.data.video.open_file import open_video

COLOURS = 200  # frames of a file of which the colours are measured, about


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
    blank: np.ndarray | None = None  # [P] bool; None if images were not looked at
    since: np.ndarray | None = None  # [P] a number of the earliest frame that looks the same; -1: not decoded
    levels: dict[int, np.ndarray] = field(default_factory=dict)  # of some packets: see `ImageWatch`

    def gops(self) -> np.ndarray:
        """The number of frames from each key frame to the next."""
        return np.diff(np.append(np.flatnonzero(self.key), len(self.key)))


def scan_video(path: Path, decode: bool = False, threads: int = 1, look: bool = False) -> VideoScan:
    """Read the packets of a file; with `decode`, also decode them all; with `look`, look at the images."""
    scan = VideoScan(path)
    watch = ImageWatch() if look else None
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
                    decoded |= _decode(packet, watch, max(1, scan.declared // COLOURS))
    except (av.FFmpegError, OSError, ValueError) as error:  # ValueError: text in the file that is not UTF-8
        reason = getattr(error, "strerror", None) or str(error).split(":")[0]
        scan.error = reason.strip() or type(error).__name__
    scan.times = np.array(ticks, np.float64) * step
    scan.key = np.array(keys, bool)
    if decode:
        scan.decodes = _intact(np.isin(ticks, list(decoded)), scan.key)
    if watch is not None:
        place = {tick: i for i, tick in enumerate(watch.keys)}
        places = np.array([place.get(tick, -1) for tick in ticks], np.int64)
        scan.blank = np.append(watch.blank, False).astype(bool)[places]
        scan.since = np.append(watch.since, -1).astype(np.int64)[places]
        scan.levels = {i: watch.levels[tick] for i, tick in enumerate(ticks) if tick in watch.levels}
    if not scan.error and len(ticks) + hidden < scan.declared - _cut_off(path, scan.declared):
        scan.error = "the file ends early"
    return scan


def _cut_off(path: Path, declared: int) -> int:
    """How many of the declared packets are never shown because an edit list cuts them off."""
    try:
        return declared - len(read_packets(LocalRanges(path)))
    except (Unsupported, DatasetError):
        return 0


def _decode(packet: av.Packet, watch: ImageWatch | None, every: int) -> set[int]:
    """The times of the undamaged frames that a packet decodes to. Colours are measured in each `every`-th."""
    try:
        frames = packet.decode()
    except av.FFmpegError:
        return set()
    good = [f for f in frames if isinstance(f, av.VideoFrame) and f.pts is not None and not f.is_corrupt]
    for frame in good if watch is not None else ():
        assert watch is not None and frame.pts is not None
        watch.add(frame.pts, frame, colours=len(watch.keys) % every == 0)
    return {frame.pts for frame in good if frame.pts is not None}


def _intact(decodes: np.ndarray, key: np.ndarray) -> np.ndarray:
    """A frame is intact if it and all frames since its key frame can be decoded; others build on damaged frames."""
    intact = decodes.copy()
    for first, after in zip(np.flatnonzero(key), np.append(np.flatnonzero(key)[1:], len(key))):
        intact[first:after] = np.logical_and.accumulate(decodes[first:after])
    return intact
