"""Access to the package `transformers`: it is imported only when it is used, and errors say what to do."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

from flexor.core.errors import ConfigError


def import_transformers(needed_for: str) -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise ConfigError(
            f"{needed_for} requires the package transformers ({error}): pip install 'flexor[vla]'."
        ) from error


def fetch(kind: str, name: str, **options: Any) -> Any:
    """What a class of `transformers` loads from a local folder or a Hub repository."""
    transformers = import_transformers(name)
    try:
        with _quietly(transformers.utils.logging):
            return getattr(transformers, kind).from_pretrained(name, **options)
    except (OSError, ValueError) as error:
        said = (str(error).strip().splitlines() or [repr(error)])[0]
        raise ConfigError(
            f"Can't load a {kind} from {name!r}, which must be a local folder or a Hub repository: {said}"
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
