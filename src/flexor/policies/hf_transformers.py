"""Access to the package `transformers`: it is imported only when it is used, and errors say what to do."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from flexor.core.errors import ConfigError, first_line
from flexor.core.model_files import where_to_put
from flexor.core.paths import inside


def import_transformers(needed_for: str) -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise ConfigError(
            f"{needed_for} requires the package transformers ({error}): pip install 'flexor[vla]'."
        ) from error


BUILTIN = "builtin/"  # names of models that come with Flexor: sizes and tokenizers, no weights


def resolve_builtin(name: str) -> str:
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
            return getattr(transformers, kind).from_pretrained(resolve_builtin(name), **options)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"Can't load a {kind} from {name!r}, which must be a local folder or a Hub repository: {first_line(error)}"
            f"{where_to_put(name, files) if files else ''}"
        ) from error


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
