"""`flexor watch` in a real terminal, and what it prints without one."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flexor.cli import main as cli
from flexor.runs.reader import RunReader
from flexor.runs.watch.chart import ChartLine, chart, sparkline
from flexor.runs.watch.keys import parse_keys
from flexor.runs.watch.screen import Screen
from support.run_folders import add_checkpoint, add_lines, report, write_run
from support.tmux import Terminal, find_tmux

needs_tmux = pytest.mark.skipif(
    find_tmux() is None, reason="no tmux on this machine: install the package tmux"
)


def watching(*words: object) -> list[str]:
    return [sys.executable, "-m", "flexor", "watch", *map(str, words)]


@pytest.fixture
def trained(tmp_path: Path) -> Iterator[Path]:
    """A run that a process writes: it lives as long as the test."""
    process = subprocess.Popen(["sleep", "1000"])
    run = write_run(tmp_path / "runs" / "first", last=1000, pid=process.pid)
    add_checkpoint(run, 900)
    yield run
    process.kill()
    process.wait()


# --- in a terminal


@needs_tmux
def test_the_screen_follows_a_run(trained: Path):
    with Terminal(watching(trained, "--every", "0.2")) as terminal:
        text = terminal.wait("step 1,000 of 2,000")
        assert "first  running" in text and "50 %" in text and "│" in text
        for part in (
            "0.3707",
            "samples/s",
            "data wait",
            "GPU busy",
            "93 %",
            "gradient norm",
            "1.00e-04",
            "left, until",
            "checkpoint  step 900",
        ):  # a screen is drawn line by line
            text = terminal.wait(part)
        assert text.index("learning") < text.index("speed") < text.index("machine")
        assert "epoch" not in text  # it is behind the key m
        with (trained / "metrics.jsonl").open("a") as out:
            out.write('{"step": 1100, "loss": 876')  # a line that is being written
        add_lines(trained / "gpu.jsonl", {"time": 1.0, "power_w": 512.0})
        terminal.press("m")
        text = terminal.wait("512")
        assert "step 1,000" in text and "876" not in text
        with (trained / "metrics.jsonl").open("a") as out:
            out.write('.5, "samples_per_s": 400.0, "verdict": "data-bound: decode"}\n')
        for text in (
            "step 1,100",
            "876.5",
            "verdict     data-bound: decode",
        ):
            terminal.wait(text)
        terminal.press("q")
        assert "exit code 0" in terminal.wait("exit code") and "step 1,100" not in terminal.text()


@needs_tmux
def test_it_fits_any_size(trained: Path):
    with Terminal(watching(trained, "--every", "30"), width=120, height=40) as terminal:
        terminal.wait("q quit")
        for width, height in ((60, 16), (20, 5), (200, 50), (80, 24)):
            terminal.resize(width, height)
            # at once, long before the next look at the run; the last line is that of the keys
            terminal.wait(lambda text, rows=height: _fits(text, rows))
        terminal.press("C-c")
        terminal.wait("exit code 0")


def _fits(text: str, rows: int) -> bool:
    lines = text.rstrip("\n").split("\n")
    return len(lines) == rows and lines[0].startswith("first") and lines[-1].startswith("arrows")


@needs_tmux
def test_keys_switch_and_compare_runs(trained: Path):
    folder = trained.parent
    write_run(folder / "second", last=2000, settings={"optimizer": {"lr": 5e-4}})
    with Terminal(watching(folder, "--every", "0.2")) as terminal:
        text = terminal.wait("q quit")
        assert ">● first" in text and " ● second" in text and "finished" in text  # both, compared
        terminal.press("Right")
        terminal.wait(">● second")
        terminal.press("c")
        terminal.wait("second  finished  step 2,000 of 2,000")
        terminal.press("1")
        terminal.wait("first  running")
        terminal.press("l", "s")
        terminal.wait("loss  log axis, smoothed 0.9")
        terminal.press("Down")
        terminal.wait("samples/s  log axis")
        terminal.press("h")
        terminal.wait("another run")
        terminal.press("Escape")
        terminal.wait("first  running")
        terminal.press("PageUp", "x", "9")  # mean nothing
        write_run(folder / "third", last=300)  # begins while we watch
        terminal.press("c")
        terminal.wait("third")
        terminal.press("q")
        terminal.wait("exit code 0")


@needs_tmux
def test_a_run_that_is_killed_and_one_that_begins(tmp_path: Path):
    folder = tmp_path / "runs"
    folder.mkdir()
    process = subprocess.Popen(["sleep", "1000"])
    try:
        with Terminal(watching(folder, "--every", "0.2")) as terminal:
            terminal.wait("no run yet")
            run = write_run(folder / "new", last=0, pid=process.pid)
            terminal.wait("new  starting")
            add_lines(run / "metrics.jsonl", report(100))
            terminal.wait("new  running  step 100")
            add_checkpoint(run, 100)
            process.kill()
            process.wait()
            text = terminal.wait("new  stopped")
            assert "left, until" not in text
            terminal.wait("flexor resume")
            shutil.rmtree(folder)
            terminal.wait(lambda text: "no run yet" in text)
            terminal.press("q")
            terminal.wait("exit code 0")
    finally:
        process.kill()


@needs_tmux
def test_a_terminal_without_unicode_or_colours(trained: Path):
    env = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}
    line = ["env", *(f"{k}={v}" for k, v in env.items()), "NO_COLOR=1", *watching(trained)]
    with Terminal(line) as terminal:
        text = terminal.wait("q quit")
        assert text.isascii() and "*" in text and "first  running" in text
        terminal.press("q")
        terminal.wait("exit code 0")


@needs_tmux
def test_text_from_a_run_can_not_take_over_the_terminal(tmp_path: Path):
    run = write_run(tmp_path / "[bold]run\x1b[2J")
    add_lines(run / "metrics.jsonl", report(1100, verdict="\x1b]0;title\x07[red]bad[/red]\x1b[2J"))
    (run / "job.log").write_text("12:00 \x1b[31mred\x1b[0m :smile:\n")
    with Terminal(watching(run)) as terminal:
        text = terminal.wait("q quit")
        assert "[bold]run [2J" in text and "[red]bad[/red]" in text and ":smile:" in text
        terminal.press("q")
        terminal.wait("exit code 0")


# --- without a terminal


def test_one_screen_is_printed(trained: Path, capsys: pytest.CaptureFixture[str]):
    for more in ([], ["--once"]):
        assert cli.main(["watch", str(trained), *more]) == 0
        out = capsys.readouterr().out
        assert "first  running  step 1,000 of 2,000" in out and "\x1b" not in out and "q quit" not in out
        assert all(len(line) <= 100 for line in out.split("\n"))


def test_the_state_as_json(trained: Path, capsys: pytest.CaptureFixture[str]):
    write_run(trained.parent / "second", last=2000)
    assert cli.main(["watch", str(trained.parent), "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)["runs"]
    assert (first["name"], first["status"], second["status"]) == ("first", "running", "finished")
    assert first["values"]["loss"] == report(1000)["loss"] and first["checkpoints"][0]["step"] == 900


def test_folders_without_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["watch", str(tmp_path)]) == 0
    assert "no run yet" in capsys.readouterr().out
    assert cli.main(["watch", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"runs": []}
    assert cli.main(["watch", str(tmp_path / "none")]) == 2
    assert "does not exist" in capsys.readouterr().err
    assert cli.main(["watch", str(tmp_path), "--every", "0"]) == 2


def test_watching_changes_nothing(trained: Path, capsys: pytest.CaptureFixture[str]):
    before = {path: path.stat().st_mtime_ns for path in trained.rglob("*")}
    assert cli.main(["watch", str(trained)]) == 0
    assert {path: path.stat().st_mtime_ns for path in trained.rglob("*")} == before


# --- its parts


def test_a_curve_goes_where_its_values_are():
    rows = chart([ChartLine([0, 1, 2, 3], [0.0, 1.0, 2.0, 3.0])], 50, 9)
    braille = [row.plain for row in rows]
    assert braille[0].strip().startswith("3 │") and braille[7].strip().startswith("0 │")
    assert braille[8].split() == ["0", "3"]
    first = [next(i for i, char in enumerate(line[12:]) if char != " ") for line in braille[:8]]
    assert first == sorted(first, reverse=True)  # it rises from the left to the right
    plain = chart([ChartLine([0, 1], [1.0, 2.0])], 50, 9, plain=True)
    assert all(row.plain.isascii() for row in plain)


def test_values_that_can_not_be_drawn():
    nan = float("nan")
    assert "no values yet" in chart([], 40, 5)[0].plain
    assert "no positive values" in chart([ChartLine([1, 2], [-1.0, 0.0])], 40, 5, log=True)[0].plain
    assert len(chart([ChartLine([1, 2, 3], [nan, 5.0, nan])], 40, 5)) == 5
    assert sparkline([1.0, nan, 2.0], 3) == "▁!█" and sparkline([nan], 3) == ""


def test_samples_of_the_machine_are_short(trained: Path, capsys: pytest.CaptureFixture[str]):
    gpus = [{"index": g, "util": 0.9, "power_w": 512.5, "temperature_c": 61} for g in range(2)]
    sample = {
        "time": 1e9,
        "step": 5,
        "span": 5.0,
        "cpu_cores": [0.5] * 64,
        "disk_read_mb_s": 93.0,
        "gpus": gpus,
    }
    add_lines(trained / "system.jsonl", sample)
    assert cli.main(["watch", str(trained), "--all"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    for part in ("GPU 1 util 90 %", "GPU 0 power 512.5 W", "disk read 93 MB/s", "cpu cores.highest 0.5"):
        assert part in out
    assert out.index("l1 loss") < out.index("GPU 0 util") < out.index("cpu cores.mean")


def test_keys_by_their_names():
    assert parse_keys("q\x1b[A\x1bOB\x1b[5~\tx\x1b") == ["q", "up", "down", "right", "x", "escape"]


@pytest.mark.parametrize("size", [(1, 1), (10, 3), (40, 8), (300, 100)])
def test_no_size_is_too_small(trained: Path, size: tuple[int, int]):
    run = RunReader(trained)
    run.poll()
    for screen in (Screen([]), Screen([run]), Screen([run, run], comparing=True), Screen([run], help=True)):
        lines = screen.lines(*size)
        assert len(lines) <= size[1] and all(line.cell_len <= size[0] for line in lines)
