"""Copies any consecutive frames out of a video file without decoding them.

If the first of them is no key frame, the frames since the key frame before it are copied too, and belong to no episode:
the metadata says where in the file an episode begins.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flexor.core.errors import DatasetError
from flexor.data.format.dataset_files import PacketClip
from flexor.data.repair.remux import CopiedStream, resets_decoder
from flexor.data.video.decode import VideoIndex, read_video_packets


@dataclass(frozen=True)
class Cut:
    """The packets that consecutive frames need, in decode order."""

    packets: np.ndarray  # [P] their numbers in the file
    places: np.ndarray  # [P] the place of each one's frame in display order
    lead: int
    """Frames before the requested ones."""

    count: int

    @property
    def delay(self) -> int:
        """Largest number of packets that are decoded before one that is shown earlier."""
        return int((np.arange(len(self.places)) - self.places).max())


def plan_cut(index: VideoIndex, first: int, count: int) -> Cut:
    """The packets of `count` frames starting at `first`, and those that must be decoded before them."""
    frames = slice(first, first + count)
    low, high = int(index.start[frames].min()), int(index.packet[frames].max())
    numbers, ticks = np.arange(low, high + 1), index.packets.pts[low : high + 1]
    usable = ticks >= ticks[0]  # other frames need those before the key frame
    numbers, ticks = numbers[usable], ticks[usable]
    start, end = index.frame_pts[first], index.frame_pts[first + count - 1]
    inside = (ticks >= start) & (ticks <= end)
    if inside.sum() != count:
        raise DatasetError(f"{index.ranges.name}: frames {first} to {first + count - 1} can't be cut out")
    places = np.argsort(np.argsort(ticks, kind="stable"))
    return Cut(numbers, places, int((ticks < start).sum()), count)


def copy_cut(index: VideoIndex, file: Path, cut: Cut, delay: int) -> PacketClip:
    """The packets of a cut, shown at 0, 1, 2 ... and decoded `delay` earlier."""
    facts = index.packets
    stream = CopiedStream(facts.codec, facts.extradata, facts.width, facts.height, delay, file)
    order = {number: i for i, number in enumerate(cut.packets.tolist())}
    packets = []
    for number, packet in read_video_packets(index, int(cut.packets[0]), int(cut.packets[-1]) + 1):
        if number in order:
            i = order[number]
            packet.pts, packet.dts = int(cut.places[i]), i - delay
            packet.is_keyframe = bool(index.key[number])
            packets.append(packet)
    joins = resets_decoder(facts.codec, facts.extradata, bytes(packets[0]))
    return PacketClip(stream, packets, joins, cut.lead, cut.count)
