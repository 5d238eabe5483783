"""`flexor bench`: how fast batches come, and how fast they could."""

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
        description="Load a dataset with no model and say how far that is from what the hardware allows. "
        "Settings of `flexor train` may follow: --dataset.*, --batch_size, --num_workers, --seed, --policy.*.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("what", choices=("data",), help="what to measure")
    parser.add_argument(
        "--mode",
        choices=bench_data.MODES,
        default="single",
        help="a sample is: one frame of all cameras; eight steps one second apart; what --policy.type trains on",
    )
    parser.add_argument("--ranks", type=int, default=1, help="processes that load side by side")
    parser.add_argument("--epochs", type=int, default=1, help="times to go through the data")
    parser.add_argument("--batches", type=int, help="stop after so many batches instead")
    parser.add_argument("--warmup", type=int, default=0, help="batches before measuring starts")
    parser.add_argument("--source", default="disk", help="label: hub, bucket, warmed bucket, disk")
    parser.add_argument(
        "--device",
        default="cuda" if torch.cuda.is_available() else "host",
        help="where batches go: cuda, cpu (pictures become RGB there), or host: ready to be sent to a GPU",
    )
    parser.add_argument("--output", type=Path, help="folder or FILE.json for the report; CSV goes beside it")
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
