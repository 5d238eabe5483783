"""Flags that several verbs share: their spelling, and the number of processes they request."""

from __future__ import annotations

import argparse
import os
import re

from flexor.core.errors import ConfigError
from flexor.launch.local import flexor_command, supervise


def take_flag(arguments: list[str], *flags: str) -> bool:
    """Whether one of the flags was given. It is removed from the arguments."""
    found = [word for word in arguments if word in flags]
    arguments[:] = [word for word in arguments if word not in flags]
    return bool(found)


def dashed(arguments: list[str]) -> list[str]:
    """Accept --image_size for --image-size, because settings of `train` are written with underscores."""
    return [re.sub("^--[^=]*", lambda flag: flag[0].replace("_", "-"), word) for word in arguments]


def take_processes(verb: str, arguments: list[str]) -> int:
    """How many processes --gpus or --processes requests; 1 means this process. The flags are removed."""
    parsed, arguments[:] = process_flags(f"flexor {verb}").parse_known_args(arguments)
    return count_processes(parsed)


def start_processes(arguments: list[str], processes: int, max_restarts: int = 0) -> int:
    """Run `flexor ARGUMENTS` in several processes on this machine until they end. Returns the exit code."""
    return supervise(flexor_command(arguments), processes, max_restarts)


def process_flags(verb: str) -> argparse.ArgumentParser:
    """The flags that set the number of processes."""
    parser = argparse.ArgumentParser(prog=verb, add_help=False, allow_abbrev=False, usage=argparse.SUPPRESS)
    one = parser.add_mutually_exclusive_group()
    one.add_argument(
        "--gpus", metavar="N", help="number of GPUs on this machine, one process per GPU; or all"
    )
    one.add_argument("--processes", metavar="N", help="number of processes on the CPU; GPUs are not used")
    return parser


def count_processes(parsed: argparse.Namespace) -> int:
    """How many processes are requested; the default is 1. --processes hides the GPUs from now on."""
    if parsed.gpus is None and parsed.processes is None:
        return 1
    flag = "--processes" if parsed.gpus is None else "--gpus"
    if "RANK" in os.environ or int(os.environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        rank = os.environ.get("RANK") or os.environ.get("SLURM_PROCID")
        raise ConfigError(
            f"{flag}: a launcher has already started this process as rank {rank} of several. Leave out {flag}, or "
            "start Flexor without the launcher."
        )
    if parsed.gpus is not None:
        return _gpus(parsed.gpus)
    count = read_count(flag, parsed.processes, 1)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # for this process too: it may be the only one
    return count


def _gpus(wanted: str) -> int:
    """How many GPUs to use; an error if fewer are visible."""
    import torch

    count = visible = torch.cuda.device_count()
    if wanted != "all":
        count = read_count("--gpus", wanted, 1)
    if visible == 0:
        raise ConfigError(
            f"--gpus={wanted}: PyTorch {torch.__version__} sees no GPU{_masked()}. Check the GPUs with nvidia-smi, "
            "or train on the CPU with --processes=N."
        )
    if count > visible:
        raise ConfigError(
            f"--gpus={wanted}: the number of visible GPUs is {visible}{_masked()}. Use at most {visible}, "
            "or --gpus=all."
        )
    return count


def _masked() -> str:
    mask = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "" if mask is None else f" (CUDA_VISIBLE_DEVICES={mask})"


def read_count(flag: str, text: str, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise ConfigError(f"{flag}={text} must be an integer of at least {least}.")
    return int(text)
