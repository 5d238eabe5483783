"""Who may connect: the API key, the names of this server, and web pages of other sites that may not."""

from __future__ import annotations

import base64
import binascii
import hmac
import ipaddress
import socket
from collections.abc import Iterable
from urllib.parse import urlsplit

from websockets.datastructures import Headers

REALM = 'Basic realm="flexor", charset="UTF-8"'
LONGEST_HOST = 255
SAFE = {  # headers of every reply
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
}


def has_key(headers: Headers, key: str | None) -> bool:
    """Whether a request has the key. The time that this takes says nothing about the key.

    Robots send `Authorization: Api-Key KEY`, as openpi's client. Browsers ask for a user name and a password and send
    those (Basic): the password is the key, and the name is ignored.
    """
    if key is None:
        return True
    authorization = headers.get_all("Authorization")
    kind, _, value = (authorization[0] if len(authorization) == 1 else "").partition(" ")
    if kind.lower() == "basic":
        try:
            value = base64.b64decode(value, validate=True).decode().partition(":")[2]
        except (binascii.Error, UnicodeDecodeError):
            value = ""
    elif kind.lower() not in ("api-key", "bearer"):
        value = ""
    return hmac.compare_digest(value.encode(errors="replace"), key.encode())


def names_of_server(bound: str, allowed: Iterable[str]) -> frozenset[str]:
    """The names under which this server may be asked for: `localhost`, the machine's, `bound` and those `allowed`."""
    machine = socket.gethostname()
    names = ("localhost", machine, machine.partition(".")[0], f"{machine}.local", bound, *allowed)
    return frozenset(_plain(name) for name in names)


def foreign_name(headers: Headers, names: frozenset[str]) -> str | None:
    """The name under which a request asks for this server, if it is none of its own.

    A web page can make its own name point at this machine (DNS rebinding). Then the browser takes this server for the
    page's site, and the page reads whatever the server shows. Its requests have the page's name as their host. An
    address is no such name. Programs that name no host are no browsers.
    """
    hosts = headers.get_all("Host")
    if not hosts:
        return None
    if len(hosts) > 1:
        return ", ".join(hosts)[:LONGEST_HOST]
    name = _plain(_without_port(hosts[0]))
    return None if name in names or _is_address(name) else hosts[0][:LONGEST_HOST]


def is_foreign_page(headers: Headers) -> bool:
    """Whether a web page of another site asks: a browser would send it the password that it knows for this one."""
    return any([_site(origin)] != headers.get_all("Host") for origin in headers.get_all("Origin"))


def wants_socket(headers: Headers) -> bool:
    return any("websocket" in value.lower() for value in headers.get_all("Upgrade"))


def _site(origin: str) -> str | None:
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return None


def _without_port(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return name if colon and port.isdecimal() and (":" not in name or name.endswith("]")) else host


def _plain(name: str) -> str:
    """One spelling of a name: DNS ignores capitals, and a dot at the end."""
    return name.strip().lower().removesuffix(".").removeprefix("[").removesuffix("]")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
