"""The `flexor` program: one subcommand per verb. Each parses its flags, calls one function and prints."""

from __future__ import annotations

import gc
import importlib
import os
import sys
import threading
import traceback
from collections.abc import Sequence
from types import TracebackType

from flexor import __version__
from flexor.core.console import print_error, print_text
from flexor.core.disk_errors import FREE_SPACE, PROBLEMS
from flexor.core.errors import UNUSABLE, UNWRITABLE, ConfigError, FlexorError
from flexor.core.log import setup_logging
from flexor.core.trust import trust
from flexor.core.typed import closest

# Each verb is a file in this folder with a function `run(arguments)` that returns the exit code.
VERBS = {
    "plan": "estimate memory, time and cost of a run on any GPU, before you start it",
    "train": "train a policy (without arguments: on the built-in task)",
    "resume": "continue a run exactly from its newest checkpoint",
    "ui": "show runs, plans, datasets and servers in a browser",
    "watch": "show runs on a live screen in the terminal: loss, speed, time left, plan against reality",
    "report": "write one HTML page about runs: curves, plan against reality, differences of settings, videos",
    "diagnose": "find what limits the speed of a run (data, launches, GPU, ...), and which change helps most",
    "eval": "run episodes with a trained policy, or compare its predictions with recorded ones",
    "collect": "act in an environment with a policy that learns on another machine",
    "serve": "serve a trained policy to robots over the network",
    "export": "write the policy of a checkpoint to one file, even if several processes saved it in parts",
    "push": "push the policy of a run, and optionally its checkpoints, to the Hugging Face Hub",
    "record": "record demonstrations of the built-in task, or episodes of a robot, as a dataset",
    "launch": "start a run on several GPUs, on a cluster or in the cloud: local, slurm, hf-jobs, ssh",
    "data": "inspect, repair, decode or push a dataset: info, check, show, repair, stats, cache, push",
    "bench": "measure one part, and the limits of the hardware: data, step, policy, serve",
    "demo": "record, train and evaluate on the built-in task, in a few minutes on a CPU",
    "doctor": "check this machine, and print what a bug report needs",
    "completion": "print a script with which bash, zsh or fish complete commands, settings and values",
}
START = """Train robot policies on LeRobot datasets. Three commands to start with:

  flexor demo                                       train a small policy and evaluate it, in minutes on a CPU
  flexor plan --policy.type=act --gpu="RTX 4090"    predict memory, time and cost of a run, without a GPU
  flexor train --dataset.repo_id=USER/NAME          train a policy on a dataset of yours

To see runs, plans and datasets in a browser: flexor ui

`flexor --help` lists all commands.
"""
WINDOWS = (
    "Flexor needs Linux or macOS: it locks files and handles signals as Windows does not. On Windows, install it in "
    "WSL 2, where CUDA works too: docs/platforms.md. The robot's package, flexor-client, works on Windows."
)
USAGE = """usage: flexor COMMAND ...

Train robot policies on LeRobot datasets.

{verbs}

`flexor help COMMAND` shows the options. With --json, commands that print a report print one JSON object instead.
Code that is only named by a checkpoint or a run is not executed unless you trust it: --trust=path/to/file.py:CLASS.
"""


def program() -> int:
    """Run `main` as the whole process: the entry point of the `flexor` command."""
    sys.excepthook = _print_traceback
    threading.excepthook = _print_traceback_of_thread
    code = main()
    _flush()
    gc.freeze()  # else Python searches everything imported for garbage at exit, which takes half a second
    return code


def _print_traceback(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
    """A bug in Flexor. Its report is text, too, which may be from outside, and is sent to others."""
    print_text("".join(traceback.format_exception(kind, error, where)).rstrip("\n"), sys.stderr)


def _print_traceback_of_thread(args: threading.ExceptHookArgs) -> None:
    _print_traceback(args.exc_type, args.exc_value or args.exc_type(), args.exc_traceback)


def _flush() -> None:
    """What can't be written, because the terminal is closed, must not change the exit code."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb. A user error gives a message and an exit code, not a traceback."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    setup_logging(verbose="FLEXOR_DEBUG" in os.environ)
    verb, rest = (arguments[0], arguments[1:]) if arguments else ("", [])
    try:
        if verb == "help" and rest:
            verb, rest = rest[0], [*rest[1:], "--help"]
        if (text := _general(verb)) is not None:
            print_text(text)
            return 0
        if verb not in VERBS:
            raise ConfigError(f"Unknown command {verb!r}. {closest(verb, VERBS)}")
        if sys.platform == "win32":
            raise FlexorError(WINDOWS)
        trust(_take_trusted(rest))
        code: int = importlib.import_module(f"flexor.cli.{verb}").run(rest)
        return code
    except FlexorError as error:
        if not error.already_logged and _is_first_of_host():
            print_error(f"flexor {verb}: {error}")
        _leave_ranks(error.exit_code)
        return error.exit_code
    except KeyboardInterrupt:
        print_error("interrupted")
        return 130
    except BrokenPipeError:
        # the program that reads our output has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.errno in UNUSABLE:
            print_error(f"flexor {verb}: {error}. Give another path.")
            return 1
        if error.errno not in UNWRITABLE:
            raise
        full = error.errno in PROBLEMS and PROBLEMS[error.errno].full
        advice = FREE_SPACE if full else "Choose a folder that is writable"
        print_error(f"flexor {verb}: {error}. {advice}.")
        _leave_ranks(1)
        return 1


def _general(verb: str) -> str | None:
    """What is printed without a command, or about all of them."""
    if not verb:
        return START
    if verb in ("-h", "--help", "help"):
        return USAGE.format(verbs="\n".join(f"  {name:11} {text}" for name, text in VERBS.items()))
    return f"flexor {__version__}" if verb in ("-V", "--version") else None


def _take_trusted(arguments: list[str]) -> list[str]:
    """The code that --trust=CODE names, for any verb. The flags are removed."""
    flags = [word for word in arguments if word.startswith("--trust=")]
    if "--trust" in arguments or "--trust=" in flags:
        raise ConfigError("--trust needs the code that you trust: --trust=path/to/file.py:CLASS.")
    arguments[:] = [word for word in arguments if word not in flags]
    return [flag.removeprefix("--trust=") for flag in flags]


def _is_first_of_host() -> bool:
    """Before the ranks are connected, only one process per host prints an error: all of them have the same one."""
    return _joined() or os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")) == "0"


def _joined() -> bool:
    dist = sys.modules.get("torch.distributed")
    return dist is not None and dist.is_initialized() and dist.get_world_size() > 1


def _leave_ranks(code: int) -> None:
    """End a process of a multi-process run immediately: a clean exit might wait for ranks that have ended."""
    if _joined():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
