"""Access to the package `transformers`: it is imported only when it is used, and errors say what to do."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from flexor.core.errors import ConfigError
from flexor.core.paths import inside
from flexor.data.storage.source import is_repo_id


def import_transformers(needed_for: str) -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise ConfigError(
            f"{needed_for} requires the package transformers ({error}): pip install 'flexor[vla]'."
        ) from error


BUILTIN = "builtin/"  # names of models that come with Flexor: sizes and tokenizers, no weights


def located(name: str) -> str:
    """The folder of a model that comes with Flexor; any other name as it is."""
    if not name.startswith(BUILTIN):
        return name
    return str(inside(Path(__file__).parent / "models", name.removeprefix(BUILTIN)))


def fetch(kind: str, name: str, files: Sequence[str] = (), **options: Any) -> Any:
    """What a class of `transformers` loads from a local folder or a Hub repository.

    `files` are those it needs: if they can't be loaded, the error says where to put them. Code in that folder or
    repository is not run.
    """
    transformers = import_transformers(name)
    if kind.startswith("Auto"):
        options["trust_remote_code"] = False  # by default, `transformers` would ask
    try:
        with _quietly(transformers.utils.logging):
            return getattr(transformers, kind).from_pretrained(located(name), **options)
    except (OSError, ValueError) as error:
        said = (str(error).strip().splitlines() or [repr(error)])[0]
        raise ConfigError(
            f"Can't load a {kind} from {name!r}, which must be a local folder or a Hub repository: {said}"
            f"{_where_to_put(name, files) if files else ''}"
        ) from error


def _where_to_put(name: str, files: Sequence[str]) -> str:
    """What to do where the Hub can't be reached, or does not give a repository to everybody."""
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


@contextlib.contextmanager
def _quietly(logging: Any) -> Iterator[None]:
    """We often load only a part of a model, and each time `transformers` would list the unused weights."""
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
