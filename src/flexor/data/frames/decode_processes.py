"""Processes that decode into shared memory, for a loader that has more cores than one interpreter can use.

One thread sends requests and receives answers (see `video/decode_request.py`). A process has two small requests at a
time, so that it never waits for the next one; a large one goes to the first process that is free. A process that dies
fails what is requested from then on.
"""

from __future__ import annotations

import heapq
import os
import pickle
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count

from flexor.core.child_python import module_command, module_environment
from flexor.core.errors import FlexorError, SourceError
from flexor.data.frames.shared_memory import SharedMemory
from flexor.data.video.decode import count_read
from flexor.data.video.decode_request import DecodeAnswer, DecodeRequest
from flexor.data.video.decode_worker import IGNORED_SIGNALS, LENGTH, message

__all__ = ["Answered", "DecodeProcesses", "processes_available"]

NEXT_BYTES = (
    8 << 20
)  # of frames; a process that has fewer to decode gets a further request, so that it never waits
CHUNK = 1 << 20  # bytes received at once
WORKER = "flexor.data.video.decode_worker"
EXIT_S = 5.0  # to see how a process ended that closed its connection

Answered = Callable[[DecodeAnswer | BaseException], None]
"""What is called with the answer to a request, or with the error that prevents one."""


def processes_available() -> bool:
    """Whether this system can share memory with processes in the way that is needed here."""
    return hasattr(os, "memfd_create") and bool(sys.executable)


@dataclass(eq=False)
class _Process:
    """One process and its connection."""

    number: int
    process: subprocess.Popen[bytes]
    connection: socket.socket
    pending: deque[tuple[int, Answered]] = field(
        default_factory=deque
    )  # bytes of frames; first come, first served
    pending_bytes: int = 0
    unsent: bytearray = field(default_factory=bytearray)
    received: bytearray = field(default_factory=bytearray)

    def messages(self) -> list[bytes]:
        """The complete messages among what was received."""
        complete, begin = [], 0
        while len(self.received) - begin >= LENGTH.size:
            end = begin + LENGTH.size + LENGTH.unpack_from(self.received, begin)[0]
            if end > len(self.received):
                break
            complete.append(bytes(self.received[begin + LENGTH.size : end]))
            begin = end
        del self.received[:begin]
        return complete


class DecodeProcesses:
    """Runs requests in processes, lowest priority number first. The processes start with the first request."""

    def __init__(self, processes: int, indexes: SharedMemory):
        """`indexes`: memory with the indexes of video files."""
        self.count = processes
        self.memory, self.indexes = SharedMemory(), indexes
        self._waiting: list[tuple[tuple[int, ...], int, int, bytes, Answered]] = []
        self._tie = count()
        self._lock = threading.Lock()
        self._processes: list[_Process] = []
        self._thread: threading.Thread | None = None
        self._closing = False
        self._wake, self._wakened = socket.socketpair()
        self._wake.setblocking(False)

    def submit(self, priority: tuple[int, ...], request: DecodeRequest, answered: Answered) -> None:
        """`answered` is called by the thread of this object, soon."""
        data = message(request)
        with self._lock:
            heapq.heappush(self._waiting, (priority, next(self._tie), request.nbytes, data, answered))
            if self._thread is None and not self._closing:
                self._processes = [self._start(number) for number in range(self.count)]
                self._thread = threading.Thread(target=self._run, name="loader-decode", daemon=True)
                self._thread.start()
        self._wake_up()

    @property
    def process_ids(self) -> list[int]:
        return [process.process.pid for process in self._processes]

    def close(self) -> None:
        """End all processes; requests that are not answered yet are dropped."""
        with self._lock:
            self._closing = True
        self._wake_up()
        if self._thread is not None:
            self._thread.join()
        for process in self._processes:
            process.connection.close()
            process.process.kill()
        for process in self._processes:
            process.process.wait()
        self._wake.close()
        self._wakened.close()
        self.memory.close()

    def _start(self, number: int) -> _Process:
        ours, theirs = socket.socketpair()
        # The process starts with these signals blocked: Ctrl-C must not end it before it can ignore them.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED_SIGNALS)
        try:
            inherited = theirs.fileno(), self.memory.descriptor, self.indexes.descriptor
            process = subprocess.Popen(
                module_command(WORKER, *inherited, os.getpid()),
                stdin=subprocess.DEVNULL,
                pass_fds=inherited,
                env=module_environment(),
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            theirs.close()
        ours.setblocking(False)
        return _Process(number, process, ours)

    def _wake_up(self) -> None:
        with suppress(BlockingIOError, OSError):  # it is awake already, or has ended
            self._wake.send(b"\0")

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._wakened, selectors.EVENT_READ)
            for process in self._processes:
                selector.register(process.connection, selectors.EVENT_READ, process)
            while not self._closing:
                try:
                    self._hand_out()
                    for process in self._processes:
                        self._send(process, selector)
                    for key, events in selector.select():
                        if key.data is None:
                            self._wakened.recv(CHUNK)
                        elif events & selectors.EVENT_READ:
                            self._receive(key.data)
                except Exception as error:
                    self._fail(error)
                    return

    def _hand_out(self) -> None:
        """Give the waiting requests to the processes that have the fewest."""
        with self._lock:
            while self._waiting:
                process = min(self._processes, key=lambda process: process.pending_bytes)
                if process.pending_bytes >= NEXT_BYTES:
                    return
                _, _, nbytes, data, answered = heapq.heappop(self._waiting)
                process.pending.append((nbytes, answered))
                process.pending_bytes += nbytes
                process.unsent += data

    def _send(self, process: _Process, selector: selectors.BaseSelector) -> None:
        try:
            while process.unsent:
                del process.unsent[: process.connection.send(process.unsent)]
        except BlockingIOError:
            pass
        except OSError as error:
            raise self._death(process) from error
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if process.unsent else 0)
        if selector.get_key(process.connection).events != events:
            selector.modify(process.connection, events, process)

    def _receive(self, process: _Process) -> None:
        try:
            data = process.connection.recv(CHUNK)
        except BlockingIOError:
            return
        except OSError as error:
            raise self._death(process) from error
        if not data:
            raise self._death(process)
        process.received += data
        for content in process.messages():
            answer = pickle.loads(content)  # noqa: S301  (from a process of ours)
            count_read(answer.bytes_read)
            nbytes, answered = process.pending.popleft()
            process.pending_bytes -= nbytes
            if answer.failure is not None:
                raise FlexorError(f"decode process {process.number} failed:\n{answer.failure}")
            answered(SourceError(answer.unreachable) if answer.unreachable is not None else answer)

    def _death(self, process: _Process) -> FlexorError:
        with suppress(subprocess.TimeoutExpired):
            process.process.wait(EXIT_S)
        code = process.process.returncode
        how = (
            f"was killed by {signal.Signals(-code).name}" if code and code < 0 else f"ended with code {code}"
        )
        return FlexorError(
            f"decode process {process.number} of {self.count} (process {process.process.pid}) {how}. If the machine "
            f"is short of memory, use a smaller --num_workers, or decode in threads with "
            f"--dataset.decode_in=threads."
        )

    def _fail(self, error: BaseException) -> None:
        """All requests fail, also those that come later."""
        while not self._closing:
            with self._lock:
                answered = [entry[-1] for entry in self._waiting]
                self._waiting.clear()
            for process in self._processes:
                answered += [entry[-1] for entry in process.pending]
                process.pending.clear()
            for function in answered:
                function(error)
            self._wakened.recv(CHUNK)
