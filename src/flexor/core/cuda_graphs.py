"""Why a computation could not be captured in a CUDA graph, as one sentence for the user."""

from __future__ import annotations

import traceback
from pathlib import Path

import torch


def why_not_captured(error: BaseException, by: str) -> str:
    """What went wrong, and the line of the policy where it did. `by`: the file that captures, which is not to blame."""
    while error.__context__ is not None:  # ending a capture that went wrong fails too, and says less
        error = error.__context__
    said = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
    return f"{said}{_line(error, by)}"


def _line(error: BaseException, by: str) -> str:
    """The last line that is not torch's or the capturing file's."""
    inside = Path(torch.__file__).parent
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if inside not in Path(frame.filename).parents and Path(frame.filename) != Path(by)
    ]
    return f" ({frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line})" if frames else ""
