"""Console output: progress bars, tables, and all that commands print: no other file calls `print` with foreign text.

Names from outside can't control the terminal, and no password is shown.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TextIO

from tqdm import tqdm

from flexor.core.secrets import redacted, redacted_values
from flexor.core.text import one_line, printable, visible

RED, YELLOW, GREEN = 31, 33, 32  # as terminals number them
FAILED = {r"^flexor [\w-]+:": RED}
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


def print_result(
    result: dict[str, Any], as_json: bool, text: str, colours: Mapping[str, int] | None = None
) -> None:
    """Print a command's result: as JSON for programs, or as text for people."""
    if as_json:
        print_json(result)
    else:
        print_text(text, colours=colours)


def print_text(text: str, file: TextIO | None = None, colours: Mapping[str, int] | None = None) -> None:
    """`colours`: of what matches these patterns, in a terminal."""
    print(coloured(visible(redacted(text)), colours or {}, file or sys.stdout), file=file, flush=True)


def coloured(text: str, colours: Mapping[str, int], stream: TextIO) -> str:
    """The text with what matches a pattern in bold and in a colour, where `stream` shows colours."""
    if not shows_colours(stream):
        return text
    for pattern, colour in colours.items():
        text = re.sub(pattern, lambda match: f"\x1b[1;{colour}m{match[0]}\x1b[0m", text, flags=re.MULTILINE)  # noqa: B023
    return text


def shows_colours(stream: TextIO) -> bool:
    """Not in a pipe or a file, and not where NO_COLOR says so (https://no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def print_json(value: object, indent: int | None = None) -> None:
    print(json.dumps(redacted_values(value), indent=indent), flush=True)


def print_error(text: str) -> None:
    """Print why a command failed, on standard error. The terminal may be closed."""
    with suppress(OSError):
        print(coloured(printable(redacted(text)), FAILED, sys.stderr), file=sys.stderr, flush=True)


def table(rows: Sequence[Sequence[object]]) -> str:
    """Rows of cells in aligned columns."""
    cells = [[one_line(str(cell)) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths)) for row in cells)
    return "\n".join(line.rstrip() for line in lines)
