"""The `flexor` program: one subcommand per verb, which parses, calls one function and prints."""

from __future__ import annotations

import gc
import importlib
import os
import sys
from collections.abc import Sequence

from flexor import __version__
from flexor.core.errors import UNWRITABLE, ConfigError, FlexorError
from flexor.core.log import setup_logging
from flexor.core.typed import closest

# Each is a file beside this one, with a function `run(arguments)` that returns the exit code.
VERBS = {
    "plan": "memory, time and cost of a run on any GPU, before it is started",
    "train": "train a policy (without arguments: on the built-in task)",
    "resume": "go on with a run, exactly where its newest checkpoint left off",
    "eval": "play episodes with a trained policy",
    "export": "the policy of a checkpoint as one file, also if many processes saved it in parts",
    "record": "record demonstrations of the built-in task as a dataset",
    "launch": "local, slurm, hf-jobs: start a run on several GPUs, on a cluster, in the cloud",
    "data": "info, check, repair, stats, cache: look at a dataset, mend it and decode it, before training on it",
    "bench": "data: how fast batches come, and how fast they could",
    "demo": "record, train and evaluate on the built-in task, in a few minutes on a CPU",
    "doctor": "what a bug report needs, and what is wrong with this machine",
}
USAGE = """usage: flexor VERB ...

Train robot policies on LeRobot datasets.

{verbs}

`flexor VERB --help` says more. Verbs that report take --json: one JSON object on standard output.
"""


def program() -> int:
    """`main` in a process of its own."""
    code = main()
    gc.freeze()  # at the end Python would look for garbage in all that was imported, for half a second
    return code


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; a mistake of the user's is a message and an exit code, not a traceback."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    setup_logging(verbose="FLEXOR_DEBUG" in os.environ)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(USAGE.format(verbs="\n".join(f"  {verb:11} {text}" for verb, text in VERBS.items())))
        return 0
    if arguments[0] in ("-V", "--version"):
        print(f"flexor {__version__}")
        return 0
    verb, rest = arguments[0], arguments[1:]
    try:
        if verb not in VERBS:
            raise ConfigError(f"There is no verb {verb!r}. {closest(verb, VERBS)}")
        code: int = importlib.import_module(f"flexor.cli.{verb}").run(rest)
        return code
    except FlexorError as error:
        if not error.said and _is_first_of_host():
            print(f"flexor {verb}: {error}", file=sys.stderr)
        _leave_ranks(error.exit_code)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # whoever read our output has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.errno not in UNWRITABLE:
            raise
        print(f"flexor {verb}: {error}. Make room or choose another folder.", file=sys.stderr)
        _leave_ranks(1)
        return 1


def _is_first_of_host() -> bool:
    """Of processes that have not met, one of each host speaks: all of them make the same mistake."""
    return _joined() or os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")) == "0"


def _joined() -> bool:
    dist = sys.modules.get("torch.distributed")
    return dist is not None and dist.is_initialized() and dist.get_world_size() > 1


def _leave_ranks(code: int) -> None:
    """End a process of many at once: tidying up might wait for ranks that are gone."""
    if _joined():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
