"""R3: killed, told to stop, out of disk: the last checkpoint is whole and the run goes on exactly."""

import contextlib
import fcntl
import functools
import itertools
import json
import os
import random
import select
import signal
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from flexor.cli.main import main
from flexor.train.checkpoint import folder as checkpoint
from support import environment, runs
from support.limits import LIMIT_S, wait_for

STEPS = 10
EVERY_STEP = [f"--steps={STEPS}", "--save_freq=1"]


@pytest.fixture(scope="module")
def uninterrupted(lowdim, tiny_act, tmp_path_factory) -> Path:
    """The run that nothing happened to."""
    return runs.train(lowdim, tmp_path_factory.mktemp("whole") / "run", tiny_act, *EVERY_STEP)


def steps_done(run: Path) -> int:
    try:
        return len((run / "metrics.jsonl").read_text().splitlines())
    except FileNotFoundError:
        return 0


@pytest.mark.ranks
@pytest.mark.parametrize("seed", range(4))
def test_killed_at_random_instants(seed, uninterrupted, lowdim, tiny_act, tmp_path):
    """Saving every step, most instants lie inside of a save."""
    rng = random.Random(seed)
    run, after = tmp_path / "run", rng.randint(2, 8)
    process = runs.Forked(tmp_path / "out", "train", *runs.flags(lowdim, run, tiny_act, *EVERY_STEP))
    process.wait_for(lambda: steps_done(run) >= after)
    time.sleep(rng.random() * 0.03)
    process.send_signal(signal.SIGKILL)
    process.end()
    runs.assert_checkpoints_whole(run)
    assert main(["resume", str(run)]) == 0
    runs.assert_same(uninterrupted, run, STEPS)
    runs.assert_checkpoints_whole(run)
    assert [p.name for p in (run / "checkpoints").iterdir() if p.name.startswith(".")] == []


def die_at(owner: str, name: str, call: int) -> None:
    """Make this process kill itself when it is about to do something for the nth time."""
    holder = {"Path": Path, "os": os}[owner]
    function, calls = getattr(holder, name), itertools.count(1)

    def wrapper(*arguments: Any, **options: Any) -> Any:
        if next(calls) == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **options)

    setattr(holder, name, wrapper)


INSTANTS = [
    *(("Path", "rename", call) for call in (1, 2, 3, 4, 7)),
    *(("Path", "symlink_to", call) for call in (1, 2)),
    *(("os", "fsync", call) for call in (9, 14, 30)),
    *(("os", "unlink", call) for call in (2, 9)),
    ("os", "rmdir", 1),
]


@pytest.mark.ranks
@pytest.mark.parametrize("owner, name, call", INSTANTS)
def test_killed_at_each_kind_of_instant_of_a_save(
    owner, name, call, uninterrupted, lowdim, tiny_act, tmp_path
):
    """Before a rename, before `last` moves, between two files, while an old checkpoint is being removed."""
    run = tmp_path / "run"
    flags = runs.flags(lowdim, run, tiny_act, *EVERY_STEP, "--checkpoint.keep_last=2")
    process = runs.Forked(
        tmp_path / "out", "train", *flags, before=functools.partial(die_at, owner, name, call)
    )
    _, error = process.end()
    assert process.returncode == -signal.SIGKILL, error
    if not (run / "config.yaml").exists():
        runs.train(lowdim, run, tiny_act, "--steps=1")  # nothing had begun, so the folder is free
        return
    runs.assert_checkpoints_whole(run)
    if checkpoint.newest(run / "checkpoints") is None:
        assert main(["resume", str(run)]) == 1
        return
    assert main(["resume", str(run)]) == 0
    runs.assert_same(uninterrupted, run, STEPS)
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["000009", "000010", "last"]


def test_kill_before_the_first_step_leaves_a_folder_that_can_be_used(lowdim, tiny_act, tmp_path):
    """All that there is then is the lock."""
    run = tmp_path / "run"
    run.mkdir()
    (run / ".lock").write_text("pid 1 on nowhere")
    runs.train(lowdim, run, tiny_act, "--steps=1")


def check_stopped(number: int, code: int, outcome: tuple[int, str, str], run: Path) -> int:
    """What a run that was told to stop leaves behind; the step it stopped at."""
    returncode, out, error = outcome
    assert returncode == code, error
    assert signal.Signals(number).name in error and f"flexor resume {run}" in error
    assert "Traceback" not in error and out == ""
    (step,) = checkpoint.complete(run / "checkpoints")
    assert step == steps_done(run)
    runs.assert_checkpoints_whole(run)
    return step


@pytest.mark.ranks
@pytest.mark.parametrize(
    "number, code",
    [(signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGHUP, 75), (signal.SIGINT, 130)],
)
def test_told_to_stop_saves_and_goes_on_exactly(number, code, lowdim, tiny_act, tmp_path):
    run, again = tmp_path / "run", tmp_path / "again"
    flags = runs.flags(lowdim, run, tiny_act, "--steps=200000", "--save_freq=0", "--num_workers=2")
    process = runs.Forked(tmp_path / "out", "train", *flags)
    process.wait_for(lambda: steps_done(run) >= 3)
    process.send_signal(number)
    out, error = process.end()
    step = check_stopped(number, code, (process.returncode, out, error), run)

    total = step + 4
    assert main(["resume", str(run), f"--steps={total}"]) == 0
    runs.train(lowdim, again, tiny_act, f"--steps={total}", "--save_freq=0")
    runs.assert_same(again, run, total)


@pytest.mark.ranks
@pytest.mark.slow
def test_told_to_stop_as_a_user_would(lowdim, tiny_act, tmp_path):
    run = tmp_path / "run"
    process = runs.start("train", *runs.flags(lowdim, run, tiny_act, "--steps=200000", "--save_freq=0"))
    wait_for(lambda: steps_done(run) >= 2 or process.poll() is not None)
    process.send_signal(signal.SIGTERM)
    out, error = process.communicate(timeout=LIMIT_S)
    check_stopped(signal.SIGTERM, 75, (process.returncode, out, error), run)


@pytest.mark.ranks
def test_nohup(lowdim, tiny_act, tmp_path):
    """A run that was started with SIGHUP ignored goes on when its terminal is closed."""
    run = tmp_path / "run"
    flags = runs.flags(lowdim, run, tiny_act, "--steps=200000", "--save_freq=0")
    nohup = functools.partial(signal.signal, signal.SIGHUP, signal.SIG_IGN)
    process = runs.Forked(tmp_path / "out", "train", *flags, before=nohup)
    process.wait_for(lambda: steps_done(run) >= 2)
    process.send_signal(signal.SIGHUP)
    more = steps_done(run) + 3
    process.wait_for(lambda: steps_done(run) >= more)
    process.send_signal(signal.SIGTERM)
    out, error = process.end()
    check_stopped(signal.SIGTERM, 75, (process.returncode, out, error), run)


def attach(terminal: int) -> None:
    """Make a terminal the one of this process, which it writes to and gets signals from."""
    os.setsid()
    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
    for number in (1, 2):
        os.dup2(terminal, number)


@pytest.mark.ranks
def test_closed_terminal(lowdim, tiny_act, tmp_path):
    """The kernel sends SIGHUP, and whatever is written to the terminal from then on fails."""
    run = tmp_path / "run"
    ours, theirs = os.openpty()
    flags = runs.flags(lowdim, run, tiny_act, "--steps=200000", "--save_freq=0")
    process = subprocess.Popen(
        [sys.executable, "-m", "flexor", "train", *flags],
        preexec_fn=functools.partial(attach, theirs),
        env=environment.for_cpu(),
        pass_fds=[theirs],
    )
    os.close(theirs)
    reader = threading.Thread(target=read_all, args=(ours, close := threading.Event()))
    reader.start()
    try:
        wait_for(lambda: steps_done(run) >= 2 or process.poll() is not None)
        close.set()
        reader.join(LIMIT_S)
        assert process.wait(LIMIT_S) == 75
    finally:
        close.set()
        process.kill()
    (step,) = checkpoint.complete(run / "checkpoints")
    assert step == steps_done(run)
    runs.assert_checkpoints_whole(run)


def read_all(terminal: int, close: threading.Event) -> None:
    while not close.is_set():
        ready, _, _ = select.select([terminal], [], [], 0.1)
        with contextlib.suppress(OSError):
            if ready:
                os.read(terminal, 1 << 16)
    os.close(terminal)


@pytest.mark.ranks
def test_second_ctrl_c_does_not_wait(lowdim, tiny_act, tmp_path):
    run = tmp_path / "run"
    flags = runs.flags(lowdim, run, tiny_act, "--steps=200000", "--save_freq=0")
    process = runs.Forked(tmp_path / "out", "train", *flags)
    process.wait_for(lambda: steps_done(run) >= 1)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)
    _, error = process.end()
    assert process.returncode == 130 and "Traceback" not in error
    runs.assert_checkpoints_whole(run)


# Damage


@pytest.fixture
def three(uninterrupted, tmp_path) -> Path:
    return runs.cut_back(uninterrupted, tmp_path / "three", 3)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [truncate, flip, Path.unlink])
@pytest.mark.parametrize(
    "name",
    [
        "pretrained_model/model.safetensors",
        "pretrained_model/policy_preprocessor.json",
        "training_state/optimizer_state.safetensors",
        "training_state/training_step.json",
        "training_state/flexor.json",
    ],
)
def test_damaged_checkpoint_is_refused_by_name(damage, name, three, capsys):
    damage(three / "checkpoints" / "000003" / name)
    assert main(["resume", str(three)]) == 1
    error = capsys.readouterr().err
    assert name in error and "000003" in error and "000002" in error


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"files": {"a": 1}}', '{"files": 3}', "\xff"])
def test_damaged_manifest(text, three, capsys):
    (three / "checkpoints" / "000003" / checkpoint.MANIFEST).write_text(text)
    assert main(["resume", str(three)]) == 1
    error = capsys.readouterr().err
    assert "manifest.json" in error and "000002" in error


def test_moving_the_damaged_one_away_helps(three, uninterrupted, tmp_path):
    flip(three / "checkpoints" / "000003" / "pretrained_model" / "model.safetensors")
    (three / "checkpoints" / "000003").rename(tmp_path / "away")
    assert main(["resume", str(three)]) == 0
    runs.assert_same(uninterrupted, three, STEPS)


def test_folder_without_a_manifest_is_left_aside_and_said(three, uninterrupted, log_lines):
    (three / "checkpoints" / "000003" / checkpoint.MANIFEST).unlink()
    assert main(["resume", str(three)]) == 0
    assert any("000003 has no manifest" in line for line in log_lines)
    runs.assert_same(uninterrupted, three, STEPS)


def test_half_a_line_of_metrics(three, uninterrupted):
    with (three / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')
    assert main(["resume", str(three)]) == 0
    runs.assert_same(uninterrupted, three, STEPS)


# One folder, one run


@pytest.mark.ranks
def test_one_owner_at_a_time(lowdim, tiny_act, tmp_path, capsys):
    run = tmp_path / "run"
    flags = runs.flags(lowdim, run, tiny_act, "--steps=200000", "--save_freq=1", "--checkpoint.keep_last=1")
    process = runs.Forked(tmp_path / "out", "train", *flags)
    try:
        process.wait_for(lambda: steps_done(run) >= 2)
        assert main(["train", *flags]) == 2
        assert f"flexor resume {run}" in capsys.readouterr().err
        assert main(["resume", str(run)]) == 2
        error = capsys.readouterr().err
        assert "in use" in error and f"pid {process.pid}" in error
        assert process.poll() is None
    finally:
        process.send_signal(signal.SIGKILL)
        process.end()
    assert main(["resume", str(run), f"--steps={max(checkpoint.complete(run / 'checkpoints')) + 1}"]) == 0


def test_folder_in_use_before_its_settings_are_written(lowdim, tiny_act, tmp_path, capsys):
    from flexor.train.checkpoint.run_folder import open_run

    run = tmp_path / "run"
    with open_run(run, resume=False):
        assert main(["train", *runs.flags(lowdim, run, tiny_act, "--steps=1")]) == 2
        assert "in use" in capsys.readouterr().err
    assert not run.exists()


def test_finished_run_is_not_overwritten(uninterrupted, lowdim, tiny_act, capsys):
    before = json.dumps(runs.metrics(uninterrupted))
    assert main(["train", *runs.flags(lowdim, uninterrupted, tiny_act, "--steps=1")]) == 2
    assert f"flexor resume {uninterrupted}" in capsys.readouterr().err
    assert json.dumps(runs.metrics(uninterrupted)) == before


def test_folder_with_other_things_is_not_touched(lowdim, tiny_act, tmp_path, capsys):
    run = tmp_path / "run"
    run.mkdir()
    (run / "thesis.tex").write_text("precious")
    assert main(["train", *runs.flags(lowdim, run, tiny_act, "--steps=1")]) == 2
    assert "not empty" in capsys.readouterr().err
    assert [p.name for p in run.iterdir()] == ["thesis.tex"]
