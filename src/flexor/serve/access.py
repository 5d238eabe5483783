"""Who may connect: the API key, and web pages of other sites that may not."""

from __future__ import annotations

import base64
import binascii
import hmac
from urllib.parse import urlsplit

from websockets.datastructures import Headers

REALM = 'Basic realm="flexor", charset="UTF-8"'


def has_key(headers: Headers, key: str | None) -> bool:
    """Whether a request has the key. The time that this takes says nothing about the key.

    Robots send `Authorization: Api-Key KEY`, as openpi's client. Browsers ask for a user name and a password and send
    those (Basic): the password is the key, and the name is ignored.
    """
    if key is None:
        return True
    given = headers.get_all("Authorization")
    kind, _, value = (given[0] if len(given) == 1 else "").partition(" ")
    if kind.lower() == "basic":
        try:
            value = base64.b64decode(value, validate=True).decode().partition(":")[2]
        except (binascii.Error, UnicodeDecodeError):
            value = ""
    elif kind.lower() not in ("api-key", "bearer"):
        value = ""
    return hmac.compare_digest(value.encode(errors="replace"), key.encode())


def is_foreign_page(headers: Headers) -> bool:
    """Whether a web page of another site asks: a browser would send it the password that it knows for this one."""
    origins = headers.get_all("Origin")
    return any([urlsplit(origin).netloc] != headers.get_all("Host") for origin in origins)


def wants_socket(headers: Headers) -> bool:
    return any("websocket" in value.lower() for value in headers.get_all("Upgrade"))
