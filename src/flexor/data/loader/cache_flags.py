"""The flags of `flexor data cache`."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import Any

from flexor.core.errors import ConfigError

ABOUT = "cache all decoded frames of a dataset before training; list or remove such caches"


def add_verb(verbs: Any) -> None:
    """Add `cache` to the verbs of `flexor data`."""
    verb = verbs.add_parser("cache", help=ABOUT, description=ABOUT)
    job = verb.add_mutually_exclusive_group(required=True)
    job.add_argument("root", nargs="?", help="folder, Hub repository or fsspec URL of the dataset")
    job.add_argument("--list", action="store_true", help="list all caches and their sizes")
    job.add_argument(
        "--prune", action="store_true", help="remove broken caches, and those selected by the flags below"
    )
    build = verb.add_argument_group("for a dataset")
    build.add_argument("--size", help="scale images to HEIGHTxWIDTH; train with the same dataset.cache.size")
    build.add_argument("--format", choices=("raw", "jpeg"), help="default: raw; jpeg is smaller, but lossy")
    build.add_argument("--cameras", type=lambda text: text.split(","), help="NAME,NAME; default: all")
    build.add_argument("--workers", type=_count, help="number of threads; default: one per core")
    prune = verb.add_argument_group("with --prune; caches in use are never removed")
    prune.add_argument(
        "--older-than", type=_amount(d=86400, h=3600), help="caches not used for this long, such as 30d"
    )
    prune.add_argument(
        "--to",
        type=_amount(MB=10**6, GB=10**9, TB=10**12),
        help="the least recently used caches, until the rest takes at most this much, such as 50GB",
    )
    prune.add_argument("--dataset", help="only caches of this dataset, named as in --list")
    prune.add_argument("--all", action="store_true", help="all caches")
    verb.add_argument("--json", action="store_true", help="print one JSON object")


def check(parsed: argparse.Namespace) -> None:
    """Raise an error for a flag of another job, which would have no effect."""
    flags = {
        "a dataset": ("size", "format", "cameras", "workers"),
        "--prune": ("older_than", "to", "dataset", "all"),
    }
    selected = "--prune" if parsed.prune else "--list" if parsed.list else "a dataset"
    for job, names in flags.items():
        for name in names:
            if job != selected and getattr(parsed, name) not in (None, False):
                flag = f"--{name.replace('_', '-')}"
                raise ConfigError(f"{flag} is only valid with {job}, not with {selected}.")


def _amount(**units: int) -> Callable[[str], int]:
    """Reads a number with a unit, such as 30d."""

    def read(text: str) -> int:
        match = re.fullmatch(rf"(\d+(?:\.\d+)?)({'|'.join(units)})", text)
        if not match:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number followed by {' or '.join(units)}")
        return int(float(match[1]) * units[match[2]])

    return read


def _count(text: str) -> int:
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a valid number of threads: give 1 or more")
    return int(text)
