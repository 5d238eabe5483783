"""`flexor record`: record demonstrations of the built-in task, or episodes of a policy on a server."""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexor.cli.flags import dashed
from flexor.cli.server_flags import server_address, server_flags
from flexor.core.console import print_result, progress
from flexor.core.errors import ConfigError
from flexor.core.option_parser import OptionParser

if TYPE_CHECKING:
    from flexor.evaluate.served import ServerAddress

ROBOT = ("robot", "task", "fps", "seconds", "execute", "max_step", "beyond_training", "when_lost", "rename")
REQUIRED = ("robot", "task", "fps", "seconds")


def run(arguments: list[str]) -> int:
    from flexor.data.format.dataset_files import check_new_folder
    from flexor.sim.record import record_dataset

    options = parser()
    parsed, settings = options.parse_known_args(dashed(arguments))
    server = server_address(parsed)
    flags = vars(parsed)
    for name in ("server", "api_key", "certificate", "jpeg"):
        del flags[name]
    robot = {name: flags.pop(name) for name in ROBOT}
    root, as_json = flags.pop("root"), flags.pop("json")
    successes_only = flags.pop("successes_only")
    check_new_folder(root)
    if any(value is not None for value in robot.values()):
        return _record_robot(root, server, robot, flags, as_json)
    if server is not None:
        return _record_served(root, server, settings, successes_only, as_json, flags)
    for_server = [word for word in settings if word.startswith("--env.")]
    if for_server or successes_only:
        raise ConfigError(
            f"{for_server[0] if for_server else '--successes-only'} needs --server=ws://HOST:PORT."
        )
    options.refuse(parsed, settings)
    record_dataset(root, progress=progress("recording"), **flags)
    print_result({"root": str(root), **flags}, as_json, f"recorded {flags['episodes']} episodes in {root}")
    return 0


def parser() -> OptionParser:
    from flexor.sim.record import OBSERVED, PIXELS

    flags = OptionParser(
        prog="flexor record",
        description="Record demonstrations of the built-in task as a LeRobot dataset. With --server, record instead "
        "what the policy on a server sees and does: in any environment (--env.type=..., --env.kwargs=..., "
        "--env.max_steps=...), or on a robot.",
    )
    add = flags.add_argument
    add("root", type=Path, help="new folder for the dataset")
    add("--episodes", type=int, default=300, metavar="N", help="episodes to record (default: 300)")
    add("--seed", type=int, default=0, help="seed of the first episode (default: 0)")
    size = "height and width of the image in pixels (default: 32)"
    add("--image-size", type=int, default=32, metavar="PIXELS", help=size)
    observed = f"what the policy observes: an image, or the positions of the objects (default: {PIXELS})"
    add("--obs-type", choices=tuple(OBSERVED), default=PIXELS, help=observed)
    add("--codec", choices=("h264", "av1"), default="h264", help="video codec (default: h264)")
    noise = "strength of the disturbances from which the expert recovers: 0 (none) to 1.5 (default: 1)"
    add("--noise", type=float, default=1.0, help=noise)
    actions = (
        "record the expert's action, to imitate, or the executed one, to learn from rewards (default: expert)"
    )
    add("--actions", choices=("expert", "executed"), default="expert", help=actions)
    targets = "discs on the table, 1 or 2; with 2, the task description says which one is meant (default: 1)"
    add("--targets", type=int, default=1, metavar="N", help=targets)
    server_flags(flags)
    add("--successes-only", action="store_true", help="with --server: leave out episodes that failed")
    _add_robot(flags)
    add("--json", action="store_true", help="print one JSON object")
    return flags


def _add_robot(flags: argparse.ArgumentParser) -> None:
    add = flags.add_argument_group("a robot, driven by the policy of --server").add_argument
    add("--robot", metavar="FILE.py:FUNCTION", help="function that returns a LeRobot robot")
    add("--task", help="the task in words")
    add("--fps", type=float, help="control steps per second")
    add("--seconds", type=float, help="length of an episode")
    add(
        "--execute",
        type=int,
        metavar="N",
        help="actions of a chunk to execute before the next chunk takes over",
    )
    add("--max-step", type=float, help="largest change of any joint per step; actions are clamped to it")
    add(
        "--beyond-training",
        type=_beyond_training,
        metavar="WIDTHS",
        help="how far outside the range in the training data an action may be before it is refused, in widths of that "
        "range (default: 1); any: not checked",
    )
    lost = "what the robot does if the connection is lost (default: finish)"
    add("--when-lost", choices=("finish", "hold", "stop"), help=lost)
    renamed = "what the policy calls a camera; repeatable"
    add("--rename", action="append", metavar="NAME=INPUT", help=renamed)


def _beyond_training(text: str) -> float:
    value = math.inf if text == "any" else float(text)
    if not value >= 0:
        raise ValueError(text)
    return value


def _record_served(
    root: Path,
    server: ServerAddress,
    settings: list[str],
    successes_only: bool,
    as_json: bool,
    parsed: dict[str, Any],
) -> int:
    from flexor.config.parse import nest, parse_flags
    from flexor.config.schema import EnvConfig
    from flexor.core.typed import from_plain
    from flexor.evaluate.envs import open_env
    from flexor.evaluate.served import record_served

    flags = parse_flags(settings)
    unknown = [key for key in flags if not key.startswith("env.")]
    if unknown:
        raise ConfigError(f"Unknown setting {unknown[0]}: with --server, only env.* can be set.")
    if parsed["noise"] != 1.0:
        raise ConfigError(
            "--noise disturbs the expert; the policy on a server is not disturbed. Leave it out."
        )
    env = from_plain(EnvConfig, nest(flags).get("env", {}), "env")
    kind, kwargs = env.type or "place", dict(env.kwargs)
    if kind == "place":
        kwargs = {name: parsed[name] for name in ("image_size", "obs_type", "targets")} | kwargs
    counts = record_served(
        root,
        server,
        lambda: open_env(replace(env, type=kind, kwargs=kwargs)),
        episodes=parsed["episodes"],
        seed=parsed["seed"],
        max_steps=env.max_steps,
        successes_only=successes_only,
        codec=parsed["codec"],
        progress=progress("recording"),
    )
    text = f"recorded {counts['episodes']} episodes in {root}; {counts['successes']} of {parsed['episodes']} succeeded"
    print_result({"root": str(root), "server": server.url, "env": kind, **counts}, as_json, text)
    return 0


def _record_robot(
    root: Path, server: ServerAddress | None, robot: dict[str, Any], parsed: dict[str, Any], as_json: bool
) -> int:
    from flexor.evaluate.robot_record import RobotSession, make_robot, record_robot
    from flexor_client import ActionLimits

    missing = [f"--{name}" for name in REQUIRED if robot[name] is None] + ([] if server else ["--server"])
    if server is None or missing:
        raise ConfigError(f"To record a robot, also give {', '.join(missing)}.")
    pairs = [word.partition("=") for word in robot["rename"] or ()]
    if not all(name and theirs for name, _, theirs in pairs):
        raise ConfigError(
            f"--rename={robot['rename'][0]}: give NAME=INPUT, such as top=observation.images.front."
        )
    session = RobotSession(
        task=robot["task"],
        fps=robot["fps"],
        episodes=parsed["episodes"],
        seconds=robot["seconds"],
        execute=robot["execute"],
        when_lost=robot["when_lost"] or "finish",
        rename={name: theirs for name, _, theirs in pairs},
        limits=ActionLimits(step=robot["max_step"]) if robot["max_step"] else None,
        beyond_training=1.0 if robot["beyond_training"] is None else robot["beyond_training"],
        codec=parsed["codec"],
    )

    def ask(number: int) -> None:
        if sys.stdin.isatty():
            input(f"Episode {number + 1} of {session.episodes}: prepare the scene, then press Enter. ")

    counts = record_robot(
        root, server, make_robot(robot["robot"]), session, before_episode=ask, progress=progress("recording")
    )
    text = f"recorded {counts['episodes']} episodes, {counts['frames']} frames, in {root}"
    print_result({"root": str(root), "server": server.url, **counts}, as_json, text)
    return 0
