"""A real browser without a window: opens pages, runs JavaScript in them, moves the pointer, takes screenshots.

It speaks the DevTools protocol with Chromium through two pipes, so it needs no other package. Pages can't reach a
network: every host name is mapped to nowhere, except this machine's own address.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from support.limits import LIMIT_S

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--mute-audio"),
    *(
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
        "--remote-debugging-pipe",
        "--window-size=1280,900",
    ),
)


def find_browser() -> str | None:
    named = os.environ.get("FLEXOR_TEST_BROWSER")
    return named or next((path for name in NAMES if (path := shutil.which(name))), None)


def _not_small(end: int) -> int:
    """The same end of a pipe under a number that is not 3 or 4, which Chromium uses."""
    moved = fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(end)
    return moved


class Browser:
    """One tab. `errors` collects uncaught exceptions, console errors, and what the page's policy blocked."""

    def __init__(self, program: str, limit_s: float = LIMIT_S):
        self.limit_s = limit_s
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._profile = tempfile.mkdtemp(prefix="browser")
        self._last, self._rest = 0, b""
        to_read, self._to = (_not_small(end) for end in os.pipe())
        self._from, to_write = (_not_small(end) for end in os.pipe())
        flags = [*FLAGS, f"--user-data-dir={self._profile}", "about:blank"]
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{to_read} 4>&{to_write}', "browser", program, *flags],
            pass_fds=(to_read, to_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(to_read)
        os.close(to_write)
        tabs = self._send("Target.getTargets", session=None)["targetInfos"]
        tab = next(t["targetId"] for t in tabs if t["type"] == "page")
        self._session = self._send("Target.attachToTarget", session=None, targetId=tab, flatten=True)[
            "sessionId"
        ]
        for part in ("Page", "Runtime", "Log", "Network"):
            self._send(f"{part}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)  # nothing to save; asked politely, it takes seconds
        self._process.wait()
        os.close(self._to)
        os.close(self._from)
        shutil.rmtree(self._profile, ignore_errors=True)

    def open(self, page: Path | str, dark: bool = False) -> None:
        """A file, or an address on this machine."""
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self._send("Emulation.setEmulatedMedia", features=scheme)
        self._send("Page.navigate", url="about:blank")
        self.wait("location.protocol === 'about:'")
        self.errors.clear()  # those of the page before are none of this one
        self.requests.clear()
        self._send("Page.navigate", url=page if isinstance(page, str) else page.resolve().as_uri())
        self.wait("location.protocol !== 'about:' && document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression."""
        answer = self._send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, condition: str) -> None:
        end = time.monotonic() + self.limit_s
        while not self.run(condition):
            assert time.monotonic() < end, f"never true: {condition}; errors: {self.errors}"
            time.sleep(0.02)

    def point(self, selector: str, x: float, y: float = 0.5) -> None:
        """Move the pointer to a place in an element, as soon as it is there; x and y from 0 to 1."""
        self._mouse("mouseMoved", self._place(selector, x, y))

    def drag(self, selector: str, begin: float, end: float) -> None:
        """Press the button at a place in an element, move to another one on the same height, and let go."""
        places = [self._place(selector, x, 0.5) for x in (begin, (begin + end) / 2, end)]
        self._mouse("mouseMoved", places[0])
        self._mouse("mousePressed", places[0], button="left", buttons=1, clickCount=1)
        for place in places[1:]:
            self._mouse("mouseMoved", place, button="left", buttons=1)
        self._mouse("mouseReleased", places[-1], button="left", clickCount=1)

    def double_click(self, selector: str) -> None:
        place = self._place(selector, 0.5, 0.5)
        for count in (1, 2):
            self._mouse("mousePressed", place, button="left", buttons=1, clickCount=count)
            self._mouse("mouseReleased", place, button="left", clickCount=count)

    def _mouse(self, kind: str, place: dict[str, float], **more: Any) -> None:
        self._send("Input.dispatchMouseEvent", type=kind, **place, **more)

    def _place(self, selector: str, x: float, y: float) -> dict[str, float]:
        element = f"document.querySelector({json.dumps(selector)})"
        self.wait(f"{element} !== null")
        self.run(f"{element}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
        box = self.run(
            f"(({{x, y, width, height}}) => [x, y, width, height])({element}.getBoundingClientRect())"
        )
        return {"x": box[0] + x * box[2], "y": box[1] + y * box[3]}

    def screenshot(self, path: Path, full_page: bool = False) -> None:
        answer = self._send("Page.captureScreenshot", format="png", captureBeyondViewport=full_page)
        path.write_bytes(base64.b64decode(answer["data"]))

    def _send(self, method: str, session: str | None = "", **params: Any) -> dict[str, Any]:
        self._last += 1
        message: dict[str, Any] = {"id": self._last, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._last:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            self._note(answer)

    def _receive(self) -> dict[str, Any]:
        end = time.monotonic() + self.limit_s
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._from], [], [], max(end - time.monotonic(), 0))
            assert ready, f"the browser has not answered for {self.limit_s:g} s"
            data = os.read(self._from, 1 << 20)
            assert data, "the browser has ended"
            self._rest += data
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def _note(self, event: dict[str, Any]) -> None:
        method, params = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(params["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.errors.append(json.dumps(params["args"]))
        elif method == "Network.requestWillBeSent":
            url = params["request"]["url"]
            if not url.startswith("data:"):
                self.requests.append(url)
