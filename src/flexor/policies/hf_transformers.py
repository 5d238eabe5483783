"""What comes from the package `transformers`: imported only when it is used, and errors that say what to do."""

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
            f"{needed_for} needs the package transformers ({error}): pip install 'flexor[vla]'."
        ) from error


def fetch(kind: str, name: str, **options: Any) -> Any:
    """What a class of `transformers` loads from a folder here or a repository of the Hub."""
    transformers = import_transformers(name)
    try:
        with _quietly(transformers.utils.logging):
            return getattr(transformers, kind).from_pretrained(name, **options)
    except (OSError, ValueError) as error:
        said = (str(error).strip().splitlines() or [repr(error)])[0]
        raise ConfigError(
            f"{name!r} must be a folder here or a repository of the Hub that a {kind} can be loaded from: {said}"
        ) from error


@contextlib.contextmanager
def _quietly(logging: Any) -> Iterator[None]:
    """We often want a part of what is there, and each time it would be said what was left."""
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
