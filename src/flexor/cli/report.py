"""`flexor report`: runs as one HTML page."""

from __future__ import annotations

from pathlib import Path

from flexor.core.console import print_result, progress
from flexor.core.option_parser import OptionParser


def run(arguments: list[str]) -> int:
    from flexor.runs.report.page import render, write_report

    parsed = parser().parse_args(arguments)
    result = write_report(
        parsed.runs, parsed.output, limit=int(parsed.max_mb * 1e6), progress=progress("reading")
    )
    print_result(result, parsed.json, render(result))
    return 0


def parser() -> OptionParser:
    text = (
        "Write one HTML page about runs, while they train or afterwards: curves, where the time goes, plan against "
        "reality, differences of settings, checkpoints, images and videos. The page needs no network."
    )
    parser = OptionParser(prog="flexor report", description=text)
    parser.add_argument("runs", nargs="+", type=Path, help="runs, or folders of runs, to compare")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="where to write the page (default: report.html in the run's folder; for several runs, in this folder)",
    )
    parser.add_argument(
        "--max-mb",
        type=float,
        default=20,
        help="maximum size of the page in MB; videos that exceed it are only listed (default: 20)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser
