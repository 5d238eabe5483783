"""The README and pages of docs/ have the figures of the files in `benchmarks/results`."""

import json
import re
from pathlib import Path

import pytest

import many_gpus
import vla_table

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results"
README = (ROOT / "README.md").read_text()


def newest(name: str) -> str:
    return sorted(RESULTS.glob(name))[-1].read_text()


def test_step_times():
    rows = re.findall(
        r"^\| .*training step, batch 8 \| ([\d.]+) ms \| \*\*([\d.]+) ms\*\*", README, re.MULTILINE
    )
    measured = set()
    for file in RESULTS.glob("step_speed*.json"):
        for case in json.loads(file.read_text())["cases"]:
            ways = case["ways"]
            lerobot = min(ways[f"LeRobot, {precision}"]["ms"] for precision in ("float32", "bf16"))
            flexor = ways.get("graph, bf16, channels last") or ways["graph, bf16"]
            measured.add((f"{lerobot:.1f}", f"{flexor['ms']:.1f}"))
    assert len(rows) == 5 and {*rows} <= measured


def test_pusht():
    results = json.loads(newest("pusht*.json"))
    minutes = sum(seed["training_minutes"] for seed in results["seeds"]) / len(results["seeds"])
    text = f"**{results['mean_best_reward']:.3f}** after {minutes:.0f} minutes, mean of three seeds"
    assert len(results["seeds"]) == results["trained_at_once"] == 3 and text in README


def test_video_streaming():
    page = (RESULTS / "2026-11-15_data_vs_lerobot.md").read_text()
    lerobot, flexor = re.search(
        r"^\| av1_gop2-single, streaming, frames/s \| ([\d,]+) .*?\| ([\d,]+) \|", page, re.M
    ).groups()
    cached = re.search(r"^\| av1_gop2-single, second epoch, frames/s \|.*?\| ([\d,]+) \|", page, re.M)[1]
    assert f"| {lerobot} | **{flexor}**; {cached} once cached |" in README


def test_planned_memory():
    summary = json.loads(newest("plan_accuracy*.json"))["summary"]
    assert f"planned against measured | | within **{100 * summary['allocated']['median']:.2f} %**" in README


def test_large_models():
    results = json.loads(newest("vla_table*.json"))
    assert vla_table.table(results) in (ROOT / "docs/vla.md").read_text()
    far = max(
        abs(row["planned_allocated_bytes"] / row["measured_allocated_bytes"] - 1)
        for row in results["rows"]
        if row["measured_ms"]
    )
    assert far < 0.0003


def test_many_gpus():
    """The page has the tables of the file, and the planner still plans what is in it."""
    results = json.loads(newest("many_gpus*.json"))
    assert many_gpus.tables(results) in (ROOT / "docs/multi_gpu.md").read_text()
    act = many_gpus.POLICIES[0]
    written = [case for case in results["cases"] if case["policy"] == act.name]
    for again, case in zip(many_gpus.cases(act), written, strict=True):
        assert again["machine"] == case["machine"] and again["links"] == case["links"]
        assert again["step_ms"] == pytest.approx(case["step_ms"], rel=0.01), (
            "run benchmarks/many_gpus.py again"
        )
    assert all(case["graph"] for case in results["cases"])


def test_steps_of_ranks():
    rows = json.loads(newest("ranks_step*.json"))["rows"]
    ms = {(row["policy"], row["way"], row["step"]): row["step_ms"] for row in rows if not row["flags"]}
    page = (ROOT / "docs/multi_gpu.md").read_text()
    for policy, name in (
        ("act", "ACT"),
        ("diffusion", "Diffusion"),
        ("smolvla", "SmolVLA, the action expert"),
    ):
        alone, graph, eager = (
            ms[policy, way, step]
            for way, step in (("one process", "graph"), ("1 over NCCL", "graph"), ("1 over NCCL", "eager"))
        )
        assert f"| {name} | {alone:.1f} | {graph:.1f} | {graph / alone:.2f} | {eager:.1f} |" in page
    graph, eager = (round(ms["act", "2 over gloo", step]) for step in ("graph", "eager"))
    assert re.search(rf"need {graph} ms for\sa step of ACT as two graphs, and {eager} ms eager", page)


def test_steps_of_ranks_with_fsdp():
    rows = json.loads(newest("ranks_step*.json"))["rows"]
    page = (ROOT / "docs/multi_gpu.md").read_text()
    for policy, name, batch_size in (
        ("smolvla", "SmolVLA", 8),
        ("smolvla", "SmolVLA", 32),
        ("pi0", "pi0", 8),
    ):
        larger = f"--batch_size={batch_size}" if batch_size != 8 else ""
        ms = {
            (row["way"], row["step"]): f"{row['step_ms']:.1f}"
            for row in rows
            if row["policy"] == policy
            and ("train_expert_only=false" in row["flags"] or policy != "smolvla")
            and (larger in row["flags"] if larger else "batch_size" not in row["flags"])
        }
        alone, graph = ms["one process", "graph"], ms["1 with FSDP", "graph"]
        others = [ms.get(("1 of 8 with FSDP", "graph"), ""), ms.get(("1 with FSDP", "eager"), "")]
        cells = [f"{name}, batch {batch_size}", alone, graph, f"{float(graph) / float(alone):.2f}", *others]
        assert re.sub(r"\s+", " ", f"| {' | '.join(cells)} |") in page


def test_large_models_beside_lerobot():
    results, page = json.loads(newest("large_models*.json")), (ROOT / "docs/bench.md").read_text()
    for case in results["steps"]:
        if case["lerobot_ms"]:
            times = f"{case['lerobot_ms'] / case['flexor_ms']:.1f}"
            assert f"| {case['lerobot_ms']:.1f} | {case['flexor_ms']:.1f} | {times} |" in page
    for case in results["chunks"]:
        assert f"| {case['flexor_ms']:.1f} |\n" in page
