"""The `flexor` program: one subcommand per verb, which parses, calls one function and prints."""

from __future__ import annotations

import argparse
import gc
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from flexor import __version__
from flexor.core.console import print_result, progress
from flexor.core.errors import UNWRITABLE, ConfigError, FlexorError
from flexor.core.log import log, setup_logging
from flexor.core.run_files import RUN_CONFIG
from flexor.core.typed import closest

USAGE = """usage: flexor VERB ...

Train robot policies on LeRobot datasets.

  plan        memory, time and cost of a run on any GPU, before it is started
  train       train a policy (without arguments: on the built-in task)
  resume      go on with a run, exactly where its newest checkpoint left off
  eval        play episodes with a trained policy
  export      the policy of a checkpoint as one file, also if many processes saved it in parts
  record      record demonstrations of the built-in task as a dataset
  launch      local, slurm, hf-jobs: start a run on several GPUs, on a cluster, in the cloud
  data        info, check, repair, stats, cache: look at a dataset, mend it and decode it, before training on it
  bench       data: how fast batches come, and how fast they could
  demo        record, train and evaluate on the built-in task, in a few minutes on a CPU
  doctor      what a bug report needs, and what is wrong with this machine

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
        print(USAGE)
        return 0
    if arguments[0] in ("-V", "--version"):
        print(f"flexor {__version__}")
        return 0
    verb, rest = arguments[0], arguments[1:]
    try:
        if verb not in VERBS:
            raise ConfigError(f"There is no verb {verb!r}. {closest(verb, VERBS)}")
        return VERBS[verb](rest)
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


def _take(arguments: list[str], *flags: str) -> bool:
    """Whether one of the flags was given; it is removed."""
    found = [word for word in arguments if word in flags]
    arguments[:] = [word for word in arguments if word not in flags]
    return bool(found)


def plan(arguments: list[str]) -> int:
    from flexor.cli.plan import plan as run

    gc.disable()  # a plan ends before there is much garbage, and looking for it would take a tenth of the time
    try:
        return run(arguments)
    finally:
        gc.enable()


def train(arguments: list[str]) -> int:
    from flexor.cli.launch import start_processes, take_processes
    from flexor.config.help import train_help
    from flexor.config.parse import load_config, parse_flags
    from flexor.plan.preflight import Preflight
    from flexor.train.loop import train as run_training

    if _take(arguments, "-h", "--help"):
        print(train_help(str(parse_flags(arguments).get("policy.type", "act"))))
        return 0
    processes = take_processes("train", arguments)
    if processes > 1:
        return start_processes(["train", *arguments], processes)
    as_json = _take(arguments, "--json")
    flags = parse_flags(arguments)
    again = str(flags.get("resume", "false")).lower()
    if again == "true":
        return resume(
            [str(_run_of(flags)), *(["--json"] if as_json else []), *_without(arguments, "resume", "config")]
        )
    config = load_config(_without(arguments, "resume"))
    return _finish(run_training(config, "auto" if again == "auto" else "no", Preflight()), as_json)


def _run_of(flags: dict[str, Any]) -> Path:
    """The run that `lerobot-train --resume=true --config_path=.../train_config.json` means."""
    if "config" not in flags:
        raise ConfigError(
            "--resume=true needs --config_path=RUN/checkpoints/last/pretrained_model/train_config.json."
        )
    path = Path(flags["config"]).absolute()
    for folder in (path, *path.parents):
        if (folder / RUN_CONFIG).is_file():
            return folder
    raise ConfigError(f"--config_path={path} does not lie in a run of Flexor: use `flexor resume RUN`.")


def _without(arguments: list[str], *dropped: str) -> list[str]:
    """The flags less some."""
    from flexor.config.parse import parse_flags

    kept = {k: v for k, v in parse_flags(arguments).items() if k not in dropped}
    return [f"--{key}={value}" for key, value in kept.items()]


def resume(arguments: list[str]) -> int:
    from flexor.cli.launch import start_processes, take_processes
    from flexor.plan.preflight import Preflight
    from flexor.train.checkpoint.resume import resumed_config
    from flexor.train.loop import train as run_training

    if _take(arguments, "-h", "--help"):
        print(
            "usage: flexor resume RUN [--steps=N] [--key=value ...] [--gpus=N | --processes=N] [--json]\n\n"
            "Go on with the run in folder RUN from its newest checkpoint. Settings that would make it\n"
            "another run can't change. --gpus=N starts a process for each of N GPUs (or of all),\n"
            "--processes=N starts N on the CPU."
        )
        return 0
    processes, as_json = take_processes("resume", arguments), _take(arguments, "--json")
    if not arguments or arguments[0].startswith("--"):
        raise ConfigError("Which run? Name its folder first: flexor resume RUN [--steps=N ...].")
    if processes > 1:
        return start_processes(["resume", *arguments, *["--json"] * as_json], processes)
    config = resumed_config(Path(arguments[0]), arguments[1:])
    return _finish(run_training(config, "yes", Preflight()), as_json)


def _finish(result: Any, as_json: bool) -> int:
    summary = {
        "run": str(result.folder),
        "step": result.step,
        "checkpoint": str(result.checkpoint) if result.checkpoint else None,
        "wall_clock_s": round(result.seconds, 3),
        "metrics": result.metrics,
    }
    if not result.main:
        return 0
    where = f"checkpoint {result.checkpoint}" if result.checkpoint else "no checkpoint saved"
    print_result(summary, as_json, f"done: step {result.step} after {result.seconds:.0f} s, {where}")
    return 0


def evaluate(arguments: list[str]) -> int:
    from flexor.evaluate.report import evaluate_policy

    parser = argparse.ArgumentParser(
        prog="flexor eval", description="Play episodes with a trained policy and report its success."
    )
    parser.add_argument("policy", help="run, checkpoint folder or Hub repository")
    parser.add_argument(
        "settings", nargs="*", help="--env.type=..., --eval.n_episodes=..., --policy.device=..."
    )
    parser.add_argument(
        "--videos",
        type=Path,
        help="folder for videos (how many: --eval.videos); unless given, the run's",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parsed, more = parser.parse_known_args(_lerobot_eval(arguments))
    result, text = evaluate_policy(
        parsed.policy, [*parsed.settings, *more], parsed.videos, progress("evaluating")
    )
    print_result(result, parsed.json, text)
    return 0


def _lerobot_eval(arguments: list[str]) -> list[str]:
    """`lerobot-eval --policy.path=X` names the policy by a flag; here it stands by itself."""
    return [word.removeprefix("--policy.path=") for word in arguments if word != "--policy.path"]


def export(arguments: list[str]) -> int:
    from flexor.train.checkpoint.export import export as run_export

    parser = argparse.ArgumentParser(
        prog="flexor export",
        description="Write the policy of a checkpoint as one model.safetensors in LeRobot's format, also if many "
        "processes saved it in parts.",
    )
    parser.add_argument("path", type=Path, help="run (its newest checkpoint) or checkpoint folder")
    parser.add_argument("--output", type=Path, help="new folder; unless given, into the checkpoint itself")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parsed = parser.parse_args(arguments)
    folder = run_export(parsed.path, parsed.output)
    print_result({"policy": str(folder)}, parsed.json, f"exported {folder}")
    return 0


def record(arguments: list[str]) -> int:
    from flexor.sim.record import OBSERVED, PIXELS, record_dataset

    parser = argparse.ArgumentParser(
        prog="flexor record",
        description="Record demonstrations of the built-in task as a LeRobot dataset.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("root", type=Path, help="new folder for the dataset")
    parser.add_argument("--episodes", type=int, default=300, help="demonstrations to record")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first episode")
    parser.add_argument("--image-size", type=int, default=32, help="height and width of the picture")
    parser.add_argument(
        "--obs-type",
        choices=tuple(OBSERVED),
        default=PIXELS,
        help="what is observed: a picture, or where things are",
    )
    parser.add_argument("--codec", choices=("h264", "av1"), default="h264", help="how the video is written")
    parser.add_argument("--noise", type=float, default=1.0, help="disturbances the expert recovers from")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parsed = vars(parser.parse_args(_dashed(arguments)))
    root, as_json = parsed.pop("root"), parsed.pop("json")
    record_dataset(root, progress=progress("recording"), **parsed)
    print_result({"root": str(root), **parsed}, as_json, f"recorded {parsed['episodes']} episodes in {root}")
    return 0


def launch(arguments: list[str]) -> int:
    from flexor.cli.launch import launch as start

    return start(arguments, main)


def data(arguments: list[str]) -> int:
    from flexor.cli.data import data as run

    return run(_dashed(arguments))


def _dashed(arguments: list[str]) -> list[str]:
    """--image_size is --image-size, since `train` writes its settings with underscores."""
    return [re.sub("^--[^=]*", lambda flag: flag[0].replace("_", "-"), word) for word in arguments]


def bench(arguments: list[str]) -> int:
    import torch

    from flexor.bench import data as bench_data
    from flexor.bench.report import render, write
    from flexor.config.parse import load_config, parse_flags

    parser = argparse.ArgumentParser(
        prog="flexor bench data",
        description="Load a dataset with no model and say how far that is from what the hardware allows. "
        "Settings of `flexor train` may follow: --dataset.*, --batch_size, --num_workers, --seed, --policy.*.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("what", choices=("data",), help="what to measure")
    parser.add_argument(
        "--mode",
        choices=bench_data.MODES,
        default="single",
        help="a sample is: one frame of all cameras; eight steps one second apart; what --policy.type trains on",
    )
    parser.add_argument("--ranks", type=int, default=1, help="processes that load side by side")
    parser.add_argument("--epochs", type=int, default=1, help="times to go through the data")
    parser.add_argument("--batches", type=int, help="stop after so many batches instead")
    parser.add_argument("--warmup", type=int, default=0, help="batches before measuring starts")
    parser.add_argument("--source", default="disk", help="label: hub, bucket, warmed bucket, disk")
    parser.add_argument(
        "--device",
        default="cuda" if torch.cuda.is_available() else "host",
        help="where batches go: cuda, cpu (pictures become RGB there), or host: ready to be sent to a GPU",
    )
    parser.add_argument("--output", type=Path, help="folder or FILE.json for the report; CSV goes beside it")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parsed, settings = parser.parse_known_args(arguments)
    own = vars(parsed)
    output, as_json, _ = own.pop("output"), own.pop("json"), own.pop("what")
    options, config = bench_data.Options(**own), load_config(settings)
    if "num_workers" not in parse_flags(settings):
        config.num_workers = bench_data.threads_per_rank(parsed.ranks)
    report = bench_data.bench_data(config, options)
    for path in write(report, output):
        log.info("wrote %s", path)
    print_result(report, as_json, render(report))
    return 0


def demo(arguments: list[str]) -> int:
    from flexor.cli.demo import run_demo

    parser = argparse.ArgumentParser(
        prog="flexor demo",
        description="Record, train and evaluate on the built-in task: minutes on a CPU. Settings of "
        "`flexor train` may follow.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--output-dir", "--output_dir", type=Path, default=Path("runs/demo"), help="folder for the run"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parsed, settings = parser.parse_known_args(arguments)
    summary, text = run_demo(parsed.output_dir, settings)
    print_result(summary, parsed.json, text)
    return 0


def doctor(arguments: list[str]) -> int:
    from flexor.cli.doctor import examine, render

    parser = argparse.ArgumentParser(
        prog="flexor doctor",
        description="What a bug report needs, and what is wrong. Exits with 1 on a problem.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parsed = parser.parse_args(arguments)
    findings = examine()
    print_result(findings, parsed.json, render(findings))
    return 1 if findings["problems"] else 0


VERBS: dict[str, Callable[[list[str]], int]] = {
    "plan": plan,
    "train": train,
    "resume": resume,
    "launch": launch,
    "eval": evaluate,
    "export": export,
    "record": record,
    "data": data,
    "bench": bench,
    "demo": demo,
    "doctor": doctor,
}
