"""`flexor record`: record demonstrations of the built-in task, or episodes of a policy on a server."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexor.cli.flags import dashed
from flexor.cli.server_flags import server_address, server_flags
from flexor.core.console import print_result, progress
from flexor.core.errors import ConfigError

if TYPE_CHECKING:
    from flexor.evaluate.served import ServerAddress

ROBOT = ("robot", "task", "fps", "seconds", "execute", "max_step", "beyond_training", "when_lost", "rename")
NEEDED = ("robot", "task", "fps", "seconds")


def run(arguments: list[str]) -> int:
    from flexor.data.format.dataset_files import check_new_folder
    from flexor.sim.record import OBSERVED, PIXELS, record_dataset

    parser = argparse.ArgumentParser(
        prog="flexor record",
        description="Record demonstrations of the built-in task as a LeRobot dataset. With --server, what the served "
        "policy sees and does, in any environment (--env.type=..., --env.kwargs=..., --env.max_steps=...).",
        allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("root", type=Path, help="new folder for the dataset")
    parser.add_argument("--episodes", type=int, default=300, help="demonstrations to record")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first episode")
    parser.add_argument("--image-size", type=int, default=32, help="height and width of the image, in pixels")
    parser.add_argument(
        "--obs-type",
        choices=tuple(OBSERVED),
        default=PIXELS,
        help="what the policy observes: an image, or the positions of the objects",
    )
    parser.add_argument("--codec", choices=("h264", "av1"), default="h264", help="video codec")
    parser.add_argument(
        "--noise",
        type=float,
        default=1.0,
        help="strength of the disturbances that the expert recovers from, 0 (none) to 1.5",
    )
    parser.add_argument(
        "--targets",
        type=int,
        default=1,
        help="discs on the table; with 2, a green and a blue one, the task description says which is meant",
    )
    server_flags(parser)
    parser.add_argument(
        "--successes-only", action="store_true", help="with --server: leave out episodes that failed"
    )
    robot = parser.add_argument_group("a robot, driven by the policy of --server")
    add = robot.add_argument
    add("--robot", metavar="FILE.py:FUNCTION", help="a function that returns a robot of LeRobot's")
    add("--task", help="the task in words")
    add("--fps", type=float, help="steps of the robot per second")
    add("--seconds", type=float, help="length of an episode")
    add("--execute", type=int, help="actions of a chunk to execute before the next one takes over")
    add("--max-step", type=float, help="clamp actions to this change of any joint per step")
    add(
        "--beyond-training",
        type=_beyond_training,
        metavar="WIDTHS",
        help="how far outside of the range in its training data an action may be, in widths of that range, before it "
        "is refused (default 1); any: not checked",
    )
    add("--when-lost", choices=("finish", "hold", "stop"), help="what the robot does if the server is lost")
    add(
        "--rename",
        action="append",
        metavar="NAME=INPUT",
        help="a camera's name for the policy; several times",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    given, more = parser.parse_known_args(dashed(arguments))
    server = server_address(given)
    parsed = vars(given)
    for name in ("server", "api_key", "certificate", "jpeg"):
        del parsed[name]
    driven = {name: parsed.pop(name) for name in ROBOT}
    root, as_json = parsed.pop("root"), parsed.pop("json")
    successes_only = parsed.pop("successes_only")
    check_new_folder(root)
    if any(value is not None for value in driven.values()):
        return _record_robot(root, server, driven, parsed, as_json)
    if server is not None:
        return _record_served(root, server, more, successes_only, as_json, parsed)
    if more or successes_only:
        raise ConfigError(f"{more[0] if more else '--successes-only'} needs --server=ws://HOST:PORT.")
    record_dataset(root, progress=progress("recording"), **parsed)
    print_result({"root": str(root), **parsed}, as_json, f"recorded {parsed['episodes']} episodes in {root}")
    return 0


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
    from flexor.evaluate.envs import make_env
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
        lambda: make_env(kind, task=env.task, package=env.package, **kwargs),
        episodes=parsed["episodes"],
        seed=parsed["seed"],
        max_steps=env.max_steps,
        successes_only=successes_only,
        codec=parsed["codec"],
        progress=progress("recording"),
    )
    told = f"recorded {counts['episodes']} episodes in {root}; {counts['successes']} of {parsed['episodes']} succeeded"
    print_result({"root": str(root), "server": server.url, "env": kind, **counts}, as_json, told)
    return 0


def _record_robot(
    root: Path, server: ServerAddress | None, driven: dict[str, Any], parsed: dict[str, Any], as_json: bool
) -> int:
    from flexor.evaluate.robot_record import RobotSession, make_robot, record_robot
    from flexor_client import ActionLimits

    missing = [f"--{name}" for name in NEEDED if driven[name] is None] + ([] if server else ["--server"])
    if server is None or missing:
        raise ConfigError(f"To record a robot, also give {', '.join(missing)}.")
    pairs = [word.partition("=") for word in driven["rename"] or ()]
    if not all(name and theirs for name, _, theirs in pairs):
        raise ConfigError(
            f"--rename={driven['rename'][0]}: give NAME=INPUT, such as top=observation.images.front."
        )
    session = RobotSession(
        task=driven["task"],
        fps=driven["fps"],
        episodes=parsed["episodes"],
        seconds=driven["seconds"],
        execute=driven["execute"],
        when_lost=driven["when_lost"] or "finish",
        rename={name: theirs for name, _, theirs in pairs},
        limits=ActionLimits(step=driven["max_step"]) if driven["max_step"] else None,
        beyond_training=1.0 if driven["beyond_training"] is None else driven["beyond_training"],
        codec=parsed["codec"],
    )

    def ask(number: int) -> None:
        if sys.stdin.isatty():
            input(f"Episode {number + 1} of {session.episodes}: prepare the scene, then press Enter. ")

    counts = record_robot(
        root, server, make_robot(driven["robot"]), session, before_episode=ask, progress=progress("recording")
    )
    told = f"recorded {counts['episodes']} episodes, {counts['frames']} frames, in {root}"
    print_result({"root": str(root), "server": server.url, **counts}, as_json, told)
    return 0
