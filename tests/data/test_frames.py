import logging
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from samples import picture

from flexor.data.clips import decode_image
from flexor.data.encode import encode_png
from flexor.data.frames import FrameStore, default_budget
from flexor.errors import DatasetError


class FakeClip:
    """Frame n of episode e is filled with 10 e + n; counts how it is read."""

    def __init__(self, episode, length=5, size=(4, 6)):
        self.pixels = np.stack([np.full((*size, 3), 10 * episode + n, np.uint8) for n in range(length)])
        self.nbytes = self.pixels.nbytes
        self.whole = self.parts = 0
        self.lock = threading.Lock()

    def read(self, frames):
        with self.lock:
            self.parts += 1
        return self.pixels[frames]

    def read_all(self):
        with self.lock:
            self.whole += 1
        return self.pixels


def clips(episodes=3, camera="cam"):
    return {(camera, episode): FakeClip(episode) for episode in range(episodes)}


def get(store, pairs, camera="cam"):
    episodes, frames = np.array(pairs).T
    return store.get(camera, episodes, frames)[:, 0, 0, 0].tolist()


PAIRS = [(2, 1), (0, 4), (2, 1), (1, 0), (0, 0)]
VALUES = [21, 4, 21, 10, 0]


def test_frames_come_in_the_order_asked_for_and_each_episode_is_decoded_once(caplog):
    some = clips()
    store = FrameStore(some, budget=10**6)
    with caplog.at_level(logging.INFO, "flexor"):
        assert store.admit("cam", np.arange(3))
        for _ in range(3):
            assert get(store, PAIRS) == VALUES
    assert [clip.whole for clip in some.values()] == [1, 1, 1]
    assert [clip.parts for clip in some.values()] == [0, 0, 0]
    assert "each video is decoded once" in caplog.text


def test_what_does_not_fit_is_decoded_on_request_and_the_log_says_so(caplog):
    some = clips()
    store = FrameStore(some, budget=3 * some["cam", 0].nbytes - 1)
    assert not store.admit("cam", np.arange(3))
    assert get(store, PAIRS) == VALUES
    assert [clip.whole for clip in some.values()] == [0, 0, 0]
    assert [clip.parts for clip in some.values()] == [1, 1, 1]  # one request per episode, not per frame
    assert "do not fit" in caplog.text


def test_fewer_episodes_of_the_same_store_may_fit():
    some = clips()
    store = FrameStore(some, budget=some["cam", 0].nbytes)
    assert not store.admit("cam", np.arange(3))
    assert store.admit("cam", np.array([1]))
    assert get(store, PAIRS) == VALUES
    assert (some["cam", 1].whole, some["cam", 0].whole) == (1, 0)


def test_room_is_counted_over_all_cameras_and_reserved_once():
    some = clips(2, "a") | clips(2, "b")
    store = FrameStore(some, budget=3 * some["a", 0].nbytes)
    assert store.admit("a", np.arange(2)) and store.admit("a", np.arange(2))
    assert not store.admit("b", np.arange(2))


def test_many_threads_decode_an_episode_once():
    some = clips()
    store = FrameStore(some, budget=10**6)
    store.admit("cam", np.arange(3))
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: get(store, PAIRS), range(64)))
    assert all(result == VALUES for result in results)
    assert [clip.whole for clip in some.values()] == [1, 1, 1]


def test_pictures_of_different_sizes_in_one_batch():
    store = FrameStore({("cam", 0): FakeClip(0), ("cam", 1): FakeClip(1, size=(8, 8))}, budget=0)
    with pytest.raises(DatasetError, match="episode 1 has pictures of"):
        get(store, [(0, 0), (1, 0)])


def test_default_budget_is_a_share_of_what_is_free():
    assert 2**20 < default_budget() < 2**45


def test_png_is_lossless():
    image = picture(1, 2)
    np.testing.assert_array_equal(decode_image(encode_png(image)), image)


def test_jpeg_colour_is_interpolated():
    """A smooth change of colour stays smooth, though JPEG keeps colour at half the resolution."""
    import av

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
