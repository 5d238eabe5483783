"""`flexor export`: write the policy of a checkpoint as one file."""

from __future__ import annotations

from pathlib import Path

from flexor.core.console import print_result, progress
from flexor.core.option_parser import OptionParser


def run(arguments: list[str]) -> int:
    from flexor.train.checkpoint.export import export as run_export

    parser = OptionParser(
        prog="flexor export",
        description="Write the policy of a checkpoint as one model.safetensors in LeRobot's format, even if "
        "several processes saved it in parts.",
    )
    parser.add_argument(
        "path", type=Path, help="run folder (its newest checkpoint is used) or checkpoint folder"
    )
    parser.add_argument("--output", type=Path, help="new folder (default: the checkpoint's own folder)")
    parser.add_argument(
        "--records",
        type=Path,
        metavar="FOLDER",
        help="instead of the policy, write what a run recorded while it learned into this folder, as a LeRobot dataset",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parsed = parser.parse_args(arguments)
    if parsed.records is not None:
        from flexor.rl.export import export_records

        written = export_records(parsed.path, parsed.records, progress("exporting"))
        print_result({"dataset": str(written)}, parsed.json, f"exported {written}")
        return 0
    folder = run_export(parsed.path, parsed.output)
    print_result({"policy": str(folder)}, parsed.json, f"exported {folder}")
    return 0
