"""What interrupts training: saving checkpoints and evaluating."""

from __future__ import annotations

import math

from flexor.core.findings import Finding, Fix
from flexor.runs.diagnosis.figures import Figures, number
from flexor.runs.diagnosis.verdict import faster, percent

NOTICED = 0.1
TARGET = 0.02  # share of the time that is suggested
MAX_STEPS = 1e12
# field of the metrics -> the verdict, what it is, and the settings that say how often
KINDS = {
    "checkpoint_s": ("saving-bound", "saving checkpoints", ("save_freq",)),
    "evaluation_s": ("evaluation-bound", "evaluating", ("eval_steps", "env_eval_freq")),
}


def paused(f: Figures) -> list[Finding]:
    findings = []
    for name, (verdict, activity, settings) in KINDS.items():
        share = f.pauses.share(name)
        if share < NOTICED:
            continue
        per_step = f.pauses.durations[name] / f.pauses.steps
        every = {setting: int(number(f.setting(setting)) or 0) for setting in settings}
        every = {setting: steps for setting, steps in every.items() if steps > 0}
        evidence = f"{activity} takes {percent(share)} of the time"
        if len(every) == 1:
            steps = next(iter(every.values()))
            evidence += f": {per_step * steps:.3g} s every {steps:,} steps"
        figures = [
            (activity, percent(share)),
            ("a step without it", f"{1e3 * f.pauses.step_s:.4g} ms"),
            *((setting, f"{steps:,}") for setting, steps in every.items()),
        ]
        fixes = _rarer(f, every, per_step, share)
        findings.append(Finding(verdict, evidence, fixes, cost=share, figures=figures))
    return findings


def _rarer(f: Figures, every: dict[str, int], per_step: float, share: float) -> list[Fix]:
    """How often it would cost little."""
    times = per_step / max(TARGET * f.pauses.step_s, 1e-9)  # as rare
    flags = [f"--{setting}={_round_up(min(steps * times, MAX_STEPS))}" for setting, steps in every.items()]
    return [Fix("does it less often", " ".join(flags), faster(1 - share + TARGET))] if flags else []


def _round_up(steps: float) -> int:
    """To 1, 2 or 5 times a power of ten."""
    power = 10 ** math.floor(math.log10(max(steps, 1.0)))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= steps)
