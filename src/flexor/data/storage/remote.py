"""One file on a server: reads its size and byte ranges, and retries when the network fails.

Every HTTP response is checked: it must be the requested range, and still of the file that was opened.
Otherwise a file that was replaced in the meantime would be read as a mixture of two versions.
"""

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from flexor.core.errors import DatasetError, SourceError
from flexor.core.http_errors import http_status, retry_after
from flexor.core.log import log

__all__ = [
    "LONGEST_REQUEST",
    "HubFile",
    "NoRanges",
    "RemoteFile",
    "copy_file",
    "fsspec_file",
    "http_options",
    "look_up",
    "read_part",
    "retrying",
]

T = TypeVar("T")

ATTEMPTS = 8
FIRST_WAIT = 0.5
"""Seconds before the second attempt; doubled for each further attempt, with random jitter in the upper half."""
LONGEST_WAIT = 30.0
LONGEST_RETRY_AFTER = 300.0
"""Longest wait, in seconds, that a server may request; beyond it, the server counts as down."""
TIMEOUT = 30.0
"""Seconds without any data after which a response counts as lost."""
LONGEST_REQUEST = 16 << 20
"""Bytes per request: this much is downloaded again when the connection breaks."""
RECHECK = 60.0
"""Seconds after which a file that is not read over HTTP is checked for changes again."""


class RemoteFile(Protocol):
    name: str
    """Its URL, for messages."""
    size: int
    identity: str
    """Changes when the content changes, as far as the server reports it."""

    def get(self, start: int, end: int) -> bytes:
        """Bytes start to end, in one attempt."""


class NoRanges(SourceError):
    """The server only sends whole files."""


class _Refused(OSError):
    """An HTTP status that is not a success."""

    def __init__(self, status: int, headers: Mapping[str, str]):
        super().__init__(f"the server answers with status {status}")
        self.status, self.headers = status, headers


def read_part(file: RemoteFile, start: int, end: int) -> bytes:
    """Bytes start to end, with retries."""
    return retrying(f"{file.name} (bytes {start} to {end})", lambda: file.get(start, end))


def copy_file(file: RemoteFile, path: Path) -> None:
    """Copy a file part by part, so that a broken connection costs one part, not the whole file."""
    with path.open("wb") as copy:
        for start in range(0, file.size, LONGEST_REQUEST):
            copy.write(read_part(file, start, min(start + LONGEST_REQUEST, file.size)))


def retrying(target: str, attempt: Callable[[], T]) -> T:
    """The result of `attempt`, retried while that may help; a DatasetError if all attempts fail."""
    for number in range(1, ATTEMPTS + 1):
        try:
            return attempt()
        except DatasetError:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".strip(": ")
            wait = _wait(error, number)
            if wait is None or number == ATTEMPTS:
                raise SourceError(_gave_up(target, number, reason, error)) from error
            log.info("%s: %s; trying again in %.1f s", target, reason, wait)
            time.sleep(wait)
    raise AssertionError("the last attempt returns or raises")


def _gave_up(target: str, attempts: int, reason: str, error: Exception) -> str:
    tried = f" after {attempts} attempts" if attempts > 1 else ""
    if http_status(error) in (401, 403) or isinstance(error, PermissionError):
        fix = "Check the credentials (for the Hub: `hf auth login`)"
    elif http_status(error) == 404 or isinstance(error, FileNotFoundError):
        fix = "Check the URL, and that the dataset there is complete"
    else:
        fix = "Check the network and the server, then start again: a run resumes from its last checkpoint"
    return f"{target} can't be read{tried}: {reason}. {fix}"


def _wait(error: Exception, attempt: int) -> float | None:
    """Seconds to wait before the next attempt; None if another attempt would not help."""
    status = http_status(error)
    if status is None:
        from huggingface_hub.errors import OfflineModeIsEnabled

        if isinstance(error, FileNotFoundError | PermissionError | OfflineModeIsEnabled):
            return None
    elif status not in (408, 425, 429) and status < 500:
        return None
    retry_after_s = retry_after(error)
    if retry_after_s is not None:
        return retry_after_s if retry_after_s <= LONGEST_RETRY_AFTER else None
    return random.uniform(0.5, 1) * min(FIRST_WAIT * 2 ** (attempt - 1), LONGEST_WAIT)


def _check_answer(
    file: "HttpFile | HubFile", status: int, headers: Mapping[str, str], start: int, end: int
) -> None:
    """Raise an error if the response is not bytes start to end of the file that was opened."""
    total = (
        headers.get("Content-Range", "").rpartition("/")[2]
        if status == 206
        else headers.get("Content-Length")
    )
    resized = total is not None and total.isdigit() and int(total) != file.size
    if status in (412, 416) or (status in (200, 206) and (resized or _other(file.etag, headers.get("ETag")))):
        raise changed(file.name)
    if status == 200 and (start, end) != (0, file.size):
        raise NoRanges(
            f"{file.name}: the server ignores byte ranges and sends the whole file each time. Copy the dataset "
            f"to this machine (--dataset.root), or use a server that supports byte ranges"
        )
    if status not in (200, 206):
        raise _Refused(status, headers)
    if status == 206 and not headers.get("Content-Range", "").startswith(f"bytes {start}-"):
        raise OSError(f"the server sends {headers.get('Content-Range')} for bytes {start}-{end - 1}")


def _other(opened: str | None, now: str | None) -> bool:
    return opened is not None and now is not None and opened != now


def changed(name: str) -> SourceError:
    return SourceError(
        f"{name} has changed since it was opened. Continuing would mix two versions: start again to use "
        f"the new one, and do not change a dataset while it is being read"
    )


def _complete(data: bytes, start: int, end: int) -> bytes:
    if len(data) != end - start:
        raise OSError(f"got {len(data)} bytes instead of {end - start}")
    return data


@dataclass
class HubFile:
    """A file in a repository on the Hub, at one commit: it cannot change."""

    name: str
    size: int
    identity: str
    etag = None  # not needed at a fixed commit, and servers behind the Hub may return different ones

    def get(self, start: int, end: int) -> bytes:
        from huggingface_hub import get_session
        from huggingface_hub.utils import build_hf_headers

        headers = build_hf_headers() | _range(start, end)
        with get_session().stream("GET", self.name, headers=headers, timeout=TIMEOUT) as response:
            _check_answer(self, response.status_code, response.headers, start, end)
            return _complete(response.read(), start, end)


def http_options() -> dict[str, Any]:
    """Options of fsspec's HTTP file system: its default timeout is five minutes."""
    from aiohttp import ClientTimeout

    return {"timeout": ClientTimeout(total=None, sock_connect=TIMEOUT, sock_read=TIMEOUT)}


@dataclass
class HttpFile:
    """A file on a web server, read through fsspec's session, which may have credentials."""

    fs: Any
    name: str
    size: int
    identity: str
    etag: str | None = None

    def get(self, start: int, end: int) -> bytes:
        from fsspec.asyn import sync

        return sync(self.fs.loop, self._get, start, end)

    async def _get(self, start: int, end: int) -> bytes:
        session = await self.fs.set_session()
        options = dict(self.fs.kwargs)
        headers = {**options.pop("headers", {}), **_range(start, end)}
        async with session.get(self.fs.encode_url(self.name), headers=headers, **options) as response:
            _check_answer(self, response.status, response.headers, start, end)
            return _complete(await response.read(), start, end)


def _range(start: int, end: int) -> dict[str, str]:
    return {"Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}


@dataclass
class FsspecFile:
    """A file on any other file system that fsspec supports."""

    fs: Any
    path: str
    name: str
    size: int
    identity: str
    _checked: float = field(default_factory=time.monotonic)

    def get(self, start: int, end: int) -> bytes:
        if time.monotonic() - self._checked > RECHECK:
            self._check()
        # Synchronous file systems read through a file object; its own read-ahead is not wanted.
        options = {} if self.fs.async_impl else {"cache_type": "none"}
        data = self.fs.cat_file(self.path, start=start, end=end, **options)
        if len(data) != end - start:
            self._check()  # shorter now?
        return _complete(data, start, end)

    def _check(self) -> None:
        self.fs.invalidate_cache()
        if _identity(self.fs.info(self.path)) != self.identity:
            raise changed(self.name)
        self._checked = time.monotonic()


def fsspec_file(fs: Any, path: str, address: str, info: dict[str, Any]) -> RemoteFile:
    """The file at `path` of a file system that describes it with `info`."""
    if info.get("size") is None:
        raise DatasetError(
            f"{address}: the server does not report the file's size. Copy the dataset to this machine instead"
        )
    size, identity = int(info["size"]), _identity(info)
    if address.startswith(("http://", "https://")):
        return HttpFile(fs, path, size, identity, info.get("ETag"))
    return FsspecFile(fs, path, address, size, identity)


def look_up(fs: Any, path: str) -> dict[str, Any] | None:
    """A file's info from its file system, in one attempt; None if the file does not exist."""
    try:
        return fs.info(path)
    except FileNotFoundError as error:
        # fsspec's HTTP raises this for every failure; the real error is its cause.
        cause = error.__cause__
        if isinstance(cause, Exception) and getattr(cause, "status", None) not in (404, 410):
            raise cause from None
        return None


def _identity(info: dict[str, Any]) -> str:
    """A text that changes when a file's content changes, from its file system's info."""
    marks = ("ETag", "etag", "blob_id", "md5Hash", "mtime", "created", "Last-Modified")
    mark = next((str(info[key]) for key in marks if info.get(key)), "")
    return f"{info['name']} {info['size']} {mark}"
