"""Decoding on the GPU's own decoder: is it exact, how fast, and what do it and a training step do to each other.

    python benchmarks/nvdec.py [--seconds 2] [--out nvdec.json]

Clips of 480x640 with a sensor's noise are encoded first. Then, each in a process of its own, so that a crash
costs one part only:

    exact     every frame's planes against the CPU's, in order and at random
    units     frames/s of whole units (runs of GOPs) and of single frames at random, by threads; the CPU beside it
    training  the same while the GPU computes, on the stream that decoding uses and on one of its own
    peer      NVIDIA's PyNvVideoCodec reading the same files from end to end, if it is installed

Prints one JSON object.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch

from flexor.data.video import nvdec
from flexor.data.video.decode import VideoIndex, decode_frames, index_video
from flexor.data.video.nvdec import CODECS, Capabilities, NvDecoder, _capabilities, supported
from flexor.data.video.planes import PlaneFormat, format_of, pack

HEIGHT, WIDTH, FPS, NOISE = 480, 640, 30, 5.0
# name: encoder, group of pictures, frames, options. x264 and x265 use B-frames here, as they do by default.
CLIPS = {
    "h264_gop2": ("libx264", 2, 300, {"preset": "veryfast"}),
    "h264_gop250": ("libx264", 250, 500, {"preset": "veryfast", "sc_threshold": "0"}),
    "hevc_gop30": ("libx265", 30, 300, {"preset": "ultrafast", "x265-params": "log-level=none"}),
    "vp9_gop30": ("libvpx-vp9", 30, 120, {"deadline": "realtime", "cpu-used": "8"}),
    "av1_gop30": ("libsvtav1", 30, 60, {"preset": "12"}),
}
UNIT = 64  # frames at least: a unit is a run of whole GOPs
PARTS = ("exact", "units", "training", "peer")
CUDA = torch.device("cuda", 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=2.0, help="of every measurement")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--out", type=Path, help="also write the JSON to this file")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--clips", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        nvdec.decode_on_cpu = no_help
        print(json.dumps(globals()[args.part](args)))
        return
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        images = scene(300)
        with ThreadPoolExecutor(len(CLIPS)) as pool:
            list(pool.map(lambda name: write_clip(Path(folder) / f"{name}.mp4", images, *CLIPS[name]), CLIPS))
        result = {"machine": machine(), "encoding_s": round(time.perf_counter() - begin, 1)}
        for part in PARTS:
            result[part] = in_its_own_process(part, folder, args)
            if args.out:
                args.out.write_text(json.dumps(result, indent=1))
    print(json.dumps(result, indent=1))


def no_help(
    index: VideoIndex, frames: np.ndarray, out: torch.Tensor, failed: dict[int, str]
) -> dict[int, str]:
    """In place of decoding on the CPU what the hardware does not give: it is the hardware that is measured."""
    raise RuntimeError(f"NVDEC: {len(failed)} of {len(frames)} frames fail, {failed[min(failed)]}")


def in_its_own_process(part: str, folder: str, args: argparse.Namespace) -> Any:
    command = [sys.executable, __file__, "--part", part, "--clips", folder, "--seconds", str(args.seconds)]
    command += ["--threads", *map(str, args.threads)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=90)
    except subprocess.TimeoutExpired:
        return {"error": "took longer than 90 s"}
    if done.returncode:
        return {"error": done.stderr[-3000:], "status": done.returncode}
    return json.loads(done.stdout.splitlines()[-1])


def machine() -> dict[str, Any]:
    return {
        "gpu": torch.cuda.get_device_name(CUDA) if torch.cuda.is_available() else None,
        "torch": torch.__version__,
        "pyav": av.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


def scene(frames: int) -> list[np.ndarray]:
    """Something that moves, and noise."""
    rng = np.random.default_rng(0)
    rows, columns = np.mgrid[:HEIGHT, :WIDTH].astype(np.float32)
    colours = [128 + 80 * np.sin(columns / 37), 128 + 80 * np.cos(rows / 29), (rows + columns) % 200]
    still = np.stack(colours, -1)  # [H, W, 3]
    noise = [rng.normal(0, NOISE, still.shape).astype(np.float32) for _ in range(8)]
    images = []
    for i in range(frames):
        image = (np.roll(still, 2 * i, 1) + np.roll(noise[i % 8], 17 * i, 0)).clip(0, 255).astype(np.uint8)
        image[100:200, i % 500 : i % 500 + 80] = (i * 7) % 256
        images.append(image)
    return images


def write_clip(
    path: Path, images: list[np.ndarray], encoder: str, gop: int, frames: int, options: dict[str, str]
) -> None:
    with av.open(str(path), "w") as container:
        stream = container.add_stream(encoder, FPS, options={"g": str(gop), "crf": "18"} | options)
        stream.height, stream.width, stream.pix_fmt = HEIGHT, WIDTH, "yuv420p"
        for i in range(frames):
            image = images[i % len(images)]
            container.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        container.mux(stream.encode(None))


def open_clip(folder: Path, name: str) -> tuple[VideoIndex, PlaneFormat]:
    index = index_video(folder / f"{name}.mp4")
    formats: list[PlaneFormat] = []
    decode_frames(index, np.array([0]), lambda _, frame: formats.append(format_of(frame)))
    return index, formats[0]


def units_of(index: VideoIndex) -> list[np.ndarray]:
    """Frames in runs of whole GOPs."""
    starts = np.unique(index.start)
    first = np.searchsorted(index.start, starts)  # first frame that needs each GOP (closed GOPs)
    cuts = [0]
    for frame in first:
        if frame - cuts[-1] >= UNIT:
            cuts.append(int(frame))
    return [np.arange(a, b) for a, b in zip(cuts, [*cuts[1:], len(index)])]


# exact


def exact(args: argparse.Namespace) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for codec in CODECS:
        capabilities = _capabilities(codec, 0)
        result[f"driver_{codec}"] = (
            {name: getattr(capabilities, name) for name, _ in Capabilities._fields_ if "reserved" not in name}
            if isinstance(capabilities, Capabilities)
            else capabilities
        )
    for name in CLIPS:
        index, format = open_clip(args.clips, name)
        reason = supported(index.packets.codec, format, CUDA)
        result[name] = {"not_supported": reason} if reason else compare(index, format)
    return result


def compare(index: VideoIndex, format: PlaneFormat) -> dict[str, Any]:
    everything = np.arange(len(index))
    truth = np.zeros((len(index), format.nbytes), np.uint8)
    decode_frames(index, everything, lambda i, frame: pack(frame, format, truth[i]))
    decoder = NvDecoder(CUDA)
    some = np.sort(np.random.default_rng(1).choice(len(index), 25, replace=False))
    result = {}
    for order, frames in (("in_order", everything), ("at_random", some), ("again", everything)):
        out = torch.zeros(len(frames), format.nbytes, dtype=torch.uint8, device=CUDA)
        bad = decoder.decode(index, frames, out)
        difference = np.abs(out.cpu().numpy().astype(np.int16) - truth[frames])
        equal = int((difference.max(1) == 0).sum())
        result[order] = {
            "frames": len(frames),
            "equal": equal,
            "worst": int(difference.max()),
            "bad": len(bad),
        }
    return result


# units


def units(args: argparse.Namespace) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name in CLIPS:
        index, format = open_clip(args.clips, name)
        if supported(index.packets.codec, format, CUDA):
            continue
        runs = units_of(index)
        singles = [np.array([frame]) for frame in range(len(index))]
        result[name] = {
            "units": {n: rate(args.seconds, n, on_gpu(index, format, runs)) for n in args.threads},
            "single": {
                n: rate(args.seconds, n, on_gpu(index, format, singles)) for n in (1, max(args.threads))
            },
            "cpu_units": {n: rate(args.seconds, n, on_cpu(index, format, runs)) for n in (1, 8, 16)},
        }
    return result


Work = Callable[[np.random.Generator], int]
"""Decodes something at random and says how many frames it was."""


def on_gpu(index: VideoIndex, format: PlaneFormat, choices: list[np.ndarray]) -> Callable[[], Work]:
    def make() -> Work:
        decoder = NvDecoder(CUDA)
        out = torch.empty(max(map(len, choices)), format.nbytes, dtype=torch.uint8, device=CUDA)

        def work(rng: np.random.Generator) -> int:
            frames = choices[rng.integers(len(choices))]
            assert not decoder.decode(index, frames, out[: len(frames)])
            return len(frames)

        return work

    return make


def on_cpu(index: VideoIndex, format: PlaneFormat, choices: list[np.ndarray]) -> Callable[[], Work]:
    def make() -> Work:
        out = np.empty((max(map(len, choices)), format.nbytes), np.uint8)

        def work(rng: np.random.Generator) -> int:
            frames = choices[rng.integers(len(choices))]
            assert not decode_frames(index, frames, lambda i, frame: pack(frame, format, out[i]))
            return len(frames)

        return work

    return make


def rate(seconds: float, threads: int, make: Callable[[], Work], beside: Any = None) -> dict[str, Any]:
    """Frames/s of `threads` threads; `beside`, if given, is computed by this one meanwhile."""
    ready, stop = threading.Barrier(threads + 1), threading.Event()
    counts, errors = [0] * threads, []

    def run(me: int) -> None:
        try:
            work, rng = make(), np.random.default_rng(me)
            work(rng)  # opens the decoder
        except BaseException as error:
            errors.append(repr(error))
            ready.abort()
            return
        ready.wait()
        try:
            while not stop.is_set():
                counts[me] += work(rng)
        except Exception as error:
            errors.append(repr(error))

    workers = [threading.Thread(target=run, args=(i,)) for i in range(threads)]
    for worker in workers:
        worker.start()
    try:
        ready.wait(60)
    except threading.BrokenBarrierError:
        return {"error": errors or "did not start"}
    torch.cuda.synchronize()
    begin, cpu = time.perf_counter(), time.process_time()
    steps = beside(seconds) if beside else time.sleep(seconds)
    stop.set()
    for worker in workers:
        worker.join()
    torch.cuda.synchronize()
    took, cpu = time.perf_counter() - begin, time.process_time() - cpu
    result: dict[str, Any] = {"frames_per_s": round(sum(counts) / took)}
    result["cpu_us_per_frame"] = round(1e6 * cpu / max(sum(counts), 1))
    if steps is not None:
        result["step_ms"] = round(steps, 2)
    if errors:
        result["errors"] = errors
    return result


# training


def training(args: argparse.Namespace) -> dict[str, Any]:
    """Steps of about 25 ms of matrix products, never more than two of them queued."""
    index, format = open_clip(args.clips, "h264_gop250")
    work = on_gpu(index, format, units_of(index))
    result: dict[str, Any] = {"step_ms_alone": round(steps(torch.cuda.default_stream())(args.seconds), 2)}
    for name, stream in (
        ("default_stream", torch.cuda.default_stream()),
        ("own_stream", torch.cuda.Stream()),
    ):
        for threads in (4, 8):
            result[f"{name}_{threads}"] = rate(args.seconds, threads, work, steps(stream))
    return result


def steps(stream: torch.cuda.Stream) -> Callable[[float], float]:
    """Computes on `stream` for some seconds and gives the milliseconds per step."""
    a = torch.randn(8192, 8192, device=CUDA, dtype=torch.bfloat16)
    torch.cuda.synchronize()

    def run(seconds: float) -> float:
        done: list[torch.cuda.Event] = []
        begin = time.perf_counter()
        with torch.cuda.stream(stream):
            while time.perf_counter() - begin < seconds:
                for _ in range(18):
                    a @ a
                done.append(torch.cuda.Event())
                done[-1].record(stream)
                if len(done) > 2:
                    done[-3].synchronize()
        stream.synchronize()
        return 1000 * (time.perf_counter() - begin) / len(done)

    return run


# peer


def peer(args: argparse.Namespace) -> dict[str, Any]:
    try:
        import PyNvVideoCodec as nvc
    except Exception as error:  # not installed, or the driver's parts are missing
        return {"not_there": str(error)[:300]}
    result: dict[str, Any] = {"version": nvc.__version__}
    for name in ("h264_gop2", "h264_gop250"):
        make = reads_file(nvc, args.clips / f"{name}.mp4")
        result[name] = {n: rate(args.seconds, n, make) for n in args.threads}
    make = reads_file(nvc, args.clips / "h264_gop250.mp4")
    for threads in (4, 8):
        stream = torch.cuda.default_stream()
        result[f"training_default_stream_{threads}"] = rate(args.seconds, threads, make, steps(stream))
    return result


def reads_file(nvc: Any, path: Path) -> Callable[[], Work]:
    """The whole file, on a stream of the thread's own, each frame copied out as NV12."""

    def make() -> Work:
        torch.cuda.set_device(CUDA)
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        out = torch.empty(HEIGHT * 3 // 2, WIDTH, dtype=torch.uint8, device=CUDA)
        codec = nvc.CreateDemuxer(str(path)).GetNvCodecId()
        decoder = nvc.CreateDecoder(
            gpuid=0, codec=codec, cudacontext=0, cudastream=stream.cuda_stream, usedevicememory=True
        )

        def work(_: np.random.Generator) -> int:
            count = 0
            with torch.cuda.stream(stream):
                for packet in nvc.CreateDemuxer(str(path)):
                    for frame in decoder.Decode(packet):
                        out.copy_(torch.from_dlpack(frame))
                        count += 1
            return count

        return work

    return make


if __name__ == "__main__":
    main()
