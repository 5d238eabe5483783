"""Checks the licence of everything that is installed: each must be on the list below. `make lint` runs it.

All of these allow use in any program. A package with another licence, or without one, is an error: read its licence,
then add it here or do without the package.
"""

from __future__ import annotations

import importlib.metadata
import re
import sys

ALLOWED = (  # as packages write them: SPDX identifiers, and older names
    r"Apache(-2\.0| 2\.0| Software| License)?( License)?( WITH LLVM-exception)?|0BSD|BSD(-[23]-Clause)?|3-Clause BSD|"
    r"MIT(-CMU)?|ISC|HPND|Zlib|CC0-1\.0|BSL-1\.0|Unlicense|PSF-2\.0|Python Software Foundation|CNRI-Python|MPL-2\.0|"
    r"Mozilla Public License 2\.0"
)
# CUDA's libraries, which torch needs on NVIDIA GPUs, under NVIDIA's own terms. Flexor does not distribute them.
WITH_TORCH = r"nvidia-|cuda-"


def licences(package: importlib.metadata.Distribution) -> list[str]:
    """The licences that apply together, of the field that states them best."""
    about = package.metadata
    classifiers = [
        c.rpartition(":: ")[2] for c in about.get_all("Classifier") or () if c.startswith("License ::")
    ]
    approved = [
        re.sub(r" \(.*\)$", "", name) for name in classifiers if name not in ("OSI Approved", "DFSG approved")
    ]
    text = (
        about.get("License-Expression")
        or " AND ".join(approved)
        or (about.get("License") or "").split("\n")[0]
    )
    return [part.strip(" ()") for part in re.split(r"\bAND\b|,", text) if part.strip()]


def is_allowed(licence: str) -> bool:
    choices = [choice.strip(" ()") for choice in licence.split(" OR ")]
    return any(re.fullmatch(f"(?i:{ALLOWED})( License)?", choice) for choice in (licence, *choices))


def refused() -> dict[str, str]:
    """Installed packages whose licence is not on the list."""
    wrong = {}
    for package in importlib.metadata.distributions():
        named = licences(package)
        if not re.match(WITH_TORCH, package.name) and (not named or not all(map(is_allowed, named))):
            wrong[package.name] = " AND ".join(named) or "none stated"
    return wrong


if __name__ == "__main__":
    wrong = refused()
    for name, licence in sorted(wrong.items()):
        print(f"{name}: its licence, {licence}, is not on the list in {sys.argv[0]}", file=sys.stderr)
    sys.exit(1 if wrong else 0)
