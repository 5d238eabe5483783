"""Two hosts on this machine with a network link between them, for runs of several nodes.

A host has its own hostname, network and /etc/hosts; files, memory and cores are this machine's. The link can be cut,
slow or lossy. `host_keeper.py` says how. Processes are started on a host by the Python of `HostPython`.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from support import environment, host_keeper
from support.limits import wait_for
from support.warm_python import Change, WarmPython

KEEPER = "FLEXOR_TESTS_HOST"  # the variable that says on which host a process is to run
NAMES = ("node1", "node2")
ADDRESSES = {name: host_keeper.address(number) for number, name in enumerate(NAMES, 1)}
RESOLVER = {
    "resolv.conf": "nameserver 127.0.0.1\n",  # where nobody answers: see the keeper
    "nsswitch.conf": "hosts: files dns\n",  # whatever else this machine asks
}


def names_known(name: str) -> dict[str, str]:
    """Files in /etc of a host that knows the names of all."""
    return _etc(ADDRESSES)


def own_name_local(name: str) -> dict[str, str]:
    """The same, but its own name is a loopback address, as Debian and Ubuntu have it."""
    return _etc({**ADDRESSES, name: "127.0.1.1"})


def no_names_known(name: str) -> dict[str, str]:
    return _etc({})


def _etc(addresses: Mapping[str, str]) -> dict[str, str]:
    lines = [f"{address} {name}\n" for name, address in {"localhost": "127.0.0.1", **addresses}.items()]
    return {"hosts": "".join(lines), **RESOLVER}


class HostPython(WarmPython):
    """A Python that starts modules on the host that its environment names."""

    def __init__(self, prepare: Change = list):
        super().__init__(functools.partial(_on_host, prepare))


def _on_host(prepare: Change, arguments: list[str]) -> list[str]:
    host_keeper.enter(int(os.environ[KEEPER]))
    return prepare(arguments)


@dataclass
class Host:
    name: str
    keeper: int
    address: str

    def start(self, log: Path, command: list[str], **env: str | None) -> subprocess.Popen[bytes]:
        """A command with a `HostPython`; a variable that is None is not set."""
        variables = {**environment.for_cpu(), **env, KEEPER: str(self.keeper)}
        variables = {name: value for name, value in variables.items() if value is not None}
        with log.open("w") as file:
            return subprocess.Popen(command, env=variables, stdout=file, stderr=file, cwd=log.parent)

    def signal(self, number: int) -> None:
        """To all processes on this host."""
        before: set[int] = set()
        while pids := {*host_keeper.processes_on(self.keeper)} - before:  # they may start others meanwhile
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
            before |= pids


class Link:
    """The cable between two hosts."""

    def __init__(self, process: subprocess.Popen[str]):
        self.process = process

    def set(self, delay_s: float = 0.0, loss: float = 0.0) -> dict[str, int]:
        """From now on a frame comes so late, or is lost with this probability. How many were `carried` and `lost`."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps({"delay_s": delay_s, "loss": loss}) + "\n")
        self.process.stdin.flush()
        count: dict[str, int] = json.loads(self.process.stdout.readline())
        return count

    def cut(self) -> None:
        self.set(loss=1.0)


@contextmanager
def linked_hosts(
    folder: Path, etc: Callable[[str], Mapping[str, str]] = names_known
) -> Iterator[tuple[Host, Host, Link]]:
    """Two hosts and the link between them. At the end, everything that runs on them is killed."""
    if not sys.platform.startswith("linux"):
        pytest.skip("hosts are made of namespaces, which only Linux has")
    for host in NAMES:
        (folder / host).mkdir(parents=True)
        for file, text in etc(host).items():
            (folder / host / file).write_text(text)
    command = [sys.executable, "-I", host_keeper.__file__, str(folder), *NAMES]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            hosts = []
            for _ in NAMES:
                said = json.loads(process.stdout.readline())
                if "error" in said:
                    pytest.skip(f"this machine does not permit two hosts: {said['error']}")
                hosts.append(Host(said["host"], said["keeper"], said["address"]))
            yield hosts[0], hosts[1], Link(process)
        finally:
            assert process.stdin
            process.stdin.close()
            process.wait()
    for host in hosts:
        wait_for(lambda host=host: not Path(f"/proc/{host.keeper}").exists())
