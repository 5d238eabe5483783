"""The network interface through which ranks on several hosts exchange tensors on the CPU.

torch's gloo listens at the address of this host's name. If /etc/hosts says that this is 127.0.1.1, as on Debian and
Ubuntu, or if no DNS server answers, ranks on other hosts can't connect. So gloo is given the interface through which
this host and that of rank 0 reach each other.
"""

from __future__ import annotations

import ipaddress
import json
import os
import socket
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import psutil

if TYPE_CHECKING:
    from torch.distributed import Store

INTERFACE = "GLOO_SOCKET_IFNAME"  # which torch reads
PREFIX = "flexor/route/"


class Route(NamedTuple):
    """From this host to that of rank 0."""

    local: str
    remote: str


def choose_interface(rank: int, world_size: int, store: Store) -> None:
    """Choose the interface for gloo, unless the user has chosen one. All ranks must call this."""
    route = find_route(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    store.set(f"{PREFIX}{rank}", json.dumps(route))
    if INTERFACE in os.environ:
        return
    addresses = [] if route is None else [route.local]
    if not any(map(_reachable, addresses)):
        # the host of rank 0 may know itself by a loopback address only: the others know another one
        texts = store.multi_get([f"{PREFIX}{other}" for other in range(world_size)])
        addresses += [Route(*parsed).remote for text in texts if (parsed := json.loads(text))]
    if interface := find_interface(filter(_reachable, addresses)):
        os.environ[INTERFACE] = interface


def find_route(host: str, port: int) -> Route | None:
    """Which addresses a connection to `host` would have at its ends; None if there is no way. Sends nothing."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return Route(probe.getsockname()[0], probe.getpeername()[0])
    except OSError:
        return None


def find_interface(addresses: Iterable[str]) -> str | None:
    """The interface of this host that has one of these addresses."""
    owners = {
        address.address: name for name, all_of_it in psutil.net_if_addrs().items() for address in all_of_it
    }
    return next((owners[address] for address in addresses if address in owners), None)


def describe_name(host: str) -> str:
    """A sentence about a host whose name can't be resolved; empty if it can."""
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        return f"The name {host} can't be resolved here: {error.strerror}. "
    return ""


def _reachable(address: str) -> bool:
    """From other hosts."""
    return not ipaddress.ip_address(address.partition("%")[0]).is_loopback
