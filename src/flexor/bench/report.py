"""Writes a report as text, JSON and CSV."""

from __future__ import annotations

import csv
import json
import time
from pathlib import Path
from typing import Any

from flexor.core.console import table
from flexor.core.output_paths import check_output_file, check_output_folder, make_parents

FOLDER = Path("runs/bench")
ROWS = (  # figure, label, format
    ("frames_per_s_node", "frames/s on this node", "{:,.0f}"),
    ("limit_frames_per_s", "physical limit, frames/s", "{:,.0f}"),
    ("of_limit", "share of the limit", "{:.0%}"),
    ("samples_per_s", "samples/s", "{:,.1f}"),
    ("p50_sample_latency_ms", "ms per sample, median", "{:.2f}"),
    ("p95_sample_latency_ms", "95th percentile", "{:.2f}"),
    ("p99_sample_latency_ms", "99th percentile", "{:.2f}"),
    ("wallclock_s", "seconds", "{:.1f}"),
    ("frames", "frames delivered", "{:,.0f}"),
    ("decoded", "frames decoded", "{:,.0f}"),
    ("frames_decoded_per_frame_delivered", "decoded per delivered", "{:.3f}"),
    ("hits", "frames found in pool or cache", "{:,.0f}"),
    ("misses", "frames not found", "{:,.0f}"),
    ("hit_rate", "hit rate", "{:.1%}"),
    ("evictions", "evicted", "{:,.0f}"),
    ("bad_frames", "bad frames", "{:,.0f}"),
    ("bytes_read", "bytes read, MB", "MB"),
    ("bytes_delivered", "bytes delivered, MB", "MB"),
    ("pool_bytes", "pool, MB", "MB"),
    ("cache_bytes", "cache, MB", "MB"),
    ("cpu_s_per_frame", "CPU ms per frame", "ms"),
)


def render(report: dict[str, Any]) -> str:
    """The report as text."""
    epochs = report["epochs"]
    columns = epochs if len(epochs) == 1 else [*epochs, report]
    titles = [f"epoch {epoch['epoch']}" for epoch in epochs] + ["all"] * (len(columns) - len(epochs))
    rows: list[list[str]] = [["", *titles]]
    for name, label, style in ROWS:
        if name in columns[0]:
            rows.append([label, *(_cell(column[name], style) for column in columns)])
    lines = [
        f"{report['dataset']} ({report['source']}): mode {report['mode']}, {report['cameras']} cameras, "
        f"batch {report['batch_size']} on {report['device']}, ranks: {report['ranks']}, {report['threads']} "
        f"{report['decode_in']} on {report['cores']} cores, tier {report['tier']}",
        "",
        table(rows),
        "",
        f"first batch after {report['first_batch_latency_s']:.2f} s; peak memory "
        f"{report['peak_memory_bytes'] / 1e6:,.0f} MB, of which {report['memory_at_start_bytes'] / 1e6:,.0f} MB "
        f"before the dataset was opened",
        "shuffle: {episodes:.1f} episodes in a batch of {batch} (uniform: {episodes_uniform:.1f}), {near:.1f} "
        "pairs of near-duplicates (uniform: {near_uniform:.1f})".format(**report["shuffle"]),
        *(f"epoch {epoch['epoch']}: limited by {epoch['bound']}" for epoch in epochs),
        *_scaling(report),
    ]
    return "\n".join(lines)


def _single_values(report: dict[str, Any]) -> dict[str, Any]:
    """What has a place in a table: shares become columns of their own."""
    flat = {f"{name}_share": share for name, share in report["shares"].items()}
    return flat | {key: value for key, value in report.items() if not isinstance(value, dict | list)}


def _scaling(report: dict[str, Any]) -> list[str]:
    """A table with a line per number of workers, if several were measured."""
    runs = report.get("scaling", [])
    if not runs:
        return []
    first = runs[0]["frames_per_s_node"]
    rows = [["workers", "decode in", "frames/s", "speed-up", "of the limit", "limited by"]]
    for run in runs:
        rate = run["frames_per_s_node"]
        why = run["bound"].partition(" (")[0].partition(":")[0]
        share = _cell(run["of_limit"], "{:.0%}")
        workers, speed_up = str(run["num_workers"]), f"{rate / first:.2f}x"
        rows.append([workers, run["decode_in"], f"{rate:,.0f}", speed_up, share, why])
    return ["", table(rows)]


def _cell(value: float | None, style: str) -> str:
    if value is None:
        return "-"
    if style == "MB":
        return f"{value / 1e6:,.0f}"
    return f"{1e3 * value:.2f}" if style == "ms" else style.format(value)


def check_report_path(output: Path | None) -> None:
    """Raise an error if the report can't be written there: to be called before the measurement."""
    output = output or FOLDER
    if output.suffix == ".json":
        check_output_file(output, "--output")
        check_output_file(output.with_suffix(".csv"), "--output")
    else:
        check_output_folder(output, "--output")


def write(report: dict[str, Any], output: Path | None) -> tuple[Path, Path]:
    """Write all results as JSON, and a CSV with a line per epoch, into a folder or next to the given JSON file."""
    output = output or FOLDER
    name = f"data_{report['mode']}_{time.strftime('%Y%m%d_%H%M%S')}"
    path = output if output.suffix == ".json" else output / f"{name}.json"
    make_parents(path).write_text(json.dumps(report, indent=2) + "\n")
    about = _single_values(report)
    with path.with_suffix(".csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, [*about, "epoch"])
        writer.writeheader()
        for epoch in report["epochs"]:
            writer.writerow({**about, **_single_values(epoch)})
    return path, path.with_suffix(".csv")
