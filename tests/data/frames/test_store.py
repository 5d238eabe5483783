"""The frame store: any frames, from where they are kept or decoded, in one format per camera."""

from concurrent.futures import ThreadPoolExecutor

import av
import numpy as np
import pytest

from flexor.core.errors import DatasetError
from flexor.data.format.metadata import Feature
from flexor.data.frames.clips import decode_image
from flexor.data.frames.store import FrameStore, fill_cache
from flexor.pages.images import png
from support.samples import picture

LENGTHS = np.array([5, 3, 4])


class Pictures:
    """Frame n of episode e is filled with 10 e + n; some may be broken."""

    feature = Feature("cam", "video", (4, 6, 3))

    def __init__(self, episode, length, bad=(), size=(4, 6), layout="rgb24"):
        self.episode, self.length, self.bad, self.size, self.layout = episode, length, bad, size, layout
        self.where = f"episode {episode}"
        self.decoded = []

    def starts(self):
        return np.arange(self.length)

    def request(self, frames):
        return self, self._decode, frames

    def _decode(self, frames, sink):
        for i, frame in enumerate(frames.tolist()):
            if frame not in self.bad:
                self.decoded.append(frame)
                pixels = np.full((*self.size, 3), 10 * self.episode + frame, np.uint8)
                sink(i, av.VideoFrame.from_ndarray(pixels, format=self.layout))
        return {i: "noise" for i, frame in enumerate(frames.tolist()) if frame in self.bad}


class Memory:
    """A keeper of frames in a dictionary."""

    jpeg = False

    def __init__(self):
        self.frames = {}

    def has(self, ids):
        return np.array([i in self.frames for i in ids.tolist()], bool)

    def view(self, frame):
        return self.frames[frame]

    def put(self, ids, frames):
        self.frames |= {int(i): np.array(f) for i, f in zip(ids, frames)}


def store(**broken):
    clips = {("cam", e): Pictures(e, n, broken.get(f"e{e}", ())) for e, n in enumerate(LENGTHS.tolist())}
    return FrameStore(clips, LENGTHS)


IDS = np.array([9, 4, 9, 5, 0])
VALUES = [21, 4, 21, 10, 0]


def test_frames_come_in_the_order_asked_for_and_are_decoded_once():
    frames = store()
    assert frames.get("cam", IDS)[:, 0, 0, 0].tolist() == VALUES
    decoded = [clip.decoded for clip in frames.clips.values()]
    assert decoded == [[0, 0, 4], [0], [1]]  # and one more for the format


def test_a_kept_frame_is_not_decoded():
    frames = store()
    frames.caches = {"cam": Memory()}
    assert fill_cache(frames, ["cam"], np.arange(3, 12), workers=2) == {"cam": 0}
    before = [list(clip.decoded) for clip in frames.clips.values()]
    assert frames.get("cam", IDS[:-1])[:, 0, 0, 0].tolist() == VALUES[:-1]
    assert [clip.decoded for clip in frames.clips.values()] == before
    assert frames.is_cached("cam", np.arange(12)).tolist() == [False] * 3 + [True] * 9


def test_filling_goes_on_where_it_stopped_and_counts_what_is_broken():
    frames = store(e1=[1])
    frames.caches = {"cam": Memory()}
    fill_cache(frames, ["cam"], np.arange(5), workers=1)
    progress = []
    assert fill_cache(frames, ["cam"], np.arange(12), 2, lambda *done: progress.append(done)) == {"cam": 1}
    assert progress[-1] == (7, 7) and frames.is_cached("cam", np.arange(12)).sum() == 11


def test_a_broken_frame_is_named():
    with pytest.raises(DatasetError, match="episode 1, frame 2: noise"):
        store(e1=[2]).get("cam", np.array([0, 7]))


def test_the_format_is_that_of_the_first_frame_that_decodes():
    assert store(e0=range(5), e1=[0, 1]).format("cam").nbytes == 4 * 6 * 3
    with pytest.raises(DatasetError, match="none of its frames can be decoded: noise"):
        store(e0=range(5), e1=range(3), e2=range(4)).format("cam")


def test_pictures_of_another_size_are_brought_to_the_first_ones():
    frames = store()
    frames.clips["cam", 1] = Pictures(1, 3, size=(8, 12))
    assert frames.get("cam", np.array([0, 6])).shape == (2, 4, 6, 3)


def test_many_threads():
    frames = store()
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: frames.get("cam", IDS)[:, 0, 0, 0].tolist(), range(64)))
    assert all(result == VALUES for result in results)


def test_png_is_lossless():
    image = picture(1, 2)
    np.testing.assert_array_equal(decode_image(png(image)), image)


def test_jpeg_colour_is_interpolated():
    """A smooth change of colour stays smooth, though JPEG keeps colour at half the resolution."""
    ramp = np.linspace(0, 1, 64)
    image = np.stack([40 + 180 * ramp, np.full(64, 120), 220 - 180 * ramp], axis=-1)
    image = np.broadcast_to(image.round().astype(np.uint8), (32, 64, 3))
    context = av.CodecContext.create("mjpeg", "w")
    context.width, context.height, context.pix_fmt, context.time_base = 64, 32, "yuvj420p", 1
    context.qmin = context.qmax = 2
    frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(image), format="rgb24")
    frame = frame.reformat(format="yuvj420p", dst_color_range="JPEG")
    data = b"".join(bytes(packet) for packet in [*context.encode(frame), *context.encode(None)])
    decoded = decode_image(data).astype(int)
    assert np.abs(decoded - image).max() < 8
    steps = np.diff(decoded[:, 2:-2, 0], axis=1)
    assert abs(steps[:, ::2].mean() - steps[:, 1::2].mean()) < 2  # 4.7 where colour is repeated


def test_no_picture():
    with pytest.raises(ValueError, match="GIF8"):
        decode_image(b"GIF89a......")
