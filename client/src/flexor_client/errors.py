"""What can go wrong between a robot and its policy."""

from __future__ import annotations

import unicodedata

LONGEST_MESSAGE = 2000  # characters


def printable(text: str, most: int = LONGEST_MESSAGE) -> str:
    """The text in one line, with control characters as \\x1b and the like: they could rewrite a terminal or a log."""
    text = text if len(text) <= most else f"{text[:most]}..."
    if text.isprintable():
        return text
    return "".join(
        letter.encode("unicode_escape").decode("ascii")
        if unicodedata.category(letter)[0] == "C" or letter in "\u2028\u2029"
        else letter
        for letter in text
    )


class WireError(ValueError):
    """A frame or a file that is not what it should be."""


class ClientError(Exception):
    """Anything this package raises: the message says what is wrong, where, and how to fix it.

    Messages may quote a server, so they are always printable.
    """

    def __init__(self, message: str = ""):
        super().__init__(printable(str(message)))


class ServerLostError(ClientError, ConnectionError):
    """The server can't be reached, does not answer in time, or closed the connection."""


class RefusedError(ClientError):
    """The server is there, but refuses the key, answered with an error, or with something that can't be used."""


class LimitError(ClientError):
    """An action that must not reach the robot."""


class ExpiredError(ClientError):
    """The observation was too old when the server came to it, so it was not predicted."""
