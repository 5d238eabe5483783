"""Videos and images from anywhere: a list of other files is no video, and no image fills the memory."""

import struct
import zlib

import av
import pytest

from flexor.data.check.scan import scan_video
from flexor.data.frames.clips import decode_image
from flexor.data.video.open_file import open_video
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


def huge_png(width: int, height: int) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    rows = zlib.compress(bytes(1 << 20), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


@pytest.mark.parametrize("size", [(60_000, 60_000), (1, 1 << 30)])
def test_an_image_of_a_few_bytes_does_not_take_gigabytes(size):
    with pytest.raises((av.FFmpegError, ValueError)):
        decode_image(huge_png(*size))
