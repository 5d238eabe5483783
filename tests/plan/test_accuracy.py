"""Plans against what was measured on a GPU: `benchmarks/results`, so this needs none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MEASURED = BENCHMARKS / "results" / "plan_accuracy_h200_2026-11-18.json"
CASES = [
    "act 16 --precision=fp16",
    "diffusion 64 one",
    "vqbet 64 square --policy.crop_shape=null",
    "tdmpc 256",
    "multi_task_dit 32 --policy.vision_encoder_lr_multiplier=0",
    "smolvla 8",
]

FREED = {"multi_task_dit 32 --policy.vision_encoder_lr_multiplier=0": 32 * 2 * 2 * 3 * 224 * 224 * 4}
"""Bytes that a run needs less than when it was measured: the cropped images are no longer in memory twice."""


@pytest.mark.parametrize("name", CASES)
def test_a_plan_is_as_measured(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # for the description of a CLIP
    from flexor.plan.site.hardware import load_hardware
    from flexor.plan.speed.speeds import assumed
    from plan_accuracy import Case, planned

    results = json.loads(MEASURED.read_text())
    rows = {row["case"]: row["measured"] for row in results["rows"]}
    plan = planned(Case.named(name).after(results["flags"]), load_hardware().find("H200"), assumed())
    allocated = rows[name]["allocated"] - FREED.get(name, 0)
    assert plan["allocated"] == pytest.approx(allocated, rel=0.005)
    assert plan["process"] == pytest.approx(rows[name]["process"], rel=0.12)
    assert plan["calibrated"]["seconds"] == pytest.approx(rows[name]["seconds"], rel=0.15)


@pytest.mark.parametrize("name", ["act 8", "diffusion 32", "tdmpc 256 graph, float32"])
def test_memory_of_eager_steps_and_graphs_is_as_measured(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from step_memory import DEFAULT, peaks

    measured = list(peaks(DEFAULT, name))
    assert measured
    for peak in measured:
        assert peak.planned == pytest.approx(peak.measured, rel=0.005), peak


def test_the_page_says_what_the_results_say():
    results = json.loads(MEASURED.read_text())
    summary = results["summary"]
    page = (BENCHMARKS.parent / "docs" / "plan.md").read_text()
    for name, error in {
        "memory that torch has allocated at the peak": "allocated",
        "memory of the process": "process",
        "time of a step that the GPU bounds, calibrated": "time, gpu-bound, calibrated",
        "time of a step that the host bounds, calibrated": "time, host-bound, calibrated",
    }.items():
        assert (
            f"| {name} | {percent(summary[error]['median'])} | {percent(summary[error]['worst'])} |" in page
        )
    assert f"{summary['cases']} runs of seven policies" in page
    for row in results["largest"]:
        assert row["right"] and f"{row['largest']:,}" in page
    readme = " ".join((BENCHMARKS.parent / "README.md").read_text().split())
    memory, time = summary["allocated"], summary["time, gpu-bound, calibrated"]
    assert f"For {summary['cases']} runs of seven policies" in readme
    assert (
        f"within {percent(memory['median'])} of the allocated memory (median; {percent(memory['worst'])} at"
        in readme
    )
    assert f"within {percent(time['median'])} ({percent(time['worst'])} at worst)" in readme


def percent(share: float) -> str:
    return f"{100 * share:.{2 if share < 0.01 else 1 if share < 0.1 else 0}f} %"
