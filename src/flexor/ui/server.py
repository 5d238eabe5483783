"""The application's web server: on this machine only, with a token, from the standard library.

It only reads, but for two things: a run's notes, and lists of episodes to leave out.
"""

from __future__ import annotations

import errno
import json
import secrets
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from websockets.datastructures import Headers

from flexor.core.errors import ConfigError, FlexorError
from flexor.core.log import log
from flexor.core.paths import UnsafePath
from flexor.pages.page import as_json
from flexor.serve.access import SAFE
from flexor.ui.access import Access
from flexor.ui.replies import (
    FileReply,
    LinesReply,
    NotFound,
    Reply,
    Request,
    byte_range,
    json_reply,
)

HOST = "127.0.0.1"
PORT = 8765
LARGEST_REQUEST = 4 << 20
IDLE_S = 60.0  # after which a connection without requests is closed
Route = Callable[[Request], Reply | FileReply | LinesReply]


class UIServer(ThreadingHTTPServer):
    """`reads` and `writes`: the routes by their names, which are the first part of the path."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, port: int, reads: Mapping[str, Route], writes: Mapping[str, Route]):
        self.reads, self.writes = reads, writes
        self.access = Access(secrets.token_urlsafe(24))
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                why = "is in use" if error.errno == errno.EADDRINUSE else "needs more rights"
                raise ConfigError(
                    f"--port={port} {why}: choose another one, or 0 for any free one."
                ) from error
            raise

    @property
    def link(self) -> str:
        return f"http://{HOST}:{self.server_port}/?token={self.access.token}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that goes away is no error; anything else was answered already."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: UIServer
    timeout = IDLE_S

    def do_GET(self) -> None:
        self._answer(self.server.reads, writes=False)

    def do_POST(self) -> None:
        self._answer(self.server.writes, writes=True)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged: they have the token in them."""

    def version_string(self) -> str:
        return "flexor"

    def _answer(self, routes: Mapping[str, Route], writes: bool) -> None:
        address = urlsplit(self.path)
        query = dict(parse_qsl(address.query, keep_blank_values=True))
        headers = Headers(self.headers.items())
        refusal = self.server.access.refusal(headers, query, writes)
        content = self._content() if writes else {}
        if refusal is not None:
            status, why = refusal
            self._send(Reply(why.encode(), "text/plain; charset=utf-8", status))
            return
        name, *words = [unquote(word) for word in address.path.strip("/").split("/")]
        if name not in routes:
            self._send(json_reply({"error": f"There is no {name!r} here."}, 404))
            return
        self._send(_result(routes[name], Request(words, query, content or {}), content), query)

    def _content(self) -> dict[str, Any] | None:
        """The JSON object of a request; None if it is something else."""
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > LARGEST_REQUEST:
            self.close_connection = True  # what follows is not read
            return None
        try:
            content = json.loads(self.rfile.read(int(length)))
        except ValueError:
            return None
        return content if isinstance(content, dict) else None

    def _send(self, reply: Reply | FileReply | LinesReply, query: Mapping[str, str] | None = None) -> None:
        try:
            if isinstance(reply, FileReply):
                self._send_file(reply)
            elif isinstance(reply, LinesReply):
                self._send_lines(reply)
            else:
                if reply.kind.startswith("text/html") and self.server.access.in_link(dict(query or {})):
                    reply.headers = {**reply.headers, "Set-Cookie": self.server.access.set_cookie()}
                packed = reply.packed() if "gzip" in self.headers.get("Accept-Encoding", "") else reply
                self._begin(packed.status, packed.kind, len(packed.body), packed.headers)
                self.wfile.write(packed.body)
        except (BrokenPipeError, ConnectionResetError, TimeoutError):
            self.close_connection = True

    def _begin(self, status: int, kind: str, length: int | None, headers: Mapping[str, str]) -> None:
        self.send_response(status, HTTPStatus(status).phrase)
        for name, value in {**SAFE, "Content-Type": kind, **headers}.items():
            self.send_header(name, value)
        if length is None:
            self.send_header("Connection", "close")
        else:
            self.send_header("Content-Length", str(length))
        self.end_headers()

    def _send_file(self, reply: FileReply) -> None:
        try:
            size = reply.size()
            part = byte_range(self.headers.get("Range"), size)
        except OSError:
            self._send(json_reply({"error": "This file no longer exists."}, 404))
            return
        except ValueError:
            self._begin(416, reply.kind, 0, {"Content-Range": f"bytes */{size}"})
            return
        first, count = part or (0, size)
        headers = {"Accept-Ranges": "bytes", "Cache-Control": "private, max-age=60"}
        if part:
            headers["Content-Range"] = f"bytes {first}-{first + count - 1}/{size}"
        self._begin(206 if part else 200, reply.kind, count, headers)
        for piece in reply.pieces(first, count):
            self.wfile.write(piece)

    def _send_lines(self, reply: LinesReply) -> None:
        self.close_connection = True
        self._begin(200, "application/x-ndjson", None, {})
        try:
            for value in reply.values:
                self.wfile.write(as_json(value).encode(errors="replace") + b"\n")
                self.wfile.flush()
        finally:
            close = getattr(reply.values, "close", None)
            if close:
                close()  # the browser is gone: what is computed for it ends


def _result(route: Route, request: Request, content: dict[str, Any] | None) -> Reply | FileReply | LinesReply:
    """What a route returns; its errors as JSON with the text that a person reads."""
    if content is None:
        return json_reply({"error": "The request is not a JSON object."}, 400)
    try:
        return route(request)
    except (NotFound, UnsafePath) as error:
        return json_reply({"error": str(error)}, 404)
    except FlexorError as error:
        return json_reply({"error": str(error)}, 400)
    except Exception as error:  # one request that fails must not end the others
        log.exception("flexor ui: a request failed")
        return json_reply({"error": f"{type(error).__name__}: {error}"}, 500)
