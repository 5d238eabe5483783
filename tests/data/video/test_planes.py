import io
import pickle
import platform
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexor.core.errors import DatasetError, FlexorError
from flexor.data.video.colour import MATRICES
from flexor.data.video.on_device import rgb_on_device
from flexor.data.video.planes import (
    PlaneFormat,
    decode_jpeg,
    encode_jpeg,
    format_of,
    pack,
    resized,
    to_rgb,
)

# What torchcodec reads of the clips that tests/parity/colour.py writes.
GOLDEN = np.load(Path(__file__).parents[2] / "golden" / "colour.npz")
CLIPS = [name for name in GOLDEN.files if f"{name}.mp4" in GOLDEN.files]
RAW = {"h264", "h264, width not of 16", "h264, bt709", "h264, full range", "av1", "av1, full range", "mpeg4"}


def last_frame(name):
    with av.open(io.BytesIO(GOLDEN[f"{name}.mp4"].tobytes())) as container:
        return list(container.decode(video=0))[-1]


def packed(frame, format):
    planes = np.zeros(format.nbytes, np.uint8)
    pack(frame, format, planes)
    return planes


def rgb(format, planes):
    out = np.zeros((format.height, format.width, format.channels), np.uint8)
    to_rgb(format, planes, out)
    return out


def noise(format, n=2, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (n, format.nbytes), np.uint8)


def filled(layout, height, width, *planes):
    """A frame with the given planes, numbers or arrays."""
    frame = av.VideoFrame(width, height, layout)
    for plane, values in zip(frame.planes, planes):
        memory = np.frombuffer(plane, np.uint8).reshape(plane.height, plane.line_size)
        row = np.shape(values)[-1] if np.ndim(values) else plane.line_size
        memory[:, :row] = values
    return frame


LAYOUTS = ["yuv420p", "rgb24", "rgba", "gray"]


@given(height=st.integers(1, 99), width=st.integers(1, 99), layout=st.sampled_from(LAYOUTS))
def test_planes_lie_one_after_the_other(height, width, layout):
    if layout == "yuv420p":
        height, width = 2 * height, 2 * width
    format = PlaneFormat(height, width, layout)
    end = 0
    for first, rows, row in format.planes:
        assert first == end
        end = first + rows * row
    assert end == format.nbytes
    planes = np.arange(format.nbytes)
    np.testing.assert_array_equal(np.concatenate([part.ravel() for part in format.split(planes)]), planes)


@pytest.mark.parametrize("name", CLIPS)
def test_colours_are_those_of_torchcodec(name):
    frame = last_frame(name)
    format = format_of(frame)
    assert (format.layout == "yuv420p") == (
        frame.format.name in ("yuv420p", "yuvj420p") and "odd" not in name
    )
    picture = rgb(format, packed(frame, format))
    far = np.abs(picture.astype(int) - GOLDEN[name])
    if platform.machine() == GOLDEN["machine"]:
        assert far.max() == 0
    else:  # other processors round otherwise, there as here
        assert far.max() <= 3 and far.mean() < 1.5
    as_rgb = PlaneFormat(format.height, format.width, "rgb24")
    np.testing.assert_array_equal(packed(frame, as_rgb).reshape(picture.shape), picture)


@pytest.mark.parametrize("name", sorted(RAW))
def test_planes_are_what_the_decoder_put_out(name):
    frame = last_frame(name)
    format = format_of(frame)
    assert format.nbytes * 2 == frame.height * frame.width * 3
    for plane, part in zip(frame.planes, format.split(packed(frame, format))):
        memory = np.frombuffer(plane, np.uint8).reshape(plane.height, plane.line_size)
        np.testing.assert_array_equal(part, memory[:, : plane.width])


@pytest.mark.parametrize("width", [32, 50, 96])
@pytest.mark.parametrize("colorspace", [0, 1, 2, 5, 6, 9])
@pytest.mark.parametrize("color_range", [0, 1, 2])
@pytest.mark.parametrize("name", ["yuv420p", "yuvj420p"])
def test_numbers_are_copied_whatever_their_tags(name, width, colorspace, color_range):
    frame = av.VideoFrame(width, 34, name)
    frame.colorspace, frame.color_range = colorspace, color_range
    random, expected = np.random.default_rng(width), []
    for plane, columns in zip(frame.planes, (width, width // 2, width // 2)):
        rows = np.frombuffer(plane, np.uint8).reshape(-1, plane.line_size)
        rows[:] = random.integers(0, 256, rows.shape, np.uint8)
        expected.append(rows[:, :columns].ravel())
    format = format_of(frame)
    out = np.zeros((2, format.nbytes), np.uint8)
    for row in out:  # the first frame decides how those like it are copied
        pack(frame, format, row)
        assert np.array_equal(row, np.concatenate(expected))
    assert hash(pickle.loads(pickle.dumps(format))) == hash(format)


def test_tags_are_read_as_torchcodec_reads_them():
    tags = {name: format_of(last_frame(name)) for name in CLIPS}
    assert tags["h264"].matrix == tags["h264, bt601"].matrix == "bt601" and not tags["h264"].full_range
    assert tags["h264, bt709"].matrix == "bt709" and tags["h264, bt2020"].matrix == "bt2020"
    assert tags["h264, full range"].full_range
    assert not tags["av1, full range"].full_range  # what it does with widths that are multiples of 32
    assert tags["av1, full range, width not of 32"].full_range


@pytest.mark.parametrize("full_range", [False, True])
@pytest.mark.parametrize("matrix", MATRICES)
@pytest.mark.parametrize("size", [(48, 64), (30, 46), (18, 16)])
def test_a_device_gives_the_colours_of_the_cpu(size, matrix, full_range):
    format = PlaneFormat(*size, "yuv420p", matrix, full_range)
    planes = noise(format, n=9)
    pictures = rgb_on_device(format, torch.from_numpy(planes))
    assert pictures.shape == (9, 3, *size) and pictures.dtype == torch.uint8 and pictures.is_contiguous()
    expected = np.stack([rgb(format, frame) for frame in planes]).transpose(0, 3, 1, 2)
    far = np.abs(pictures.numpy().astype(int) - expected)
    assert far.max() <= 2 and far.mean() < 0.1


def test_a_device_converts_a_large_batch_in_parts():
    format = PlaneFormat(1024, 2048, "yuv420p", "bt709", False)
    planes = torch.from_numpy(noise(format, n=10))  # 8 frames at a time
    together = rgb_on_device(format, planes)
    torch.testing.assert_close(together[[0, 7, 8, 9]], rgb_on_device(format, planes[[0, 7, 8, 9]]))


@pytest.mark.parametrize("layout", ["rgb24", "rgba", "gray"])
def test_pictures_come_out_as_they_are(layout):
    format = PlaneFormat(5, 7, layout)
    planes = noise(format)
    pictures = rgb_on_device(format, torch.from_numpy(planes))
    for i in range(2):
        expected = planes[i].reshape(5, 7, format.channels)
        np.testing.assert_array_equal(rgb(format, planes[i]), expected)
        np.testing.assert_array_equal(pictures[i].permute(1, 2, 0), expected)
    frame = filled(layout, 5, 7, planes[0].reshape(5, -1))
    assert format_of(frame) == format
    np.testing.assert_array_equal(packed(frame, format), planes[0])


def test_a_picture_goes_to_its_place_in_a_batch():
    format = PlaneFormat(48, 64, "yuv420p")
    planes = noise(format, n=3)
    batch = np.full((5, 48, 64, 3), 7, np.uint8)
    for i in range(3):
        to_rgb(format, planes[i], batch[i + 1])
    np.testing.assert_array_equal(batch[1:4], np.stack([rgb(format, frame) for frame in planes]))
    assert (batch[[0, 4]] == 7).all()
    with pytest.raises(AssertionError):
        to_rgb(format, planes[0], np.zeros((48, 128, 3), np.uint8)[:, ::2])


def test_threads_do_not_disturb_each_other():
    formats = [PlaneFormat(48, 64, "yuv420p", "bt601", False), PlaneFormat(46, 76, "yuv420p", "bt709", True)]
    jobs = [(format, planes) for format in formats for planes in noise(format, n=40)]
    with ThreadPoolExecutor(4) as threads:
        pictures = list(threads.map(lambda job: rgb(*job), jobs))
        frames = list(threads.map(lambda job: encode_jpeg(*job), jobs))
    for job, picture, jpeg in zip(jobs, pictures, frames):
        np.testing.assert_array_equal(picture, rgb(*job))
        assert jpeg == encode_jpeg(*job)


def test_scaling_averages_areas_and_keeps_the_numbers():
    luma = np.random.default_rng(0).integers(60, 180, (64, 96), np.uint8)
    frame = filled("yuv420p", 64, 96, luma, 70, 200)
    frame.colorspace = 1
    format = resized(format_of(frame), 32, 48)
    assert (format.height, format.width, format.layout, format.matrix) == (32, 48, "yuv420p", "bt709")
    y, u, v = format.split(packed(frame, format))
    assert np.abs(y - luma.reshape(32, 2, 48, 2).mean((1, 3))).max() <= 1.5
    assert (u == 70).all() and (v == 200).all()


def test_an_odd_size_is_kept_as_rgb():
    frame = last_frame("h264, bt709")
    format = resized(format_of(frame), 33, 41)
    assert format == PlaneFormat(33, 41, "rgb24")
    native = rgb(format_of(frame), packed(frame, format_of(frame)))
    small = packed(frame, format).reshape(33, 41, 3)
    assert np.abs(small.mean((0, 1)) - native.mean((0, 1))).max() < 3


def test_full_range_on_paper_only_is_scaled_without_changing_the_numbers():
    frame = filled("yuv420p", 32, 64, 16, 128, 128)
    frame.color_range = 2
    format = resized(format_of(frame), 16, 32)
    assert not format.full_range
    assert (format.split(packed(frame, format))[0] == 16).all()


def test_a_frame_of_other_colours_is_brought_to_the_cameras():
    """A file of the same camera may be tagged otherwise; its pictures stay the same."""
    frame = last_frame("h264, bt709, full range")
    native = format_of(frame)
    other = PlaneFormat(native.height, native.width, "yuv420p", "bt601", False)
    far = np.abs(rgb(native, packed(frame, native)).astype(int) - rgb(other, packed(frame, other)))
    assert far.mean() < 2.5


@settings(max_examples=20)
@given(level=st.integers(0, 255), u=st.integers(0, 255), v=st.integers(0, 255), full_range=st.booleans())
def test_jpeg_keeps_numbers_and_not_colours(level, u, v, full_range):
    format = PlaneFormat(32, 48, "yuv420p", "bt709", full_range)
    planes, restored = np.zeros(format.nbytes, np.uint8), np.zeros(format.nbytes, np.uint8)
    for part, value in zip(format.split(planes), (level, u, v)):
        part[:] = value
    decode_jpeg(format, encode_jpeg(format, planes), restored)
    assert np.abs(restored.astype(int) - planes).max() <= 1


@pytest.mark.parametrize("name", ["h264", "h264, bt709, full range", "h264, rgb", "mpeg4, odd", "gray"])
def test_jpeg_is_near_the_frame_and_smaller(name):
    frame = last_frame("h264, rgb" if name == "gray" else name)
    frame = frame.reformat(format="gray") if name == "gray" else frame
    format = format_of(frame)
    planes, restored = packed(frame, format), np.zeros(format.nbytes, np.uint8)
    for _ in range(3):
        jpeg = encode_jpeg(format, planes)
        decode_jpeg(format, jpeg, restored)
        assert np.abs(restored.astype(int) - planes).mean() < 3
    assert len(jpeg) < format.nbytes
    decode_jpeg(format, np.frombuffer(jpeg, np.uint8), restored)  # as it lies in a cache


def test_jpeg_says_what_it_cannot_do():
    rgba = PlaneFormat(8, 8, "rgba")
    with pytest.raises(FlexorError, match="not support transparency"):
        encode_jpeg(rgba, noise(rgba)[0])
    format = PlaneFormat(32, 48, "yuv420p")
    out = np.zeros(format.nbytes, np.uint8)
    for damaged in (b"nothing of the kind", encode_jpeg(PlaneFormat(16, 16, "yuv420p"), out[:384])):
        with pytest.raises(DatasetError, match="damaged"):
            decode_jpeg(format, damaged, out)
    decode_jpeg(format, encode_jpeg(format, out), out)  # and goes on after that
