"""Console output: progress bars and tables."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

from tqdm import tqdm

Progress = Callable[[int, int], None]  # (done, total)


def progress(label: str) -> Progress:
    """A callback that draws a progress bar on standard error."""
    bar: tqdm | None = None

    def report(done: int, total: int) -> None:
        nonlocal bar
        if bar is None:
            bar = tqdm(
                total=total, desc=label, file=sys.stderr, leave=False, dynamic_ncols=True, disable=None
            )
        bar.update(done - bar.n)
        if done >= total:
            bar.close()

    return report


def print_result(result: dict[str, Any], as_json: bool, text: str) -> None:
    """Print a command's result: as JSON for programs, or as text for people."""
    print(json.dumps(result) if as_json else text)


def table(rows: Sequence[Sequence[object]]) -> str:
    """Rows of cells in aligned columns."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in cells
    )
