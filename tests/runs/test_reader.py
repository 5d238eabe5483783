"""A run's folder read while it is written, cut, replaced, or full of things that are not expected."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flexor.core.errors import ConfigError
from flexor.runs.find import find_runs, short_names
from flexor.runs.jsonl import GrowingLines
from flexor.runs.process import is_alive
from flexor.runs.reader import RunReader
from flexor.runs.series import AllSeries, Series, smoothed, thinned
from flexor.runs.state import status_of, verdict_text
from support.limits import wait_for
from support.run_folders import add_checkpoint, add_lines, ended_pid, report, write_run


def polled(folder: Path) -> RunReader:
    reader = RunReader(folder)
    reader.poll()
    return reader


# --- lines


def test_a_line_counts_when_its_end_is_there(tmp_path: Path):
    file = tmp_path / "metrics.jsonl"
    lines = GrowingLines(file)
    assert lines.read() == (False, []) and lines.written is None
    file.write_text('{"step": 1}\n{"step": 2, "lo')
    assert lines.read() == (False, [{"step": 1}])
    assert lines.read() == (False, [])
    with file.open("a") as out:
        out.write('ss": 3.5}\n')
    assert lines.read() == (False, [{"step": 2, "loss": 3.5}]) and lines.damaged == 0


def test_damaged_lines_are_counted_and_skipped(tmp_path: Path):
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b'{"step": 1}\n\xff\xfe\n[1]\n\n{"step": 1, {"step": 3}\n{"step": 4}\n')
    lines = GrowingLines(file)
    assert lines.read()[1] == [{"step": 1}, {"step": 4}] and lines.damaged == 3


def test_a_file_that_a_resumed_run_wrote_anew(tmp_path: Path):
    run = write_run(tmp_path / "run", last=500)
    reader = polled(run)
    assert reader.step == 500
    aside = run / ".metrics.jsonl"
    aside.write_text("".join(json.dumps(report(step, loss=9.0)) + "\n" for step in (100, 200)))
    aside.rename(run / "metrics.jsonl")
    reader.poll()
    assert reader.step == 200 and reader.series["loss"].y == [9.0, 9.0]
    (run / "metrics.jsonl").unlink()
    reader.poll()
    assert reader.step == 0 and reader.state().reported_s_ago is None


# --- series


def test_whatever_lines_contain_becomes_a_series():
    series = AllSeries("gpu.")
    series.add(
        {"time": 10.0, "power": [1, 2.5], "name": "H200", "throttled": False, "deep": {"a": {"b": None}}}
    )
    series.add({"time": 12.0, "power": [3, 4]})
    series.add({"power": [5, 6]})  # neither step nor time
    assert series.series["gpu.power.1"] == Series("time", [10.0, 12.0], [2.5, 4.0])
    assert math.isnan(series.series["gpu.deep.a.b"].last) and series.series["gpu.throttled"].y == [0.0]
    assert series.texts == {"gpu.name": "H200"}


def test_samples_are_over_time_even_if_they_say_the_step():
    all_series = AllSeries("system.", "time")
    all_series.add({"step": 5, "time": 10.0, "cpu": 0.5, "span": 5, "cpu_cores": [0.0, 1.0] * 20})
    all_series.add({"step": 5, "time": 15.0, "cpu": 0.6})
    assert all_series.series["system.cpu"] == Series("time", [10.0, 15.0], [0.5, 0.6])
    cores = {name: series.y for name, series in all_series.series.items() if "cores" in name}
    assert cores == {
        "system.cpu_cores.mean": [0.5],
        "system.cpu_cores.lowest": [0.0],
        "system.cpu_cores.highest": [1.0],
    }
    assert "system.span" not in all_series.series


def test_repeated_steps_replace_what_was_reported_before():
    series = Series("step")
    for step, value in ((1, 1.0), (2, 2.0), (3, 3.0), (2, 20.0), (4, 4.0)):
        series.add(step, value)
    assert (series.x, series.y) == ([1, 2, 4], [1.0, 20.0, 4.0])


def test_thinned_keeps_the_ends_and_the_spikes():
    series = Series("step", [float(i) for i in range(10_000)], [0.0] * 10_000)
    series.y[1234], series.y[777] = 50.0, math.nan
    x, y = thinned(series, 100)
    assert len(x) <= 100 and x[0] == 0 and x[-1] == 9999 and max(v for v in y if v == v) == 50.0
    assert all(series.y[int(at)] == value for at, value in zip(x, y) if value == value)
    assert thinned(series, 20_000) == (series.x, series.y)


def test_smoothing_is_an_average_that_begins_at_the_first_value():
    assert smoothed([3.0, 3.0, 3.0], 0.9) == pytest.approx([3.0] * 3)
    values = smoothed([1.0, math.nan, 2.0], 0.5)
    assert values[0] == 1 and math.isnan(values[1]) and values[2] == pytest.approx(5 / 3)
    assert smoothed([1.0, 5.0], 0) == [1.0, 5.0]


# --- the state of a run


def test_the_state_of_a_run_that_trains(tmp_path: Path):
    plan = {"planned_step_s": 0.008, "planned_allocated_bytes": 3e9}
    run = write_run(tmp_path / "run", last=1000, steps=2000, pid=os.getpid(), record={"plan": plan})
    add_lines(run / "metrics.jsonl", {"step": 1000, "held_out_loss": None})
    add_checkpoint(run, 500)
    add_checkpoint(run, 1000, complete=False)
    state = polled(run).state()
    assert (state.status, state.step, state.steps) == ("running", 1000, 2000)
    assert state.step_s == pytest.approx(0.01) and state.elapsed_s == pytest.approx(10)
    assert state.left_s == pytest.approx(10, abs=5)  # less what has passed since the last line
    assert state.values["loss"] == report(1000)["loss"] and state.values["held_out_loss"] is None
    step, memory = state.plan
    assert (step.planned, step.actual) == (0.008, pytest.approx(0.01 * 0.95))
    assert (memory.name, memory.planned, memory.actual) == ("allocated_bytes", 3e9, None)
    assert [(c.step, c.bytes) for c in state.checkpoints] == [(500, 1000)]


def test_the_time_left_is_the_one_that_the_run_says(tmp_path: Path):
    run = write_run(tmp_path / "run", last=100, steps=2000, pid=os.getpid())
    add_lines(
        run / "metrics.jsonl", report(200, samples_per_s=4.0, left_s=600.0)
    )  # its first steps were slow
    state = polled(run).state()
    assert state.left_s == pytest.approx(600, abs=5) and state.step_s is not None and state.step_s > 0.5


def test_what_is_written_later_appears_by_itself(tmp_path: Path):
    run = write_run(tmp_path / "run")
    reader = polled(run)
    add_lines(run / "gpu.jsonl", {"time": 5.0, "power_w": 400}, {"time": 6.0, "power_w": 410})
    add_lines(run / "metrics.jsonl", report(1100, forward_s=0.004, verdict="data-bound: decoding"))
    (run / "train.log").write_text("first\n12:00:00 I step 1100\r\n\n")
    reader.poll()
    state = reader.state()
    assert state.values["gpu.power_w"] == 410 and state.values["forward_s"] == 0.004
    assert state.verdict == "data-bound: decoding" and state.log_line == "12:00:00 I step 1100"


def test_the_verdict_of_a_run(tmp_path: Path):
    diagnosis = {"verdict": "GPU-bound", "evidence": "the GPU is busy", "change": "", "figures": {}}
    run = write_run(tmp_path / "run", record={"diagnosis": diagnosis})
    assert polled(run).state().verdict == "GPU-bound: the GPU is busy"
    told = {"verdict": "data-bound (disk)", "evidence": "it waits", "change": "--num_workers=8 helps"}
    add_lines(run / "metrics.jsonl", report(1100, verdict=told))
    assert polled(run).state().verdict == "data-bound (disk): it waits. --num_workers=8 helps"


def test_reports_that_say_the_time(tmp_path: Path):
    run = write_run(tmp_path / "run", last=0)
    add_lines(run / "metrics.jsonl", *(report(step, time=1e9 + step) for step in (100, 200, 300)))
    reader = polled(run)
    assert reader.clock[200.0] == 1e9 + 200 and reader.state().elapsed_s == pytest.approx(200 + 1)
    assert "time" not in reader.series


@pytest.mark.parametrize(
    ("step", "steps", "alive", "ago", "has_begun", "status"),
    [
        (2000, 2000, False, 5.0, True, "finished"),
        (2000, 3000, True, 5.0, True, "running"),  # resumed with more steps
        (500, 2000, False, 5.0, True, "stopped"),
        (500, 2000, True, 9999.0, True, "running"),  # it may be evaluating
        (500, 2000, None, 5.0, True, "running"),
        (500, 2000, None, 9999.0, True, "silent"),
        (0, 2000, True, None, True, "starting"),
        (0, None, None, None, False, "empty"),
    ],
)
def test_status(
    step: int, steps: int | None, alive: bool | None, ago: float | None, has_begun: bool, status: str
):
    assert status_of(step, steps, alive, ago, 1.0, has_begun) == status


def test_a_process_with_the_same_number_is_another_one(tmp_path: Path):
    run = write_run(tmp_path / "run", pid=os.getpid())
    assert is_alive(run) is True
    os.utime(run / ".lock", (1e9, 1e9))  # long before this process began
    assert is_alive(run) is False
    (run / ".lock").write_text(f"pid {ended_pid()} on {os.uname().nodename}")
    assert is_alive(run) is False
    (run / ".lock").write_text("pid 1 on another-host")
    assert is_alive(run) is None
    (run / ".lock").write_text("")
    assert is_alive(run) is None


def test_a_process_that_waits_for_its_parent_has_ended(tmp_path: Path):
    process = subprocess.Popen([sys.executable, "-c", ""])
    run = write_run(tmp_path / "run", pid=process.pid)
    wait_for(lambda: is_alive(run) is False)
    process.wait()


@pytest.mark.parametrize(
    ("recorded", "text"),
    [
        (None, None),
        ("", None),
        ("GPU-bound", "GPU-bound"),
        (
            {"verdict": "data-bound", "evidence": "wait 40 %", "change": "cache"},
            "data-bound: wait 40 %. cache",
        ),
        ([{"verdict": "throttled"}, "straggler"], "throttled; straggler"),
        ({"other": 1}, None),
        (3, None),
    ],
)
def test_verdicts(recorded: object, text: str | None):
    assert verdict_text(recorded) == text


def test_files_that_are_not_what_they_should_be(tmp_path: Path):
    run = write_run(tmp_path / "run", last=0)
    (run / "config.yaml").write_text("steps: [unclosed")
    (run / "run.json").write_text("[]")
    (run / "checkpoints").write_text("a file")
    (run / "other.jsonl").mkdir()
    state = polled(run).state()
    assert state.steps is None and state.checkpoints == [] and state.status == "stopped"


# --- which folders are runs


def test_runs_are_found_in_folders(tmp_path: Path):
    for name in ("a/one", "a/two", "b/one"):
        write_run(tmp_path / name)
    add_checkpoint(tmp_path / "a/one", 1)
    folders = find_runs([tmp_path / "b/one", tmp_path, tmp_path / "a/one/metrics.jsonl"])
    assert folders == [tmp_path / name for name in ("b/one", "a/one", "a/two")]
    assert short_names(folders) == ["b/one", "a/one", "a/two"]
    assert short_names([tmp_path / "a/one", tmp_path / "a/two"]) == ["one", "two"]
    with pytest.raises(ConfigError, match="does not exist"):
        find_runs([tmp_path / "none"])
    (tmp_path / "note.txt").write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        find_runs([tmp_path / "note.txt"])


def test_reading_needs_no_torch():
    script = "import sys, flexor.runs.watch.live, flexor.runs.report.page; assert 'torch' not in sys.modules, 'torch'"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0
