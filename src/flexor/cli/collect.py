"""`flexor collect`: act in an environment with the policy of a learner on another machine, which learns from it."""

from __future__ import annotations

import os
import socket
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flexor.cli.serve import KEY
from flexor.core.console import print_result
from flexor.core.errors import ConfigError
from flexor.core.option_parser import OptionParser

GROUPS = ("env", "rl")


def parser() -> OptionParser:
    flags = OptionParser(
        prog="flexor collect",
        description="Act in an environment (--env.type=..., --env.kwargs=...) with the policy of a learner on another "
        "machine: `flexor train --policy.type=sac --rl.serve.port=...`. The policy runs here and gets new weights "
        "while it acts; the learner gets every step. While the learner is gone, steps are kept on the disk.",
    )
    add = flags.add_argument
    add("learner", metavar="URL", help="address of the learner: ws://HOST:PORT, or wss:// with TLS")
    add(
        "--actor",
        default=socket.gethostname()[:64],
        metavar="NAME",
        help="name of this actor (default: this host's)",
    )
    add(
        "--spool",
        type=Path,
        metavar="FOLDER",
        help="folder for steps that the learner does not have yet, one for each actor (default: runs/actors/NAME)",
    )
    add(
        "--wait",
        choices=("episode", "step"),
        default="episode",
        help="wait for a learner that has more than its rl.serve.max_lag steps still to learn from: before an episode "
        "(default), or before any step, for a simulator that is faster than the learner",
    )
    add("--device", default="cpu", help="cpu, cuda, cuda:1 or mps, where the policy acts (default: cpu)")
    add("--api-key", metavar="KEY", help=f"API key of the learner; safer in the environment variable {KEY}")
    add(
        "--certificate",
        type=Path,
        metavar="FILE",
        help="certificate (PEM) to trust, if the learner's is self-signed",
    )
    add("--jpeg", type=int, metavar="QUALITY", help="send images as JPEG of this quality, from 1 to 100")
    add("--json", action="store_true", help="print one JSON object at the end")
    return flags


def run(arguments: list[str]) -> int:
    parsed, more = parser().parse_known_args(arguments)
    settings = _settings(more)
    from flexor.config.rl import RLConfig
    from flexor.config.schema import EnvConfig
    from flexor.core.devices import find_device
    from flexor.core.typed import check_values, from_plain
    from flexor.evaluate.served import ServerAddress
    from flexor.rl.actor import ActorSettings, collect

    env = from_plain(EnvConfig, settings.get("env", {}), "env")
    rl = from_plain(RLConfig, settings.get("rl", {}), "rl")
    check_values(rl, "rl")
    if env.type is None:
        raise ConfigError("Say where to act with --env.type=place, or any gymnasium id.")
    key = parsed.api_key or os.environ.get(KEY) or None
    learner = ServerAddress(parsed.learner, key, parsed.certificate, parsed.jpeg)
    spool = parsed.spool or Path("runs") / "actors" / _as_folder(parsed.actor)
    actor = ActorSettings(learner, parsed.actor, spool, str(find_device(parsed.device)), parsed.wait)
    result = collect(actor, env, rl)
    text = f"{result.steps} steps, {result.episodes} episodes, {result.successes} successes"
    if result.pending and not result.finished:
        text += (
            f"; {result.pending} steps are in {spool}, and are handed over when this actor is started again"
        )
    print_result({**asdict(result), "spool": str(spool)}, parsed.json, text)
    return 0


def _settings(words: list[str]) -> dict[str, Any]:
    from flexor.config.parse import code_in, nest, parse_flags
    from flexor.core.trust import trust

    flags = parse_flags(words)
    for name in flags:
        if name.partition(".")[0] not in GROUPS:
            raise ConfigError(f"Unknown setting --{name}. Settings of an actor begin with --env. or --rl.")
    trust(code_in(flags))
    return nest(flags)


def _as_folder(name: str) -> str:
    return (
        "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in name).lstrip(".")
        or "actor"
    )
