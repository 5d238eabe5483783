"""Keeps the screen of `flexor watch` up to date."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live

from flexor.runs.find import find_runs, is_run, short_names
from flexor.runs.reader import RunReader
from flexor.runs.watch.keys import Keys
from flexor.runs.watch.screen import Screen

SEARCHED_EVERY_S = 2.0
WIDTH, HEIGHT = 100, 30  # of a screen that is printed where there is no terminal


class WatchedRuns:
    """The runs of the named folders; those that begin later are found too."""

    def __init__(self, named: Sequence[Path]):
        self.named = list(named)
        self.readers: list[RunReader] = []
        self._searched = 0.0
        self._search()

    def poll(self) -> None:
        growing = not all(is_run(path) for path in self.named)
        if growing and time.monotonic() - self._searched > SEARCHED_EVERY_S:
            self._search()
        for reader in self.readers:
            reader.poll()

    def _search(self) -> None:
        self._searched = time.monotonic()
        folders = find_runs(self.named if not self.readers else [p for p in self.named if p.exists()])
        readers = {reader.folder: reader for reader in self.readers}
        self.readers = [readers.get(folder) or RunReader(folder) for folder in folders]
        for reader, name in zip(self.readers, short_names(folders)):
            reader.name = name

    def to_json(self) -> dict[str, Any]:
        return {"runs": [reader.state().to_json() for reader in self.readers]}


def print_once(runs: WatchedRuns, everything: bool = False) -> None:
    """One screen as text. It is as wide as the terminal, if there is one."""
    console = make_console()
    width, height = console.size if console.is_terminal else (console.width, HEIGHT)
    screen = make_screen(runs, console, everything)
    for line in screen.lines(width, height - 1)[:-1]:  # without the keys, which do nothing here
        console.print(line, soft_wrap=True)


def watch_live(runs: WatchedRuns, every: float, everything: bool = False) -> None:
    """Until somebody presses q."""
    console = make_console()
    screen = make_screen(runs, console, everything)
    with Keys() as keys, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            runs.poll()
            screen.runs = runs.readers
            live.update(Group(*screen.lines(*console.size)), refresh=True)
            if not all(screen.press(key) for key in keys.wait(every)):
                return


def make_screen(runs: WatchedRuns, console: Console, everything: bool = False) -> Screen:
    runs.poll()
    plain = not console.encoding.lower().startswith("utf")
    return Screen(runs.readers, comparing=len(runs.readers) > 1, plain=plain, everything=everything)


def make_console() -> Console:
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure:
        reconfigure(errors="replace")  # a name that this terminal can't show
    terminal = sys.stdout.isatty()
    return Console(highlight=False, markup=False, emoji=False, width=None if terminal else WIDTH)


def is_interactive() -> bool:
    return sys.stdout.isatty() and not make_console().is_dumb_terminal
