"""`flexor record`: record demonstrations of the built-in task."""

from __future__ import annotations

import argparse
from pathlib import Path

from flexor.cli.flags import dashed
from flexor.core.console import print_result, progress


def run(arguments: list[str]) -> int:
    from flexor.sim.record import OBSERVED, PIXELS, record_dataset

    parser = argparse.ArgumentParser(
        prog="flexor record",
        description="Record demonstrations of the built-in task as a LeRobot dataset.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("root", type=Path, help="new folder for the dataset")
    parser.add_argument("--episodes", type=int, default=300, help="demonstrations to record")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first episode")
    parser.add_argument("--image-size", type=int, default=32, help="height and width of the image, in pixels")
    parser.add_argument(
        "--obs-type",
        choices=tuple(OBSERVED),
        default=PIXELS,
        help="what the policy observes: an image, or the positions of the objects",
    )
    parser.add_argument("--codec", choices=("h264", "av1"), default="h264", help="video codec")
    parser.add_argument(
        "--noise",
        type=float,
        default=1.0,
        help="strength of the disturbances that the expert recovers from, 0 (none) to 1.5",
    )
    parser.add_argument(
        "--targets",
        type=int,
        default=1,
        help="discs on the table; with 2, a green and a blue one, the task description says which is meant",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parsed = vars(parser.parse_args(dashed(arguments)))
    root, as_json = parsed.pop("root"), parsed.pop("json")
    record_dataset(root, progress=progress("recording"), **parsed)
    print_result({"root": str(root), **parsed}, as_json, f"recorded {parsed['episodes']} episodes in {root}")
    return 0
