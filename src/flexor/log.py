"""Logging: one line per event on standard error, so that standard output stays free for `--json`."""

import logging
import sys

from tqdm import tqdm

log = logging.getLogger("flexor")


class _AboveBars(logging.Handler):
    """Prints lines above a progress bar instead of through it."""

    def emit(self, record: logging.LogRecord) -> None:
        tqdm.write(self.format(record), file=sys.stderr)


def setup_logging(verbose: bool = False) -> None:
    """Send the program's log to standard error, once."""
    if log.handlers:
        return
    handler = _AboveBars()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname).1s %(message)s", datefmt="%H:%M:%S"))
    log.addHandler(handler)
    log.setLevel(logging.DEBUG if verbose else logging.INFO)
    log.propagate = False
