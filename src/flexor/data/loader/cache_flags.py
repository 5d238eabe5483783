"""The flags of `flexor data cache`."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import Any

from flexor.core.errors import ConfigError

ABOUT = "decode all frames of a dataset ahead of training; look at such caches; remove them"


def add_verb(verbs: Any) -> None:
    """Add `cache` to the verbs of `flexor data`."""
    verb = verbs.add_parser("cache", help=ABOUT, description=ABOUT)
    job = verb.add_mutually_exclusive_group(required=True)
    job.add_argument("root", nargs="?", help="folder, Hub repository or fsspec address of the dataset")
    job.add_argument("--list", action="store_true", help="what is there, and how much room it takes")
    job.add_argument(
        "--prune", action="store_true", help="remove what is broken, and what the flags below say"
    )
    build = verb.add_argument_group("for a dataset")
    build.add_argument(
        "--size", help="scale pictures to HEIGHTxWIDTH; train with the same dataset.cache.size"
    )
    build.add_argument(
        "--format", choices=("raw", "jpeg"), help="raw unless given; jpeg is smaller, and lossy"
    )
    build.add_argument("--cameras", type=lambda text: text.split(","), help="NAME,NAME; unless given, all")
    build.add_argument("--workers", type=_count, help="threads; unless given, one per core")
    prune = verb.add_argument_group("with --prune; caches in use stay")
    prune.add_argument(
        "--older-than", type=_amount(d=86400, h=3600), help="not used for so long, such as 30d"
    )
    prune.add_argument(
        "--to",
        type=_amount(MB=10**6, GB=10**9, TB=10**12),
        help="the least recently used, until the others take no more than that, such as 50GB",
    )
    prune.add_argument("--dataset", help="only caches of this dataset, as --list names it")
    prune.add_argument("--all", action="store_true", help="all")
    verb.add_argument("--json", action="store_true", help="print one JSON object")


def check(parsed: argparse.Namespace) -> None:
    """A flag of another job would do nothing: say so."""
    flags = {
        "a dataset": ("size", "format", "cameras", "workers"),
        "--prune": ("older_than", "to", "dataset", "all"),
    }
    chosen = "--prune" if parsed.prune else "--list" if parsed.list else "a dataset"
    for job, names in flags.items():
        for name in names:
            if job != chosen and getattr(parsed, name) not in (None, False):
                raise ConfigError(f"--{name.replace('_', '-')} goes with {job}, not with {chosen}.")


def _amount(**units: int) -> Callable[[str], int]:
    """Reads a number with a unit, such as 30d."""

    def read(text: str) -> int:
        found = re.fullmatch(rf"(\d+(?:\.\d+)?)({'|'.join(units)})", text)
        if not found:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number followed by {' or '.join(units)}")
        return int(float(found[1]) * units[found[2]])

    return read


def _count(text: str) -> int:
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of threads")
    return int(text)
