"""Which episodes go into which part of a dataset."""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np

from flexor.core.errors import ConfigError
from flexor.core.paths import safe_name
from flexor.data.edit.source import EditSource

REST = "rest"
HOW = "Give a fraction such as 0.9, a number of episodes such as 20, a list such as 0:20 or 3,5 or @FILE, or rest."


def divide(source: EditSource, shares: Mapping[str, str], seed: int | None) -> dict[str, list[int]]:
    """The episodes of each part. Fractions and numbers take episodes in order, or by lot with a `seed`."""
    if not shares:
        raise ConfigError(f"Name the parts, such as --train 0.9 --val 0.1. {HOW}")
    for name in shares:
        if safe_name(name) != name or "/" in name or name.startswith("."):
            raise ConfigError(f"--{name}: the name of a part is the name of a folder.")
    kinds = {name: _kind(name, text) for name, text in shares.items()}
    if sum(kind == REST for kind in kinds.values()) > 1:
        raise ConfigError("Only one part can get the rest.")
    lists = {n: source.parse(text, f"--{n}") for n, text in shares.items() if kinds[n] == "list"}
    _check_disjoint(lists)
    listed = {episode for episodes in lists.values() for episode in episodes}
    free = [episode for episode in source.episodes if episode not in listed]
    if seed is not None:
        free = np.random.default_rng(seed).permutation(free).tolist()
    for name, count in _counts(shares, kinds, len(source.episodes), len(free)).items():
        lists[name], free = sorted(free[:count]), free[count:]
    lists |= {name: sorted(free) for name, kind in kinds.items() if kind == REST}
    for name in shares:
        if not lists[name]:
            raise ConfigError(
                f"--{name}={shares[name]}: no episode is left for it; the dataset has {len(source.episodes)}."
            )
    return {name: lists[name] for name in shares}


def _kind(name: str, text: str) -> str:
    if text == REST:
        return REST
    if re.fullmatch(r"[0-9]+", text):
        return "number"
    if re.fullmatch(r"[0-9]*\.[0-9]+|[0-9]+\.[0-9]*", text):
        if not 0 < float(text) <= 1:
            raise ConfigError(f"--{name}={text}: a fraction is more than 0 and at most 1. {HOW}")
        return "fraction"
    if text.startswith(("@", "[")) or re.fullmatch(r"[0-9:, ]+", text):
        return "list"
    raise ConfigError(f"--{name}={text} is not a share of a dataset. {HOW}")


def _counts(shares: Mapping[str, str], kinds: Mapping[str, str], total: int, free: int) -> dict[str, int]:
    """How many episodes each part with a fraction or a number gets. Fractions of all that add up to 1 use all."""
    counts, end, taken = {}, 0.0, 0
    for name, text in shares.items():
        if kinds[name] == "number":
            counts[name] = int(text)
        elif kinds[name] == "fraction":
            end += float(text)
            if end > 1 + 1e-9:
                raise ConfigError(f"The fractions add up to {end:g}, more than 1.")
            counts[name] = round(end * total) - taken
            taken += counts[name]
    if sum(counts.values()) > free:
        raise ConfigError(
            f"The parts need {sum(counts.values())} episodes, but {free} of {total} are left for fractions and "
            "numbers."
        )
    return counts


def _check_disjoint(lists: Mapping[str, list[int]]) -> None:
    owner: dict[int, str] = {}
    for name, episodes in lists.items():
        for episode in episodes:
            if episode in owner:
                raise ConfigError(f"Episode {episode} is in --{owner[episode]} and in --{name}.")
            owner[episode] = name
