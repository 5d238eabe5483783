"""Measurements of both programs -> ratios, and whether they clear the bars."""

import statistics
from typing import Any

Results = dict[str, dict[str, list[dict[str, Any]]]]  # case -> setting -> rounds

# The least ratio to LeRobot's fastest setting, and the least share of the decode limit.
BARS = {
    "av1_gop2-single": (2.5, 0.85),
    "av1_gop2-sarm": (10.0, None),
    "h264_gop250-single": (50.0, None),
    "av1_gop2_96-single": (3.0, 0.7),
    "av1_gop2_256-single": (3.0, 0.8),
}
CACHED_BAR = 40.0


def page(about: dict[str, Any], results: Results, stream: str, cached: str) -> str:
    """A Markdown page: the bars first, then every setting."""
    lines = [
        f"# Data loading beside LeRobot, {about['date']}",
        "",
        f"`{about['command']}`: {about['cores']} cores of {about['processor']}, {about['memory_gb']} GB; batches of "
        f"{about['batch_size']}; LeRobot {about['lerobot']}; medians of up to {about['rounds']} rounds.",
        "",
        "| case | LeRobot's best | Flexor | ratio | bar | |",
        "| --- | --- | --- | --- | --- | --- |",
        *(line for case, settings in results.items() for line in bar_lines(case, settings, stream, cached)),
        "",
    ]
    for case, settings in results.items():
        lines += setting_lines(case, settings)
    return "\n".join(lines)


def bar_lines(case: str, settings: dict[str, list[dict[str, Any]]], stream: str, cached: str) -> list[str]:
    lerobot = {n: rounds for n, rounds in settings.items() if n.startswith("lerobot") and rate(rounds)}
    if not lerobot:
        return [f"| {case} | no setting worked | | | | |"]
    best = max(lerobot, key=lambda name: rate(lerobot[name]) or 0)
    theirs = rate(lerobot[best]) or 0
    name = best.removeprefix("lerobot, ")
    lines = []
    ratio_bar, limit_bar = BARS.get(case.partition(",")[0], (None, None))
    for setting, bar in ((stream, ratio_bar), (cached, None if case.startswith("h264") else CACHED_BAR)):
        ours = rate(settings.get(setting, [])) or 0
        label = f"{case}, {setting.removeprefix('flexor, ')}, frames/s"
        verdict, bar_text = ("", "") if bar is None else (passed(ours >= bar * theirs), f"{bar:g}x")
        lines.append(
            f"| {label} | {theirs:,.0f} ({name}) | {ours:,.0f} | {ours / theirs:.1f}x | {bar_text} | {verdict} |"
        )
    share = median(settings.get(stream, []), "of_limit")
    if share is not None:
        verdict = "" if limit_bar is None else passed(share >= limit_bar)
        bar_text = "" if limit_bar is None else f"{limit_bar:.0%}"
        lines.append(
            f"| {case}, streaming, of the physical limit | | {share:.0%} | | {bar_text} | {verdict} |"
        )
    return [
        *lines,
        *first_batch_line(case, settings, stream),
        *memory_line(case, settings[stream], lerobot[best], name),
    ]


def first_batch_line(case: str, settings: dict[str, list[dict[str, Any]]], stream: str) -> list[str]:
    """Against LeRobot with workers, at its quickest."""
    theirs = {
        name: seconds
        for name, rounds in settings.items()
        if name.startswith("lerobot") and " 0 workers" not in name
        if (seconds := median(rounds, "first_batch_latency_s")) is not None
    }
    ours = median(settings[stream], "first_batch_latency_s")
    if not theirs or ours is None:
        return []
    name = min(theirs, key=lambda n: theirs[n])
    least = theirs[name]
    return [
        f"| {case}, first batch | {least:.1f} s ({name.removeprefix('lerobot, ')}) | {ours:.2f} s | "
        f"{ours / least:.2f}x | no later | {passed(ours <= least)} |"
    ]


def memory_line(case: str, ours: list[dict[str, Any]], theirs: list[dict[str, Any]], name: str) -> list[str]:
    """What loading takes, above what each program has in memory before it opens a dataset.

    On ARM, LeRobot must be measured with a CUDA build of torch, which is larger; that is not held against it.
    """
    mine, other = above_imports(ours), above_imports(theirs)
    if mine is None or other is None:
        return []
    return [
        f"| {case}, peak memory above imports | {other / 1e9:.2f} GB ({name}) | {mine / 1e9:.2f} GB | "
        f"{mine / other:.2f}x | no more | {passed(mine <= other)} |"
    ]


def setting_lines(case: str, settings: dict[str, list[dict[str, Any]]]) -> list[str]:
    lines = [
        f"## {case}",
        "",
        "| setting | frames/s (each round) | first batch s | peak memory GB | above imports GB |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, rounds in settings.items():
        errors = [r["error"] for r in rounds if "error" in r]
        rates = ", ".join(f"{r['frames_per_s']:,.0f}" for r in rounds if r.get("frames_per_s")) or "; ".join(
            errors
        )
        above = above_imports(rounds)
        cells = (
            name,
            rates,
            _number(median(rounds, "first_batch_latency_s"), 1),
            _number(median(rounds, "peak_memory_bytes"), 1e-9),
            _number(above, 1e-9),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def above_imports(rounds: list[dict[str, Any]]) -> float | None:
    values = [r["peak_memory_bytes"] - r["imported_bytes"] for r in rounds if "imported_bytes" in r]
    return statistics.median(values) if values else None


def rate(rounds: list[dict[str, Any]]) -> float | None:
    return median(rounds, "frames_per_s")


def median(rounds: list[dict[str, Any]], name: str) -> float | None:
    values = [r[name] for r in rounds if r.get(name) is not None]
    return statistics.median(values) if values else None


def passed(cleared: bool) -> str:
    return "pass" if cleared else "FAIL"


def _number(value: float | None, scale: float) -> str:
    return "" if value is None else f"{value * scale:.2f}"
