"""Folders and files that look like a dataset and are not one yet: old formats, and pointers of Git LFS."""

from __future__ import annotations

from pathlib import Path

POINTER_START = b"version https://git-lfs.github.com/spec/"
POINTER_BYTES = 1024  # a pointer is never larger
POINTER = "the file is a Git LFS pointer: its data was not downloaded"

V1 = "a LeRobot dataset v1, with meta_data/ instead of meta/"
CONVERT_V1 = (
    "It is of an old format, which LeRobot left in 2024. If it is on the Hub, take a later version of it: "
    "`hf download USER/NAME --repo-type dataset --revision v3.0` (or v2.1, v2.0). Otherwise convert it with LeRobot "
    "0.3.3, the last one with lerobot.datasets.v2.convert_dataset_v1_to_v2"
)


def is_lfs_pointer(path: Path) -> bool:
    """Whether Git has put a text there that only names the file."""
    try:
        if path.stat().st_size > POINTER_BYTES:
            return False
        with path.open("rb") as file:
            return file.read(len(POINTER_START)) == POINTER_START
    except OSError:
        return False


def how_to_pull(root: Path) -> str:
    return f"run `git lfs install` once, then `git -C {root} lfs pull`; or download the dataset with `hf download`"


def is_v1(root: Path) -> bool:
    return (root / "meta_data/info.json").is_file()


def advice_on_version(version: str) -> str:
    """What to do with a dataset whose version is none that is supported."""
    if version.startswith(("v1.", "1.")):
        return CONVERT_V1
    if version.startswith(("v3.", "v4.", "v5.")):
        return "It is newer than this Flexor: update Flexor, or export the dataset as v3.0"
    return "Convert the dataset with LeRobot's conversion scripts"
