"""The command: plain text for people, an object for programs, clear errors."""

import json
from pathlib import Path

from flexor.cli import main as cli
from support.run_folders import add_lines, report, write_run


def slow_run(folder: Path) -> Path:
    run = write_run(folder, last=0)
    loader = {
        "threads": 4,
        "read_s": 3.8,
        "decode_s": 0.1,
        "assemble_s": 0.1,
        "bytes": 10**6,
        "source": "disk",
    }
    lines = [report(step, step_s=0.01, data_wait=0.6, loader=loader) for step in range(100, 1100, 100)]
    add_lines(run / "metrics.jsonl", *lines)
    return run


def test_text_and_object(tmp_path, capsys):
    slow_run(tmp_path / "runs/slow")
    write_run(tmp_path / "runs/new", last=0, steps=5)
    assert cli.main(["diagnose", str(tmp_path / "runs")]) == 0
    text = capsys.readouterr().out
    assert "slow: stopped, step 1,000\ndata-bound (disk): it waits for data 60 % of the time" in text
    assert "  waiting for data" in text and "--num_workers=8" in text and "2.0 times as fast" in text
    assert "new: stopped, step 0\nnot enough reports yet" in text
    assert cli.main(["diagnose", str(tmp_path / "runs"), "--json"]) == 0
    new, slow = json.loads(capsys.readouterr().out)["runs"]
    assert (new["verdict"], slow["verdict"], slow["others"]) == (None, "data-bound (disk)", [])
    assert slow["figures"]["waiting for data"] == "60 %" and slow["changes"][0]["speedup"] > 1


def test_errors(tmp_path, capsys):
    for path, why in ((tmp_path, "there is no run in"), (tmp_path / "none", "does not exist")):
        assert cli.main(["diagnose", str(path)]) != 0
        assert why in capsys.readouterr().err
