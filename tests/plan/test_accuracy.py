"""Plans against what was measured on a GPU: `benchmarks/results`, so this needs none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MEASURED = BENCHMARKS / "results" / "plan_accuracy_h200_2026-11-16.json"
CASES = [
    "act 8",
    "act 64 one --precision=bf16",
    "act 32 --precision=bf16 --lora.r=16",
    "act 8 --gradient_accumulation_steps=4",
    "diffusion 24 one",
    "vqbet 64 --precision=bf16",
    "tdmpc 256 --precision=bf16",
    "multi_task_dit 32 --precision=bf16 --policy.vision_encoder_lr_multiplier=0",
]


@pytest.mark.parametrize("name", CASES)
def test_memory_is_as_measured(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # for the description of a CLIP
    from plan_accuracy import BY_NAME, planned

    from flexor.plan.hardware import load_hardware

    rows = {row["case"]: row["measured"] for row in json.loads(MEASURED.read_text())["rows"]}
    plan = planned(BY_NAME[name], load_hardware().find("H200"), None)
    assert plan["allocated"] == pytest.approx(rows[name]["allocated"], rel=0.005)
    assert plan["process"] == pytest.approx(rows[name]["process"], rel=0.03)


def test_the_bars_are_met():
    """As the benchmark wrote them down."""
    result = json.loads(MEASURED.read_text())
    summary = result["summary"]
    assert summary["cases"] >= 40 and not summary["failed"]
    assert summary["allocated"]["median"] <= 0.005 and summary["allocated"]["worst"] <= 0.02
    assert summary["process"]["median"] <= 0.02 and summary["process"]["worst"] <= 0.08
    assert summary["time, gpu-bound, calibrated"]["median"] <= 0.1
    assert summary["time, gpu-bound, uncalibrated"]["median"] <= 0.2
    assert summary["time, host-bound, calibrated"]["median"] <= 0.2
