"""What can go wrong between a robot and its policy."""

from __future__ import annotations


class ClientError(Exception):
    """Anything this package raises: the message says what is wrong, where, and how to fix it."""


class ServerLostError(ClientError, ConnectionError):
    """The server can't be reached, does not answer in time, or closed the connection."""


class RefusedError(ClientError):
    """The server is there, but refuses the key, or answered an observation with an error."""


class LimitError(ClientError):
    """An action that must not reach the robot."""


class ExpiredError(ClientError):
    """The observation was too old when the server came to it, so it was not predicted."""
