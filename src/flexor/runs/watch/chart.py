"""Curves in characters: eight dots each in braille, or one where the terminal has no Unicode."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

from flexor.runs.text import figure

DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # of a braille character: columns, then rows
BLOCKS = "▁▂▃▄▅▆▇█"
PLAIN_BLOCKS = "_.-=+*#@"
LABEL = 10  # characters of the axis


@dataclass
class ChartLine:
    x: Sequence[float]
    y: Sequence[float]
    style: str = "cyan"


@dataclass
class _Window:
    """The part of the plane that is drawn, and how many dots it has."""

    left: float
    right: float
    low: float
    high: float
    columns: int
    rows: int

    def column(self, x: float) -> int:
        return round((x - self.left) / ((self.right - self.left) or 1) * (self.columns - 1))

    def row(self, y: float) -> int:
        return self.rows - 1 - round((y - self.low) / ((self.high - self.low) or 1) * (self.rows - 1))


def chart(
    lines: Sequence[ChartLine], width: int, height: int, *, log: bool = False, plain: bool = False
) -> list[Text]:
    """Lines of text: the curves, with the values at the top and the bottom, and the steps below."""
    usable = [_usable(line, log) for line in lines]
    points = [point for finite_points in usable for point in finite_points]
    columns_wide, rows_high = max(width - LABEL - 2, 2), max(height - 1, 1)
    if not points:
        empty = "no positive values yet" if log else "no values yet"
        return [Text(empty.center(width)[:width], style="dim"), *[Text("")] * (height - 1)]
    dot_columns, dot_rows = (1, 1) if plain else (2, 4)
    low, high = min(y for _, y in points), max(y for _, y in points)
    if low == high:
        margin = abs(low) * 0.05 or 1.0
        low, high = low - margin, high + margin
    xs = [x for x, _ in points]
    window = _Window(min(xs), max(xs), low, high, columns_wide * dot_columns, rows_high * dot_rows)
    cells: dict[tuple[int, int], tuple[int, str]] = {}
    for line, finite_points in zip(lines, usable):
        for column, row in _dots(finite_points, window):
            place = (row // dot_rows, column // dot_columns)
            bits = cells.get(place, (0, ""))[0] | DOTS[column % dot_columns][row % dot_rows]
            cells[place] = (bits, line.style)
    labels = {0: high, rows_high - 1: low}
    if rows_high > 4:
        labels[rows_high // 2] = (low + high) / 2
    rows = [_row(number, labels, cells, columns_wide, log, plain) for number in range(rows_high)]
    right = figure(window.right)
    ends = figure(window.left).ljust(columns_wide)[: columns_wide - len(right)] + right
    return [*rows, Text(" " * (LABEL + 2) + ends, style="dim")][:height]


def _usable(line: ChartLine, log: bool) -> list[tuple[float, float]]:
    pairs = [(x, y) for x, y in zip(line.x, line.y) if math.isfinite(y) and (y > 0 or not log)]
    return [(x, math.log10(y)) for x, y in pairs] if log else pairs


def _dots(points: Sequence[tuple[float, float]], window: _Window) -> set[tuple[int, int]]:
    """A column shows all that its points span, so that a spike is seen; columns are joined."""
    spans: dict[int, list[int]] = {}
    for x, y in points:
        spans.setdefault(window.column(x), []).append(window.row(y))
    dots: set[tuple[int, int]] = set()
    previous: tuple[int, int] | None = None
    for column in sorted(spans):
        rows = spans[column]
        dots |= {(column, row) for row in range(min(rows), max(rows) + 1)}
        if previous is not None:
            dots |= _joined(previous, (column, rows[0]))
        previous = (column, rows[-1])
    return dots


def _joined(begin: tuple[int, int], end: tuple[int, int]) -> set[tuple[int, int]]:
    (x, y), (dx, dy) = begin, (end[0] - begin[0], end[1] - begin[1])
    count = max(abs(dx), abs(dy), 1)
    return {(round(x + dx * i / count), round(y + dy * i / count)) for i in range(count + 1)}


def _row(
    number: int,
    labels: dict[int, float],
    cells: dict[tuple[int, int], tuple[int, str]],
    columns_wide: int,
    log: bool,
    plain: bool,
) -> Text:
    value = labels.get(number)
    label = "" if value is None else figure(10**value if log else value)
    text = Text(f"{label:>{LABEL}} ", style="dim", no_wrap=True)
    text.append("|" if plain else "│")
    for column in range(columns_wide):
        bits, style = cells.get((number, column), (0, ""))
        if not bits:
            text.append(" ")
        else:
            text.append("*" if plain else chr(0x2800 + bits), style=f"not dim {style}")
    return text


def sparkline(values: Sequence[float], width: int, plain: bool = False) -> str:
    """The newest values as a line of blocks."""
    marks = PLAIN_BLOCKS if plain else BLOCKS
    last = list(values)[-width:]
    finite = [value for value in last if math.isfinite(value)]
    if not finite:
        return ""
    low, span = min(finite), (max(finite) - min(finite)) or 1.0
    steps = len(marks) - 1
    return "".join(marks[round((v - low) / span * steps)] if math.isfinite(v) else "!" for v in last)
