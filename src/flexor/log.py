"""Logging: one line per event on standard error, so that standard output stays free for `--json`."""

import logging
import sys

from tqdm import tqdm

log = logging.getLogger("flexor")


class _AboveBars(logging.Handler):
    """Prints lines above a progress bar instead of through it."""

    def emit(self, record: logging.LogRecord) -> None:
        tqdm.write(self.format(record), file=sys.stderr)


def set_rank(rank: int, world_size: int) -> None:
    """Of many processes the first one talks; the others only warn, and say who they are."""
    for handler in log.handlers if world_size > 1 else []:
        who = f"[rank {rank}] " if rank else ""
        handler.setFormatter(_formatter(who))
        handler.setLevel(logging.WARNING if rank else logging.NOTSET)


def _formatter(who: str = "") -> logging.Formatter:
    return logging.Formatter(f"%(asctime)s %(levelname).1s {who}%(message)s", datefmt="%H:%M:%S")


def setup_logging(verbose: bool = False) -> None:
    """Send the program's log to standard error, once."""
    if log.handlers:
        return
    handler = _AboveBars()
    handler.setFormatter(_formatter())
    log.addHandler(handler)
    log.setLevel(logging.DEBUG if verbose else logging.INFO)
    log.propagate = False
