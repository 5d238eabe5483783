"""`flexor launch`: start a run on several GPUs, on a cluster or in the cloud."""

from __future__ import annotations

import shlex

from flexor.cli import resume, train
from flexor.cli.flags import count_processes, process_flags, read_count, start_processes
from flexor.core.console import print_text
from flexor.core.errors import ConfigError
from flexor.core.option_parser import OptionParser
from flexor.core.typed import closest
from flexor.launch.local import describe, flexor_command

USAGE = """usage: flexor launch WHERE [options] [--] [train | resume RUN] [settings ...]

Start a run on several GPUs, on a cluster or in the cloud.

  local       one process per GPU of this machine
  slurm       a job on a SLURM cluster
  hf-jobs     a job on Hugging Face's machines
  ssh         a machine that you reach by ssh

`flexor launch WHERE --help` shows the options. --dry-run prints what would be started, and starts nothing.
"""
VERBS = {"train": train.run, "resume": resume.run}
PLACES = ("local", "slurm", "hf-jobs", "ssh")


def run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print_text(USAGE)
        return 0
    where, rest = arguments[0], arguments[1:]
    places = dict(zip(PLACES, (local, slurm, hf_jobs, ssh), strict=True))
    if where not in places:
        raise ConfigError(f"Can't launch on {where!r}. {closest(where, places)}")
    return places[where](rest)


def slurm(arguments: list[str]) -> int:
    from flexor.launch.slurm import launch_slurm

    return launch_slurm(arguments)


def hf_jobs(arguments: list[str]) -> int:
    from flexor.launch.hf.jobs import launch_hf_jobs

    return launch_hf_jobs(arguments)


def ssh(arguments: list[str]) -> int:
    from flexor.launch.ssh.launch import launch_ssh

    return launch_ssh(arguments)


def local(arguments: list[str]) -> int:
    """`flexor launch local ...`: start the processes of a run on this machine."""
    parser = OptionParser(
        prog="flexor launch local",
        usage="flexor launch local [--gpus=N | --processes=N] [--max-restarts=R] [--dry-run] "
        "[--] [train | resume RUN] [settings ...]",
        description="Train with one process per GPU of this machine, or continue a run. The default is to use all "
        "visible GPUs (CUDA_VISIBLE_DEVICES). On Ctrl-C, SIGTERM or SIGUSR1 the run saves a checkpoint and stops. The "
        "exit code is that of the first process that failed (75: a checkpoint was saved, so the run can be resumed).",
        parents=[process_flags("")],
    )
    parser.add_argument(
        "--max-restarts",
        "--max_restarts",
        default="0",
        metavar="R",
        help="after a crash, restart all processes from the last checkpoint, at most R times",
    )
    parser.add_argument(
        "--dry-run", "--dry_run", action="store_true", help="print the commands instead of starting them"
    )
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    parsed, settings = parser.parse_known_args(arguments[:cut])
    command = _with_verb([*settings, *arguments[cut + 1 :]])
    if parsed.gpus is None and parsed.processes is None:
        parsed.gpus = "all"
    processes, restarts = count_processes(parsed), read_count("--max-restarts", parsed.max_restarts, 0)
    alone = processes == 1 and restarts == 0
    if parsed.dry_run:
        words = flexor_command(command)
        print_text(shlex.join(words) if alone else describe(words, processes))
        return 0
    if alone:  # one process needs no launcher
        return VERBS[command[0]](command[1:])
    return start_processes(command, processes, restarts)


def _with_verb(words: list[str]) -> list[str]:
    """The command to start; `train` is the default verb."""
    if words and words[0] in VERBS:
        return words
    if words and not words[0].startswith("-") and "=" not in words[0]:
        raise ConfigError(f"Can't launch {words[0]!r}. {closest(words[0], VERBS)}")
    return ["train", *words]
