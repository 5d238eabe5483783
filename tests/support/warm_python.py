"""A `python` for tests that takes no seconds to import torch: for launchers, which start the program by themselves.

    PYTHON -m MODULE ARGUMENTS      PYTHON is the script that `WarmPython` makes

The script asks a process that has everything imported to fork, and stays for as long as the forked one lives: it hands
on signals, ends with its exit code, and takes it along when it is killed. To whoever starts and stops it, it is a
Python like any other. A server's process for connections really is one: it gets open files, and needs no torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import shlex
import shutil
import signal
import socket
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from flexor.serve import connection_process
from support import warm_python_client
from support.limits import wait_for
from support.runs import SERVER

Change = Callable[[list[str]], list[str]]


class WarmPython:
    """`python` is the script. `change`, where there is one, is applied to the arguments of every call."""

    def __init__(self, change: Change | None = None):
        self.folder = Path(tempfile.mkdtemp(prefix="flexor"))  # a socket's path may have a hundred characters
        address, self.python = self.folder / "socket", self.folder / "python"
        command = [sys.executable, "-I", warm_python_client.__file__, str(address), str(self.python)]
        real = f'[ "$2" = {connection_process.__name__} ] && exec {shlex.quote(sys.executable)} "$@"'
        self.python.write_text(f'#!/bin/sh\n{real}\nexec {shlex.join(command)} "$@"\n')
        self.python.chmod(0o755)
        self._process = SERVER.Process(target=_serve, args=(address, change), daemon=True)
        self._process.start()
        wait_for(lambda: address.exists() or not self._process.is_alive())
        assert self._process.is_alive()

    def close(self) -> None:
        self._process.kill()
        shutil.rmtree(self.folder)


def _serve(address: Path, change: Change | None) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"{address}.new")
        server.listen(32)
        Path(f"{address}.new").rename(address)  # whoever sees it may call
        while True:
            caller, _ = server.accept()
            request, streams, _, _ = socket.recv_fds(caller, 1 << 20, 3)
            if os.fork() == 0:
                server.close()
                _answer(json.loads(request), streams, caller, change)
            caller.close()
            for stream in streams:
                os.close(stream)
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG) != (0, 0):
                    pass


def _answer(
    request: dict[str, Any], streams: list[int], caller: socket.socket, change: Change | None
) -> None:
    """Fork what the caller wants, and tell it how that ended."""
    pid = os.fork()
    if pid == 0:
        caller.close()
        _be(request, streams, change)
    for stream in streams:
        os.close(stream)
    caller.sendall(f"{pid}\n".encode())
    threading.Thread(target=_end_with, args=(caller, pid), daemon=True).start()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(OSError):
        caller.sendall(f"{code}\n".encode())
    os._exit(0)


def _end_with(caller: socket.socket, pid: int) -> None:
    with contextlib.suppress(OSError):
        caller.recv(1)  # nothing comes: it returns when the caller is gone
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _be(request: dict[str, Any], streams: list[int], change: Change | None) -> None:
    """In the folder and the environment of the caller, with its streams."""
    code = 1
    try:
        os.setsid()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w", 1), os.fdopen(2, "w", 1)
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["folder"])
        sys.executable = request["python"]
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
        option, module, *arguments = [word for word in request["arguments"] if word != "-u"]
        assert option == "-m", f"{request['arguments']}: only -m MODULE can be started like this"
        sys.argv = [module, *(change(arguments) if change else arguments)]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else bool(leaving.code)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
