"""Keys that somebody presses while a screen is shown."""

from __future__ import annotations

import os
import re
import select
import sys
import time
from typing import Any

LOOK_S = 0.1  # how often the size of the terminal is looked at
ARROWS = {"A": "up", "B": "down", "C": "right", "D": "left"}
ESCAPES = {f"\x1b{mode}{key}": name for mode in "[O" for key, name in ARROWS.items()}
ESCAPES |= {"\x1b[Z": "left", "\t": "right", "\r": "enter", "\n": "enter"}
ESCAPES |= {"\x03": "q", "\x04": "q", "\x1b": "escape"}


class Keys:
    """Inside, keys arrive at once and are not shown. Afterwards the terminal is as it was. Without one: no keys."""

    def __init__(self) -> None:
        self.source: int | None = None
        self._before: Any = None

    def __enter__(self) -> Keys:
        try:
            import termios
            import tty

            if sys.stdin.isatty():
                source = sys.stdin.fileno()
                self._before = termios.tcgetattr(source)
                tty.setcbreak(source)
                self.source = source
        except (ImportError, OSError, ValueError):
            pass
        return self

    def __exit__(self, *_: object) -> None:
        if self.source is not None:
            import termios

            termios.tcsetattr(self.source, termios.TCSADRAIN, self._before)

    def wait(self, seconds: float) -> list[str]:
        """The keys that were pressed: as soon as there are some, the terminal has another size, or time is up."""
        until, size = time.monotonic() + seconds, _size()
        while (left := until - time.monotonic()) > 0 and _size() == size:
            pause = min(left, LOOK_S)
            if self.source is None:
                time.sleep(pause)
            elif select.select([self.source], [], [], pause)[0]:
                data = os.read(self.source, 1024)
                if not data:  # the terminal has gone
                    return ["q"]
                return parse_keys(data.decode(errors="replace"))
        return []


def parse_keys(text: str) -> list[str]:
    """Letters as they are, other keys by their names. Keys that have no name here are left out."""
    keys = re.findall(r"\x1b\[[0-9;]*[A-Za-z~]|\x1bO.|.", text, re.DOTALL)
    return [ESCAPES.get(key, key) for key in keys if key in ESCAPES or len(key) == 1]


def _size() -> os.terminal_size | None:
    try:
        return os.get_terminal_size(sys.stdout.fileno())
    except (OSError, ValueError):
        return None
