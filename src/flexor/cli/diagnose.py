"""`flexor diagnose`: what holds a run back, and what would help."""

from __future__ import annotations

from pathlib import Path

from flexor.core.console import print_result
from flexor.core.errors import ConfigError
from flexor.core.option_parser import OptionParser
from flexor.core.run_files import METRICS


def run(arguments: list[str]) -> int:
    from flexor.runs.diagnosis.read import diagnose_run, render
    from flexor.runs.find import find_runs, short_names

    parsed = parser().parse_args(arguments)
    folders = find_runs(parsed.runs)
    if not folders:
        where = ", ".join(map(str, parsed.runs))
        raise ConfigError(f"there is no run in {where}: name a run's folder, which has a {METRICS}.")
    reports = [diagnose_run(folder, name) for folder, name in zip(folders, short_names(folders))]
    if parsed.plan:
        for report, folder in zip(reports, folders):
            if report.diagnosis.verdict is not None:
                from flexor.plan.gains import add_plan

                report.note = add_plan(report.diagnosis, report.figures, folder)
    print_result({"runs": [report.to_json() for report in reports]}, parsed.json, render(reports))
    return 0


def parser() -> OptionParser:
    text = (
        "Find what limits the speed of a run, while it trains or afterwards: data (decoding, disk, network, memory "
        "copies), kernel launches, communication, the GPU itself, memory, heat, a slow rank or other jobs on the "
        "machine. Shows the evidence, and the changes that help most."
    )
    parser = OptionParser(prog="flexor diagnose", description=text)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="runs, or folders of runs")
    parser.add_argument(
        "--no-plan",
        dest="plan",
        action="store_false",
        help="don't open the dataset to compute how much each change would gain",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser
