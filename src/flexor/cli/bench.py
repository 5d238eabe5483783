"""`flexor bench`: how fast batches are loaded, and how fast the hardware could load them."""

from __future__ import annotations

import argparse
from pathlib import Path

from flexor.core.console import print_result
from flexor.core.log import log


def run(arguments: list[str]) -> int:
    import torch

    from flexor.bench import data as bench_data
    from flexor.bench.report import render, write
    from flexor.config.parse import load_config, parse_flags

    parser = argparse.ArgumentParser(
        prog="flexor bench data",
        description="Load a dataset without a model, and compare the speed with the limits of the hardware. "
        "Settings of `flexor train` are accepted: --dataset.*, --batch_size, --num_workers, --seed, --policy.*.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("what", choices=("data",), help="what to measure")
    parser.add_argument(
        "--mode",
        choices=bench_data.MODES,
        default="single",
        help="contents of a sample: one frame of all cameras (single), eight steps one second apart (sarm), or the "
        "observations and actions that --policy.type trains on (policy)",
    )
    parser.add_argument("--ranks", type=int, default=1, help="number of processes that load in parallel")
    parser.add_argument("--epochs", type=int, default=1, help="number of epochs to load")
    parser.add_argument("--batches", type=int, help="stop after this number of batches instead")
    parser.add_argument(
        "--warmup", type=int, default=0, help="number of batches to load before the measurement starts"
    )
    parser.add_argument(
        "--source",
        default="disk",
        help="where the data is stored, a label for the report: hub, bucket, warmed bucket, disk",
    )
    parser.add_argument(
        "--device",
        default="cuda" if torch.cuda.is_available() else "host",
        help="where batches go: cuda, cpu (images are converted to RGB there), or host (ready to be sent to a GPU)",
    )
    parser.add_argument(
        "--output", type=Path, help="folder or FILE.json for the report; a CSV file is written next to it"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parsed, settings = parser.parse_known_args(arguments)
    own = vars(parsed)
    output, as_json, _ = own.pop("output"), own.pop("json"), own.pop("what")
    options, config = bench_data.Options(**own), load_config(settings)
    if "num_workers" not in parse_flags(settings):
        config.num_workers = bench_data.threads_per_rank(parsed.ranks)
    report = bench_data.bench_data(config, options)
    for path in write(report, output):
        log.info("wrote %s", path)
    print_result(report, as_json, render(report))
    return 0
