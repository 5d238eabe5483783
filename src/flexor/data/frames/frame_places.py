"""Where frames are: the video file of each, and its number there, as decode processes need it.

All of a request are looked up at once, in arrays. Files are indexed when a frame of them is first asked for.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from flexor.core.errors import DatasetError, SourceError
from flexor.data.frames.clips import Clip, VideoClip, VideoFile
from flexor.data.frames.shared_memory import SharedArena
from flexor.data.storage.ranges import LocalRanges
from flexor.data.video.decode import VideoIndex, packet_ranges, packets_together
from flexor.data.video.decode_request import PacketBytes
from flexor.data.video.shared_index import write_index

__all__ = ["FramePlaces"]

UNKNOWN, UNREADABLE = -2, -1


class FramePlaces:
    """Of all cameras that are videos. Safe to use from several threads."""

    def __init__(self, clips: Mapping[tuple[str, int], Clip], ends: np.ndarray):
        """`clips` by camera and episode; `ends` of the episodes, as ids of frames."""
        self.clips, self.ends = clips, ends
        self.memory = SharedArena()
        self.reasons: dict[tuple[str, int], str] = {}
        """Why episodes can't be read at all, by camera and number."""
        self._files: dict[str, np.ndarray] = {}  # [episodes] where the index of each one's file begins
        self._frames: dict[str, np.ndarray] = {}  # [ids] numbers in the file
        self._indexed: dict[int, int] = {}  # where the index of a file begins, by the object's id
        self._elsewhere: dict[int, VideoFile] = {}  # files that only this process can read
        self._lock = threading.Lock()

    def find(self, camera: str, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where the index of each frame's file begins in shared memory, and its number in the file, both [n].

        The former is negative for frames that can't be read (see `why`)."""
        if camera not in self._files:
            with self._lock:
                self._frames.setdefault(camera, np.empty(int(self.ends[-1]), np.int64))
                self._files.setdefault(camera, np.full(len(self.ends), UNKNOWN))
        episodes = np.searchsorted(self.ends, ids, side="right")
        files = self._files[camera][episodes]
        if (files == UNKNOWN).any():
            for episode in np.unique(episodes[files == UNKNOWN]).tolist():
                self._look_up(camera, episode)
            files = self._files[camera][episodes]
        return files, self._frames[camera][ids]

    def why(self, camera: str, frame: int) -> str:
        """Why a frame's episode can't be read."""
        return self.reasons[camera, int(np.searchsorted(self.ends, frame, side="right"))]

    def packets(self, files: np.ndarray, frames: np.ndarray) -> tuple[dict[int, PacketBytes], dict[int, str]]:
        """What other processes can't read: the packets of these frames, by file; and why files have none."""
        packets: dict[int, PacketBytes] = {}
        reasons: dict[int, str] = {}
        for file in np.unique(files).tolist() if self._elsewhere else ():
            if file in self._elsewhere:
                try:
                    packets[file] = _packets(self._elsewhere[file].index, np.unique(frames[files == file]))
                except SourceError:
                    raise
                except DatasetError as error:  # it is too short
                    reasons[file] = str(error)
        return packets, reasons

    def _look_up(self, camera: str, episode: int) -> None:
        clip = self.clips[camera, episode]
        assert isinstance(clip, VideoClip), "only videos are decoded by other processes"
        end = int(self.ends[episode])
        try:
            numbers = clip.numbers
            with self._lock:
                file = self._index(clip.file)
            self._frames[camera][end - len(numbers) : end] = numbers
            self._files[camera][episode] = file  # last: other threads look here first
        except SourceError:
            raise
        except DatasetError as error:
            self.reasons[camera, episode] = str(error)
            self._files[camera][episode] = UNREADABLE

    def _index(self, file: VideoFile) -> int:
        """Move the index of a file to shared memory."""
        if id(file) not in self._indexed:
            index = file.index
            ranges = index.ranges
            local = isinstance(ranges, LocalRanges)
            portable = index if local else replace(index, ranges=PacketBytes(ranges.name, ranges.size, []))
            offset, shared = write_index(portable, self.memory.take)
            file.replace_index(replace(shared, ranges=ranges))
            self._indexed[id(file)] = offset
            if not local:
                self._elsewhere[offset] = file
        return self._indexed[id(file)]


def _packets(index: VideoIndex, frames: np.ndarray) -> PacketBytes:
    """The packets that these frames need, ascending, read here."""
    ranges = index.ranges
    parts = []
    for first, end, _ in packet_ranges(index, frames):
        for low, high in packets_together(index, first, end):
            parts.append((low, ranges.read(low, high - low)))
    return PacketBytes(ranges.name, ranges.size, parts)
