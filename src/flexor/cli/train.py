"""`flexor train`: train a policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flexor.cli import resume
from flexor.cli.flags import start_processes, take_flag, take_processes
from flexor.core.console import print_text
from flexor.core.errors import ConfigError
from flexor.core.log import setup_logging
from flexor.core.run_files import RUN_CONFIG


def run(arguments: list[str]) -> int:
    from flexor.config.parse import config_from_flags, parse_flags

    if take_flag(arguments, "-h", "--help"):
        from flexor.config.help import train_help

        print_text(train_help(str(parse_flags(arguments).get("policy.type", "act"))))
        return 0
    processes = take_processes("train", arguments)
    if processes > 1:
        return start_processes(["train", *arguments], processes)
    from flexor.plan.preflight import Preflight
    from flexor.train.loop import train as run_training

    setup_logging(verbose=take_flag(arguments, "--verbose"))
    as_json = take_flag(arguments, "--json")
    flags = parse_flags(arguments)
    mode = str(flags.pop("resume", "false")).lower()
    if mode == "true":
        return resume.resume_run(_pop_run(flags), flags, as_json)
    config = config_from_flags(flags)
    if config.policy.learns_online:
        from flexor.rl.run import train_online

        return resume.report_run(train_online(config, "auto" if mode == "auto" else "no"), as_json)
    return resume.report_run(run_training(config, "auto" if mode == "auto" else "no", Preflight()), as_json)


def _pop_run(flags: dict[str, Any]) -> Path:
    """The run that `lerobot-train --resume=true --config_path=.../train_config.json` means."""
    if "config" not in flags:
        raise ConfigError(
            "--resume=true requires --config_path=RUN/checkpoints/last/pretrained_model/train_config.json."
        )
    path = Path(flags.pop("config")).absolute()
    for folder in (path, *path.parents):
        if (folder / RUN_CONFIG).is_file():
            return folder
    raise ConfigError(f"--config_path={path} is not in a run folder of Flexor. Use `flexor resume RUN`.")
