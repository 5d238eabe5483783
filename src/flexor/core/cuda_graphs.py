"""Capturing a computation in a CUDA graph, and why that failed, as one sentence for the user."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

Pool = Any  # memory of graphs, from `torch.cuda.graph_pool_handle`

_failed: list[torch.cuda.CUDAGraph] = []  # kept: torch asks them where pinned memory belongs


@contextmanager
def capture(graph: torch.cuda.CUDAGraph, pool: Pool, stream: torch.cuda.Stream) -> Iterator[None]:
    """What runs inside is captured, not computed. If that fails, torch works afterwards as before."""
    current = torch.cuda.current_stream(stream.device)
    with torch.cuda.device(stream.device), torch.cuda.stream(current):  # restores the stream: torch may not
        try:
            with _into(graph, pool, stream):
                yield
        except BaseException:
            _clean_up(graph, pool, stream)
            raise


def _into(graph: torch.cuda.CUDAGraph, pool: Pool, stream: torch.cuda.Stream) -> torch.cuda.graph:
    # the loader's threads may allocate memory meanwhile: only this thread's calls matter
    return torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local")


def _clean_up(graph: torch.cuda.CUDAGraph, pool: Pool, stream: torch.cuda.Stream) -> None:
    """Torch ends a capture that CUDA has given up only by half.

    Its allocator then never frees what several streams have used, such as batches, and its random numbers work only in
    graphs.
    """
    with suppress(RuntimeError):  # the capture had ended: a mistake that CUDA did not see
        torch._C._cuda_endAllocateToPool(stream.device.index, pool)
        torch._C._cuda_releasePool(stream.device.index, pool)
    graph.reset()
    _failed.append(graph)
    empty = torch.cuda.CUDAGraph()  # a capture that succeeds ends that of random numbers
    with _into(empty, torch.cuda.graph_pool_handle(), stream):
        torch.zeros(1, device=stream.device)


def why_not_captured(error: BaseException, capturing_file: str) -> str:
    """What went wrong, and the line of the policy where it did. `capturing_file` is not to blame."""
    while error.__context__ is not None:  # ending a capture that went wrong fails too, and says less
        error = error.__context__
    message = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
    return f"{message}{_line(error, capturing_file)}"


def _line(error: BaseException, capturing_file: str) -> str:
    """The last line that is not torch's or of a file that captures."""
    inside = Path(torch.__file__).parent
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if inside not in Path(frame.filename).parents
        and Path(frame.filename) not in (Path(capturing_file), Path(__file__))
    ]
    return f" ({frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line})" if frames else ""
