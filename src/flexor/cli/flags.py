"""Flags that several verbs share: their spelling, the number of processes they request, a robot without a dataset."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from flexor.core.errors import ConfigError
from flexor.core.option_parser import OptionParser
from flexor.launch.local import flexor_command, supervise

if TYPE_CHECKING:
    from flexor.config.schema import TrainConfig
    from flexor.plan.data.imagined_robot import Robot

ROBOT = ("cameras", "state", "action")
PRECISIONS = ("float32", "tf32", "bfloat16")  # of predictions


def take_flag(arguments: list[str], *flags: str) -> bool:
    """Whether one of the flags was given. It is removed from the arguments."""
    rest = [word for word in arguments if word not in flags]
    is_set = len(rest) < len(arguments)
    arguments[:] = rest
    return is_set


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
    parser = OptionParser(prog=verb, add_help=False, usage=argparse.SUPPRESS)
    exclusive = parser.add_mutually_exclusive_group()
    exclusive.add_argument(
        "--gpus", metavar="N", help="number of GPUs on this machine, one process per GPU; or all"
    )
    exclusive.add_argument(
        "--processes", metavar="N", help="number of processes on the CPU; GPUs are not used"
    )
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


def _gpus(text: str) -> int:
    """How many GPUs to use; an error if fewer are visible."""
    import torch

    count = visible = torch.cuda.device_count()
    if text != "all":
        count = read_count("--gpus", text, 1)
    if visible == 0:
        raise ConfigError(
            f"--gpus={text}: PyTorch {torch.__version__} sees no GPU{_masked()}. Check the GPUs with nvidia-smi, "
            "or train on the CPU with --processes=N."
        )
    if count > visible:
        raise ConfigError(
            f"--gpus={text}: the number of visible GPUs is {visible}{_masked()}. Use at most {visible}, "
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


def robot_flags(group: Any) -> None:
    """The flags that describe a robot, for verbs that need no dataset."""
    group.add_argument(
        "--cameras",
        metavar="NxHxW",
        help="number of cameras, height, width (default 2x480x640, or another size that the policy supports)",
    )
    group.add_argument(
        "--state", type=int, metavar="N", help="number of values in the robot's state (default 14)"
    )
    group.add_argument("--action", type=int, metavar="N", help="number of values in an action (default 14)")


def names_dataset(
    parsed: argparse.Namespace, settings: Mapping[str, Any], describing: Collection[str] = ROBOT
) -> bool:
    """Whether the settings name a dataset. To describe one as well, with the flags `describing`, is an error."""
    from flexor.config.parse import DATASETS

    if not {"config", *DATASETS} & settings.keys():
        return False
    described = [name for name in describing if getattr(parsed, name) is not None]
    if described:
        raise ConfigError(
            f"--{min(described)} describes a dataset that is not recorded yet, but a dataset is given too. "
            "Leave out one of them."
        )
    return True


def described_run(parsed: argparse.Namespace, settings: Mapping[str, Any]) -> tuple[TrainConfig, Robot]:
    """The settings of a run without a dataset, with the policy's features filled in, and the robot described."""
    from dataclasses import replace

    from flexor.config.parse import config_from_flags
    from flexor.plan.data.imagined_robot import Robot, parse_cameras, usual_robot

    config = config_from_flags({**settings, "dataset.repo_id": "planned/dataset"})
    sizes = {name: getattr(parsed, name) for name in ("state", "action") if getattr(parsed, name) is not None}
    if parsed.cameras is None:
        with suppress(ConfigError):  # below is the error of the default robot
            robot, policy = usual_robot(config.policy, **sizes)
            return replace(config, policy=policy), robot
    robot = Robot(*parse_cameras(parsed.cameras or "2x480x640"), **sizes)
    return replace(config, policy=robot.fill_in(config.policy)), robot
