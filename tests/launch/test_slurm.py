"""SLURM: what the script asks for, and what a real SLURM makes of it."""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flexor.cli.main import main
from flexor.launch.slurm import Job, batch_script, parser, seconds, submit, write
from flexor.train.checkpoint import folder as checkpoint
from support import ranks, runs, slurm_node
from support.limits import wait_for
from support.slurm_node import SlurmJob

pytestmark = pytest.mark.ranks(waits=True)

# The script


def dry_run(capsys, *arguments: str) -> str:
    assert main(["launch", "slurm", "--dry-run", *arguments]) == 0
    return capsys.readouterr().out


def sbatch_flags(script: str) -> list[str]:
    return re.findall("^#SBATCH (.*)$", script, re.MULTILINE)


def command(script: str) -> list[str]:
    """What srun is given, as a shell reads it."""
    line = re.search(r"^srun .*? \|\| code", script, re.MULTILINE | re.DOTALL)
    assert line
    return shlex.split(line[0].replace("\\\n", ""))[3:-2]


def test_asks_for_one_process_per_gpu(capsys):
    script = dry_run(capsys, "--nodes=2", "--gpus-per-node=a100:4", "--time=2-12", "--cpus-per-task=6")
    assert {
        "--nodes=2",
        "--ntasks-per-node=4",
        "--gpus-per-node=a100:4",
        "--time=2-12",
        "--cpus-per-task=6",
    } <= set(sbatch_flags(script))
    assert "CUDA_VISIBLE_DEVICES" not in script


def test_asks_for_processes_on_the_cpu(capsys):
    script = dry_run(capsys, "--processes_per_node", "3", "--num_workers=7")
    flags = sbatch_flags(script)
    assert "--ntasks-per-node=3" in flags and not any("gpus" in flag for flag in flags)
    assert "--cpus-per-task=8" in flags  # a core for each thread, and one for the loop
    assert 'export CUDA_VISIBLE_DEVICES=""' in script


def test_defaults_are_one_gpu_for_a_day_that_may_be_preempted(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = dry_run(capsys)
    flags = sbatch_flags(script)
    assert {
        "--nodes=1",
        "--ntasks-per-node=1",
        "--gpus-per-node=1",
        "--time=24:00:00",
        "--job-name=demo",
    } <= set(flags)
    assert {"--requeue", "--open-mode=append", "--signal=USR1@120", f"--chdir={tmp_path}"} <= set(flags)
    assert not any(flag.startswith(("--mem", "--partition", "--account", "--qos")) for flag in flags)
    assert list(tmp_path.iterdir()) == []  # a dry run leaves nothing


@pytest.mark.parametrize("name", ["job_name", "output_dir"])
@pytest.mark.parametrize("line_break", ["\n", "\r", "\u2028"])
def test_no_setting_of_a_file_becomes_a_line_of_the_script(name, line_break, tmp_path, capsys):
    settings = {"output_dir": str(tmp_path / "run"), "dataset": {"repo_id": "builtin/place"}}
    settings[name] = f"{tmp_path}/x{line_break}touch mark{line_break}#"
    (tmp_path / "theirs.yaml").write_text(json.dumps(settings))
    assert main(["launch", "slurm", "--dry-run", "--", "train", f"--config={tmp_path}/theirs.yaml"]) == 2
    output = capsys.readouterr()
    assert (
        output.out == "" and "has a line break" in output.err and "name=" in output.err.replace("dir", "name")
    )


def test_what_the_cluster_wants_to_know(capsys):
    flags = [
        "--partition=gpu",
        "--account=lab",
        "--qos=long",
        "--constraint=h100&ib",
        "--mem=64G",
        "--signal-before=300",
    ]
    script = dry_run(
        capsys, *flags, "--sbatch=--exclusive", "--sbatch=--mail-type=END", "--setup=module load cuda"
    )
    expected = {
        "--partition=gpu",
        "--account=lab",
        "--qos=long",
        "--constraint='h100&ib'",
        "--mem=64G",
        "--signal=USR1@300",
    }
    assert {*expected, "--exclusive", "--mail-type=END"} <= set(sbatch_flags(script))
    assert script.index("\nmodule load cuda\n") < script.index("\nsrun ")


@pytest.mark.parametrize("before", [[], ["--"], ["train"], ["--", "train"]])
def test_runs_the_training_in_a_folder_that_stays_the_same(before, capsys, tmp_path):
    run = tmp_path / "a run"
    words = ["--steps", "7", f"--output_dir={run}", "optimizer.lr=1e-3", "--job_name=two words"]
    script = dry_run(capsys, *before, *words)
    assert command(script) == [
        *(sys.executable, "-m", "flexor", "train"),
        *("--steps=7", f"--output_dir={run}", "--optimizer.lr=1e-3", "--job_name=two words", "--resume=auto"),
    ]
    assert "--job-name='two words'" in sbatch_flags(script)
    assert f"--output='{run}.slurm/%j.log'" in sbatch_flags(script)
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0


def test_a_run_without_a_folder_gets_one(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folders = [
        word for word in command(dry_run(capsys, "--job_name=test")) if word.startswith("--output_dir=")
    ]
    assert re.fullmatch(f"--output_dir={tmp_path}/runs/[-_0-9]+_test", folders[0])


def test_goes_on_with_a_run(lowdim, tiny_act, tmp_path, capsys):
    run = tmp_path / "run"
    more = ["--steps=1", "--batch_size=2", "--num_workers=0", "--job_name=pushing"]
    assert main(["train", f"--dataset.root={lowdim}", f"--output_dir={run}", *tiny_act, *more]) == 0
    capsys.readouterr()
    script = dry_run(capsys, "--", "resume", str(run), "--steps=9")
    assert command(script)[3:] == ["resume", str(run), "--steps=9"]
    assert {"--job-name=pushing", "--cpus-per-task=1"} <= set(sbatch_flags(script))


def test_json(capsys, tmp_path):
    result = json.loads(dry_run(capsys, "--json", f"--output_dir={tmp_path / 'run'}"))
    assert result.pop("text").startswith("#!/bin/bash\n")
    script = str(tmp_path / "run.slurm" / "job.sbatch")
    assert result == {"run": str(tmp_path / "run"), "script": script, "job_id": None, "log": None}


def test_without_sbatch_the_script_is_left_with_a_copy_of_the_settings(tmp_path, monkeypatch, capsys):
    """A job may wait for days, and its settings file be edited meanwhile."""
    monkeypatch.setenv("PATH", str(tmp_path))
    settings = tmp_path / "mine.yaml"
    settings.write_text("steps: 5\ndataset: {repo_id: somebody/something}\n")
    run, folder = tmp_path / "run", tmp_path / "run.slurm"
    assert main(["launch", "slurm", f"--config={settings}", f"--output_dir={run}"]) == 1
    out, error = capsys.readouterr()
    assert "sbatch was not found" in error and f"sbatch {folder / 'job.sbatch'}" in out
    assert f"--config={folder / 'settings.yaml'}" in command((folder / "job.sbatch").read_text())
    assert (folder / "settings.yaml").read_text() == settings.read_text()
    assert not run.exists()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--nodes=0"], "--nodes=0: expected a number, 1 or more"),
        (["--nodes=two"], "--nodes=two"),
        (["--gpus-per-node=0"], "--gpus-per-node=0"),
        (["--gpus-per-node=all"], "--gpus-per-node=all"),
        (["--processes-per-node=0"], "--processes-per-node=0"),
        (["--time=tomorrow"], "--time=tomorrow: expected HOURS:MINUTES:SECONDS"),
        (["--time=2"], "--signal-before=120 seconds leaves nothing of --time=2"),
        (["--sbatch=exclusive"], "--sbatch=exclusive"),
        (["--gpus=4"], "--gpus-per-node"),
        (["--", "train", "--processes=4"], "--processes-per-node"),
        (["--", "--stepz=4"], "stepz"),
        (["--", "--steps=0"], "steps=0 must be at least 1"),
        (["--", "eval", "run"], "Can't launch 'eval'"),
        (["--", "resume"], "No run given"),
        (["--", "resume", "/nowhere"], "/nowhere: there is no such folder"),
        (["--", "--resume=true"], "resume RUN"),
    ],
)
def test_mistakes_are_named_before_anything_is_submitted(arguments, named, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["launch", "slurm", *arguments]) in (1, 2)
    assert named in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("way", ["flag", "file"])
def test_a_password_is_not_stored(way, tmp_path, capsys):
    (tmp_path / "mine.yaml").write_text("dataset:\n  root: https://ann:secret@host/pens\n")
    flags = {
        "flag": "--dataset.root=https://ann:secret@host/pens",
        "file": f"--config={tmp_path / 'mine.yaml'}",
    }
    arguments = ["--time=1:00:00", "--gpus-per-node=1", flags[way], f"--output_dir={tmp_path / 'run'}"]
    assert main(["launch", "slurm", *arguments]) == 2
    error = capsys.readouterr().err
    assert "https://***@host/pens has a password" in error and "secret" not in error
    assert not (tmp_path / "run.slurm").exists()


def test_a_folder_in_use_is_refused_unless_it_is_to_be_gone_on_with(tmp_path, capsys):
    (tmp_path / "something").touch()
    assert main(["launch", "slurm", f"--output_dir={tmp_path}"]) == 2
    assert f"resume {tmp_path}" in capsys.readouterr().err
    assert "--resume=auto" in command(dry_run(capsys, f"--output_dir={tmp_path}", "--resume=auto"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("90", 5400),
        ("1:30", 90),
        ("24:00:00", 86400),
        ("2-12", 216000),
        ("1-0:30", 88200),
        ("1-2:03:04", 93784),
    ],
)
def test_time_as_slurm_writes_it(text, expected):
    assert seconds(text) == expected


# A real SLURM


@pytest.fixture(scope="module")
def slurm(tmp_path_factory) -> Iterator[None]:
    """Two nodes of one core. Jobs of the partition `urgent` preempt the others."""
    reason = slurm_node.missing()
    if reason:
        pytest.skip(reason)
    with slurm_node.running(tmp_path_factory.mktemp("slurm") / "cluster"):
        yield


PROGRAM = """
import os, signal, sys, time
from pathlib import Path

rank, restarts = int(os.environ["SLURM_PROCID"]), os.environ.get("SLURM_RESTART_COUNT", "0")
told, note = [], Path(sys.argv[1]) / f"{restarts}.{rank}"
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda number, _: told.append(signal.Signals(number).name))
note.write_text(" ".join(os.environ[name] for name in ("SLURMD_NODENAME", "MASTER_ADDR", "MASTER_PORT")))
while not told and not (Path(sys.argv[1]) / "end").exists():
    time.sleep(0.02)
time.sleep(0.7 * rank)  # the last one saves when the others have ended already
note.write_text(f"saved {told[:1]}")  # SLURM may say it twice
sys.exit(75 if told else int(sys.argv[2]))
"""


class Waiting(SlurmJob):
    """Two processes on two nodes that run PROGRAM."""

    def __init__(self, folder: Path, code: int = 0):
        self.notes = folder / "some notes"
        self.notes.mkdir()
        program = folder / "program.py"
        program.write_text(PROGRAM)
        words = [sys.executable, str(program), str(self.notes), str(code)]
        job = Job("a test", folder / "it's a 50% run", words, 1)
        write(job, batch_script(job, parser().parse_args(["--nodes=2", "--processes-per-node=1"])))
        number = submit(job)
        super().__init__(number, job.folder / f"{number}.log")

    def wait_for_notes(self, restart: int, text: str) -> None:
        """Until both processes of that start have left word."""
        notes = [self.notes / f"{restart}.{rank}" for rank in range(2)]
        wait_for(lambda: all(note.exists() and text in note.read_text() for note in notes), self)

    def end(self) -> None:
        (self.notes / "end").touch()


def test_preempted_and_out_of_time_it_starts_again(slurm, tmp_path):
    job = Waiting(tmp_path)
    job.wait_for_notes(0, " ")
    port = str(10000 + int(job.number))
    assert [(job.notes / f"0.{rank}").read_text() for rank in range(2)] == [
        f"127.0.0.1 127.0.0.1 {port}",
        f"127.0.0.2 127.0.0.1 {port}",
    ]
    job.preempt()
    job.wait_for_notes(0, "saved ['SIGTERM']")
    job.start_again(1)
    job.wait_for_notes(1, port)
    subprocess.run(
        ["scancel", "--signal=USR1", job.number], check=True
    )  # what SLURM does when time is nearly up
    job.wait_for_notes(1, "saved ['SIGUSR1']")
    job.start_again(2)
    job.wait_for_notes(2, port)
    job.end()
    assert job.wait_for_state("COMPLETED", 2)["ExitCode"] == "0:0"
    assert job.log.read_text().count("saved: requeueing the job") == 1  # preempted, SLURM does it without us


def test_a_failure_ends_the_job_with_its_code(slurm, tmp_path):
    job = Waiting(tmp_path, code=3)
    job.end()
    assert job.wait_for_state("FAILED")["ExitCode"] == "3:0"


def test_submitted_from_within_another_job(slurm, tmp_path, monkeypatch):
    """An interactive one, say. What SLURM told that one must not reach the new one: srun stumbles over it."""
    for name, value in {
        "JOB_ID": 1,
        "MEM_PER_CPU": 100,
        "MEM_PER_NODE": 100,
        "CPU_BIND": "mask_cpu:0x0",
    }.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    job = Waiting(tmp_path)
    job.end()
    job.wait_for_state("COMPLETED")


def test_cancelled_it_saves_and_does_not_start_again(slurm, tmp_path):
    job = Waiting(tmp_path)
    job.wait_for_notes(0, " ")
    subprocess.run(["scancel", job.number], check=True)
    job.wait_for_notes(0, "saved ['SIGTERM']")
    job.wait_for_state("CANCELLED")
    assert "requeueing the job" not in job.log.read_text()


WHO = """
import os
from flexor.train.ranks.processes import find_processes
who = find_processes()
print(who.rank, who.world_size, who.local_rank, who.local_world_size, os.environ.get("MASTER_ADDR"))
"""


def test_a_process_finds_out_which_one_it_is(slurm, tmp_path):
    """Also without our script. What the batch script itself starts is alone, whatever SLURM tells it."""
    program, out = tmp_path / "who.py", tmp_path / "out"
    program.write_text(WHO)
    python = shlex.join([sys.executable, str(program)])
    words = ["--nodes=2", "--ntasks-per-node=1", f"--output={out}", f"--wrap={python}; srun {python}"]
    answer = subprocess.run(["sbatch", "--parsable", *words], check=True, capture_output=True, text=True)
    SlurmJob(answer.stdout.strip(), out).wait_for_state("COMPLETED")
    alone, *two = out.read_text().splitlines()
    assert alone == "0 1 0 1 None"
    assert sorted(two) == ["0 2 0 1 127.0.0.1", "1 2 0 1 127.0.0.1"]


def test_what_sbatch_refuses_is_shown(slurm, tmp_path, capsys):
    words = ["--processes-per-node=1", "--partition=nowhere", f"--output_dir={tmp_path / 'run'}"]
    assert main(["launch", "slurm", *words]) == 1
    error = capsys.readouterr().err
    assert (
        "sbatch rejected" in error and "invalid partition" in error and str(tmp_path / "run.slurm") in error
    )


def test_a_training_that_is_stopped_twice_ends_as_if_it_had_not_been(
    slurm, lowdim, tiny_act, warm_python, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(sys, "executable", warm_python)
    steps, sharded = 60, ["--steps=60", "--parallel.strategy=fsdp"]
    uninterrupted, run = tmp_path / "whole", tmp_path / "stopped"
    words = ["--nodes=2", "--processes-per-node=1", "--json", "--"]
    assert main(["launch", "slurm", *words, *runs.flags(lowdim, run, tiny_act, *sharded)]) == 0
    submitted = json.loads(capsys.readouterr().out)
    job = SlurmJob(submitted["job_id"], Path(submitted["log"]))
    wait_for_steps(run, 2, job)
    job.preempt()
    not_stopped = ranks.Ranks(
        tmp_path / "ranks", 2, ["train", *runs.flags(lowdim, uninterrupted, tiny_act, *sharded)]
    )
    job.start_again(1)
    wait_for_steps(run, len(runs.metrics(run)) + 2, job)
    job.time_is_nearly_up()
    job.start_again(2)
    job.wait_for_state("COMPLETED", 2)
    assert not_stopped.end() == [0, 0], not_stopped.errors()

    saved = sorted(checkpoint.complete(run / "checkpoints"))
    assert len(saved) == 3 and saved[-1] == steps, job  # both times it was at work
    assert [line["step"] for line in runs.figures(run)] == list(range(1, steps + 1))
    assert runs.figures(run) == runs.figures(uninterrupted)
    assert ranks.apart(ranks.everything(run, steps), ranks.everything(uninterrupted, steps)) == 0


def wait_for_steps(run: Path, count: int, job: SlurmJob) -> None:
    metrics = run / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= count, job)
