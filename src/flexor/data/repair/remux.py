"""Copies an episode's frames from one video file to another without decoding them.

Frames can be cut out if the first is a key frame and none needs a packet from outside. Their times are set
anew, in frames from the episode's start: this corrects the timing of a recording.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import av
import numpy as np

from flexor.data.format.dataset_files import PacketClip
from flexor.data.format.stats import pixel_counts, sample_indices
from flexor.data.video.colour import rgb_frame
from flexor.data.video.decode import VideoIndex, decode_frames, read_video_packets
from flexor.data.video.open_file import open_video

H264_IDR = {5}
HEVC_IDR = {19, 20}


@dataclass(frozen=True)
class CopiedStream:
    """Packets as an encoder wrote them. One decoder can decode packets of equal streams one after the other."""

    codec: str
    extradata: bytes
    width: int
    height: int
    delay: int
    """Largest number of frames that a packet is decoded before it is shown; the same in the whole file."""

    template: Path = field(compare=False)
    """A file with such a stream, to copy its description from."""

    def add_to(self, container: Any) -> Any:
        with open_video(str(self.template)) as reader:
            return container.add_stream_from_template(reader.streams.video[0], opaque=True)


def first_packet(index: VideoIndex, first: int, count: int) -> int | None:
    """The first packet of `count` frames starting at `first`, if they can be decoded without other packets.

    None if they can't be cut out: the first is not a key frame, or frames around them are needed.
    """
    packets = index.packet[first : first + count]
    low = int(packets.min())
    together = int(packets.max()) - low + 1 == count
    closed = index.start[first : first + count].min() >= low  # open GOPs refer to earlier frames
    return low if together and closed and packets[0] == low and index.key[low] else None


def is_intact(index: VideoIndex, first: int, count: int) -> bool:
    """Whether the packets of these frames are inside the file, and not after the point where it was truncated."""
    packets = index.packet[first : first + count]
    ends = index.packets.offset[packets] + index.packets.size[packets]
    return bool(ends.max() <= index.ranges.size)


def reorder_delay(index: VideoIndex, first: int, count: int) -> int:
    """Largest number of packets decoded before the one that is shown first: 0 without B-frames."""
    rank = np.argsort(np.argsort(index.packet[first : first + count]))  # [count] position in decode order
    return int((rank - np.arange(count)).max())


def copy_clip(index: VideoIndex, file: Path, first: int, count: int, delay: int) -> PacketClip:
    """The packets of frames that `first_packet` finds, shown at 0, 1, 2 ... and decoded `delay` earlier."""
    low = first_packet(index, first, count)
    assert low is not None
    facts = index.packets
    stream = CopiedStream(facts.codec, facts.extradata, facts.width, facts.height, delay, file)
    display = np.argsort(
        index.packet[first : first + count]
    )  # [count] decode order -> place among the frames
    packets = []
    for number, packet in read_video_packets(index, low, low + count):
        packet.pts, packet.dts = int(display[number - low]), number - low - delay
        packet.is_keyframe = bool(index.key[number])
        packets.append(packet)
    return PacketClip(stream, packets, joins=resets_decoder(facts.codec, facts.extradata, bytes(packets[0])))


def resets_decoder(codec: str, extradata: bytes, packet: bytes) -> bool:
    """Whether this key frame resets the decoder.

    In H.264 and HEVC only some key frames do. Without a reset, frames that follow another episode's packets
    would be shown out of order.
    """
    if codec == "h264" and len(extradata) > 6 and extradata[0] == 1:
        return any(nal[0] & 0x1F in H264_IDR for nal in _nal_units(packet, 1 + (extradata[4] & 3)))
    if codec == "hevc" and len(extradata) > 22 and extradata[0] == 1:
        return any(nal[0] >> 1 & 0x3F in HEVC_IDR for nal in _nal_units(packet, 1 + (extradata[21] & 3)))
    return codec not in ("h264", "hevc")


def _nal_units(packet: bytes, size: int) -> Iterator[bytes]:
    """The parts of a packet, each preceded by its length in `size` bytes."""
    at = 0
    while at + size < len(packet):
        length = int.from_bytes(packet[at : at + size], "big")
        yield packet[at + size : at + size + max(length, 1)]
        at += size + length


@dataclass(frozen=True)
class DecodedEpisode:
    """The result of decoding an episode's frames."""

    pixels: np.ndarray | None
    """Summed `pixel_counts` [C, 256] of the frames used for statistics."""

    fault: str | None


def decode_episode(
    index: VideoIndex, first: int, count: int, every: bool, pixels: bool = True
) -> DecodedEpisode:
    """Decode frames: all, or only those used for statistics."""
    sampled = set((first + sample_indices(count)).tolist())
    frames = _decoded_with(index, first, count) if every else np.array(sorted(sampled))
    counts = np.zeros((3, 256), np.int64)
    odd_size = False

    def take(i: int, frame: av.VideoFrame) -> None:
        nonlocal counts, odd_size
        if (frame.height, frame.width) != (index.height, index.width):
            odd_size = True
        elif pixels and int(frames[i]) in sampled:
            counts += pixel_counts(rgb_frame(frame).to_ndarray()[:, : frame.width])

    bad = decode_frames(index, frames, take)
    if bad:
        return DecodedEpisode(None, f"{len(bad)} of {len(frames)} frames can't be decoded: {bad[min(bad)]}")
    if odd_size:
        return DecodedEpisode(None, "the image size changes within the file")
    return DecodedEpisode(counts if pixels else None, None)


def _decoded_with(index: VideoIndex, first: int, count: int) -> np.ndarray:
    """These frames, and the earlier frames that they depend on."""
    packets = index.packet[first : first + count]
    low, high = int(index.start[first : first + count].min()), int(packets.max())
    frames = np.flatnonzero((index.packet >= low) & (index.packet <= high))
    # decoded frames are identified by their time
    return frames[np.append(True, np.diff(index.frame_pts[frames]) > 0)]
