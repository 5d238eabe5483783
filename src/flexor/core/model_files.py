"""Files of pretrained models, tokenizers and policies: in a local folder, or in a repository on the Hub."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from flexor.core.errors import ConfigError, FlexorError, first_line
from flexor.core.paths import inside


def is_repo_id(name: str) -> bool:
    """Whether this could be a repository on the Hub rather than a folder: user/name."""
    return re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name, re.ASCII) is not None


def neighbours(folder: Path) -> str:
    """The folders beside one that is missing, as a part of an error: "; runs has act, act-2"."""
    parent = folder.parent
    names = sorted(entry.name for entry in parent.iterdir() if entry.is_dir()) if parent.is_dir() else []
    near = get_close_matches(folder.name, names, n=3)
    return f"; {parent} has {', '.join(near or names[:3])}" if names and parent != Path() else ""


@dataclass(frozen=True)
class ModelFiles:
    """The files of a folder or of a Hub repository, from which they are downloaded into the Hub's cache."""

    name: str
    """A folder, USER/NAME or USER/NAME@REVISION."""
    label: str
    """How errors call it, such as policy.vlm_model_name=USER/NAME."""
    advice: str = ""
    """What else to do if it can't be had, as further sentences."""
    error: type[FlexorError] = ConfigError

    def folder(self, patterns: Sequence[str], ignored: Sequence[str] = ()) -> Path:
        """The local folder, or one with the repository's files of these names or patterns."""
        if Path(self.name).is_dir():
            return Path(self.name)
        repo_id, _, revision = self.name.partition("@")
        if not is_repo_id(repo_id):
            raise self.error(
                f"{self.label}: there is no such folder, and it is not the name of a Hub repository (user/name)."
                f"{self.advice}"
            )
        try:
            return download(repo_id, patterns, revision or None, ignored=ignored)
        except Exception as error:  # the client raises many types; all mean the same to the user
            if beside := neighbours(Path(self.name)):
                text = f"{self.label}: there is no such folder{beside}. Nor is there one on the Hub that can be read."
                raise self.error(f"{text}{self.advice}") from error
            raise self.error(
                f"{self.label}: there is no such folder, and it can't be downloaded from the Hub: {first_line(error)}"
                f"{self.advice}"
            ) from error

    def path(self, file: str) -> Path:
        """One file."""
        folder = self.folder([file])
        path = inside(folder, file)
        if not path.is_file():
            raise self.error(f"{self.label}: there is no {file} in {folder}.{self.advice}")
        return path


def download(
    repo_id: str,
    patterns: Sequence[str],
    revision: str | None = None,
    *,
    ignored: Sequence[str] = (),
    kind: str = "model",
    cache: Path | None = None,
    cached_only: bool = False,
) -> Path:
    """The cached folder of a repository, with its files of these patterns. Errors are those of the Hub's client."""
    from huggingface_hub import snapshot_download

    folder = snapshot_download(
        repo_id,
        repo_type=kind,
        revision=revision,
        cache_dir=cache,
        allow_patterns=list(patterns),
        ignore_patterns=list(ignored),
        local_files_only=cached_only,
    )
    return Path(folder)


def where_to_put(name: str, files: Sequence[str]) -> str:
    """A sentence on what to do where the Hub can't be reached, or does not give a repository to everybody."""
    from huggingface_hub import constants

    listed = ", ".join(files)
    if Path(name).is_dir() or not is_repo_id(name):
        return f" The folder must hold {listed}."
    cache = f"{constants.HF_HUB_CACHE}/models--{name.replace('/', '--')}"
    return (
        f" With network access, `hf download {name} {' '.join(files)}` puts its files into {cache}; a repository whose "
        "licence you must accept also requires `hf auth login`. Without, copy that folder from another machine, or put "
        f"{listed} into any folder and use its path instead of {name!r}."
    )
