"""`flexor resume`: continue a run from its newest checkpoint."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flexor.cli.flags import start_processes, take_flag, take_processes
from flexor.core.console import GREEN, print_result, print_text, table
from flexor.core.errors import ConfigError
from flexor.core.log import setup_logging


def run(arguments: list[str]) -> int:
    if take_flag(arguments, "-h", "--help"):
        print_text(
            "usage: flexor resume RUN [--steps=N] [--key=value ...] [--gpus=N | --processes=N] [--verbose] [--json]\n"
            "       flexor resume hub:USER/NAME[@REVISION] [--output_dir=FOLDER] ...\n\n"
            "Continue the run in folder RUN from its newest checkpoint. Settings that would make it a\n"
            "different run can't be changed. --gpus=N starts one process per GPU (N or all),\n"
            "--processes=N starts N processes on the CPU.\n\n"
            "hub:USER/NAME is a run that was pushed with its checkpoints: the newest complete one is\n"
            "downloaded to --output_dir, by default runs/NAME.\n\n"
            "If the run's policy is code that is not part of Flexor, name it to have it executed:\n"
            "--trust=path/to/file.py:CLASS."
        )
        return 0
    processes, as_json = take_processes("resume", arguments), take_flag(arguments, "--json")
    if not arguments or arguments[0].startswith("--"):
        raise ConfigError("The run folder is missing. Name it first: flexor resume RUN [--steps=N ...].")
    address, on_hub = arguments[0], arguments[0].startswith("hub:")
    if processes == 1:
        setup_logging(verbose=take_flag(arguments, "--verbose"))
    if processes == 1 or on_hub:
        from flexor.config.parse import parse_flags, to_words

        flags = parse_flags(arguments[1:])
        folder = _download(address, flags) if on_hub else Path(address)
        if processes == 1:
            return resume_run(folder, flags, as_json)
        arguments = [str(folder), *to_words(flags)]
    return start_processes(["resume", *arguments, *["--json"] * as_json], processes)


def resume_run(folder: Path, flags: Mapping[str, Any], as_json: bool) -> int:
    """Continue a run in this process, with these changes of its settings."""
    from flexor.plan.preflight import Preflight
    from flexor.train.checkpoint.resume import resumed_config
    from flexor.train.loop import train as run_training

    config = resumed_config(folder, flags)
    if config.policy.learns_online:
        from flexor.rl.run import train_online

        return report_run(train_online(config, "yes"), as_json)
    return report_run(run_training(config, "yes", Preflight()), as_json)


def _download(address: str, flags: dict[str, Any]) -> Path:
    """The folder of a run on the Hub, on this machine. --output_dir, which says where, is taken from the flags."""
    from flexor.train.hub.download import fetch_run

    output = flags.pop("output_dir", None)
    return fetch_run(address, Path(output) if output else None)


def report_run(result: Any, as_json: bool) -> int:
    summary = {
        "run": str(result.folder),
        "step": result.step,
        "checkpoint": str(result.checkpoint) if result.checkpoint else None,
        "wall_clock_s": round(result.seconds, 3),
        "metrics": result.metrics,
        **({"hub": result.hub} if result.hub else {}),
    }
    if not result.main:
        return 0
    where = f"checkpoint {result.checkpoint}" if result.checkpoint else "no checkpoint saved"
    text = f"done: step {result.step} after {result.seconds:.0f} s, {where}"
    lines = [text, *_next_commands(result.folder)] if result.checkpoint else [text]
    print_result(summary, as_json, "\n".join(lines), colours={r"^done\b": GREEN})
    return 0


def _next_commands(run: Path) -> list[str]:
    """What one would do with a trained policy."""
    folder = shlex.quote(str(run))
    commands = [
        (f"  flexor ui {shlex.quote(str(run.parent))}", "curves and videos, beside those of other runs"),
        (f"  flexor eval {folder} --open_loop", "predicted actions beside recorded ones"),
        (f"  flexor serve {folder}", "the policy for robots on the network"),
    ]
    return ["", table(commands)]
