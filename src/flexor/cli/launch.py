"""The verb `launch`, and the flags by which `train` and `resume` start several processes themselves."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Callable

from flexor.core.errors import ConfigError
from flexor.core.typed import closest
from flexor.launch.local import describe, flexor_command, supervise

USAGE = """usage: flexor launch WHERE [options] [--] [train | resume RUN] [settings ...]

Start a run somewhere else than in this process.

  local       one process per GPU of this machine
  slurm       a job on a SLURM cluster
  hf-jobs     a job on Hugging Face's machines

`flexor launch WHERE --help` says more. With --dry-run nothing is started, only shown.
"""
VERBS = ("train", "resume")


Run = Callable[[list[str]], int]  # `flexor ARGUMENTS` in this process


def launch(arguments: list[str], run: Run) -> int:
    """`flexor launch WHERE ...`"""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    where, rest = arguments[0], arguments[1:]
    places: dict[str, Run] = {"local": lambda words: local(words, run), "slurm": slurm, "hf-jobs": hf_jobs}
    if where not in places:
        raise ConfigError(f"Can't launch on {where!r}. {closest(where, places)}")
    return places[where](rest)


def slurm(arguments: list[str]) -> int:
    from flexor.launch.slurm import launch_slurm

    return launch_slurm(arguments)


def hf_jobs(arguments: list[str]) -> int:
    from flexor.launch.hf.jobs import launch_hf_jobs

    return launch_hf_jobs(arguments)


def local(arguments: list[str], run: Run) -> int:
    """`flexor launch local ...`: the processes of a run on this machine."""
    parser = argparse.ArgumentParser(
        prog="flexor launch local",
        usage="flexor launch local [--gpus=N | --processes=N] [--max-restarts=R] [--dry-run] "
        "[--] [train | resume RUN] [settings ...]",
        description="Train with one process per GPU of this machine, or go on with a run. Without --gpus and "
        "--processes all visible GPUs are used (CUDA_VISIBLE_DEVICES). Ctrl-C, SIGTERM and SIGUSR1 make the run "
        "save and stop; the exit code is that of the first process that failed (75: saved, start me again).",
        allow_abbrev=False,
        parents=[_process_flags("")],
    )
    parser.add_argument(
        "--max-restarts",
        "--max_restarts",
        default="0",
        metavar="R",
        help="after a crash start all processes again, at most R times, from the last checkpoint",
    )
    parser.add_argument("--dry-run", "--dry_run", action="store_true", help="print what would be started")
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    parsed, settings = parser.parse_known_args(arguments[:cut])
    command = _with_verb([*settings, *arguments[cut + 1 :]])
    if parsed.gpus is None and parsed.processes is None:
        parsed.gpus = "all"
    processes, restarts = _count(parsed), _number("--max-restarts", parsed.max_restarts, 0)
    alone = processes == 1 and restarts == 0
    if parsed.dry_run:
        print(shlex.join(flexor_command(command)) if alone else describe(flexor_command(command), processes))
        return 0
    # one process needs no launcher
    return run(command) if alone else start_processes(command, processes, restarts)


def _with_verb(words: list[str]) -> list[str]:
    """What to start: `train` unless it says."""
    if words and words[0] in VERBS:
        return words
    if words and not words[0].startswith("-") and "=" not in words[0]:
        raise ConfigError(f"Can't launch {words[0]!r}. {closest(words[0], VERBS)}")
    return ["train", *words]


def take_processes(verb: str, arguments: list[str]) -> int:
    """How many processes --gpus or --processes of a verb asks for; they are removed. 1 is this one."""
    parsed, arguments[:] = _process_flags(f"flexor {verb}").parse_known_args(arguments)
    return _count(parsed)


def start_processes(arguments: list[str], processes: int, max_restarts: int = 0) -> int:
    """Run `flexor ARGUMENTS` in several processes on this machine, to the end; the exit code."""
    return supervise(flexor_command(arguments), processes, max_restarts)


def _process_flags(verb: str) -> argparse.ArgumentParser:
    """The flags that say how many processes there are."""
    parser = argparse.ArgumentParser(prog=verb, add_help=False, allow_abbrev=False, usage=argparse.SUPPRESS)
    one = parser.add_mutually_exclusive_group()
    one.add_argument("--gpus", metavar="N", help="GPUs of this machine, a process for each; or all")
    one.add_argument("--processes", metavar="N", help="processes on the CPU instead, GPUs or not")
    return parser


def _count(parsed: argparse.Namespace) -> int:
    """How many processes are asked for; 1 if nothing is said. --processes hides the GPUs from now on."""
    if parsed.gpus is None and parsed.processes is None:
        return 1
    flag = "--processes" if parsed.gpus is None else "--gpus"
    if "RANK" in os.environ or int(os.environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        rank = os.environ.get("RANK") or os.environ.get("SLURM_PROCID")
        raise ConfigError(
            f"{flag}: a launcher has started this process as rank {rank} of several. Leave {flag} out, or start "
            "without that launcher."
        )
    if parsed.gpus is not None:
        return _gpus(parsed.gpus)
    count = _number(flag, parsed.processes, 1)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # also from this process, which may be the only one
    return count


def _gpus(wanted: str) -> int:
    """How many GPUs to use, if they are there."""
    import torch

    count = visible = torch.cuda.device_count()
    if wanted != "all":
        count = _number("--gpus", wanted, 1)
    if visible == 0:
        raise ConfigError(
            f"--gpus={wanted}: PyTorch {torch.__version__} sees no GPU{_masked()}. Look with nvidia-smi, or train on "
            "the CPU with --processes=N."
        )
    if count > visible:
        raise ConfigError(
            f"--gpus={wanted}: {visible} visible{_masked()}. Ask for at most {visible}, or for all."
        )
    return count


def _masked() -> str:
    mask = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "" if mask is None else f" (CUDA_VISIBLE_DEVICES={mask})"


def _number(flag: str, text: str, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise ConfigError(f"{flag}={text}: expected a number, {least} or more.")
    return int(text)
