"""Logging: one line per event on standard error, so that standard output stays free for `--json`."""

import logging
import sys
import textwrap
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from tqdm import tqdm

from flexor.core.console import RED, YELLOW, shows_colours
from flexor.core.secrets import redacted
from flexor.core.text import printable

log = logging.getLogger("flexor")

EXAMPLES = 3  # of a warning that applies to many things


class _AboveBars(logging.Handler):
    """Prints lines above a progress bar instead of through it."""

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError, ValueError):  # the terminal is closed: a run goes on, or saves
            tqdm.write(in_colour_of(record.levelno, self.format(record)), file=sys.stderr)


def in_colour_of(level: int, line: str) -> str:
    """Warnings and errors in colour, where the terminal shows colours."""
    if level < logging.WARNING or not shows_colours(sys.stderr):
        return line
    return f"\x1b[{RED if level >= logging.ERROR else YELLOW}m{line}\x1b[0m"


_rank = 0


def set_rank(rank: int, world_size: int) -> None:
    """Rank 0 logs everything. Other ranks log only warnings, prefixed with their rank."""
    global _rank
    _rank = rank
    for handler in log.handlers if world_size > 1 else []:
        prefix = f"[rank {rank}] " if rank else ""
        handler.setFormatter(_formatter(prefix))
        handler.setLevel(logging.WARNING if rank else logging.NOTSET)


class _Printable(logging.Formatter):
    """Names from outside, such as that of a camera, are in many messages: none may control the terminal.

    And addresses of datasets are in many: none may show a password.
    """

    def format(self, record: logging.LogRecord) -> str:
        return printable(redacted(super().format(record)))


def _formatter(prefix: str = "", date: str = "%H:%M:%S") -> logging.Formatter:
    return _Printable(f"%(asctime)s %(levelname).1s {prefix}%(message)s", date)


def setup_logging(verbose: bool = False) -> None:
    """Send the program's log to standard error, once. `verbose`: with details of how it does what it was asked to."""
    if verbose:
        log.setLevel(logging.DEBUG)
    if log.handlers:
        return
    handler = _AboveBars()
    handler.setFormatter(_formatter())
    log.addHandler(handler)
    log.setLevel(logging.DEBUG if verbose else logging.INFO)
    log.propagate = False


class _QuietFile(logging.FileHandler):
    """A log that can't be written must not disturb a run: the terminal has the same lines."""

    def handleError(self, record: logging.LogRecord) -> None:
        pass


@contextmanager
def log_file(path: Path) -> Iterator[None]:
    """Inside, what is logged is also appended to a file, with the date."""
    handler = None
    try:
        handler = _QuietFile(path, encoding="utf-8", errors="replace")
        handler.setFormatter(_formatter(date="%Y-%m-%d %H:%M:%S"))
        log.addHandler(handler)
    except OSError:
        log.debug("no log file at %s", path)
    try:
        yield
    finally:
        if handler is not None:
            log.removeHandler(handler)
            with suppress(OSError):
                handler.close()


def warn_once(text: str, *values: object) -> None:
    """Warn about something that every process of a run detects: only rank 0 logs it, and only once."""
    if _rank == 0:
        _warn_once(text % values if values else text)


@cache
def _warn_once(text: str) -> None:
    log.warning("%s", text)


def with_examples(text: str, examples: Iterable[str]) -> str:
    """A text with its first few examples, wrapped to fit a terminal."""
    examples = list(examples)
    lines = [text]
    for example in examples[:EXAMPLES]:
        lines += textwrap.wrap(
            example, 100, initial_indent="  ", subsequent_indent="    ", break_long_words=False
        )
    if len(examples) > EXAMPLES:
        lines.append(f"  and {len(examples) - EXAMPLES} more")
    return "\n".join(lines)


class Repeats:
    """Warnings that may repeat: collected from any thread, logged once with a count and examples."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._examples: dict[str, dict[str, None]] = {}
        self._logged: dict[str, int] = {}

    def add(self, text: str, example: str) -> None:
        """`text` has a place for the count: "%d episodes ..."."""
        with self._lock:
            self._examples.setdefault(text, {})[example] = None

    def tell(self, last: bool = False) -> None:
        """Log new warnings. Repeats of an already logged warning are only logged on the `last` call."""
        with self._lock:
            counts = {text: len(examples) for text, examples in self._examples.items()}
            new = {text: count for text, count in counts.items() if count > self._logged.get(text, 0)}
            new = {text: count for text, count in new.items() if last or text not in self._logged}
            lines = [with_examples(text % count, self._examples[text]) for text, count in new.items()]
            self._logged |= new
        for line in lines:
            log.warning("%s", line)
