"""What a run writes today is what those who read it expect."""

import json
from pathlib import Path

import pytest

from flexor.cli import main as cli
from flexor.core.log import log, log_file
from flexor.runs.reader import RunReader
from support import runs


@pytest.mark.slow
def test_a_run_is_watched_and_reported(lowdim, tiny_act, tmp_path, capsys):
    run = runs.train(lowdim, tmp_path / "run", tiny_act, "--steps=3", "--save_freq=2")
    capsys.readouterr()
    assert cli.main(["watch", str(run), "--json"]) == 0
    (state,) = json.loads(capsys.readouterr().out)["runs"]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert (state["status"], state["step"], state["steps"]) == ("finished", 3, 3)
    values_shown = {name: value for name, value in state["values"].items() if "." not in name}
    assert values_shown == {
        name: value for name, value in lines[-1].items() if isinstance(value, float) and name != "time"
    }
    assert lines[-1]["loader"]["threads"] == 0 and state["values"]["loader.read_s"] == 0
    assert [checkpoint["step"] for checkpoint in state["checkpoints"]] == [2, 3]
    assert "step 3  loss" in state["log_line"] or "checkpoint" in state["log_line"]
    assert cli.main(["report", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"][0]["step"] == 3
    assert cli.main(["diagnose", str(run.parent), "--json"]) == 0  # of all runs in a folder
    (diagnosed,) = json.loads(capsys.readouterr().out)["runs"]
    assert (diagnosed["verdict"], diagnosed["status"]) == (
        None,
        "finished",
    ) and "not enough reports" in diagnosed["why_not"]
    assert cli.main(["diagnose", str(run)]) == 0 and "not enough reports yet" in capsys.readouterr().out
    assert cli.main(["resume", str(run), "--steps=4"]) == 0  # a report in its folder does not disturb it
    reader = RunReader(run)
    reader.poll()
    assert reader.state().step == 4 and reader.series["loss"].x == [1, 2, 3, 4]
    assert sum("step 1  loss" in line for line in (run / "train.log").read_text().splitlines()) == 1


def test_a_log_that_can_not_be_written_disturbs_nobody(tmp_path, capsys):
    with log_file(tmp_path / "none" / "train.log"):
        log.warning("one")
    with log_file(tmp_path / "train.log"):
        log.warning("two")
    log.warning("three")
    assert (tmp_path / "train.log").read_text().split(" W ")[1] == "two\n"
    if Path("/dev/full").exists():
        with log_file(Path("/dev/full")):
            log.warning("four")
    assert "Traceback" not in capsys.readouterr().err
