"""Indexes video files and decodes the requested frames; each GOP (group of pictures) is decoded once.

Frames are numbered in display order. A frame's time is its presentation timestamp from the container, never
its number divided by a frame rate: that is wrong for files that do not start at zero or have a variable rate.

Packets go from the file directly to a decoder that its thread reuses. A request opens, demuxes and seeks
nothing, which is most of the cost of random access to a video.
"""

import io
import threading
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from operator import add
from pathlib import Path

import av
import numpy as np
from av.video.reformatter import VideoReformatter

from flexor.data.storage.ranges import LocalRanges, Ranges
from flexor.data.video.mp4 import Packets, Unsupported, broken, read_packets
from flexor.data.video.open_file import MOST_PIXELS, open_video

__all__ = [
    "VideoIndex",
    "bytes_read",
    "count_read",
    "decode",
    "decode_frames",
    "index_video",
    "packet_ranges",
    "packets_together",
    "read_ahead",
]

MAX_DECODERS = 8  # per thread; a dataset has one kind of stream per set of encoder settings


@dataclass(frozen=True, eq=False)
class VideoIndex:
    """The packets of one file in decode order, and its frames in display order.

    Packets and frames are not the same list: B-frames are stored after frames that are shown later,
    and an edit list may hide packets that must be decoded but are never shown.
    """

    ranges: Ranges
    packets: Packets
    packet: np.ndarray  # [F] packet of every frame, display order
    frame_pts: np.ndarray  # [F] ticks, ascending
    times: np.ndarray  # [F] seconds, ascending
    start: np.ndarray  # [F] packet from which decoding must start to get this frame

    def __len__(self) -> int:
        return len(self.times)

    @property
    def width(self) -> int:
        return self.packets.width

    @property
    def height(self) -> int:
        return self.packets.height

    @property
    def key(self) -> np.ndarray:
        return self.packets.key

    @property
    def gops(self) -> np.ndarray:
        """Packet ranges [G, 2] from one key frame to the next, in decode order."""
        keys = np.flatnonzero(self.key)
        return np.stack([keys, np.append(keys[1:], len(self.key))], axis=1)

    @cached_property
    def keys(self) -> np.ndarray:
        """Packets where decoding may start."""
        return np.flatnonzero(self.key)


def index_video(file: str | Path | Ranges) -> VideoIndex:
    """Read the positions of a video file's packets from its tables; no frame is read or decoded."""
    if isinstance(file, str | Path) and not Path(file).is_file():
        raise broken(str(file), "the file is missing")
    ranges = LocalRanges(Path(file)) if isinstance(file, str | Path) else file
    try:
        packets = read_packets(ranges)
    except Unsupported:
        packets = _demux(ranges)
    if not len(packets.pts):
        raise broken(ranges.name, "it contains no video packet")
    key = packets.key
    if not key[0]:
        key[0] = True  # some muxers do not flag the first packet; there is nothing before it anyway
    visible = np.flatnonzero(~packets.hidden)
    packet = visible[np.argsort(packets.pts[visible], kind="stable")]
    return VideoIndex(
        ranges=ranges,
        packets=packets,
        packet=packet,
        frame_pts=packets.pts[packet],
        times=packets.pts[packet] * packets.time_base,
        start=_decode_starts(key, packets.pts)[packet],
    )


Sink = Callable[[int, av.VideoFrame], None]
DecoderOf = Callable[[Packets], av.VideoCodecContext]


def decode_frames(
    index: VideoIndex, frames: np.ndarray, sink: Sink, decoder_of: DecoderOf | None = None
) -> dict[int, str]:
    """Decode distinct frames; `sink(i, frame)` gets frames[i], in any order.

    Returns {i: reason} for frames that can't be decoded: one broken packet affects only the rest of its GOP.
    A file that can't be read at all raises an error.
    """
    waiting = {pts: i for i, pts in enumerate(index.frame_pts[frames].tolist())}
    assert len(waiting) == len(frames), "frames must be distinct"
    reason = "the decoder returns no frame"
    for first, end, count in packet_ranges(index, frames):
        decoded = _decoded(index, first, end, decoder_of or _decoder)
        for pictures, problem in decoded:
            reason = problem or reason
            for picture in pictures:
                place = None if picture.is_corrupt else waiting.pop(picture.pts, None)
                if place is not None:
                    sink(place, picture)
                    count -= 1
            if not count:
                break  # without asking the decoder for what it has left
        decoded.close()
    return {i: f"{reason} (at {pts * index.packets.time_base:.3f} s)" for pts, i in waiting.items()}


def read_ahead(index: VideoIndex, frames: np.ndarray) -> None:
    """Announce that these frames will be decoded soon, so that their packets are prefetched."""
    packets = index.packets
    for first, end, _ in packet_ranges(index, frames):
        low = int(packets.offset[first:end].min())
        high = min(int((packets.offset[first:end] + packets.size[first:end]).max()), index.ranges.size)
        if low < high:
            index.ranges.ahead(low, high - low)


def decode(
    file: str | Path | Ranges, frames: Sequence[int] | np.ndarray, index: VideoIndex | None = None
) -> np.ndarray:
    """RGB frames [n, H, W, 3] by number in display order; any order, repeats allowed.

    The pixels are those of PyAV's `frame.to_ndarray(format="rgb24")`, bit for bit.
    """
    index = index or index_video(file)
    requested = np.asarray(frames, np.int64)
    if len(requested) and (requested.min() < 0 or requested.max() >= len(index)):
        raise IndexError(
            f"frames {requested.min()}..{requested.max()} requested, but {index.ranges.name} has {len(index)} frames"
        )
    distinct, slots = np.unique(requested, return_inverse=True)
    pixels = np.empty((len(distinct), index.height, index.width, 3), np.uint8)
    reformatter = VideoReformatter()  # reused: to_ndarray() would create a new scaler for every frame

    def keep(i: int, frame: av.VideoFrame) -> None:
        if (frame.height, frame.width) != pixels.shape[1:3]:
            raise broken(index.ranges.name, "the image size changes within the file")
        pixels[i] = reformatter.reformat(frame, format="rgb24").to_ndarray()

    raise_bad(index, len(distinct), decode_frames(index, distinct, keep))
    return pixels[slots]


def raise_bad(index: VideoIndex, requested: int, bad: dict[int, str]) -> None:
    """Raise an error if there are frames that could not be decoded."""
    if bad:
        problem = f"{len(bad)} of {requested} frames can't be decoded; the first is {bad[min(bad)]}"
        raise broken(index.ranges.name, problem)


def _decode_starts(key: np.ndarray, pts: np.ndarray) -> np.ndarray:
    """The key packet from which decoding must start, for each packet.

    In an open GOP, the frames shown before the key frame refer to the previous GOP, so decoding must start
    one key frame earlier.
    """
    keys = np.flatnonzero(key)
    group = np.searchsorted(keys, np.arange(len(key)), side="right") - 1
    leading = pts < pts[keys[group]]
    return keys[np.maximum(group - leading, 0)]


def packet_ranges(index: VideoIndex, frames: np.ndarray) -> list[tuple[int, int, int]]:
    """Packet ranges to decode to get all of `frames`, and how many of them each has; adjacent ranges are merged."""
    if not len(frames):
        return []
    order = np.argsort(index.start[frames], kind="stable")
    first = index.start[frames][order]
    end = np.maximum.accumulate(index.packet[frames][order] + 1)
    begins = np.flatnonzero(np.append(True, first[1:] > end[:-1]))
    edges = np.append(begins, len(frames))
    columns = first[begins], end[edges[1:] - 1], np.diff(edges)
    return list(zip(*(column.tolist() for column in columns)))


def _decoded(
    index: VideoIndex, first: int, end: int, decoder_of: DecoderOf
) -> Generator[tuple[list[av.VideoFrame], str | None]]:
    """Every frame of packets first..end-1, packet by packet, and why a packet can't be decoded."""
    decoder = decoder_of(index.packets)
    failed = False  # until the next key packet: frames before it refer to lost frames
    try:
        for number, packet in read_video_packets(index, first, end):
            if failed and not index.key[number]:
                continue
            try:
                pictures, failed = decoder.decode(packet), False
            except av.FFmpegError as error:
                yield _drain(decoder), str(error)
                decoder.flush_buffers()
                failed = True
                continue
            yield pictures, None
        yield _drain(decoder), None
    finally:
        # Also if the consumer stopped early: frames left in the decoder must not reach the next request.
        decoder.flush_buffers()


def _drain(decoder: av.VideoCodecContext) -> list[av.VideoFrame]:
    try:
        return decoder.decode(None)
    except av.FFmpegError:
        return []


def packets_together(index: VideoIndex, first: int, end: int) -> list[tuple[int, int]]:
    """The bytes of packets first..end-1 as ranges of the file; adjacent packets are one range."""
    packets, total = index.packets, index.ranges.size
    # lists: for a few packets they are faster than arrays
    offset, size = packets.offset[first:end].tolist(), packets.size[first:end].tolist()
    low, high = min(offset), max(map(add, offset, size))
    if high - low <= 2 * sum(size) + (64 << 10) and high <= total:
        return [(low, high)]
    return [(at, at + count) for at, count in zip(offset, size) if at + count <= total]


def read_video_packets(index: VideoIndex, first: int, end: int) -> Iterator[tuple[int, av.Packet]]:
    """Packets first..end-1 with their numbers; adjacent packets are read together."""
    packets, total = index.packets, index.ranges.size
    together = packets_together(index, first, end)
    low, high = together[0] if len(together) == 1 else (0, 0)
    data = memoryview(index.ranges.read(low, high - low)) if high else None
    count_read(sum(high - low for low, high in together))
    columns = zip(*(column[first:end].tolist() for column in (packets.offset, packets.size, packets.pts)))
    for number, (at, count, pts) in enumerate(columns, first):
        if low <= at and at + count <= high:
            payload = data[at - low : at - low + count]  # type: ignore[index]
        else:  # a truncated packet: the decoder reports the error
            payload = memoryview(index.ranges.read(at, count) if at + count <= total else b"\xff")
        # Copied into an FFmpeg packet: decoders read beyond the end and need zeros there.
        packet = av.Packet(len(payload))
        packet.update(payload)  # type: ignore[arg-type]
        packet.pts = pts
        yield number, packet


_read = 0
_read_lock = threading.Lock()


def count_read(count: int) -> None:
    """Count bytes as read for decoding, by this process or one of its decode processes."""
    global _read
    with _read_lock:
        _read += count


def bytes_read() -> int:
    """Bytes of video that this process has read for decoding."""
    return _read


_local = threading.local()


def _decoder(packets: Packets) -> av.VideoCodecContext:
    """This thread's decoder for streams of this kind."""
    decoders: OrderedDict[tuple, av.VideoCodecContext] | None = getattr(_local, "decoders", None)
    if decoders is None:
        decoders = _local.decoders = OrderedDict()
    kind = (packets.codec, packets.extradata, packets.width, packets.height)
    if kind not in decoders:
        decoders[kind] = _new_decoder(packets)
        while len(decoders) > MAX_DECODERS:
            decoders.popitem(last=False)
    decoders.move_to_end(kind)
    return decoders[kind]


def _new_decoder(packets: Packets) -> av.VideoCodecContext:
    context = av.CodecContext.create(_decoder_name(packets.codec), "r")
    assert isinstance(context, av.VideoCodecContext)
    if packets.extradata:
        context.extradata = packets.extradata
    context.width, context.height = packets.width, packets.height
    context.options = {"max_pixels": str(MOST_PIXELS)}
    # At robot camera sizes, several single-threaded decoders are faster than one multi-threaded decoder.
    context.thread_type = "NONE"
    context.thread_count = 1
    return context


@cache
def _decoder_name(codec: str) -> str:
    """FFmpeg's own AV1 decoder needs hardware; dav1d does not."""
    return "libdav1d" if codec == "av1" and "libdav1d" in av.codecs_available else codec


def _demux(ranges: Ranges) -> Packets:
    """The packets from the demuxer, for files that `mp4.py` does not support."""
    entries: list[tuple[int, int, bool, int, bool]] = []
    try:
        with open_video(RangesFile(ranges)) as container:
            if not container.streams.video:
                raise broken(ranges.name, "it has no video stream")
            stream = container.streams.video[0]
            for packet in container.demux(stream):
                if not packet.size or packet.pts is None:
                    continue
                at = -1 if packet.pos is None else packet.pos
                if not entries and ranges.read(max(at, 0), packet.size) != bytes(packet):
                    problem = f"its packets can't be read from a {container.format.name} file"
                    raise broken(ranges.name, problem)
                entries.append((at, packet.size, packet.is_keyframe, packet.pts, packet.is_discard))
            context = stream.codec_context
            stream_info = (
                context.width,
                context.height,
                context.codec.canonical_name,
                context.extradata or b"",
            )
            time_base = float(stream.time_base or 0)
    except (av.FFmpegError, OSError) as error:
        raise broken(ranges.name, f"{error}; {len(entries)} packets could be read") from error
    columns = [np.array(column) for column in zip(*entries)] or [np.empty(0, np.int64)] * 5
    offset, size, key, pts, hidden = columns
    return Packets(*stream_info, time_base, offset, size, key.astype(bool), pts, hidden.astype(bool))


class RangesFile(io.RawIOBase):
    """A file read by ranges, as a file object for the demuxer."""

    def __init__(self, ranges: Ranges):
        self.ranges, self.at = ranges, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.at, io.SEEK_END: self.ranges.size}[whence]
        return self.at

    def read(self, count: int | None = -1) -> bytes:
        left = max(self.ranges.size - self.at, 0)
        count = left if count is None or count < 0 else min(count, left)
        data = self.ranges.read(self.at, count) if count else b""
        self.at += len(data)
        return data
