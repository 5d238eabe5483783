"""Names of weights in few words, none left out: model.layers.{0..17}.mlp.{down,up}.weight."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import groupby

ON_ONE_LINE = 3  # more names than these get a line each


def listed(names: Collection[str]) -> str:
    """All names, for an error: behind each other if they are few, else their number and a line for each group."""
    groups = grouped(names)
    if len(groups) <= ON_ONE_LINE:
        return ", ".join(groups) or "nothing"
    return f"{len(names)} weights" + "".join(f"\n  {group}" for group in groups)


def grouped(names: Iterable[str]) -> list[str]:
    """The names, those that differ only in a number as one; then, among these, those that differ only in a word."""
    rows = {tuple(name.split(".")) for name in names}
    longest = max(map(len, rows), default=0)
    for place in range(longest):
        rows = _merged(rows, place, numbers=True)
    alone = {row for row in rows if not any(part.startswith("{") for part in row)}
    rows -= alone
    for place in reversed(range(longest)):
        rows = _merged(rows, place, numbers=False)
    return sorted(".".join(row) for row in rows | alone)


def _merged(rows: set[tuple[str, ...]], place: int, numbers: bool) -> set[tuple[str, ...]]:
    """Rows that are the same but for this place, which is a number in all of them or in none, become one."""
    merged: dict[tuple[str, ...], list[str]] = {}
    result = set()
    for row in rows:
        part = row[place] if place < len(row) else "{"
        if part.startswith("{") or part.isdigit() != numbers:
            result.add(row)
        else:
            merged.setdefault((*row[:place], "", *row[place + 1 :]), []).append(part)
    for around, parts in merged.items():
        runs = consecutive(sorted(map(int, parts))) if numbers else []
        joined = [f"{run[0]}..{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs] or sorted(parts)
        word = f"{{{','.join(joined)}}}" if len(parts) > 1 else parts[0]
        result.add((*around[:place], word, *around[place + 1 :]))
    return result


def consecutive(numbers: Iterable[int]) -> list[list[int]]:
    """[0, 1, 2, 5] -> [[0, 1, 2], [5]]."""
    runs = groupby(enumerate(numbers), lambda place: place[1] - place[0])
    return [[number for _, number in run] for _, run in runs]
