"""What can go wrong between a robot and its policy."""

from __future__ import annotations


class ClientError(Exception):
    """Anything this package raises: the message says what is wrong, where, and how to fix it.

    It may quote a server. Control characters are shown as \\x1b and the like, so that they can't control a terminal.
    """

    def __str__(self) -> str:
        text = super().__str__()
        return "".join(
            c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text
        )


class ServerLostError(ClientError, ConnectionError):
    """The server can't be reached, does not answer in time, or closed the connection."""


class RefusedError(ClientError):
    """The server is there, but refuses the key, or answered an observation with an error."""


class LimitError(ClientError):
    """An action that must not reach the robot."""


class ExpiredError(ClientError):
    """The observation was too old when the server came to it, so it was not predicted."""
