"""A process that decodes stretches of video files and drops the frames: how fast the decoder is by itself.

It uses FFmpeg's own demuxer, and none of the loader's code. `bench/limits.py` starts several of them.
"""

from __future__ import annotations

import json
import sys
import time
from itertools import cycle

from av.container import InputContainer

from flexor.data.video.open_file import open_video

__all__ = ["main"]

OPEN_FILES = 16


def main() -> None:
    """Read the stretches, [path, first pts, last pts] each, as a line of JSON, wait for another line with the seconds,
    and print how many frames were decoded in how much time."""
    stretches = json.loads(sys.stdin.readline())
    print("ready", flush=True)
    seconds = float(sys.stdin.readline())
    files: dict[str, InputContainer] = {}
    frames, started = 0, time.perf_counter()
    for path, first, last in cycle(stretches):
        frames += decode(_opened(files, path), first, last)
        if time.perf_counter() - started > seconds:
            break
    print(frames, time.perf_counter() - started, flush=True)


def decode(container: InputContainer, first: int, last: int) -> int:
    """The number of decoded frames, including those between the key frame and the first frame."""
    stream = container.streams.video[0]
    container.seek(first, stream=stream)
    decoded = 0
    for frame in container.decode(stream):
        decoded += 1
        if frame.pts is None or frame.pts >= last:
            break
    return decoded


def _opened(files: dict[str, InputContainer], path: str) -> InputContainer:
    if path not in files:
        while len(files) >= OPEN_FILES:
            files.pop(next(iter(files))).close()
        files[path] = open_video(path)
        files[path].streams.video[0].thread_type = "NONE"
        files[path].streams.video[0].codec_context.thread_count = 1
    return files[path]


if __name__ == "__main__":
    main()
