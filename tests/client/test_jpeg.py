"""JPEG files: images come back, and no file takes long to decode, whatever it says about itself."""

import contextlib
import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from flexor_client.errors import WireError
from flexor_client.jpeg import EXTRA_FILE_BYTES, SCANS, encode_jpeg, is_jpeg, open_jpeg
from support.frames_to_fuzz import hostile_file
from support.hostile_requests import (
    jpeg_after_noise,
    jpeg_of_many_parts,
    jpeg_of_many_scans,
    jpeg_that_claims,
    other_files,
)

RNG = np.random.default_rng(0)
IMAGE = np.kron(RNG.integers(0, 256, (6, 8, 3)), np.ones((16, 16, 1))).astype(np.uint8)


def saved(image: np.ndarray = IMAGE, mode: str = "RGB", **settings) -> bytes:
    file = io.BytesIO()
    Image.fromarray(image).convert(mode).save(file, "JPEG", **settings)
    return file.getvalue()


def with_pillow(data: bytes) -> np.ndarray:
    with Image.open(io.BytesIO(data)) as file:
        return np.asarray(file.convert("RGB"))


def test_images_come_back():
    file = encode_jpeg(IMAGE)
    assert is_jpeg(file) and len(file) < IMAGE.nbytes / 4
    opened = open_jpeg(file)
    assert (opened.height, opened.width) == (96, 128)
    assert np.abs(opened.decode().astype(int) - IMAGE).mean() < 6
    np.testing.assert_array_equal(open_jpeg(encode_jpeg(IMAGE.transpose(2, 0, 1))).decode(), opened.decode())
    assert open_jpeg(encode_jpeg(IMAGE[:, :, :1])).decode().shape == IMAGE.shape


@pytest.mark.parametrize(
    "file",
    [
        saved(),
        saved(progressive=True),
        saved(mode="L"),
        saved(subsampling=2, quality=30, optimize=True),
        saved(icc_profile=RNG.bytes(100_000), exif=b"Exif\0\0" + RNG.bytes(20_000), comment=b"a camera"),
        saved(restart_marker_blocks=3),
    ],
    ids=["baseline", "progressive", "grey", "small", "with notes", "with restarts"],
)
def test_usual_files_are_decoded_as_pillow_does(file):
    """Notes of a camera or a photo program are left out: they change no pixel."""
    np.testing.assert_array_equal(open_jpeg(file).decode(), with_pillow(file))


@pytest.mark.parametrize(
    ("file", "words"),
    [
        (b"", "FF D8 FF"),
        (b"\x89PNG\r\n", "FF D8 FF"),
        (saved()[:100], "ends in its header|no part of a header"),
        (b"\xff\xd8\xff\xd9", "ends in its header"),
        (saved()[:2] + saved()[saved().index(b"\xff\xda") :], "before its size"),
        (saved().replace(b"\xff\xc0", b"\xff\xc9"), "only baseline and progressive"),
        (saved().replace(b"\xff\xc0", b"\xff\xc3"), "only baseline and progressive"),
        (saved(mode="CMYK"), "grey or in colour"),
        (jpeg_that_claims(0, 8), "a size"),
        (saved()[:2] + saved()[saved().index(b"\xff\xc0") :][:19] + saved()[2:], "two frames"),
        (jpeg_of_many_parts(10_000), "more than 64 parts"),
        (jpeg_after_noise(10_000), "no part of a header"),
        (jpeg_of_many_scans(96, 128, 60_000), "scans; at most 16"),
        (saved() + bytes(6 * 96 * 128 + EXTRA_FILE_BYTES), "too many for 96 x 128 pixels"),
        *((file, "FF D8 FF") for file in other_files(8, 8).values()),
    ],
)
def test_what_is_no_file_of_a_camera_is_refused_before_it_is_decoded(file, words):
    with pytest.raises(WireError, match=words):
        open_jpeg(file)


def test_scans_are_counted_wherever_they_hide():
    """Padding before a marker, and tables between scans, do not hide a scan."""
    data = saved(progressive=True).removesuffix(b"\xff\xd9")
    scan = data[data.rindex(b"\xff\xda") :]
    assert data.count(b"\xff\xda") <= SCANS
    for between in (b"", b"\xff\xff\xff", b"\xff\xfe\x00\x02", b"\xff\xdd\x00\x04\x00\x01"):
        with pytest.raises(WireError, match="scans"):
            open_jpeg(data + (between + scan) * SCANS + b"\xff\xd9")


def test_a_damaged_file_is_an_error():
    file = saved()
    with pytest.raises(WireError, match="can't be read"):
        open_jpeg(file[: len(file) * 2 // 3]).decode()


@given(st.data())
@settings(deadline=None, max_examples=200)
def test_any_damage_is_read_or_refused(data):
    file = bytearray(
        data.draw(st.sampled_from([saved(IMAGE[:16, :16]), saved(IMAGE[:16, :16], progressive=True)]))
    )
    for at in data.draw(st.lists(st.integers(2, len(file) - 1), max_size=6)):
        file[at] = data.draw(st.integers(0, 255))
    with contextlib.suppress(WireError):
        opened = open_jpeg(bytes(file))
        if opened.height * opened.width < 10**6:
            assert opened.decode().shape == (opened.height, opened.width, 3)


def test_fuzzing_raises_nothing_but_wire_errors():
    """A short version of benchmarks/fuzz_wire.py."""
    rng, refused = np.random.default_rng(0), 0
    for _ in range(500):
        try:
            opened = open_jpeg(hostile_file(rng))
            assert opened.height * opened.width > 10**6 or opened.decode().size
        except WireError:
            refused += 1
    assert 20 < refused < 490


def test_what_is_no_image_is_not_compressed():
    with pytest.raises(WireError, match="uint8"):
        encode_jpeg(IMAGE.astype(np.float32))
    for shape in ((8, 8, 4), (0, 8, 3)):
        with pytest.raises(WireError, match="1 or 3 channels"):
            encode_jpeg(np.zeros(shape, np.uint8))
    with pytest.raises(WireError, match="can't be compressed"):
        encode_jpeg(np.zeros((70_000, 8, 3), np.uint8))
