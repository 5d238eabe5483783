"""Metrics reach the file and every tracker exactly once, whatever is killed, and no tracker touches training."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from flexor.cli.main import main
from flexor.config.parse import load_config
from flexor.core.errors import ConfigError
from flexor.core.run_files import sent_file
from flexor.monitor import trackers
from flexor.monitor.forward import Follower
from flexor.monitor.services import flat
from flexor.monitor.system_file import read_lines
from flexor.monitor.trackers import Forwarder, JsonlTracker, Trackers, check_trackers, settings_of
from flexor.train.checkpoint import folder as checkpoint
from support import runs
from support.limits import FOREVER_S, LIMIT_S, wait_for

STEPS = 8
SAVED = [f"--steps={STEPS}", "--save_freq=2", "--dataset.eval_split=0.5", "--eval_steps=2"]


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """On a busy machine, a tracker takes long to import what it needs."""
    monkeypatch.setattr(trackers, "FINISH_S", LIMIT_S)
    monkeypatch.setattr(trackers, "STOP_S", LIMIT_S)


class Collector:
    begin_at = 0

    def __init__(self):
        self.got: list[tuple[int, dict[str, float]]] = []

    def log(self, step, values):
        self.got.append((step, values))

    def flush(self):
        pass


def follow(path: Path, collector: Collector) -> None:
    with path.open("rb") as file:
        Follower(file, collector, sent_file(path.parent, "test")).send()


def write(path: Path, *lines: dict) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_lines_are_sent_once_over_resumes(tmp_path):
    path, collector = tmp_path / "metrics.jsonl", Collector()
    logged, held_out = {"step": 2, "time": 1.0, "loss": 1.0}, {"step": 2, "held_out_loss": 3.0}
    write(path, {"step": 1, "loss": 2.0, "system": {"cpu": 0.5}, "grad_norm": None}, logged)
    follow(path, collector)
    write(path, {"step": 1, "loss": 2.0}, logged, held_out)  # resumed at step 1: step 2 comes again
    follow(path, collector)
    follow(path, collector)
    write(path, {"step": 1, "loss": 2.0}, logged, held_out, {"step": 3, "loss": 0.5})
    follow(path, collector)
    assert collector.got == [
        (1, {"loss": 2.0, "system/cpu": 0.5}),
        (2, {"loss": 1.0}),
        (2, {"held_out_loss": 3.0}),
        (3, {"loss": 0.5}),
    ]


def test_a_line_is_sent_when_it_is_whole(tmp_path):
    path, collector = tmp_path / "metrics.jsonl", Collector()
    with path.open("wb") as out, path.open("rb") as file:
        follower = Follower(file, collector, sent_file(tmp_path, "test"))
        for part in (b'{"step": 1, "lo', b'ss": 2.0}\n{"st', b'rubbish\n{"step": 2, "loss": 1.0}\n'):
            out.write(part)
            out.flush()
            follower.send()
    assert collector.got == [(1, {"loss": 2.0}), (2, {"loss": 1.0})]


def test_what_a_service_has_is_not_sent_again(tmp_path):
    path, collector = tmp_path / "metrics.jsonl", Collector()
    collector.begin_at = 2  # as W&B says of a run that it knows; the run came here from another machine
    write(path, *({"step": step, "loss": 1.0} for step in (1, 2, 3)))
    follow(path, collector)
    assert [step for step, _ in collector.got] == [2, 3]


def test_only_finite_numbers_are_sent():
    nan, text = float("nan"), "text"
    assert flat({"a": 1, "b": nan, "c": None, "d": {"e": {"f": 2.0, "g": text}}}) == {"a": 1, "d/e/f": 2.0}


def config(*more: str):
    return load_config(["--dataset.root=x", "--policy.type=act", *more])


@pytest.mark.parametrize("name", ["wandb", "tensorboard", "trackio"])
def test_missing_package_is_named(name, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    flag = "--wandb.enable" if name == "wandb" else f"--trackers=[{name}]"
    with pytest.raises(ConfigError, match=rf"pip install 'flexor\[{name}\]'"):
        check_trackers(config(flag))


def test_an_account_is_asked_for_before_the_run(monkeypatch):
    pytest.importorskip("wandb", reason="wandb is not installed")
    with pytest.raises(ConfigError, match=r"wandb login.*--wandb.mode=offline"):
        check_trackers(config("--wandb.enable"))
    check_trackers(config("--wandb.enable", "--wandb.mode=offline"))
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    check_trackers(config("--wandb.enable"))


def test_a_resumed_run_has_the_same_id():
    default = settings_of("wandb", config("--wandb.enable"), "abc")
    named = settings_of("wandb", config("--wandb.enable", "--wandb.run_id=mine"), "abc")
    assert (default["id"], named["id"]) == ("abc", "mine")
    assert settings_of("trackio", config(), "0123456789")["name"] == "act-01234567"


def test_other_ranks_write_nothing(tmp_path):
    with Trackers(config("--trackers=[tensorboard]"), tmp_path, silent=True) as silent:
        silent.log(1, {"loss": 1.0})
    assert list(tmp_path.iterdir()) == []


# --- processes of trackers


def forwarder(folder: Path, monkeypatch, program: str) -> Forwarder:
    """One whose process is another program."""
    real = subprocess.Popen
    monkeypatch.setattr(
        trackers.subprocess,
        "Popen",
        lambda command, **options: real([sys.executable, "-c", program], **options),
    )
    return Forwarder("tensorboard", folder, {})


@pytest.mark.parametrize("stopped", [False, True])
def test_a_tracker_that_hangs_does_not_hold_the_run(stopped, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(trackers, "FINISH_S", FOREVER_S if stopped else 0.2)
    monkeypatch.setattr(trackers, "STOP_S", 0.2 if stopped else FOREVER_S)
    hanging = forwarder(tmp_path, monkeypatch, f"import time; time.sleep({FOREVER_S})")
    all_of_them = Trackers(config(), tmp_path)
    all_of_them.forwarders.append(hanging)
    with suppress(KeyboardInterrupt), all_of_them:
        for step in range(2000):  # more than a pipe holds
            all_of_them.log(step, {"loss": 1.0, "text": "x" * 100})
        if stopped:
            raise KeyboardInterrupt
    assert hanging.process.returncode == -signal.SIGKILL
    assert "did not get all metrics" in caplog.text
    assert len(runs.metrics(tmp_path)) == 2000


def test_a_tracker_that_crashes_is_named_once(tmp_path, monkeypatch, caplog):
    crashed = forwarder(tmp_path, monkeypatch, "import sys; sys.exit(3)")
    crashed.process.wait()
    for _ in range(3):
        crashed.check()
    crashed.close_input()
    crashed.wait(time.monotonic() + LIMIT_S)
    assert caplog.text.count("tensorboard stopped (code 3)") == 1


def events(run: Path) -> list[tuple[str, int, float]]:
    """All that TensorBoard has of a run, in order of writing."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    scalars = []
    for path in sorted((run / "tensorboard").iterdir(), key=lambda p: p.stat().st_mtime_ns):
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                number = value.tensor.float_val[0] if value.HasField("tensor") else value.simple_value
                scalars.append((value.tag, event.step, number))
    return scalars


def test_tensorboard_gets_what_the_file_has(tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    settings = config("--trackers=[tensorboard]")
    write(tmp_path / "metrics.jsonl", {"step": 1, "loss": 4.0})  # before the tracker was switched on
    for steps in ((2, 3), (4,)):
        with Trackers(settings, tmp_path) as several:
            for step in steps:
                several.log(step, {"loss": float(step), "system": {"cpu": 0.5}})
    scalars = events(tmp_path)
    assert [entry for entry in scalars if entry[0] == "loss"] == [
        *(("loss", 1, 4.0), ("loss", 2, 2.0)),
        *(("loss", 3, 3.0), ("loss", 4, 4.0)),
    ]
    assert [step for tag, step, _ in scalars if tag == "system/cpu"] == [2, 3, 4]


def test_a_killed_run_is_sent_to_the_end(tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    program = (
        "import os, signal; from pathlib import Path; from flexor.config.parse import load_config\n"
        "from flexor.monitor.trackers import Trackers\n"
        "config = load_config(['--dataset.root=x', '--policy.type=act', '--trackers=[tensorboard]'])\n"
        f"trackers = Trackers(config, Path({str(tmp_path)!r}))\n"
        "for step in range(1, 4): trackers.log(step, {'loss': step})\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run([sys.executable, "-c", program], check=False)
    assert killed.returncode == -signal.SIGKILL
    wait_for(lambda: sent_file(tmp_path, "tensorboard").exists())
    wait_for(lambda: [step for _, step, _ in events(tmp_path)] == [1, 2, 3])


@pytest.mark.slow
def test_wandb_offline_twice_is_one_run(tmp_path):
    pytest.importorskip("wandb", reason="wandb is not installed")
    settings = config("--wandb.enable", "--wandb.mode=offline")
    for step in (1, 2):
        with Trackers(settings, tmp_path, "abc123") as several:
            several.log(step, {"loss": 1.0})
    folders = [path for path in (tmp_path / "wandb").glob("offline-run-*") if path.is_dir()]
    assert len(folders) == 2 and all(path.name.endswith("-abc123") for path in folders)
    assert json.loads(sent_file(tmp_path, "wandb").read_text()) == {"step": 2, "lines": 1}


@pytest.mark.slow
def test_wandb_without_a_network_keeps_the_metrics(tmp_path, monkeypatch):
    """Nothing listens there. Logging does not wait; at the end there are files to upload later."""
    pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setattr("flexor.monitor.services.CONNECT_S", 1.0)
    service = (
        "import sys, flexor.monitor.services as services; services.CONNECT_S = 2.0\n"
        "from flexor.monitor.forward import main; sys.exit(main())"
    )
    real = subprocess.Popen
    monkeypatch.setattr(
        trackers.subprocess,
        "Popen",
        lambda command, **options: real([sys.executable, "-c", service], **options),
    )
    with Trackers(config("--wandb.enable"), tmp_path, "abc") as several:
        for step in range(1, 101):
            several.log(step, {"loss": 1.0})
    assert list((tmp_path / "wandb").glob("offline-run-*-abc/*.wandb"))
    assert json.loads(sent_file(tmp_path, "wandb").read_text()) == {"step": 100, "lines": 1}


@pytest.mark.slow
def test_trackio_twice_is_one_run(tmp_path, monkeypatch):
    pytest.importorskip("trackio", reason="trackio is not installed")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "database"))
    for step in (1, 2):
        with Trackers(config("--trackers=[trackio]", "--job_name=arm"), tmp_path, "0123456789") as several:
            several.log(step, {"loss": float(step)})
    assert json.loads(sent_file(tmp_path, "trackio").read_text()) == {"step": 2, "lines": 1}
    program = (
        "import json; from trackio.sqlite_storage import SQLiteStorage as s\n"
        "print(json.dumps([s.get_runs('flexor'), s.get_logs('flexor', 'arm-01234567')]))"
    )
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    names, logs = json.loads(output.stdout.splitlines()[-1])
    assert names == ["arm-01234567"]
    assert [(entry["step"], entry["loss"]) for entry in logs] == [(1, 1.0), (2, 2.0)]


# --- the file


def test_the_file_is_json_for_every_value(tmp_path):
    tracker = JsonlTracker(tmp_path)
    tracker.log(3, {"grad_norm": float("inf"), "datasets": {"a": {"share": 0.5}}})
    tracker.close()
    (line,) = runs.metrics(tmp_path)
    assert line.pop("time") == pytest.approx(time.time(), abs=100)
    assert line == {"step": 3, "grad_norm": None, "datasets": {"a": {"share": 0.5}}}


@pytest.mark.ranks(waits=True)
def test_killed_again_and_again_the_file_is_that_of_an_untouched_run(lowdim, tiny_act, tmp_path):
    """Held-out losses too, and TensorBoard, which gets each line once."""
    here = [*SAVED, "--system_every_s=0.1"]
    with_board = [*here, "--trackers=[tensorboard]"] if trackers._is_installed("tensorboard") else here
    uninterrupted = runs.train(lowdim, tmp_path / "whole", tiny_act, *here)
    run, rng = tmp_path / "run", random.Random(0)
    verb, flags = "train", runs.flags(lowdim, run, tiny_act, *with_board)
    for number, after in enumerate((3, 5, 6)):
        process = runs.Forked(tmp_path / f"out{number}", verb, *flags)
        process.wait_for(lambda: checkpoint.newest(run / "checkpoints") is not None and reached(run, after))  # noqa: B023
        time.sleep(rng.random() * 0.02)
        process.send_signal(signal.SIGKILL)
        process.end()
        verb, flags = "resume", [str(run)]
    assert main(["resume", str(run)]) == 0
    runs.assert_same(uninterrupted, run, STEPS)
    compared = ("step", "loss", "held_out_loss")
    lines = [
        [{k: line[k] for k in compared if k in line} for line in runs.metrics(r)]
        for r in (uninterrupted, run)
    ]
    assert lines[0] == lines[1] and len(lines[0]) == STEPS + STEPS // 2
    samples = [json.loads(line) for line in (run / "system.jsonl").read_text().splitlines()]
    assert [s["step"] for s in samples] == sorted(s["step"] for s in samples)
    if "--trackers=[tensorboard]" in with_board:
        for tag, count in (("loss", STEPS), ("held_out_loss", STEPS // 2)):
            steps = [step for scalars, step, _ in events(run) if scalars == tag]
            assert steps == list(range(STEPS // count, STEPS + 1, STEPS // count)), tag


def reached(run: Path, step: int) -> bool:
    return any(line["step"] >= step for line in read_lines(run / "metrics.jsonl"))


def test_no_process_is_left(tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    with Trackers(config("--trackers=[tensorboard]"), tmp_path) as several:
        pid = several.forwarders[0].process.pid
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
