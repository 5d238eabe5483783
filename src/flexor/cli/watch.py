"""`flexor watch`: runs on a live screen."""

from __future__ import annotations

import contextlib
from pathlib import Path

from flexor.core.console import print_json
from flexor.core.errors import ConfigError
from flexor.core.option_parser import OptionParser


def run(arguments: list[str]) -> int:
    from flexor.runs.watch.live import WatchedRuns, is_interactive, print_once, watch_live

    parsed = parser().parse_args(arguments)
    if not 0.1 <= parsed.every <= 3600:
        raise ConfigError(f"--every={parsed.every:g} must be between 0.1 and 3600 seconds.")
    runs = WatchedRuns(parsed.runs)
    if parsed.json:
        runs.poll()
        print_json(runs.to_json())
    elif parsed.once or not is_interactive():
        print_once(runs, parsed.all)
    else:
        with contextlib.suppress(KeyboardInterrupt):  # another way to quit
            watch_live(runs, parsed.every, parsed.all)
    return 0


def parser() -> OptionParser:
    text = "Show runs on a live screen in the terminal, while they train or afterwards. Runs are only read."
    parser = OptionParser(prog="flexor watch", description=text)
    parser.add_argument(
        "runs", nargs="*", type=Path, default=[Path("runs")], help="runs, or folders of runs (default: runs)"
    )
    parser.add_argument(
        "--every", type=float, default=1.0, metavar="SECONDS", help="seconds between two updates (default: 1)"
    )
    parser.add_argument(
        "--once",
        action="store_true",
        help="print the current state once and exit (the default without a terminal)",
    )
    parser.add_argument(
        "--all", action="store_true", help="show all figures that a run reports, not only those that matter"
    )
    parser.add_argument("--json", action="store_true", help="print the state of the runs as one JSON object")
    return parser
