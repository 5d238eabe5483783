"""Videos and images from anywhere: a list of other files is no video, and no image fills the memory."""

import io
import struct
import zlib

import av
import numpy as np
import pytest
from PIL import Image

from flexor.data.check.scan import scan_video
from flexor.data.frames.clips import decode_image
from flexor.data.video.open_file import _without_texts, open_video
from support.samples import write_sample

LISTS = {
    "hls": "#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\n{secret}\n#EXT-X-ENDLIST\n",
    "concat": "ffconcat version 1.0\nfile secret.mp4\n",
    "dash": '<?xml version="1.0"?><MPD><Period><BaseURL>{secret}</BaseURL></Period></MPD>',
    "sdp": "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=video 9 RTP/AVP 96\n",
    "images": "secret-%03d.png",
}


@pytest.mark.parametrize("kind", LISTS)
def test_a_list_of_other_files_is_no_video(kind, tmp_path):
    sample = next((write_sample(tmp_path / "data") / "videos").rglob("*.mp4"))
    sample.rename(tmp_path / "secret.mp4")
    file = tmp_path / "video.mp4"
    file.write_text(LISTS[kind].format(secret=tmp_path / "secret.mp4"))
    with pytest.raises((av.FFmpegError, ValueError)):
        open_video(str(file))
    scan = scan_video(file)
    assert scan.error and not len(scan.times)
    with open_video(str(tmp_path / "secret.mp4")) as container:
        assert container.streams.video


def png_part(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def huge_png(width: int, height: int) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    rows = zlib.compress(bytes(1 << 20), 9)
    return b"\x89PNG\r\n\x1a\n" + png_part(b"IHDR", header) + png_part(b"IDAT", rows) + png_part(b"IEND", b"")


@pytest.mark.parametrize("size", [(60_000, 60_000), (1, 1 << 30)])
def test_an_image_of_a_few_bytes_does_not_take_gigabytes(size):
    with pytest.raises((av.FFmpegError, ValueError)):
        decode_image(huge_png(*size))


def test_a_jpeg_of_many_scans_is_refused_before_it_is_decoded():
    file = io.BytesIO()
    Image.new("RGB", (64, 64), "red").save(file, "JPEG", progressive=True)
    good = file.getvalue()
    assert decode_image(good).shape == (64, 64, 3)
    last = good[good.rindex(b"\xff\xda") : -2]
    with pytest.raises(ValueError, match="has 310 scans"):
        decode_image(good[:-2] + last * 300 + good[-2:])


@pytest.mark.parametrize("kind", [b"zTXt", b"iCCP"])
def test_compressed_texts_of_a_png_are_not_read(kind):
    """Half a megabyte of them would take half a gigabyte."""
    image = np.random.default_rng(0).integers(0, 256, (32, 48, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    good = file.getvalue()
    text = png_part(kind, b"x\0\0" + zlib.compress(bytes(1 << 20), 9))
    large = good[:33] + text + good[33:]  # after the header
    assert _without_texts(large) == good and _without_texts(good) is good
    np.testing.assert_array_equal(decode_image(large), image)
    for damaged in (large[:40], good[:33] + b"\xff" * 40, good[:8]):
        with pytest.raises((av.FFmpegError, ValueError)):
            decode_image(damaged)
