"""Where a server is, how to get in, and what is said if that fails."""

from __future__ import annotations

import logging
import socket
import ssl
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

from websockets.exceptions import InvalidStatus, InvalidURI
from websockets.sync.client import ClientConnection, connect

from flexor_client.errors import ClientError, RefusedError, ServerLostError


@dataclass(frozen=True)
class Address:
    """`url`: ws://host:port, or wss:// with TLS. `certificate`: a file with the certificates to trust instead of the
    system's."""

    url: str
    api_key: str | None = field(default=None, repr=False)
    certificate: str | Path | None = None

    def __post_init__(self) -> None:
        if not self.url.startswith(("ws://", "wss://")):
            raise ClientError(
                f"{self.url!r} is not the address of a policy server: give ws://HOST:PORT or wss://HOST:PORT."
            )
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise ClientError("The API key must be ASCII text without line breaks.")
        self.tls()

    def tls(self) -> ssl.SSLContext | None:
        if not self.url.startswith("wss://"):
            if self.certificate is not None:
                raise ClientError(
                    f"{self.url} is without TLS, so its certificate can't be checked: use wss://."
                )
            return None
        try:
            return ssl.create_default_context(
                cafile=None if self.certificate is None else str(self.certificate)
            )
        except OSError as error:
            raise ClientError(f"The certificate {self.certificate} can't be read: {error}") from error

    def connect(
        self, stack: ExitStack, timeout_s: float, closing_s: float, reply_bytes: int
    ) -> ClientConnection:
        """A connection that `stack` closes. Its frames have at most so many bytes."""
        try:
            return stack.enter_context(
                connect(
                    self.url,
                    additional_headers={"Authorization": f"Api-Key {self.api_key}"} if self.api_key else None,
                    ssl=self.tls(),
                    compression=None,
                    max_size=reply_bytes,
                    open_timeout=timeout_s,
                    close_timeout=closing_s,
                    logger=_silent_logger(),
                )
            )
        except InvalidStatus as error:
            raise self._refusal(error) from error
        except InvalidURI as error:
            raise ClientError(f"{self.url} is not an address: {error}") from error
        except ssl.SSLCertVerificationError as error:
            raise RefusedError(
                f"{self.url}: the server's certificate is not trusted ({error.verify_message}). If it is the server's "
                "own, give its file with certificate=..."
            ) from error
        except Exception as error:  # of the network, or of a handshake that is none: there are many types
            raise ServerLostError(f"{self.url} can't be reached: {error or type(error).__name__}.") from error

    def _refusal(self, error: InvalidStatus) -> ClientError:
        status = error.response.status_code
        reason = (error.response.body or b"")[:200].decode(errors="replace").strip()
        message = f"{self.url} refused the connection with status {status}"
        if status == 401:
            return RefusedError(f"{message}: the key is missing or wrong.")
        if status in (403, 421):  # it will not change its mind
            return RefusedError(f"{message}: {reason or 'the key is missing or wrong.'}")
        return ServerLostError(f"{message}: {reason or 'is it a policy server?'}")


def abort(connection: ClientConnection) -> None:
    """End a connection at once, and whatever thread is sending or receiving."""
    with suppress(OSError):
        connection.socket.shutdown(socket.SHUT_RDWR)


def _silent_logger() -> logging.Logger:
    """The library's log lines: it would print a traceback for what a server does; here it is a ClientError."""
    logger = logging.getLogger("flexor_client.websockets")
    logger.setLevel(logging.CRITICAL)
    return logger
