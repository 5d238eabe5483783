"""The names of a feature's values, which datasets declare as lists, dictionaries of lists, or not at all."""

from __future__ import annotations

from collections.abc import Sequence


def flat_names(names: object, count: int) -> list[str] | None:
    """The names of a feature's values as a dataset declares them, one each; None if it does not name each of them."""
    flat = _flat(names)
    return flat if len(flat) == count else None


def _flat(names: object) -> list[str]:
    if isinstance(names, dict):
        return [name for value in names.values() for name in _flat(value)]
    if isinstance(names, Sequence) and not isinstance(names, str):
        return [name for value in names for name in _flat(value)]
    return [] if names is None else [str(names)]
