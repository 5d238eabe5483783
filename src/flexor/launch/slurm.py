"""Runs a training as a job on a SLURM cluster: writes a readable batch script, and submits it.

SLURM starts the processes, one task each, and Flexor reads its rank from SLURM's variables. The same command starts
a run and resumes it (`--resume=auto`), so a job that was preempted, requeued or submitted again just runs its script
again. Flexor does not check the cluster's own settings (partitions, modules, quotas): sbatch does, and its error
messages are better than ours could be.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flexor.config.schema import TrainConfig
from flexor.core.console import print_result
from flexor.core.errors import ConfigError, FlexorError
from flexor.core.log import log
from flexor.core.option_parser import OptionParser
from flexor.core.output_paths import check_output_folder
from flexor.core.typed import closest
from flexor.launch.local import flexor_command
from flexor.launch.passwords import refuse_passwords

STOPPED = 75  # exit code of a run that saved a checkpoint and should be started again


@dataclass
class Job:
    """The command of a job's processes, and its folders."""

    name: str
    run: Path
    program: list[str]
    cores: int  # per process
    files: dict[Path, str] = field(default_factory=dict)  # files that the program reads, for the job's folder

    @property
    def folder(self) -> Path:
        return job_folder(self.run)

    @property
    def script(self) -> Path:
        return self.folder / "job.sbatch"


def job_folder(run: Path) -> Path:
    """Folder for script and logs. It is next to the run folder, because a new run's folder must be empty."""
    return run.with_name(f"{run.name}.slurm")


def launch_slurm(arguments: list[str]) -> int:
    """`flexor launch slurm ...`"""
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    options, words = parser().parse_known_args([_dashed(word) for word in arguments[:cut]])
    if options.signal_before >= seconds(options.time):
        raise ConfigError(
            f"--signal-before={options.signal_before} seconds leaves nothing of --time={options.time}: increase --time."
        )
    words += arguments[cut + 1 :]
    job = _job(words)
    copied = [line for text in job.files.values() for line in text.splitlines()]
    refuse_passwords([*words, *copied], str(job.folder))
    check_output_folder(job.folder, "--output_dir")
    text = batch_script(job, options)
    result: dict[str, Any] = {"run": str(job.run), "script": str(job.script), "job_id": None, "log": None}
    if options.dry_run:
        print_result({**result, "text": text}, options.json, text.rstrip())
        return 0
    write(job, text)
    if shutil.which("sbatch") is None:
        log.warning("the command sbatch was not found, so nothing is submitted")
        print_result(result, options.json, f"submit it on the cluster: sbatch {shlex.quote(str(job.script))}")
        return 1
    number = submit(job)
    result |= {"job_id": number, "log": str(job.folder / f"{number}.log")}
    print_result(result, options.json, _next_steps(result))
    return 0


def write(job: Job, text: str) -> None:
    job.folder.mkdir(parents=True, exist_ok=True)
    for path, content in {**job.files, job.script: text}.items():
        path.write_text(content)


def submit(job: Job) -> str:
    """Submit the script to SLURM; returns the job id."""
    environment = dict(os.environ)
    if (
        "SLURM_JOB_ID" in environment
    ):  # such as an interactive job: its SLURM variables would mislead srun in this job
        environment = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_") or k == "SLURM_CONF"}
    answer = subprocess.run(
        ["sbatch", "--parsable", job.script], env=environment, capture_output=True, text=True
    )
    if answer.returncode != 0:
        raise FlexorError(
            f"sbatch rejected the job: {answer.stderr.strip()}\nIts script is {job.script}. Change the job with the "
            "flags of `flexor launch slurm`; --sbatch='--FLAG=VALUE' adds what this cluster needs."
        )
    return answer.stdout.strip().partition(";")[0]  # NUMBER;CLUSTER if there are several clusters


def _next_steps(result: dict[str, Any]) -> str:
    job, path = result["job_id"], shlex.quote(result["script"])
    return (
        f"submitted job {job}, run folder {result['run']}\n"
        f"  follow:  tail -F {shlex.quote(result['log'])}\n"
        f"  status:  squeue --jobs={job}\n"
        f"  cancel:  scancel {job}   (it saves first, if SLURM gives it the time)\n"
        f"  resume:  sbatch {path}   (after it was cancelled or failed)"
    )


# --- flags

EACH = "GPUs per node, one process for each; a100:4 also sets the type"
SAVES = "how long before the time limit the run saves a checkpoint and stops"
OTHER = "any other flag of sbatch, such as --sbatch='--exclusive'; repeatable"


def parser() -> argparse.ArgumentParser:
    flags = OptionParser(
        prog="flexor launch slurm",
        usage="flexor launch slurm [options] [--] [train | resume RUN] [settings ...]",
        description="Write a batch script for SLURM and submit it. Before its time limit, the job saves a checkpoint "
        "and requeues itself, and then resumes where it stopped. It is named after the run's job_name. Script and logs "
        "are in RUN.slurm, next to the run folder. Settings of the run may also be given before --.",
    )

    def add(group: Any, flag: str, **kwargs: Any) -> None:
        if kwargs.get("type") is int:
            kwargs["type"] = _number(flag)
        group.add_argument(flag, **kwargs)

    tasks = flags.add_mutually_exclusive_group()
    add(flags, "--nodes", type=int, default=1, metavar="N", help="number of nodes (default 1)")
    add(tasks, "--gpus-per-node", type=_gpus, default="1", metavar="[TYPE:]G", help=f"{EACH} (default 1)")
    add(tasks, "--processes-per-node", type=int, metavar="P", help="processes per node, training on the CPU")
    add(flags, "--time", default="24:00:00", help="time limit, in SLURM's format (default 24:00:00)")
    add(flags, "--signal-before", type=int, default=120, metavar="SECONDS", help=f"{SAVES} (default 120)")
    add(
        flags,
        "--cpus-per-task",
        type=int,
        metavar="C",
        help="CPU cores per process (default num_workers + 1)",
    )
    add(flags, "--mem", help="memory per node, such as 64G (default: the cluster's)")
    for name in ("partition", "account", "qos", "constraint"):
        add(flags, f"--{name}", help="as for sbatch")
    add(flags, "--sbatch", type=_sbatch_flag, action="append", default=[], metavar="FLAG", help=OTHER)
    add(flags, "--setup", metavar="LINES", help="shell commands to run first: 'module load cuda; export A=B'")
    add(flags, "--dry-run", action="store_true", help="print the script, but write and submit nothing")
    add(flags, "--json", action="store_true", help="print one JSON object")
    return flags


def _dashed(word: str) -> str:
    """--gpus_per_node is the same as --gpus-per-node, because settings are written with underscores."""
    return re.sub("^--[^=]*", lambda flag: flag[0].replace("_", "-"), word)


def _number(flag: str) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < 1:
            raise ConfigError(f"{flag}={text}: expected a number, 1 or more.")
        return int(text)

    return read


def _gpus(text: str) -> str:
    if not re.fullmatch(r"([\w.-]+:)?[1-9]\d*", text):
        raise ConfigError(f"--gpus-per-node={text}: expected a number such as 4, or a100:4 to name the type.")
    return text


def _sbatch_flag(text: str) -> str:
    if not text.startswith("-") or "\n" in text:
        raise ConfigError(f"--sbatch={text}: expected a flag of sbatch, such as --sbatch='--exclusive'.")
    return text


def seconds(time: str) -> int:
    """Parse a time limit in SLURM's format: M, M:S, H:M:S, D-H, D-H:M or D-H:M:S."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", time)
    if match is None:
        raise ConfigError(
            f"--time={time}: expected HOURS:MINUTES:SECONDS or DAYS-HOURS, such as 24:00:00 or 2-12."
        )
    days, *clock = match.groups()
    numbers = [int(part) for part in clock if part is not None]
    if days is None and len(numbers) < 3:
        numbers.insert(0, 0)  # without days, a single number is minutes
    hours, minutes, rest = [*numbers, 0, 0][:3]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + rest


# --- the command


def _job(words: list[str]) -> Job:
    """Check the training's arguments now: a mistake should not wait in a queue first."""
    verb = words[0] if words and not words[0].startswith("-") and "=" not in words[0] else None
    for word in words:
        if word.partition("=")[0] in ("--gpus", "--processes"):
            raise ConfigError(
                f"{word}: SLURM starts the processes. Use --gpus-per-node or --processes-per-node."
            )
    if verb == "resume":
        return _resume(words[1:])
    if verb not in ("train", None):
        raise ConfigError(f"Can't launch {verb!r}. {closest(verb, ('train', 'resume'))}")
    return _train(words[1:] if verb else words)


def _resume(words: list[str]) -> Job:
    from flexor.config.parse import parse_flags
    from flexor.train.checkpoint.resume import resumed_config

    if not words or words[0].startswith("-"):
        raise ConfigError("No run given. Give its folder: flexor launch slurm ... -- resume RUN.")
    run = Path(words[0]).absolute()
    return _make(resumed_config(run, parse_flags(words[1:])), run, ["resume", str(run), *words[1:]], {})


def _train(words: list[str]) -> Job:
    from flexor.config.parse import config_from_flags, parse_flags, to_words
    from flexor.train.checkpoint.run_folder import default_folder

    flags = parse_flags(words)
    resume = str(flags.pop("resume", "")).lower()
    if resume not in ("", "auto"):
        raise ConfigError(
            f"--resume={resume} is not supported: resume a run with `flexor launch slurm ... -- resume RUN`."
        )
    config = config_from_flags(flags)
    run = Path(config.output_dir or default_folder(config.job_name or config.policy.type)).absolute()
    check_output_folder(run, "--output_dir")
    if not resume and run.exists() and any(run.iterdir()):
        raise ConfigError(
            f"output_dir={run} is not empty. Resume that run with `flexor launch slurm ... -- resume {run}`, "
            "or choose another folder."
        )
    files = {}
    if Path(flags.get("config", "")).is_file():
        # a copy, because a job may wait for days: editing the file in the meantime must not change the job
        copy = job_folder(run) / f"settings{Path(flags['config']).suffix}"
        files[copy] = Path(flags["config"]).read_text()
        flags["config"] = copy
    return _make(config, run, ["train", *to_words({**flags, "output_dir": run, "resume": "auto"})], files)


def _make(config: TrainConfig, run: Path, words: list[str], files: dict[Path, str]) -> Job:
    cores = config.num_workers + 1  # one per prefetch thread, and one for the loop
    return Job(config.job_name or config.policy.type, run, flexor_command(words), cores, files)


# --- the script


def batch_script(job: Job, options: argparse.Namespace) -> str:
    """The script for sbatch, with comments that explain it."""
    on_cpu = options.processes_per_node is not None
    setup = f"\n# --setup\n{options.setup}\n" if options.setup else ""
    hide_gpus = (
        'export CUDA_VISIBLE_DEVICES=""  # train on the CPU, even if the nodes have GPUs\n' if on_cpu else ""
    )
    words = [shlex.quote(word) for word in job.program]
    program = " \\\n    ".join([" ".join(words[:4]), *words[4:]])
    return f"""#!/bin/bash
# A training with Flexor. Submit it with sbatch, again if needed: it starts the run, or resumes it.
# Run folder: {_one_line("output_dir", job.run)}
{_flags(job, options)}
{setup}
# The processes connect to the first node, at a port that other jobs there are unlikely to use.
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000))
# srun does not inherit --cpus-per-task from sbatch.
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
export OMP_NUM_THREADS=${{OMP_NUM_THREADS:-$SLURM_CPUS_PER_TASK}}
{hide_gpus}
# Processes that were told to stop end one by one: srun must not kill the others while they save. If one dies or
# hangs, the others stop by themselves (--parallel.timeout_s).
code=0
srun --kill-on-bad-exit=0 --wait=0 \\
  {program} || code=$?

# {STOPPED}: told to stop, and saved. A cancelled job does not get this far, and SLURM itself requeues a preempted one.
if [ "$code" -eq {STOPPED} ]; then
  echo "saved: requeueing the job"
  scontrol requeue "$SLURM_JOB_ID" || echo "SLURM refused. Resume with: sbatch" {shlex.quote(str(job.script))}
fi
exit "$code"
"""


def _flags(job: Job, options: argparse.Namespace) -> str:
    """The #SBATCH lines."""
    on_cpu = options.processes_per_node is not None
    gpus = int(options.gpus_per_node.rpartition(":")[2])
    lines = [
        _line("job-name", job.name),
        *(_line(name, getattr(options, name)) for name in ("partition", "account", "qos", "constraint")),
        _line("nodes", options.nodes),
        "# processes per node" if on_cpu else "# processes per node: one for each GPU",
        _line("ntasks-per-node", options.processes_per_node if on_cpu else gpus),
        _line("gpus-per-node", None if on_cpu else options.gpus_per_node),
        _line("cpus-per-task", options.cpus_per_task or job.cores),
        _line("mem", options.mem),
        _line("time", options.time),
        "# this many seconds before the time limit, the run is told to save a checkpoint and stop",
        _line("signal", f"USR1@{options.signal_before}"),
        "# restart after a preemption or a node failure; all starts append to one log",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        _line("output", f"{str(job.folder).replace('%', '%%')}/%j.log"),
        _line("chdir", Path.cwd()),
        *(f"#SBATCH {flag}" for flag in options.sbatch),
    ]
    return "\n".join(line for line in lines if line)


def _line(name: str, value: object) -> str:
    """One #SBATCH line; sbatch reads quotes like a shell."""
    return "" if value is None else f"#SBATCH --{name}={shlex.quote(_one_line(name, value))}"


def _one_line(name: str, value: object) -> str:
    """The text, if it is one line: what follows would be commands of the script. It may be from a stranger's file."""
    text = str(value)
    if text.splitlines() != [text]:
        raise ConfigError(
            f"{name}={text!r} has a line break, which a batch script can't contain: choose another one."
        )
    return text
