"""What a policy server (`flexor serve`) says about itself: asked for the application, with the server's key."""

from __future__ import annotations

import http.client
import json
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, Request, build_opener

from flexor.core.errors import ConfigError

DEFAULT = "http://127.0.0.1:8000"
TIMEOUT_S = 3.0
LARGEST = 16 << 20
SCHEMES = {"ws": "http", "wss": "https", "http": "http", "https": "https"}


class WatchedServer:
    """`url`: as robots are given it, ws://host:port, or http://."""

    def __init__(self, url: str = DEFAULT, key: str | None = None):
        parts = urlsplit(url)
        if parts.scheme not in SCHEMES or not parts.hostname:
            raise ConfigError(f"--server={url} must be an address such as ws://host:8000.")
        self.url, self.key = f"{SCHEMES[parts.scheme]}://{parts.netloc}", key
        self._opener = build_opener(ProxyHandler({}))

    def status(self) -> dict[str, Any]:
        """`server`: what its page shows; or `problem`: why there is nothing to show."""
        request = Request(f"{self.url}/status")  # noqa: S310  (the scheme was checked)
        if self.key:
            request.add_header("Authorization", f"Api-Key {self.key}")
        about = {"url": self.url}
        try:
            with self._opener.open(request, timeout=TIMEOUT_S) as reply:
                status = json.loads(reply.read(LARGEST))
        except HTTPError as error:
            wrong_key = error.code in (401, 403)
            why = (
                "it requires its key: set FLEXOR_API_KEY and start again"
                if wrong_key
                else f"it answers {error.code}"
            )
            return about | {"problem": why}
        except (OSError, URLError, ValueError, http.client.HTTPException):
            return about | {"problem": "no server answers there"}
        return about | (
            {"server": status} if isinstance(status, dict) else {"problem": "it is not a policy server"}
        )
