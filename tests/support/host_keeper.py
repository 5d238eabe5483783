"""The process behind `support.hosts`: it makes hosts out of namespaces, is the cable between them, and cleans up.

    python -I host_keeper.py FOLDER NAME...

FOLDER/NAME has the files that take the place of those in /etc of that host. A host is a process, its keeper, in a
network, hostname and mount namespace; whoever enters these is on that host. The cable hands Ethernet frames from one
host to the other, as late and as rarely as it is told on standard input: {"delay_s": 0.1, "loss": 0.05}, in one line.
It answers with the number of frames so far that came, and of those that were lost. So a link can be slow, lossy or cut
without modules of the kernel (netem), and a host does not notice that its carrier is gone, as with a switch between
them. When standard input ends, however that comes, all processes on the hosts are killed, and with the last one its
namespaces are gone.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import itertools
import json
import os
import random
import selectors
import signal
import socket
import struct
import sys
import time
from contextlib import suppress
from pathlib import Path

NAMESPACES = ("user", "net", "uts", "mnt")  # in the order in which they are entered
CLONE = {"user": 0x10000000, "net": 0x40000000, "uts": 0x04000000, "mnt": 0x00020000}  # linux/sched.h
MS_BIND, MS_REC, MS_PRIVATE = 1 << 12, 1 << 14, 1 << 18  # linux/mount.h
TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x2, 0x1000  # linux/if_tun.h
SIOCSIFFLAGS, SIOCSIFADDR, SIOCSIFNETMASK = 0x8914, 0x8916, 0x891C  # linux/sockios.h
UP = 0x1 | 0x40  # IFF_UP, IFF_RUNNING
PR_SET_DUMPABLE = 4  # linux/prctl.h: /proc of a process that got a user namespace can be read
FRAME = 1 << 16

libc = ctypes.CDLL(None, use_errno=True)


def address(number: int) -> str:
    return f"10.97.0.{number}"


def check(result: int, doing: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{doing}: {os.strerror(number)}")


def enter(keeper: int) -> None:
    """Move this process, which must have only one thread, to a host."""
    names = [name for name in NAMESPACES if not _shares(keeper, name)]
    files = [os.open(f"/proc/{keeper}/ns/{name}", os.O_RDONLY) for name in names]
    folder = Path.cwd()
    for name, file in zip(names, files):
        check(libc.setns(file, CLONE[name]), f"entering the {name} namespace of a host")
        os.close(file)
    os.chdir(folder)  # a new mount namespace starts in its root
    libc.prctl(PR_SET_DUMPABLE, 1)


def _shares(pid: int, namespace: str) -> bool:
    return Path(f"/proc/{pid}/ns/{namespace}").readlink() == Path(f"/proc/self/ns/{namespace}").readlink()


def processes_on(keeper: int) -> list[int]:
    """The processes on a host, but for its keeper."""
    try:
        host = Path(f"/proc/{keeper}/ns/net").readlink()
    except OSError:
        return []
    pids = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit() and int(entry.name) != keeper and (entry / "ns/net").readlink() == host:
                pids.append(int(entry.name))
    return pids


def main(folder: str, *names: str) -> None:
    cables, taps = [], []
    for number, name in enumerate(names, 1):
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            for other in (ours, *cables):
                other.close()
            for tap in taps:
                os.close(tap)
            _keep(theirs, Path(folder), number, name)
        theirs.close()
        message, files, _, _ = socket.recv_fds(ours, 1000, 1)
        if not files:
            print(json.dumps({"error": message.decode() or f"the host {name} did not start"}), flush=True)
            return
        cables.append(ours)
        taps += files
        print(json.dumps({"host": name, "keeper": pid, "address": address(number)}), flush=True)
    _carry(taps)


def _keep(cable: socket.socket, folder: Path, number: int, name: str) -> None:
    """Be a host until the cable is gone."""
    try:
        os.setsid()
        os.close(0)  # the cable's standard input must end with the test
        for kind in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(kind, signal.SIG_IGN)
        try:
            tap = _set_up(folder, number, name)
        except OSError as error:
            cable.send(f"{error}".encode())
            return
        socket.send_fds(cable, [b"."], [tap])
        os.close(tap)
        # a DNS server that never answers, for hosts that are told to ask it
        silent = socket.socket(type=socket.SOCK_DGRAM)
        silent.bind(("127.0.0.1", 53))
        cable.recv(1)
        while pids := processes_on(os.getpid()):
            for pid in pids:
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
    finally:
        os._exit(0)


def _set_up(folder: Path, number: int, name: str) -> int:
    """This process moves to a new host; the other end of its network interface."""
    user, group = os.geteuid(), os.getegid()
    kinds = NAMESPACES if user else NAMESPACES[1:]
    check(libc.unshare(sum(CLONE[kind] for kind in kinds)), "new namespaces are not permitted")
    libc.prctl(PR_SET_DUMPABLE, 1)
    if user:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    check(libc.sethostname(name.encode(), len(name)), "setting a host's name")
    check(libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None), "keeping mounts to a host")
    for file in (folder / name).iterdir():
        target = Path("/etc") / file.name
        if target.exists():
            target = target.resolve()
            check(libc.mount(bytes(file), bytes(target), None, MS_BIND, None), f"mounting over {target}")
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH22x", b"eth0", IFF_TAP | IFF_NO_PI))
    with socket.socket(type=socket.SOCK_DGRAM) as control:
        for request, where in ((SIOCSIFADDR, address(number)), (SIOCSIFNETMASK, "255.255.255.0")):
            packed = socket.inet_aton(where)
            fcntl.ioctl(control, request, struct.pack("16sHH4s16x", b"eth0", socket.AF_INET, 0, packed))
        for interface in (b"lo", b"eth0"):
            fcntl.ioctl(control, SIOCSIFFLAGS, struct.pack("16sH22x", interface, UP))
    return tap


def _carry(taps: list[int]) -> None:
    """Be the cable between two hosts."""
    delay_s, loss, count = 0.0, 0.0, {"carried": 0, "lost": 0}
    chance, order = random.Random(0), itertools.count()
    on_the_way: list[tuple[float, int, int, bytes]] = []
    selector = selectors.DefaultSelector()
    selector.register(0, selectors.EVENT_READ)
    for tap in taps:
        selector.register(tap, selectors.EVENT_READ)
    commands = b""
    while True:
        wait = max(on_the_way[0][0] - time.monotonic(), 0) if on_the_way else None
        for key, _ in selector.select(wait):
            if key.fd == 0:
                received = os.read(0, 1 << 12)
                if not received:
                    return
                *lines, commands = (commands + received).split(b"\n")
                for line in lines:
                    now = json.loads(line)
                    delay_s, loss = now["delay_s"], now["loss"]
                    print(json.dumps(count), flush=True)
                continue
            with suppress(BlockingIOError):
                frame = os.read(key.fd, FRAME)
                count["carried" if (arrives := chance.random() >= loss) else "lost"] += 1
                if arrives:
                    other = taps[1 - taps.index(key.fd)]
                    heapq.heappush(on_the_way, (time.monotonic() + delay_s, next(order), other, frame))
        while on_the_way and on_the_way[0][0] <= time.monotonic():
            _, _, tap, frame = heapq.heappop(on_the_way)
            with suppress(OSError):
                os.write(tap, frame)


if __name__ == "__main__":
    main(*sys.argv[1:])
