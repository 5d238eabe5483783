"""A web server for tests: files with byte ranges, and whatever goes wrong with them."""

import hashlib
import threading
import time
from base64 import b64encode
from collections import deque
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from support.limits import LIMIT_S


class FileServer:
    """Serves a folder on this machine; each fault in `faults` befalls one request for a part of a file.

    A fault is a status, a status with headers, or one of: "drop" (the connection, in mid-body), "short"
    (half the bytes, and says so), "stall" (nothing comes).
    """

    def __init__(self, root: Path, handler: "type[Handler] | None" = None):
        self.root = root
        self.faults: deque[Any] = deque()
        self.requests: list[tuple[str, int, int]] = []  # name, start, end of every part asked for
        self.whole_files: list[str] = []  # name of every file sent as a whole
        self.knows_ranges = True
        self.lists = True
        self.down = 0  # requests of any kind to answer with 503
        self.latency = 0.0
        self.go = threading.Event()  # parts of files are sent while it is set
        self.go.set()
        self.over = threading.Event()
        self.login: str | None = None  # user:password that every request must have
        self.per_second = float("inf")
        self._times: deque[float] = deque()
        self.lock = threading.Lock()
        self._http = _QuietServer(("127.0.0.1", 0), handler or Handler)
        self._http.daemon_threads = True
        self._http.owner = self  # type: ignore[attr-defined]
        self.address = f"http://127.0.0.1:{self._http.server_port}"

    def __enter__(self) -> "FileServer":
        threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.go.set()
        self._http.shutdown()
        self._http.server_close()

    def next_fault(self) -> Any:
        with self.lock:
            now = time.monotonic()
            while self._times and self._times[0] < now - 1:
                self._times.popleft()
            if len(self._times) >= self.per_second:
                return 429, {"Retry-After": "1"}
            self._times.append(now)
            return self.faults.popleft() if self.faults else None


class _QuietServer(ThreadingHTTPServer):
    def handle_error(self, *arguments: object) -> None:
        """Clients that leave are part of the tests."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def owner(self) -> FileServer:
        return self.server.owner  # type: ignore[attr-defined]

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        if self.owner.down:
            self.owner.down -= 1
            self.answer(503, b"not now")
            return
        login = self.owner.login
        if login and self.headers.get("Authorization") != f"Basic {b64encode(login.encode()).decode()}":
            self.answer(401, b"who are you?")
            return
        path = self.owner.root / self.path.strip("/")
        if path.is_dir() and self.owner.lists:
            links = "".join(
                f'<a href="{p.name}{"/" * p.is_dir()}">{p.name}</a>\n' for p in sorted(path.iterdir())
            )
            self.answer(200, links.encode(), {"Content-Type": "text/html"})
        elif path.is_file():
            self.answer_file(path.read_bytes())
        else:
            self.answer(404, b"nothing here")

    def answer_file(self, data: bytes, headers: "dict[str, str] | None" = None) -> None:
        headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()[:16]}"', **(headers or {})}
        byte_range = self.headers.get("Range") if self.owner.knows_ranges else None
        name = self.path.rsplit("/", 1)[1]
        if self.command == "HEAD" or byte_range is None:
            self.owner.whole_files += [name] * (self.command == "GET")
            self.answer(200, data, headers)
            return
        first, _, last = byte_range.removeprefix("bytes=").partition("-")
        start, end = int(first), min(int(last) + 1, len(data))
        with self.owner.lock:
            self.owner.requests.append((name, start, end))
        time.sleep(self.owner.latency)
        self.owner.go.wait(LIMIT_S)
        if start >= len(data):
            self.answer(416, b"", {"Content-Range": f"bytes */{len(data)}"})
            return
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(data)}"
        self.answer_part(data[start:end], headers)

    def answer_part(self, body: bytes, headers: "dict[str, str]") -> None:
        fault = self.owner.next_fault()
        if isinstance(fault, int):
            self.answer(fault, b"not now")
        elif isinstance(fault, tuple):
            self.answer(fault[0], b"not now", fault[1])
        elif fault == "short":
            self.answer(206, body[: len(body) // 2], headers)
        elif fault == "drop":
            self.answer(206, body[: len(body) // 2], headers | {"Content-Length": str(len(body))})
            self.close_connection = True
        else:
            if fault == "stall":
                self.owner.over.wait(LIMIT_S)
            self.answer(206, body, headers)

    def answer(self, status: int, body: bytes, headers: "dict[str, str] | None" = None) -> None:
        try:
            self.send_response(status)
            for name, value in ({"Content-Length": str(len(body))} | (headers or {})).items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)
        except OSError:
            self.close_connection = True  # nobody listens any more

    def log_message(self, *arguments: object) -> None:
        pass
