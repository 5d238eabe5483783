"""Decoding on the GPU: why it can't be used, NV12 to planes, and (where there is one) the GPU itself."""

import ctypes

import av
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexor.core.errors import DatasetError
from flexor.data.video import nvdec
from flexor.data.video.decode import decode_frames, index_video
from flexor.data.video.nvdec import Capabilities, NvDecoder, PlaneWriter, judge, planes_of_nv12, supported
from flexor.data.video.planes import PlaneFormat

CPU, GPU = torch.device("cpu"), torch.device("cuda")
TOO_OLD = nvdec._no_software(av.__version__, ["cuda"])
needs_new_pyav = pytest.mark.skipif(TOO_OLD is not None, reason=str(TOO_OLD))


def kind(height=480, width=640, layout="yuv420p"):
    return PlaneFormat(height, width, layout)


def hopper(**changes):
    """What an H200's driver says about H.264."""
    facts = {"supported": 1, "engines": 7, "output_formats": 1, "max_width": 4096, "max_height": 4096}
    facts |= {"max_macroblocks": 65536, "min_width": 48, "min_height": 16}
    return Capabilities(**(facts | changes))


def test_capabilities_lie_as_the_driver_writes_them():
    assert ctypes.sizeof(Capabilities) == 88
    assert (Capabilities.supported.offset, Capabilities.max_width.offset) == (24, 28)
    assert (Capabilities.min_width.offset, Capabilities.reserved2.offset) == (40, 48)


def test_what_the_driver_says_is_judged():
    assert judge(hopper(), "h264", kind(), "H200") is None
    assert judge(hopper(supported=0), "av1", kind(), "H200") == "the H200 has no decoder for av1"
    assert judge(hopper(output_formats=2), "hevc", kind(), "H200") == "the H200 has no decoder for hevc"
    assert "from 16x48 on" in judge(hopper(), "h264", kind(32, 32), "H200")
    assert judge(hopper(), "h264", kind(16, 48), "H200") is None
    assert "up to 4096x4096" in judge(hopper(), "h264", kind(1080, 8192), "H200")
    assert "up to 4096x4096" in judge(hopper(max_macroblocks=1199), "h264", kind(), "H200")
    assert judge(hopper(max_macroblocks=1200), "h264", kind(), "H200") is None


def test_says_why_not():
    assert "the run uses device cpu" in supported("h264", kind(), CPU)
    assert "av>=17" in nvdec._no_software("16.1.0", ["cuda"])
    assert "x86_64" in nvdec._no_software("18.1.0", ["drm"])
    assert nvdec._no_software("18.1.0", ["drm", "cuda"]) is None
    assert "mpeg4" in nvdec._not_exact("mpeg4", kind())
    assert "rgb24" in nvdec._not_exact("h264", kind(layout="rgb24"))  # 4:4:4, 10 bits, odd sizes
    assert nvdec._not_exact("h264", kind()) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_no_nvdec():
    assert supported("h264", kind(), GPU) == "torch finds no NVIDIA GPU"


@settings(max_examples=30)
@given(n=st.integers(1, 4), height=st.integers(1, 9), width=st.integers(1, 9), seed=st.integers(0, 99))
def test_nv12_to_planes(n, height, width, seed):
    rng = np.random.default_rng(seed)
    planes = rng.integers(0, 256, (n, 6 * height * width), np.uint8)
    y, u, v = np.split(planes, [4 * height * width, 5 * height * width], axis=1)
    chroma = np.stack([u.reshape(n, height, width), v.reshape(n, height, width)], axis=-1)
    # Rows of the hardware's frames are padded.
    padded = np.zeros((n, 2 * height, 2 * width + 3), np.uint8)
    padded[:, :, : 2 * width] = y.reshape(n, 2 * height, 2 * width)
    luma = torch.from_numpy(padded)[:, :, : 2 * width]
    assert np.array_equal(planes_of_nv12(luma, torch.from_numpy(chroma)), planes)


def planes_of(frame):
    """Y, U, V of a yuv420p frame, rows without padding: [nbytes]."""
    rows = [np.frombuffer(p, np.uint8).reshape(-1, p.line_size)[: p.height, : p.width] for p in frame.planes]
    return np.concatenate([plane.ravel() for plane in rows])


def pictures(count, height=34, width=50):
    rng = np.random.default_rng(3)
    for _ in range(count):
        image = rng.integers(0, 256, (height, width, 3), np.uint8)
        yield av.VideoFrame.from_ndarray(image, format="rgb24").reformat(format="yuv420p")


@needs_new_pyav
def test_frames_go_to_their_rows_whatever_the_order(monkeypatch):
    monkeypatch.setattr(nvdec, "CHUNK", 4)
    frames = list(pictures(11))
    rows = [0, 1, 2, 4, 5, 9, 8, 7, 3, 10, 12]  # 6 and 11 are bad
    out = torch.full((13, 34 * 50 * 3 // 2), 7, dtype=torch.uint8)
    writer = PlaneWriter("a.mp4", 34, 50, out)
    for row, frame in zip(rows, frames):
        writer.add(row, frame.reformat(format="nv12"))
    writer.flush()
    for row, frame in zip(rows, frames):
        assert np.array_equal(out[row], planes_of(frame))
    assert (out[[6, 11]] == 7).all()


def test_a_change_of_size_is_told():
    writer = PlaneWriter("a.mp4", 32, 48, torch.zeros(1, 32 * 48 * 3 // 2, dtype=torch.uint8))
    with pytest.raises(DatasetError, match=r"a\.mp4: the image size changes"):
        writer.add(0, next(pictures(1)))


def write_clip(path, encoder, gop, frames=40, height=240, width=320, **options):
    rng = np.random.default_rng(0)
    texture = rng.integers(0, 256, (height // 4, width // 4, 3), np.uint8).repeat(4, 0).repeat(4, 1)
    with av.open(str(path), "w") as container:
        stream = container.add_stream(encoder, 30, options={"g": str(gop)} | options)
        stream.height, stream.width, stream.pix_fmt = height, width, "yuv420p"
        for i in range(frames):
            image = np.roll(texture, (3 * i, 5 * i), (0, 1))
            image[:16, :16] = 6 * i
            container.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        container.mux(stream.encode(None))
    return index_video(path)


def on_cpu(index, frames):
    rows = np.zeros((len(frames), index.height * index.width * 3 // 2), np.uint8)

    def keep(i, frame):
        rows[i] = planes_of(frame)

    assert decode_frames(index, frames, keep) == {}
    return rows


@needs_new_pyav
def test_decoding_goes_through_the_decoder_of_the_thread(tmp_path, monkeypatch):
    """All but the hardware: an NvDecoder with a decoder of the CPU, whose frames are made NV12."""

    class Software:
        def __init__(self, packets):
            self.context = av.CodecContext.create(packets.codec, "r")
            self.context.extradata = packets.extradata
            self.flush_buffers = self.context.flush_buffers

        def decode(self, packet):
            out = []
            for frame in self.context.decode(packet):
                out.append(frame.reformat(format="nv12"))
                out[-1].pts = frame.pts
            return out

    opened = []
    monkeypatch.setattr(NvDecoder, "_open", lambda self, packets: opened.append(1) or Software(packets))
    decoder = NvDecoder.__new__(NvDecoder)
    decoder._decoders = nvdec.OrderedDict()
    index = write_clip(tmp_path / "a.mp4", "libx264", 10)
    for frames in (np.arange(40), np.array([7, 8, 9, 31]), np.array([0])):
        out = torch.zeros(len(frames), 240 * 320 * 3 // 2, dtype=torch.uint8)
        writer = PlaneWriter("a.mp4", 240, 320, out)
        assert decode_frames(index, frames, writer.add, decoder._decoder) == {}
        writer.flush()
        assert np.array_equal(out, on_cpu(index, frames))
    assert len(opened) == 1


def test_the_cpu_has_the_last_word(tmp_path):
    """What the hardware did not give is decoded; what is broken is named by the caller's numbers."""
    path = tmp_path / "a.mp4"
    index = write_clip(path, "libx264", 10, bf="0")
    truth = on_cpu(index, np.arange(40))
    packet = index.packet[20]
    at, size = int(index.packets.offset[packet]), int(index.packets.size[packet])
    data = bytearray(path.read_bytes())
    data[at : at + size] = bytes(size)
    path.write_bytes(data)
    index = index_video(path)
    out = torch.zeros(30, truth.shape[1], dtype=torch.uint8)
    failed = dict.fromkeys((3, 4, 15, 16), "no session")
    bad = nvdec.decode_on_cpu(index, np.arange(5, 35), out, failed)
    assert set(bad) == {15, 16}  # frames 20 and 21
    assert np.array_equal(out[3:5], truth[8:10])
    assert not out[:3].any() and not out[15:].any()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("encoder", "codec"), [("libx264", "h264"), ("libx265", "hevc"), ("libvpx-vp9", "vp9")]
)
def test_the_gpu_gives_the_numbers_of_the_cpu(tmp_path, monkeypatch, encoder, codec):
    reason = supported(codec, kind(240, 320), GPU)
    if reason:
        pytest.skip(reason)
    monkeypatch.setattr(nvdec, "decode_on_cpu", lambda *args: args[-1])  # no help from there
    index = write_clip(tmp_path / "a.mp4", encoder, 10)
    decoder = NvDecoder(GPU)
    for frames in (np.arange(40), np.array([7, 8, 9, 31]), np.array([0])):
        out = torch.zeros(len(frames), 240 * 320 * 3 // 2, dtype=torch.uint8, device=GPU)
        assert decoder.decode(index, frames, out) == {}
        assert np.array_equal(out.cpu(), on_cpu(index, frames))
