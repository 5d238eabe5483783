"""Reads the position and time of every video packet of an MP4 file, from the file's own tables.

An MP4 file lists all its packets in one box, `moov`. This module reads only that box and the headers of the
boxes around it. So a file is indexed in about a millisecond, and over a network with one or two requests,
while a demuxer reads every packet.

The values are those that FFmpeg's demuxer reports, including the edit list. Files that FFmpeg handles specially
(fragments, several edits, inconsistent tables) are `Unsupported`: demux them. One difference is deliberate: key
frames are read from the table, while FFmpeg parses the packets of some codecs.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from flexor.core.errors import DatasetError
from flexor.data.storage.ranges import Ranges

__all__ = ["Packets", "Unsupported", "broken", "read_packets"]

# Sample entry -> codec, and the box with the decoder configuration (none for VP9).
CODECS = {
    b"avc1": ("h264", b"avcC"),
    b"avc3": ("h264", b"avcC"),
    b"hvc1": ("hevc", b"hvcC"),
    b"hev1": ("hevc", b"hvcC"),
    b"av01": ("av1", b"av1C"),
    b"vp09": ("vp9", None),
    b"mp4v": ("mpeg4", b"esds"),
}
# The first box of an MP4 (or QuickTime) file is one of these.
FIRST_BOXES = {b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide", b"pnot", b"styp"}
MOST_PACKETS = 100_000_000  # a damaged count must not request more memory than available
MPEG4_VISUAL = 0x20  # object type of an esds box


@dataclass(frozen=True)
class Packets:
    """The video packets of one file, in decode order."""

    width: int
    height: int
    codec: str
    """FFmpeg's name of the codec, not of a decoder: h264, hevc, av1, vp9, mpeg4."""
    extradata: bytes
    """What a decoder needs before the first packet; empty if nothing."""
    time_base: float
    """Seconds per tick."""

    offset: np.ndarray  # [P] int64 byte position in the file
    size: np.ndarray  # [P] int64 bytes
    key: np.ndarray  # [P] bool: decoding may start here
    pts: np.ndarray  # [P] int64 presentation time in ticks, after the edit list
    hidden: np.ndarray  # [P] bool: decoded but never shown, because the edit list hides them

    def __len__(self) -> int:
        return len(self.offset)


class Unsupported(Exception):
    """The tables are incomplete or ambiguous: the file must be demuxed."""


def broken(name: object, problem: str) -> DatasetError:
    """The error for a video file that can't be read."""
    return DatasetError(
        f"{name}: {problem}. The video is damaged or truncated: download it again, or run "
        f"`flexor data check` on the dataset's folder to see which episodes are affected"
    )


def read_packets(ranges: Ranges) -> Packets:
    """The packets of the file's first video track, without reading their data.

    In a truncated file, some packets may be past the end; those before it can still be read.
    """
    moov = _read_moov(ranges)
    try:
        return _track_packets(moov)
    except (struct.error, ValueError, IndexError) as error:
        raise broken(ranges.name, f"its index (the moov box) is damaged: {error}") from error


def _read_moov(ranges: Ranges) -> memoryview:
    """Walk over the boxes of the file, skipping their contents, to the box with the tables."""
    position = 0
    while position + 8 <= ranges.size:
        header = ranges.read(position, min(16, ranges.size - position))
        kind, body, size = _box_header(header, ranges.size - position)
        if position == 0 and kind not in FIRST_BOXES:
            raise Unsupported(f"not an MP4 file: it starts with {header[:8]!r}")
        if size < body:
            raise broken(ranges.name, f"box {kind!r} at byte {position} has an impossible size")
        if position + size > ranges.size:
            place = f"in the middle of box {kind!r}, which ends at byte {position + size}"
            raise broken(ranges.name, f"it ends at byte {ranges.size}, {place}")
        if kind == b"moof":
            raise Unsupported("fragments")
        if kind == b"moov":
            return memoryview(ranges.read(position + body, size - body))
        position += size
    if position == 0:
        raise Unsupported("not an MP4 file: too short")
    raise broken(ranges.name, "it has no index (no moov box): probably the recording was not finished")


def _box_header(header: bytes | memoryview, room: int) -> tuple[bytes, int, int]:
    """(kind, bytes of the header, bytes of the whole box); `room` is the size of a box that extends to the end."""
    size, kind = struct.unpack_from(">I4s", header)
    if size == 1:
        return kind, 16, struct.unpack_from(">Q", header, 8)[0]
    return kind, 8, size or room


def _boxes(data: memoryview) -> Iterator[tuple[bytes, memoryview]]:
    """(kind, content) of the consecutive boxes in `data`."""
    position = 0
    while position + 8 <= len(data):
        kind, body, size = _box_header(data[position : position + 16], len(data) - position)
        if size < body or position + size > len(data):
            raise ValueError(f"box {kind!r} does not fit into the box around it")
        yield kind, data[position + body : position + size]
        position += size


def _find(data: memoryview, *path: bytes) -> memoryview | None:
    """The content of the first box along a path of kinds."""
    for kind in path:
        content = next((content for name, content in _boxes(data) if name == kind), None)
        if content is None:
            return None
        data = content
    return data


def _need(data: memoryview, *path: bytes) -> memoryview:
    content = _find(data, *path)
    if content is None:
        raise ValueError(f"box {'/'.join(kind.decode() for kind in path)} is missing")
    return content


def _table(content: memoryview, kind: str = ">u4", columns: int = 1, skip: int = 8) -> np.ndarray:
    """The entries [n, columns] of a box that starts with version, flags and their number."""
    (count,) = struct.unpack_from(">I", content, skip - 4)
    return np.frombuffer(content, kind, count * columns, skip).reshape(count, columns)


def _track_packets(moov: memoryview) -> Packets:
    if _find(moov, b"mvex") is not None or _find(moov, b"cmov") is not None:
        raise Unsupported("fragments, or a compressed moov")
    track = _video_track(moov)
    media = _need(track, b"mdia")
    tables = _need(media, b"minf", b"stbl")
    codec, width, height, extradata = _sample_entry(_need(tables, b"stsd"))
    time_scale = _time_scale(_need(media, b"mdhd"))

    size = _sizes(tables)
    key = _keys(tables, len(size))
    dts, pts = _times(tables, len(size))
    movie_scale = _time_scale(_need(moov, b"mvhd"))
    first, end, shift, hidden = _apply_edits(track, Fraction(time_scale, movie_scale), dts, pts, key)
    selected = slice(first, end)
    return Packets(
        width=width,
        height=height,
        codec=codec,
        extradata=extradata,
        time_base=1 / time_scale,
        offset=_offsets(tables, size)[selected],
        size=size[selected],
        key=key[selected],
        pts=pts[selected] + shift,
        hidden=hidden[selected],
    )


def _video_track(moov: memoryview) -> memoryview:
    for kind, track in _boxes(moov):
        if kind == b"trak" and bytes(_need(track, b"mdia", b"hdlr")[8:12]) == b"vide":
            return track
    raise ValueError("it has no video track")


def _time_scale(header: memoryview) -> int:
    """Ticks per second, from an mvhd or mdhd box."""
    (scale,) = struct.unpack_from(">I", header, 20 if header[0] == 1 else 12)
    if scale == 0:
        raise Unsupported("no time scale")
    return scale


def _sample_entry(description: memoryview) -> tuple[str, int, int, bytes]:
    """(codec, width, height, extradata)."""
    entries = list(_boxes(description[8:]))
    if len(entries) != 1:
        raise Unsupported(f"{len(entries)} sample descriptions")
    kind, entry = entries[0]
    if kind not in CODECS:
        raise Unsupported(f"codec {kind!r}")
    codec, box = CODECS[kind]
    width, height = struct.unpack_from(">HH", entry, 24)
    if box is None:
        return codec, width, height, b""
    extradata = _find(entry[78:], box)
    if extradata is None:
        raise Unsupported(f"{codec} without {box!r}")
    return codec, width, height, _mpeg4_config(extradata) if box == b"esds" else bytes(extradata)


def _mpeg4_config(esds: memoryview) -> bytes:
    """The decoder configuration, from three nested descriptors."""
    kind, stream = _descriptor(esds[4:])
    if kind != 3 or stream[2] & 0xE0:  # a flag for further fields, which video in files never has
        raise Unsupported("an unusual esds box")
    kind, decoder = _descriptor(stream[3:])
    if kind != 4 or decoder[0] != MPEG4_VISUAL:
        raise Unsupported("not MPEG-4 video")
    kind, config = _descriptor(decoder[13:])
    if kind != 5:
        raise Unsupported("no decoder configuration")
    return bytes(config)


def _descriptor(data: memoryview) -> tuple[int, memoryview]:
    """(kind, content); the length has 7 bits per byte, the top bit means that another byte follows."""
    if len(data) == 0:
        return 0, data
    length, position = 0, 1
    while True:
        length = length << 7 | data[position] & 0x7F
        position += 1
        if not data[position - 1] & 0x80:
            return data[0], data[position : position + length]


def _sizes(tables: memoryview) -> np.ndarray:
    content = _find(tables, b"stsz")
    if content is None:
        raise Unsupported("no stsz table")
    constant, count = struct.unpack_from(">II", content, 4)
    if count == 0:
        raise ValueError("it lists no video packet")
    if constant:
        if count > MOST_PACKETS:
            raise ValueError(f"it lists {count} packets")
        return np.full(count, constant, np.int64)
    size = _table(content, skip=12)[:, 0].astype(np.int64)
    if (size == 0).any():
        raise Unsupported("empty packets")
    return size


def _keys(tables: memoryview, count: int) -> np.ndarray:
    content = _find(tables, b"stss")
    if _find(tables, b"stps") is not None or any(
        kind == b"sbgp" and bytes(group[4:8]) in (b"rap ", b"sync") for kind, group in _boxes(tables)
    ):
        raise Unsupported("key frames outside of the stss table")
    if content is None:
        return np.ones(count, bool)  # no table: every packet is a key frame
    numbers = _table(content)[:, 0].astype(np.int64) - 1
    # FFmpeg steps through table and packets in parallel, so it ignores an entry out of order.
    if len(numbers) == 0 or numbers[0] != 0 or (np.diff(numbers) <= 0).any() or numbers[-1] >= count:
        raise Unsupported("an unusual table of key frames")
    key = np.zeros(count, bool)
    key[numbers] = True
    return key


def _times(tables: memoryview, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Decode and display times of each packet [P], in ticks of the media."""
    runs = _table(_need(tables, b"stts"), columns=2).astype(np.int64)
    if runs[:, 0].sum() != count:
        raise Unsupported("times and packets that disagree")
    duration = np.repeat(runs[:, 1], runs[:, 0])  # [P]
    # A packet with duration 0, or more than 2**31 ticks, is a correction that FFmpeg interprets.
    if (duration[:-1] <= 0).any() or (duration >= 1 << 31).any():
        raise Unsupported("an unusual table of times")
    decoded = np.concatenate([[0], np.cumsum(duration)[:-1]])
    content = _find(tables, b"ctts")
    if content is None:
        return decoded, decoded
    # Signed in version 1; version 0 says unsigned, but FFmpeg reads both as signed, and writers write signed.
    delays = _table(content, ">i4", columns=2).astype(np.int64)
    if (delays[:, 0] <= 0).any() or delays[:, 0].sum() != count:
        raise Unsupported("delays and packets that disagree")
    return decoded, decoded + np.repeat(delays[:, 1], delays[:, 0])


def _offsets(tables: memoryview, size: np.ndarray) -> np.ndarray:
    """Byte positions [P]: packets are stored consecutively in chunks; the table lists runs of equal chunks."""
    content = _find(tables, b"stco")
    offsets = _table(_need(tables, b"co64"), ">u8") if content is None else _table(content)
    chunk_offset = offsets[:, 0].astype(np.int64)
    # first chunk (from 1), packets per chunk
    runs = _table(_need(tables, b"stsc"), columns=3).astype(np.int64)
    first = np.append(runs[:, 0] - 1, len(chunk_offset))
    if len(runs) == 0 or first[0] != 0 or (np.diff(first) <= 0).any():
        raise Unsupported("an unusual table of chunks")
    per_chunk = np.repeat(runs[:, 1], np.diff(first))
    if per_chunk.sum() != len(size):
        raise Unsupported("chunks and packets that disagree")
    before = np.cumsum(size) - size  # bytes of all packets before this one
    start = np.cumsum(per_chunk) - per_chunk  # [chunks] first packet of each
    return np.repeat(chunk_offset - before[start], per_chunk) + before


def _apply_edits(
    track: memoryview, scale: Fraction, dts: np.ndarray, pts: np.ndarray, key: np.ndarray
) -> tuple[int, int, int, np.ndarray]:
    """(first packet, end, offset to add to times, hidden packets [P]), as in FFmpeg.

    An edit shows the media from a start time, for a duration. Packets are kept from the key frame it needs to
    the key frame after its end; packets that are not shown are hidden. The first shown packet moves to time
    zero, or to the end of an empty edit before it.
    """
    hidden = np.zeros(len(pts), bool)
    edits = _edits(track)
    delay = 0
    if edits and edits[0][1] == -1:
        delay = _rescale(edits.pop(0)[0], scale)
        if not edits:
            raise Unsupported("an empty edit and nothing after it")
    if not edits:
        return 0, len(pts), 0, hidden
    if len(edits) > 1 or edits[0][1] < 0:
        raise Unsupported("several edits")
    start, stop = edits[0][1], edits[0][1] + _rescale(edits[0][0], scale)

    reordered = int(pts is not dts)
    usable = np.flatnonzero(key & (dts <= start) & (pts <= start))
    first = int(usable[-1]) if len(usable) else 0
    duration = np.append(np.diff(dts), stop - start)
    past = np.flatnonzero(key & (pts + duration >= stop))
    past = past[past >= first]
    # With B-frames, packets of the edit may be stored after the key frame that follows it: one more key frame.
    end = int(past[reordered]) + 1 if len(past) > reordered else len(pts)

    hidden = (pts < start) | (pts >= stop)
    visible = first + np.flatnonzero(~hidden[first:end])
    if len(visible) == 0:
        raise Unsupported("an edit that shows nothing")
    earliest, entry = int(pts[visible].min()), int(dts[visible[0]])
    if delay + earliest < entry:
        raise Unsupported("frames shown before they are decoded")
    return first, end, delay - max(earliest, entry), hidden


def _edits(track: memoryview) -> list[tuple[int, int]]:
    """[(duration in ticks of the movie, first time in ticks of the media or -1 for an empty edit)]."""
    content = _find(track, b"edts", b"elst")
    if content is None:
        return []
    columns = np.dtype([("duration", ">u8"), ("time", ">i8"), ("rate", ">u4")])
    if content[0] == 0:
        columns = np.dtype([("duration", ">u4"), ("time", ">i4"), ("rate", ">u4")])
    (count,) = struct.unpack_from(">I", content, 4)
    table = np.frombuffer(content, columns, count, 8)
    return list(zip(table["duration"].tolist(), table["time"].tolist()))


def _rescale(ticks: int, scale: Fraction) -> int:
    """Convert ticks of the movie to ticks of the media, rounded to nearest."""
    return (ticks * scale.numerator * 2 + scale.denominator) // (2 * scale.denominator)
