"""Names from outside become paths here, and nowhere else: a file that a name refers to is inside its folder.

Such names are in a dataset's metadata, a checkpoint's files, a Hub listing or a request. They are written by strangers:
`../../.bashrc` or `/home/you/.ssh/id_rsa` would read and overwrite files that have nothing to do with the dataset.
"""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Collection
from pathlib import Path

from flexor.core.errors import FlexorError

LONGEST_NAME = 255  # bytes that Linux allows in one name
LONGEST_PATH = 4000  # and in a path, with room for its folder
PLAIN = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*(/[A-Za-z0-9_-][A-Za-z0-9_.-]*)*")  # nearly all names
LINK_TARGETS = "FLEXOR_LINK_TARGETS"
"""Environment variable: folders, separated by colons, that symbolic links may lead to."""


class UnsafePath(FlexorError, ValueError):
    """A name from outside that is no path inside its folder."""


def safe_name(name: object) -> str:
    """A relative path such as data/chunk-000/file-000.parquet, in this form. Any other name is refused."""
    if not isinstance(name, str):
        raise UnsafePath(f"{_quoted(name)} is not the name of a file")
    if len(name) <= LONGEST_NAME and PLAIN.fullmatch(name):
        return name
    parts = [part for part in name.split("/") if part != "."]
    try:
        sizes = [len(part.encode()) for part in parts]
    except UnicodeEncodeError:
        raise UnsafePath(f"the path {_quoted(name)} is not valid Unicode") from None
    if name.startswith("/"):
        raise UnsafePath(f"the path {_quoted(name)} is absolute")
    if not all(sizes):
        raise UnsafePath(f"the path {_quoted(name)} has an empty part")
    if max(sizes, default=0) > LONGEST_NAME or sum(sizes) + len(sizes) > LONGEST_PATH:
        raise UnsafePath(f"the path {_quoted(name)} is too long")
    for part in parts:
        # what some file systems and programs take for .. or a separator: full-width letters, the dots of a leader
        plain = unicodedata.normalize("NFKC", part)
        if plain in ("", ".", ".."):
            raise UnsafePath(f"the path {_quoted(name)} leads out of its folder")
        if "/" in plain or "\\" in plain or any(unicodedata.category(letter) == "Cc" for letter in part):
            raise UnsafePath(f"the path {_quoted(name)} contains a separator or control character")
    if not parts:
        raise UnsafePath(f"the path {_quoted(name)} names no file")
    return "/".join(parts)


def inside(root: Path, name: object) -> Path:
    """The path of `name` in the folder `root`. Refuses a name that leads out of it, also through symbolic links.

    The Hub's client stores a repository's files once, and links to them from the folder of each commit. Links between
    these folders stay allowed. To allow your own links, name the folders they lead to in FLEXOR_LINK_TARGETS.
    """
    path = root / safe_name(name)
    real = os.path.realpath(path)
    if not any(_is_within(real, folder) for folder in (_area(root), *_link_targets())):
        raise UnsafePath(
            f"{_quoted(name)} in {root} is a link that leads out of the folder, to {real}. If the link is yours, allow "
            f"it with {LINK_TARGETS}={Path(real).parent}"
        )
    return path


def refuse_links_out(root: Path) -> None:
    """Refuse a folder with a symbolic link that leads out of it: what is written there could go into any file."""
    for where, folders, names in os.walk(root):
        for path in (Path(where) / name for name in (*folders, *names)):
            if path.is_symlink():
                inside(root, path.relative_to(root).as_posix())


def files_to_push(root: Path, hidden: bool = False, top: Collection[str] | None = None) -> dict[str, Path]:
    """All files below a folder by name, sorted. Refuses symbolic links: they could publish any file of this machine.

    Links that the Hub's client made in its cache are followed, and those into FLEXOR_LINK_TARGETS. Names that begin
    with a dot are left out, unless `hidden`. `top`: only these files and folders of the folder itself.
    """
    files: dict[str, Path] = {}
    for where, folders, names in os.walk(root, followlinks=True):  # those that are not refused
        pushed = {name for name in (*folders, *names) if hidden or name[0] != "."}
        pushed &= {*top} if top is not None and Path(where) == root else pushed
        folders[:] = [name for name in folders if name in pushed]
        for path in (Path(where) / name for name in pushed):
            _refuse_link(root, path)
            if not path.is_dir():
                files[path.relative_to(root).as_posix()] = path
    return dict(sorted(files.items()))


def _refuse_link(root: Path, path: Path) -> None:
    """Refuse a link, and what is neither a file nor a folder, such as a pipe: reading it might never end."""
    if path.is_symlink():
        real, area = os.path.realpath(path), _area(root)
        cached = [area] if area != os.path.realpath(root) else []
        if not any(_is_within(real, place) for place in (*cached, *_link_targets())):
            raise UnsafePath(
                f"{path} is a symbolic link to {real}. Links are not followed here, because they may lead to any file "
                f"of this machine. Put a copy there instead, or, if the link is yours, allow it with "
                f"{LINK_TARGETS}={Path(real).parent}"
            )
    if not path.is_file() and not path.is_dir():
        raise UnsafePath(f"{path} is neither a file nor a folder, so it can't be pushed: remove it.")


def _is_within(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _area(root: Path) -> str:
    """The folder that links in `root` may lead to: itself, or the whole repository in the cache of the Hub's client."""
    real = Path(os.path.realpath(root))
    for folder in (real, *real.parents):
        if folder.parent.name == "snapshots" and (folder.parent.parent / "blobs").is_dir():
            return str(folder.parent.parent)
    return str(real)


def _link_targets() -> list[str]:
    named = os.environ.get(LINK_TARGETS, "").split(":")
    return [os.path.realpath(Path(folder).expanduser()) for folder in named if folder]


def _quoted(name: object) -> str:
    text = repr(name)
    return text if len(text) <= 200 else f"{text[:200]}..."
