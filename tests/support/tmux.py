"""A real terminal of a given size: a program runs in it, keys are pressed, and what is on the screen is read."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from support.limits import LIMIT_S


def find_tmux() -> str | None:
    return shutil.which("tmux")


class Terminal:
    """A tmux server of its own, which ends with it."""

    def __init__(
        self, command: Sequence[str], width: int = 100, height: int = 30, env: dict[str, str] | None = None
    ):
        self._folder = tempfile.mkdtemp(prefix="tmux")
        self._base = ["tmux", "-S", f"{self._folder}/socket", "-f", "/dev/null"]
        # "sh" shows the exit code and waits, so that the last screen can be read
        line = f"trap : INT; {shlex.join(command)}; echo exit code $?; exec cat"
        self._tmux("new-session", "-d", "-x", str(width), "-y", str(height), "sh", "-c", line, env=env)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        subprocess.run([*self._base, "kill-server"], capture_output=True)
        shutil.rmtree(self._folder, ignore_errors=True)

    def press(self, *keys: str) -> None:
        self._tmux("send-keys", *keys)

    def resize(self, width: int, height: int) -> None:
        self._tmux("resize-window", "-x", str(width), "-y", str(height))

    def text(self) -> str:
        return self._tmux("capture-pane", "-p")

    def lines(self) -> list[str]:
        return self.text().rstrip("\n").split("\n")

    def save_colours(self, path: Path) -> None:
        path.write_text(self._tmux("capture-pane", "-p", "-e"))

    def wait(self, condition: str | Callable[[str], bool], limit_s: float = LIMIT_S) -> str:
        """The screen, as soon as it has a text or meets a condition."""
        end = time.monotonic() + limit_s
        while True:
            text = self.text()
            if condition in text if isinstance(condition, str) else condition(text):
                return text
            assert time.monotonic() < end, f"never on the screen: {condition!r}; it shows:\n{text}"
            time.sleep(0.05)

    def _tmux(self, *words: str, env: dict[str, str] | None = None) -> str:
        variables = {**os.environ, "LC_ALL": "C.UTF-8", "TERM": "xterm-256color"} | (env or {})
        variables.pop("TMUX", None)
        done = subprocess.run([*self._base, *words], capture_output=True, text=True, env=variables)
        assert done.returncode == 0, done.stderr
        return done.stdout
