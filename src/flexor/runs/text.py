"""Figures of a run as short texts."""

from __future__ import annotations

import math
import re

SHARES = (
    "data_wait",
    "gpu_busy",
    "eval_success_rate",
    "success_rate",
    "intervention_rate",
    "cpu",
    "util",
    "memory_util",
    "gpu_util",
    "gpu_memory_util",
)
UNITS = {"_mb_s": "MB/s", "_gb": "GB", "_mhz": "MHz", "_w": "W", "_j": "J", "_c": "C"}
NAMES = {
    "lr": "learning rate",
    "grad_norm": "gradient norm",
    "samples_per_s": "samples/s",
    "data_wait": "data wait",
    "gpu_busy": "GPU busy",
    "held_out_loss": "held-out loss",
    "eval_success_rate": "success rate",
    "success_rate": "success in training",
    "intervention_rate": "help",
    "first_q": "expected return",
    "discounted_return": "discounted return",
    "transitions_per_s": "env steps/s",
    "weights_age": "age of weights",
    "environment_share": "in the environment",
    "step_s": "step time",
    "left_s": "time left",
    "launch_s": "launching",
    "frames_per_s": "images/s",
    "flops_per_s": "FLOP/s",
    "ceiling_share": "of the GPU's FLOP/s",
    "run_s": "whole run",
    "allocated_bytes": "peak memory",
}
SHORT = {
    "system.cpu": "processor",
    "system.ram_own_gb": "memory",
    "system.gpu_util": "GPU busy",
    "system.gpu_vram_used_gb": "GPU memory",
}


def title_of(name: str) -> str:
    return NAMES.get(name) or name.replace("_", " ")


def short_title(name: str) -> str:
    """The same where there is little room: without the unit, which the value has; `GPU 0 util` for `gpus.0.util`."""
    if name in NAMES or name in SHORT:
        return NAMES.get(name) or SHORT[name]
    for ending in UNITS:
        name = name.removesuffix(ending)
    name = re.sub(r"\bgpus\.(\d+)\.", r"GPU \1 ", name.removeprefix("system."))
    return name.replace("_", " ")


def value_text(name: str, value: float | None) -> str:
    """A value in the unit that its name implies: a share in percent, bytes in GB, seconds as a duration."""
    if value is None or not math.isfinite(value):
        return "not finite"
    last = name.rpartition(".")[2]
    if last in SHARES or last.endswith(("_share", ".share")) or last == "share":
        return f"{100 * value:.1f} %" if value < 0.0995 else f"{100 * value:.0f} %"
    if last.endswith("_bytes"):
        return f"{value / 1e9:.2f} GB" if value >= 1e7 else f"{value / 1e6:.3g} MB"
    for ending, unit in UNITS.items():
        if last.endswith(ending):
            return f"{figure(value)} {unit}"
    if last.endswith("_s") and not last.endswith("per_s"):
        return duration_text(value)
    return figure(value)


def figure(value: float) -> str:
    """With about four digits."""
    if not math.isfinite(value):
        return "not finite"
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1e6 or size < 1e-3:
        return f"{value:.2e}"
    if size >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def duration_text(seconds: float) -> str:
    if seconds < 1:
        return f"{1e3 * seconds:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    if seconds < 3600:
        return f"{seconds // 60:.0f} min {seconds % 60:02.0f} s"
    if seconds < 48 * 3600:
        return f"{seconds // 3600:.0f} h {seconds % 3600 // 60:02.0f} min"
    return f"{seconds / 86400:.1f} days"
