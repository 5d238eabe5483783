"""Logging: one line per event on standard error, so that standard output stays free for `--json`."""

import logging
import sys

log = logging.getLogger("flexor")


def setup_logging(verbose: bool = False) -> None:
    """Send the program's log to standard error, once."""
    if log.handlers:
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname).1s %(message)s", datefmt="%H:%M:%S"))
    log.addHandler(handler)
    log.setLevel(logging.DEBUG if verbose else logging.INFO)
    log.propagate = False
