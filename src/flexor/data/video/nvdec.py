"""Decodes videos with the GPU's own decoder (NVDEC); frames stay in GPU memory as planes.

It is the same as `decode.py` with another decoder: the same packets, the same order, the same values (the formats
in `CODECS` define every bit of a decoded image). From version 17 on, PyAV's wheels for x86_64 Linux contain
everything needed; the rest comes with NVIDIA's driver.

The trade-off: FFmpeg works on CUDA's default stream, and so does everything here. Frames are ordered with other
work on that stream without waiting, but a training step queued there also delays decoding. And the hardware
conceals damage inside an image that `decode.py` would report; `flexor data check` finds it.
"""

import ctypes
import threading
from collections import OrderedDict
from collections.abc import Sequence
from functools import cache

import av
import numpy as np
import torch
from av.codec.hwaccel import HWAccel, hwdevices_available
from torch import Tensor

from flexor.core.log import log
from flexor.data.video.decode import VideoIndex, decode_frames
from flexor.data.video.mp4 import Packets, broken
from flexor.data.video.planes import PlaneFormat, format_of, pack

__all__ = ["NvDecoder", "decode_into", "supported"]

CODECS = {"h264": 4, "hevc": 8, "vp8": 9, "vp9": 10, "av1": 11}
"""NVIDIA's ids of the formats with exact decoding (MPEG-4 is not exact: its transform may be rounded)."""

CHROMA_420 = 1
MAX_DECODERS = 4  # per thread; each takes tens of MB of GPU memory
CHUNK = 32  # frames packed at once: few kernel launches per frame, and no more wait in FFmpeg's memory


class Capabilities(ctypes.Structure):
    """The driver's capabilities for one format: `CUVIDDECODECAPS` of NVIDIA's video interface."""

    _fields_ = [
        ("codec", ctypes.c_int),
        ("chroma", ctypes.c_int),
        ("bits_over_8", ctypes.c_uint),
        ("reserved1", ctypes.c_uint * 3),
        ("supported", ctypes.c_uint8),
        ("engines", ctypes.c_uint8),
        ("output_formats", ctypes.c_uint16),
        ("max_width", ctypes.c_uint),
        ("max_height", ctypes.c_uint),
        ("max_macroblocks", ctypes.c_uint),
        ("min_width", ctypes.c_uint16),
        ("min_height", ctypes.c_uint16),
        ("histogram", ctypes.c_uint8),
        ("counter_bits", ctypes.c_uint8),
        ("histogram_bins", ctypes.c_uint16),
        ("reserved2", ctypes.c_uint * 10),
    ]


def supported(codec: str, format: PlaneFormat, device: torch.device) -> str | None:
    """Why videos of this kind can't be decoded on `device`; None if they can."""
    return (
        _no_device(device)
        or _no_software(av.__version__, hwdevices_available())
        or _not_exact(codec, format)
        or _not_in_hardware(codec, format, device)
    )


def _no_device(device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"the run uses device {device}, but NVDEC needs an NVIDIA GPU"
    if not torch.cuda.is_available():
        return "torch finds no NVIDIA GPU"
    return None


def _no_software(version: str, devices: list[str]) -> str | None:
    if int(version.partition(".")[0]) < 17:
        return f"PyAV {version} can't keep frames on the GPU: upgrade it with `pip install -U 'av>=17'`"
    if "cuda" not in devices:
        return (
            f"this build of PyAV {version} does not support NVDEC. The wheels for Linux on x86_64 do: "
            "`pip install --force-reinstall --only-binary=av 'av>=17'`"
        )
    return None


def _not_exact(codec: str, format: PlaneFormat) -> str | None:
    if codec not in CODECS:
        return f"NVDEC does not decode {codec}, or not exactly as the CPU does: Flexor uses it for {', '.join(CODECS)}"
    if format.layout != "yuv420p":
        return f"the frames are {format.layout}, but with NVDEC Flexor supports only 8-bit yuv420p"
    return None


def _not_in_hardware(codec: str, format: PlaneFormat, device: torch.device) -> str | None:
    capabilities = _capabilities(codec, _number(device))
    if isinstance(capabilities, str):
        return capabilities
    return judge(capabilities, codec, format, torch.cuda.get_device_name(device))


def judge(capabilities: Capabilities, codec: str, format: PlaneFormat, gpu: str) -> str | None:
    """Why this GPU can't decode frames of this format, by the driver's capabilities; None if it can."""
    height, width = format.height, format.width
    if not capabilities.supported or not capabilities.output_formats & 1:  # bit 0: NV12
        return f"the {gpu} has no decoder for {codec}"
    if width < capabilities.min_width or height < capabilities.min_height:
        least = f"{capabilities.min_height}x{capabilities.min_width}"
        return f"frames are {height}x{width}, but the {gpu} decodes {codec} only from {least} on (height x width)"
    # Macroblocks are 16x16; the last row and column of them may be cropped.
    macroblocks = -(-width // 16) * -(-height // 16)
    max_height, max_width = capabilities.max_height, capabilities.max_width
    if width > max_width or height > max_height or macroblocks > capabilities.max_macroblocks:
        most = f"{max_height}x{max_width} (height x width)"
        return f"frames are {height}x{width}, but the {gpu} decodes {codec} only up to {most}"
    return None


def _number(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


@cache
def _capabilities(codec: str, device: int) -> Capabilities | str:
    """The driver's capabilities, or why they can't be read."""
    try:
        library = ctypes.CDLL("libnvcuvid.so.1")
    except OSError:
        return (
            "the driver's video library, libnvcuvid.so.1, is missing: start the container with "
            "NVIDIA_DRIVER_CAPABILITIES=compute,utility,video, or install the driver's decoding package"
        )
    capabilities = Capabilities(codec=CODECS[codec], chroma=CHROMA_420)
    with torch.cuda.device(device):
        torch.cuda.synchronize()  # creates the current context, which the query needs
        status = library.cuvidGetDecoderCaps(ctypes.byref(capabilities))
    error = f"the driver does not report what it can decode (CUDA error {status})"
    return capabilities if status == 0 else error


class NvDecoder:
    """Decodes on one GPU, for one thread; each thread has its own decoder."""

    def __init__(self, device: torch.device):
        self.device = torch.device("cuda", _number(device))
        self._decoders: OrderedDict[tuple, av.VideoCodecContext] = OrderedDict()

    def decode(self, index: VideoIndex, frames: np.ndarray, out: Tensor) -> dict[int, str]:
        """Planes of distinct frames, frames[i] into out[i], uint8 [n, nbytes] on the device.

        Returns {i: reason} for frames that can't be decoded, like `decode_frames`; their rows are unchanged.
        The rows are complete for all later work on the device's default stream. If the hardware fails to decode
        a frame, because it is broken or the GPU is short of memory, the CPU decodes it: only the CPU decoder
        decides which frames are bad.
        """
        with torch.cuda.device(self.device), torch.cuda.stream(torch.cuda.default_stream(self.device)):
            writer = PlaneWriter(index.ranges.name, index.height, index.width, out)
            bad = decode_frames(index, frames, writer.add, self._decoder)
            writer.flush()
            return decode_on_cpu(index, frames, out, bad) if bad else {}

    def _decoder(self, packets: Packets) -> av.VideoCodecContext:
        kind = (packets.codec, packets.extradata, packets.width, packets.height)
        if kind not in self._decoders:
            self._decoders[kind] = self._open(packets)
            while len(self._decoders) > MAX_DECODERS:
                self._decoders.popitem(last=False)
        self._decoders.move_to_end(kind)
        return self._decoders[kind]

    def _open(self, packets: Packets) -> av.VideoCodecContext:
        # FFmpeg must work in torch's context, because torch can read frames only there. torch created it with
        # settings that FFmpeg's own code for that context rejects. Any call makes it this thread's current context.
        torch.cuda.default_stream(self.device).query()
        hardware = HWAccel(
            "cuda",
            device=str(self.device.index),
            allow_software_fallback=False,
            options={"primary_ctx": "0", "current_ctx": "1"},
            is_hw_owned=True,
        )
        context = av.CodecContext.create(packets.codec, "r", hwaccel=hardware)
        assert isinstance(context, av.VideoCodecContext) and context.is_hwaccel, "call `supported` first"
        if packets.extradata:
            context.extradata = packets.extradata
        context.width, context.height = packets.width, packets.height
        context.thread_type, context.thread_count = "NONE", 1
        return context


_this_thread = threading.local()


def decode_into(index: VideoIndex, frames: np.ndarray, slots: Sequence[Tensor]) -> dict[int, str]:
    """Decode the planes of frames[i] into slots[i] on a GPU, with this thread's decoder; {i: reason} of bad frames.

    Two rows of a dataset may have the same frame, so frames may repeat.
    """
    device = slots[0].device
    decoders = _this_thread.__dict__.setdefault("decoders", {})
    if device not in decoders:
        decoders[device] = NvDecoder(device)
    distinct, users = np.unique(frames, return_inverse=True)
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.default_stream(device)):
        planes = torch.empty((len(distinct), len(slots[0])), dtype=torch.uint8, device=device)
        bad = decoders[device].decode(index, distinct, planes)
        torch._foreach_copy_(list(slots), [planes[i] for i in users.tolist()])
    return {i: bad[user] for i, user in enumerate(users.tolist()) if user in bad}


def decode_on_cpu(
    index: VideoIndex, frames: np.ndarray, out: Tensor, failed: dict[int, str]
) -> dict[int, str]:
    """Try to decode frames[i] again on the CPU, for each i in `failed`; returns those that still fail."""
    _warn(index.ranges.name)
    again = np.array(sorted(failed))
    planes = np.empty((len(again), out.shape[1]), np.uint8)
    bad = decode_frames(index, frames[again], lambda i, frame: pack(frame, format_of(frame), planes[i]))
    for i, row in enumerate(again.tolist()):
        if i not in bad:
            out[row] = torch.from_numpy(planes[i])
    return {int(again[i]): reason for i, reason in bad.items()}


@cache  # once per file
def _warn(name: str) -> None:
    log.warning("%s: NVDEC can't decode some frames; trying them on the CPU", name)


class PlaneWriter:
    """Takes frames from NVDEC (NV12) and writes them to their rows as planes, several at a time."""

    def __init__(self, name: str, height: int, width: int, out: Tensor):
        assert out.shape[1] == height * width * 3 // 2, "rows of 8-bit yuv420p"
        self.name, self.size, self.out = name, (height, width), out
        self._rows: list[int] = []
        self._luma: list[Tensor] = []
        self._chroma: list[Tensor] = []

    def add(self, row: int, frame: av.VideoFrame) -> None:
        if (frame.height, frame.width) != self.size:
            raise broken(self.name, "the image size changes within the file")
        # Requested without a stream (torch would pass one, which PyAV does not support): it is the same stream.
        luma, chroma = (torch.from_dlpack(plane.__dlpack__()) for plane in frame.planes)
        assert luma.dtype == torch.uint8, "8 bits a sample"
        self._rows.append(row)
        self._luma.append(luma)
        self._chroma.append(chroma)
        if len(self._rows) == CHUNK:
            self.flush()

    def flush(self) -> None:
        if not self._rows:
            return
        planes = planes_of_nv12(torch.stack(self._luma), torch.stack(self._chroma))
        rows = np.array(self._rows)
        # Slices, not an index tensor: uploading one would wait for all work on the stream. Rows come in order,
        # so there is one slice, unless frames are bad.
        for run in np.split(np.arange(len(rows)), np.flatnonzero(np.diff(rows) != 1) + 1):
            self.out[rows[run[0]] : rows[run[-1]] + 1] = planes[run[0] : run[-1] + 1]
        # Only now may FFmpeg reuse the frames' memory; it does so in the order of the same stream.
        self._rows, self._luma, self._chroma = [], [], []


def planes_of_nv12(luma: Tensor, chroma: Tensor) -> Tensor:
    """luma [n, H, W] and chroma [n, H/2, W/2, 2] -> planes [n, H * W * 3 / 2]: Y, then U, then V."""
    return torch.cat([luma.flatten(1), chroma.permute(0, 3, 1, 2).flatten(1)], dim=1)
