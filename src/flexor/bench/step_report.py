"""Writes the report of `flexor bench step` as text."""

from __future__ import annotations

from typing import Any

from flexor.core.console import table

COLUMNS = (  # figure, title, format
    ("step_ms", "ms per step", "{:,.2f}"),
    ("samples_per_s", "samples/s", "{:,.1f}"),
    ("of_arithmetic", "of arithmetic", "{:.1%}"),
    ("of_bandwidth", "of bandwidth", "{:.1%}"),
    ("kernels", "kernels", "{:,d}"),
    ("idle_share", "GPU idle", "{:.0%}"),
    ("peak_memory_bytes", "peak GPU memory", "GB"),
    ("compile_s", "compiling, s", "{:.1f}"),
)


def render_step(report: dict[str, Any]) -> str:
    """The report as text: a row per way to run the step."""
    times, accumulation = "", report["gradient_accumulation_steps"]
    if accumulation > 1:
        times = f" x {accumulation} passes"
    ceilings = report["ceilings"]
    lines = [
        f"{report['policy']}: batch {report['batch_size']}{times} on {report['device']}, torch {report['torch']}",
        f"measured ceilings: {_scaled(ceilings['flops_per_s'], 'FLOP/s')} ({ceilings['arithmetic']} matrix product), "
        f"{_scaled(ceilings['bytes_per_s'], 'B/s')} (copy)",
    ]
    if report["flops_per_step"] is not None:
        lines.append(
            f"a step: {_scaled(report['flops_per_step'], 'FLOP')}, {_scaled(report['bytes_per_step'], 'B')}"
        )
    return "\n".join([*lines, "", *_rows(report["rows"]), *(["", report["note"]] if report["note"] else [])])


def _rows(rows: list[dict[str, Any]]) -> list[str]:
    measured = [row for row in rows if "reason" not in row]
    columns = [column for column in COLUMNS if any(column[0] in row for row in measured)]
    cells = [["", *(title for _, title, _ in columns)]]
    cells += [[row["way"], *(_cell(row.get(name), style) for name, _, style in columns)] for row in measured]
    reasons = [f"{row['way']}  {row['reason']}" for row in rows if "reason" in row]
    return [*([table(cells)] if measured else []), *reasons]


def _cell(value: float | None, style: str) -> str:
    if value is None:
        return "-"
    return f"{value / 1e9:,.2f} GB" if style == "GB" else style.format(value)


def _scaled(value: float, unit: str) -> str:
    """1.2e12 -> 1.20 T"""
    for factor, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= factor:
            return f"{value / factor:,.2f} {letter}{unit}"
    return f"{value:,.0f} {unit}"
