"""Console output: progress bars, tables, and all that commands print: no other file calls `print` with foreign text.

Names from outside can't control the terminal, and no password is shown.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TextIO

from tqdm import tqdm

from flexor.core.secrets import redacted, redacted_values
from flexor.core.text import one_line, printable, visible

Progress = Callable[[int, int], None]  # (done, total)


def progress(label: str) -> Progress:
    """A callback that draws a progress bar on standard error."""
    bar: tqdm | None = None

    def report(done: int, total: int) -> None:
        nonlocal bar
        if bar is None:
            options: dict[str, Any] = {"file": sys.stderr, "leave": False, "dynamic_ncols": True}
            bar = tqdm(total=total, desc=one_line(label), disable=None, **options)
        bar.update(done - bar.n)
        if done >= total:
            bar.close()

    return report


def print_result(result: dict[str, Any], as_json: bool, text: str) -> None:
    """Print a command's result: as JSON for programs, or as text for people."""
    if as_json:
        print_json(result)
    else:
        print_text(text)


def print_text(text: str, file: TextIO | None = None) -> None:
    print(visible(redacted(text)), file=file, flush=True)


def print_json(value: object, indent: int | None = None) -> None:
    print(json.dumps(redacted_values(value), indent=indent), flush=True)


def print_error(text: str) -> None:
    """Print why a command failed, on standard error. The terminal may be closed."""
    with suppress(OSError):
        print(printable(redacted(text)), file=sys.stderr, flush=True)


def table(rows: Sequence[Sequence[object]]) -> str:
    """Rows of cells in aligned columns."""
    cells = [[one_line(str(cell)) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths)) for row in cells)
    return "\n".join(line.rstrip() for line in lines)
