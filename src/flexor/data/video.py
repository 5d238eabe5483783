"""Video files: where every packet lies, and the frames asked for, each group of pictures decoded once.

Frames are numbered in display order. A frame's time is its presentation time stamp, read from the
container: never its number divided by a frame rate, which is wrong for every file that does not start
at zero or has a variable rate.

Containers are opened per call and never shared, so every function here may run in many threads.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import av
import numpy as np
from av.video.reformatter import VideoReformatter

from flexor.errors import DatasetError

__all__ = ["VideoIndex", "decode", "index_video"]


@dataclass(frozen=True)
class VideoIndex:
    """The packets of one file in decode order, and its frames in display order.

    Packets and frames are not the same list: B-frames are stored after the frames they lie before,
    and an edit list may hide packets that must be decoded but are never shown.
    """

    path: Path
    width: int
    height: int
    codec: str
    time_base: float
    """Seconds per tick of `pts`."""

    offset: np.ndarray  # [P] byte position in the file
    size: np.ndarray  # [P] bytes
    key: np.ndarray  # [P] bool: decoding may start here
    pts: np.ndarray  # [P] presentation time in ticks, decode order

    packet: np.ndarray  # [F] packet of every frame, display order
    frame_pts: np.ndarray  # [F] ticks, ascending
    times: np.ndarray  # [F] seconds, ascending
    start: np.ndarray  # [F] packet from which decoding must start to get this frame right

    def __len__(self) -> int:
        return len(self.times)

    @property
    def gops(self) -> np.ndarray:
        """Packet ranges [G, 2] from one key frame to the next, in decode order."""
        keys = np.flatnonzero(self.key)
        return np.stack([keys, np.append(keys[1:], len(self.key))], axis=1)

    def number_of(self, pts: int) -> int:
        """The packet with this time stamp."""
        return int(self._by_pts[np.searchsorted(self.pts, pts, sorter=self._by_pts)])

    @cached_property
    def _by_pts(self) -> np.ndarray:
        return np.argsort(self.pts, kind="stable")

    def nearest(self, times: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The frame nearest to each time, and how far away it is in seconds."""
        times = np.asarray(times, np.float64)
        after = np.searchsorted(self.times, times).clip(1, max(len(self) - 1, 1))
        before = after - 1
        after = np.minimum(after, len(self) - 1)
        # <=: the earlier of two equally near frames, as an argmin over all of them would pick.
        frame = np.where(times - self.times[before] <= self.times[after] - times, before, after)
        return frame, np.abs(self.times[frame] - times)


def index_video(path: str | Path) -> VideoIndex:
    """Read the packets of a video file without decoding any."""
    path = Path(path)
    packets: list[tuple[int, int, bool, int, bool]] = []
    try:
        with av.open(str(path)) as container:
            stream = _video_stream(container, path)
            context = stream.codec_context
            for item in container.demux(stream):
                if item.size and item.pts is not None:
                    packets.append(_describe(item))
            width, height, codec = context.width, context.height, context.name
            time_base = float(stream.time_base or 0)
    except FileNotFoundError:
        raise _broken(path, "the file is missing") from None
    except (av.FFmpegError, OSError) as error:
        raise _broken(path, f"{error}; {len(packets)} packets could be read") from error
    if not packets:
        raise _broken(path, "it holds no video packet")
    offset, size, key, pts, hidden = (np.array(column) for column in zip(*packets))
    key = key.astype(bool)
    if not key[0]:
        key[0] = True  # some muxers do not flag the first packet; there is nothing before it anyway
    shown = np.flatnonzero(~hidden.astype(bool))
    packet = shown[np.argsort(pts[shown], kind="stable")]
    return VideoIndex(
        path=path,
        width=width,
        height=height,
        codec=codec,
        time_base=time_base,
        offset=offset,
        size=size,
        key=key,
        pts=pts,
        packet=packet,
        frame_pts=pts[packet],
        times=pts[packet] * time_base,
        start=_decode_starts(key, pts)[packet],
    )


def decode(
    path: str | Path, frames: Sequence[int] | np.ndarray, index: VideoIndex | None = None
) -> np.ndarray:
    """RGB frames [n, H, W, 3] by number in display order; any order, repeats allowed.

    The pixels are those of PyAV's `frame.to_ndarray(format="rgb24")`, bit for bit.
    """
    index = index or index_video(path)
    wanted = np.asarray(frames, np.int64)
    if len(wanted) and (wanted.min() < 0 or wanted.max() >= len(index)):
        raise IndexError(f"frame {wanted.min()}..{wanted.max()} of {len(index)} in {index.path}")
    distinct, slots = np.unique(wanted, return_inverse=True)
    pixels = np.empty((len(distinct), index.height, index.width, 3), np.uint8)
    slot_of = {int(index.frame_pts[frame]): slot for slot, frame in enumerate(distinct)}
    try:
        _decode_into(pixels, slot_of, index, _packet_ranges(index, distinct))
    except (av.FFmpegError, OSError) as error:
        raise _broken(index.path, f"decoding stopped: {error}") from error
    if slot_of:
        ticks = min(slot_of)
        raise _broken(
            index.path,
            f"{len(slot_of)} of {len(distinct)} frames do not decode; the first is at "
            f"{ticks * index.time_base:.3f} s",
        )
    if len(distinct) == len(wanted) and (slots == np.arange(len(slots))).all():
        return pixels  # already in the order asked for: spare a copy of the whole episode
    return pixels[slots]


def _describe(packet: av.Packet) -> tuple[int, int, bool, int, bool]:
    position = -1 if packet.pos is None else packet.pos
    assert packet.pts is not None
    return position, packet.size, packet.is_keyframe, packet.pts, packet.is_discard


def _decode_starts(key: np.ndarray, pts: np.ndarray) -> np.ndarray:
    """The key packet from which each packet decodes right.

    In an open group of pictures the frames shown before the key frame refer to the previous group, so
    decoding must start one key frame earlier.
    """
    keys = np.flatnonzero(key)
    group = np.searchsorted(keys, np.arange(len(key)), side="right") - 1
    leading = pts < pts[keys[group]]
    return keys[np.maximum(group - leading, 0)]


def _packet_ranges(index: VideoIndex, frames: np.ndarray) -> list[tuple[int, int]]:
    """Packet ranges to feed so that all of `frames` come out; touching ranges are one."""
    ranges: list[tuple[int, int]] = []
    pairs = zip(index.start[frames].tolist(), (index.packet[frames] + 1).tolist())
    for first, end in sorted(pairs):
        if ranges and first <= ranges[-1][1]:
            ranges[-1] = (ranges[-1][0], max(ranges[-1][1], end))
        else:
            ranges.append((first, end))
    return ranges


def _decode_into(
    pixels: np.ndarray, slot_of: dict[int, int], index: VideoIndex, ranges: list[tuple[int, int]]
) -> None:
    """Decode `ranges`, write frames into their slots of `pixels`, remove those found from `slot_of`."""
    if not ranges:
        return
    # One reformatter for all frames: to_ndarray() sets up a new scaler for every frame.
    reformatter = VideoReformatter()
    with av.open(str(index.path)) as container:
        stream = _video_stream(container, index.path)
        for first, end in ranges:
            for frame in _frames(container, stream, index, first, end):
                slot = slot_of.pop(frame.pts, None) if frame.pts is not None else None
                if slot is None:
                    continue
                if (frame.height, frame.width) != pixels.shape[1:3]:
                    raise _broken(index.path, "the picture size changes inside of the file")
                pixels[slot] = reformatter.reformat(frame, format="rgb24").to_ndarray()


def _frames(
    container: av.container.InputContainer, stream: av.VideoStream, index: VideoIndex, first: int, end: int
) -> Iterator[av.VideoFrame]:
    """Every frame that packets first..end-1 give, in display order."""
    for position, packet in _packets_from(container, stream, index, first):
        if position >= end:
            break
        yield from packet.decode()
    yield from stream.decode(None)


def _packets_from(
    container: av.container.InputContainer, stream: av.VideoStream, index: VideoIndex, first: int
) -> Iterator[tuple[int, av.Packet]]:
    """(number, packet) from packet `first` on.

    A container's seek is a hint: it may land on an earlier key frame (skip to ours) or, with B-frames,
    on a later one (ask for an earlier time). What is read is checked by its time stamp.
    """
    key_packets = np.flatnonzero(index.key[: first + 1])[::-1]
    for key in key_packets.tolist():
        container.seek(int(index.pts[key]), backward=True, any_frame=False, stream=stream)
        numbered = _numbered(container, stream, index)
        position, packet = next(numbered, (first + 1, None))
        if position <= first and packet is not None:
            break
    else:
        raise _broken(index.path, f"no way to seek to {index.pts[first] * index.time_base:.3f} s")
    if position == first:
        yield position, packet
    for position, packet in numbered:
        if position >= first:
            yield position, packet


def _numbered(
    container: av.container.InputContainer, stream: av.VideoStream, index: VideoIndex
) -> Iterator[tuple[int, av.Packet]]:
    for packet in container.demux(stream):
        if packet.size and packet.pts is not None:
            yield index.number_of(packet.pts), packet


def _video_stream(container: av.container.InputContainer, path: Path) -> av.VideoStream:
    if not container.streams.video:
        raise _broken(path, "it has no video stream")
    stream = container.streams.video[0]
    # Several one-threaded decoders beat one decoder with several threads at robot camera sizes.
    stream.thread_type = "NONE"
    stream.thread_count = 1
    return stream


def _broken(path: Path, what: str) -> DatasetError:
    return DatasetError(
        f"{path}: {what}. The video is damaged or cut short: fetch it again, or run "
        f"`flexor data check` on the dataset's folder to see which episodes are affected"
    )
