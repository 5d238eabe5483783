"""What the planner says about a diagnosed run: gains on its GPU, and only changes that fit."""

import json
from pathlib import Path

import pytest

from flexor.cli import main as cli
from support import runs
from support.run_folders import add_lines, report

BUSY = {"step_s": 0.01, "launch_s": 0.0095, "gpu_busy": 0.99, "data_wait": 0.0, "samples_per_s": 400.0}


@pytest.fixture(scope="module")
def trained(lowdim, tiny_act, tmp_path_factory) -> Path:
    """A run on a CPU, whose record is made to say that it was on a GPU."""
    run = runs.train(lowdim, tmp_path_factory.mktemp("gains") / "run", tiny_act, "--steps=1", "--step=eager")
    record = json.loads((run / "run.json").read_text())
    record["machine"]["device"] = "NVIDIA H200"
    (run / "run.json").write_text(json.dumps(record))
    return run


def diagnosed(run: Path, capsys, *flags: str, **line: object) -> dict:
    (run / "metrics.jsonl").unlink()
    lines = [report(step, **BUSY | line, time=1e9 + step / 100) for step in range(200, 2000, 200)]
    add_lines(run / "metrics.jsonl", *lines)
    capsys.readouterr()
    assert cli.main(["diagnose", str(run), "--json", *flags]) == 0
    (diagnosis,) = json.loads(capsys.readouterr().out)["runs"]
    return diagnosis


def test_gains_of_a_launch_bound_run(trained, capsys):
    diagnosis = diagnosed(trained, capsys, system={"gpu_util": 0.2})
    assert diagnosis["verdict"] == "host-launch-bound" and "note" not in diagnosis
    planned = {change["flag"]: change for change in diagnosis["changes"]}
    assert planned["--step=auto"]["planned"] and planned["--step=auto"]["speedup"] > 1.05
    assert any(flag.startswith("--batch_size=") for flag in planned)
    estimated = diagnosed(trained, capsys, "--no-plan", system={"gpu_util": 0.2})
    assert not any(change["planned"] for change in estimated["changes"])


def test_a_gpu_or_a_dataset_that_is_not_there(trained, capsys):
    record = json.loads((trained / "run.json").read_text())
    for device, why in (
        ("NVIDIA Unheard Of", "does not know NVIDIA Unheard Of"),
        ("NVIDIA H200", "can't open"),
    ):
        record["machine"]["device"] = device
        (trained / "run.json").write_text(json.dumps(record))
        if why == "can't open":
            config = (trained / "config.yaml").read_text()
            root = next(line for line in config.splitlines() if line.strip().startswith("root: /"))
            (trained / "config.yaml").write_text(config.replace(root, f"{root}-gone"))
        diagnosis = diagnosed(trained, capsys, system={"gpu_util": 0.2})
        assert diagnosis["verdict"] == "host-launch-bound" and why in diagnosis["note"]
