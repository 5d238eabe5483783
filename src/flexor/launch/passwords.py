"""Commands that are stored for a job: no password may be in them."""

from __future__ import annotations

from collections.abc import Iterable

from flexor.core.errors import ConfigError
from flexor.core.secrets import redacted


def refuse_passwords(texts: Iterable[str], where: str) -> None:
    """Refuse settings with a password that would be stored `where` others can read it."""
    for text in texts:
        if redacted(text) != text:
            raise ConfigError(
                f"{redacted(text)} has a password or token, and would be stored in {where}, where others can read it. "
                "Take it out: docs/data.md says how to pass it otherwise."
            )
