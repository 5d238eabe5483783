"""Flags that several verbs take: how they are spelled, and how many processes they ask for."""

from __future__ import annotations

import argparse
import os
import re

from flexor.core.errors import ConfigError
from flexor.launch.local import flexor_command, supervise


def take_flag(arguments: list[str], *flags: str) -> bool:
    """Whether one of the flags was given; it is removed."""
    found = [word for word in arguments if word in flags]
    arguments[:] = [word for word in arguments if word not in flags]
    return bool(found)


def dashed(arguments: list[str]) -> list[str]:
    """--image_size is --image-size, since `train` writes its settings with underscores."""
    return [re.sub("^--[^=]*", lambda flag: flag[0].replace("_", "-"), word) for word in arguments]


def take_processes(verb: str, arguments: list[str]) -> int:
    """How many processes --gpus or --processes of a verb asks for; they are removed. 1 is this one."""
    parsed, arguments[:] = process_flags(f"flexor {verb}").parse_known_args(arguments)
    return count_processes(parsed)


def start_processes(arguments: list[str], processes: int, max_restarts: int = 0) -> int:
    """Run `flexor ARGUMENTS` in several processes on this machine, to the end; the exit code."""
    return supervise(flexor_command(arguments), processes, max_restarts)


def process_flags(verb: str) -> argparse.ArgumentParser:
    """The flags that say how many processes there are."""
    parser = argparse.ArgumentParser(prog=verb, add_help=False, allow_abbrev=False, usage=argparse.SUPPRESS)
    one = parser.add_mutually_exclusive_group()
    one.add_argument("--gpus", metavar="N", help="GPUs of this machine, a process for each; or all")
    one.add_argument("--processes", metavar="N", help="processes on the CPU instead, GPUs or not")
    return parser


def count_processes(parsed: argparse.Namespace) -> int:
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
    count = read_count(flag, parsed.processes, 1)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # also from this process, which may be the only one
    return count


def _gpus(wanted: str) -> int:
    """How many GPUs to use, if they are there."""
    import torch

    count = visible = torch.cuda.device_count()
    if wanted != "all":
        count = read_count("--gpus", wanted, 1)
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


def read_count(flag: str, text: str, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise ConfigError(f"{flag}={text}: expected a number, {least} or more.")
    return int(text)
