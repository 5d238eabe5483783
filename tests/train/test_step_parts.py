"""What a real run says about the time of its steps: all parts are there, and they add up."""

from pathlib import Path
from typing import Any

import pytest

from support import runs

PAGE = Path(__file__).parents[2] / "docs" / "monitor.md"
TIMES = (
    "copy_s",
    "forward_s",
    "backward_s",
    "communication_s",
    "optimizer_s",
    "checkpoint_s",
    "evaluation_s",
)


def parts(line: dict[str, Any]) -> float:
    """Seconds of all parts of a step."""
    return line["data_wait"] * line["step_s"] + sum(line.get(name, 0.0) for name in TIMES)


def test_the_parts_of_a_step_on_a_cpu(dataset, tiny_act, tmp_path):
    more = [
        "--steps=4",
        "--save_freq=2",
        "--dataset.eval_split=0.25",
        "--eval_steps=2",
        "--gradient_accumulation_steps=2",
    ]
    run = runs.train(dataset, tmp_path / "run", tiny_act, *more)
    lines = [line for line in runs.metrics(run) if "loss" in line]
    assert len(lines) == 4
    for line in lines:
        assert line["forward_s"] > 0 and line["backward_s"] > 0 and line["optimizer_s"] > 0
        assert line["data_wait"] > 0 and parts(line) <= line["step_s"]
        assert line["samples_per_s"] == pytest.approx(8 / line["step_s"])
        assert line["frames_per_s"] == pytest.approx(line["samples_per_s"])  # of one camera
        assert not line.keys() & {"copy_s", "launch_s", "communication_s", "memory", "slowest", "flops_per_s"}
    assert lines[-1]["left_s"] == 0 < lines[0]["left_s"]
    assert [name for name in {**lines[0], **lines[-1]} if f"`{name}`" not in PAGE.read_text()] == []
    # saved and evaluated after step 2
    assert "checkpoint_s" not in lines[1] and lines[2]["checkpoint_s"] > 0 == lines[3]["checkpoint_s"]
    assert "evaluation_s" not in lines[1] and lines[2]["evaluation_s"] > 0 == lines[3]["evaluation_s"]


@pytest.mark.gpu
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("how", ["eager", "graph"])
def test_the_parts_of_a_step_on_a_gpu(how, accumulation, dataset, tiny_act, tmp_path):
    """Also inside CUDA graphs. The GPU measures the parts and the host the whole step, hence the tolerance."""
    gpu = [flag for flag in tiny_act if not flag.startswith("--policy.device")]
    flags = ["--steps=60", "--log_freq=20", f"--step={how}", f"--gradient_accumulation_steps={accumulation}"]
    run = runs.train(dataset, tmp_path / "run", [*gpu, "--policy.device=cuda"], *flags, "--save_freq=20")
    lines = [line for line in runs.metrics(run) if "loss" in line]
    assert len(lines) == 3
    for line in lines[1:]:  # the first has the capture
        assert line["forward_s"] > 0 and line["backward_s"] > 0 and line["optimizer_s"] > 0
        assert line["forward_s"] + line["backward_s"] + line["optimizer_s"] > 0.05 * line["step_s"]
        assert parts(line) <= 1.02 * line["step_s"]
        assert 0 < line["launch_s"] <= line["step_s"] and line["checkpoint_s"] > 0
        memory = line["memory"]
        assert 0 < memory["allocated_gb"] <= min(memory["peak_gb"], memory["reserved_gb"])
        assert (
            memory["retries"] == lines[0]["memory"]["retries"]
        )  # of this process: earlier tests may have some
        assert line["flops_per_s"] > 0 and 0 < line["ceiling_share"] < 1


def test_the_time_left_is_in_the_log(lowdim, tiny_act, tmp_path):
    run = runs.train(lowdim, tmp_path / "run", tiny_act, "--steps=3", "--save_checkpoint=false")
    steps = [text for text in Path(run / "train.log").read_text().splitlines() if "samples/s" in text]
    assert ["left" in text for text in steps] == [True, True, False]
