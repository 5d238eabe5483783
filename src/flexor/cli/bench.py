"""`flexor bench`: how fast batches are loaded, a step is, a policy predicts or is served, and the hardware's limits."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexor.cli.flags import PRECISIONS, described_run, names_dataset, robot_flags
from flexor.core.console import print_result, progress
from flexor.core.errors import ConfigError
from flexor.core.log import log
from flexor.core.option_parser import OptionParser

if TYPE_CHECKING:
    from flexor.config.schema import TrainConfig
    from flexor.policies.pretrained import Pretrained
    from flexor.serve.predictor import Predictor


def parser() -> OptionParser:
    flags = OptionParser(
        prog="flexor bench",
        description="Measure one part of training or inference by itself.",
    )
    measures = flags.add_subparsers(dest="what", required=True, metavar="data|step|policy|serve")
    _add_data(measures)
    _add_step(measures)
    _add_policy(measures)
    _add_serve(measures)
    return flags


def run(arguments: list[str]) -> int:
    parsed, settings = parser().parse_known_args(arguments)
    measures = {"data": _data, "step": _step, "policy": _policy, "serve": _serve}
    return measures[vars(parsed).pop("what")](parsed, settings)


def _add_data(measures: Any) -> None:
    import torch

    from flexor.bench.data import MODES

    parser = measures.add_parser(
        "data",
        help="how fast batches are loaded, and how fast the hardware could load them",
        description="Load a dataset without a model, and compare the speed with the limits of the hardware. "
        "Settings of `flexor train` are accepted: --dataset.*, --batch_size, --num_workers, --seed, --policy.*. "
        "Several numbers of workers, such as --num_workers=1,2,4,8, show how the speed scales.",
    )
    parser.add_argument(
        "--mode",
        choices=MODES,
        default="single",
        help="contents of a sample: one frame of all cameras (single), eight steps one second apart (sarm), or the "
        "observations and actions that --policy.type trains on (policy) (default: %(default)s)",
    )
    for flag, default, text in (
        ("--ranks", 1, "number of processes that load in parallel (default: 1)"),
        ("--epochs", 1, "number of epochs to load (default: 1)"),
        ("--batches", None, "stop after this number of batches instead"),
        ("--warmup", 0, "number of batches to load before measuring (default: 0)"),
    ):
        parser.add_argument(flag, type=int, default=default, metavar="N", help=text)
    parser.add_argument(
        "--source",
        default="disk",
        help="label for the report, where the data is stored: hub, bucket, warmed bucket, disk (default: disk)",
    )
    parser.add_argument(
        "--device",
        default="cuda" if torch.cuda.is_available() else "host",
        help="where batches go: cuda, cpu (images are converted to RGB there), or host (ready to be sent to a GPU) "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--output", type=Path, help="folder or FILE.json for the report; a CSV file is written next to it"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _data(parsed: argparse.Namespace, settings: list[str]) -> int:
    from flexor.bench import data as bench_data
    from flexor.bench.report import check_report_path, render, write
    from flexor.config.parse import config_from_flags, parse_flags

    measurement = vars(parsed)
    output, as_json = measurement.pop("output"), measurement.pop("json")
    check_report_path(output)
    options = bench_data.Options(**measurement)
    flags = {"num_workers": bench_data.threads_per_rank(parsed.ranks), **parse_flags(settings)}
    counts = str(flags["num_workers"]).split(",")
    if len(counts) > 1 and all(count.isdecimal() for count in counts):
        config = config_from_flags({**flags, "num_workers": int(counts[-1])})
        report = bench_data.bench_scaling(config, options, [int(count) for count in counts])
    else:
        report = bench_data.bench_data(config_from_flags(flags), options)
    for path in write(report, output):
        log.info("wrote %s", path)
    print_result(report, as_json, render(report))
    return 0


def _add_step(measures: Any) -> None:
    text = "measure the training step of a policy, against what the hardware could do"
    parser = measures.add_parser(
        "step",
        help=text,
        description="Measure the training step of a policy on synthetic batches that are already in GPU memory: eager, "
        "and as one CUDA graph. The result is compared with the peak rates of this GPU, which are measured too. "
        "All settings of `flexor train` are accepted; --step=eager or --step=graph measures only that. "
        "Without a dataset, describe the robot with the flags below.",
    )
    parser.add_argument(
        "--steps",
        type=int,
        metavar="N",
        help="steps per measurement; the median of three is reported (default 20, on a CPU 2)",
    )
    robot_flags(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _step(parsed: argparse.Namespace, settings: list[str]) -> int:
    from flexor.bench.step import WAYS, bench_step
    from flexor.bench.step_report import render_step
    from flexor.config.parse import parse_flags

    flags = parse_flags(settings)
    config = _config_of_step(parsed, flags)
    requested = config.step if "step" in flags else "auto"
    report = bench_step(config, [way for way in WAYS if requested in ("auto", way)], parsed.steps)
    print_result(report, parsed.json, render_step(report))
    return 0


def _config_of_step(parsed: argparse.Namespace, flags: Mapping[str, Any]) -> TrainConfig:
    """The settings with the features of the dataset, or of the robot described."""
    if not names_dataset(parsed, flags):
        return described_run(parsed, flags)[0]
    from flexor.config.parse import config_from_flags
    from flexor.plan.data.from_dataset import open_for_plan

    return open_for_plan(config_from_flags(flags))[0]


def _add_policy(measures: Any) -> None:
    parser = measures.add_parser(
        "policy",
        help="measure how long a policy takes to predict a chunk of actions",
        description="Measure how long a policy takes from observations to a chunk of actions, both in host memory, "
        "with its processing: eagerly, and on an NVIDIA GPU as one CUDA graph. Give a checkpoint; or --policy.type and "
        "other settings of `flexor train`, for a policy with random weights and the robot described with the flags "
        "below.",
    )
    parser.add_argument(
        "checkpoint", nargs="?", help="a run, a checkpoint, a pretrained_model folder or a Hub repository"
    )
    parser.add_argument(
        "--batches", type=int, nargs="+", metavar="N", help="batch sizes: robots per prediction (default 1 8)"
    )
    parser.add_argument(
        "--calls", type=int, metavar="N", help="predictions to measure (default 30, on a CPU 3)"
    )
    robot_flags(parser)
    parser.add_argument("--dtype", choices=PRECISIONS, help="as for `flexor serve` (default float32)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _policy(parsed: argparse.Namespace, settings: list[str]) -> int:
    from flexor.bench.policy import BATCHES, bench_policy, render_policy

    report = bench_policy(_policies(parsed, settings), parsed.batches or BATCHES, parsed.calls, parsed.dtype)
    print_result(report, parsed.json, render_policy(report))
    return 0


def _policies(parsed: argparse.Namespace, settings: list[str]) -> Iterator[Pretrained]:
    """That of a checkpoint, or an untrained one for each number of cameras up to that of the robot described."""
    from flexor.bench.policy import trained, untrained
    from flexor.config.parse import parse_flags

    flags = parse_flags(settings)
    if parsed.checkpoint is not None:
        yield trained(parsed.checkpoint, _device(flags), parsed.dtype)
        return
    robot = described_run(parsed, flags)[1]
    for cameras in range(min(1, robot.cameras), robot.cameras + 1):
        parsed.cameras = f"{cameras}x{robot.height}x{robot.width}"
        yield untrained(described_run(parsed, flags)[0].policy, parsed.dtype)


def _add_serve(measures: Any) -> None:
    parser = measures.add_parser(
        "serve",
        help="measure how long a robot waits for actions of a served policy, and where the time goes",
        description="Serve a policy on this machine and query it from other processes. The time is split into network, "
        "decode (reading the observation), queue, model and encode (packing the actions). Give a checkpoint; or "
        "--policy.type and other settings of `flexor train`, for a policy with random weights. Without either, the "
        "server is measured alone, without a model.",
    )
    parser.add_argument(
        "checkpoint", nargs="?", help="a run, a checkpoint, a pretrained_model folder or a Hub repository"
    )
    parser.add_argument(
        "--clients", type=int, nargs="+", default=[1, 8], metavar="N", help="number of clients (default 1 8)"
    )
    parser.add_argument(
        "--cameras",
        nargs="+",
        metavar="NxHxW",
        help="without a checkpoint: number of cameras, height, width (default 2x224x224, with --policy.type 2x480x640)",
    )
    parser.add_argument(
        "--encoding", choices=("raw", "jpeg"), nargs="+", default=["raw", "jpeg"], help="how images are sent"
    )
    parser.add_argument(
        "--requests",
        type=int,
        default=1000,
        metavar="N",
        help="requests of all clients together (default 1000)",
    )
    parser.add_argument("--device", help="cpu, cuda, cuda:1 or mps (default: the fastest available)")
    parser.add_argument("--dtype", choices=PRECISIONS, help="as for `flexor serve`")
    parser.add_argument("--compile", action="store_true", help="as for `flexor serve`")
    parser.add_argument("--processes", type=int, metavar="N", help="as for `flexor serve`")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _serve(parsed: argparse.Namespace, settings: list[str]) -> int:
    from flexor.bench.serve import bench_serve, render_serve

    report = bench_serve(
        _served(parsed, settings),
        parsed.clients,
        parsed.encoding,
        parsed.requests,
        parsed.processes,
        progress("measuring"),
    )
    print_result(report, parsed.json, render_serve(report))
    return 0


def _served(parsed: argparse.Namespace, settings: list[str]) -> Iterator[Predictor]:
    from flexor.bench.serve import no_model
    from flexor.plan.data.imagined_robot import parse_cameras
    from flexor.serve.open import open_predictor
    from flexor.serve.settings import ServeSettings

    if parsed.checkpoint is None and settings:
        yield from _served_untrained(parsed, settings)
        return
    if parsed.checkpoint is None:
        yield from (no_model(parse_cameras(cameras)) for cameras in parsed.cameras or ["2x224x224"])
        return
    if parsed.cameras:
        raise ConfigError("--cameras: a checkpoint has cameras of its own. Leave it out.")
    yield open_predictor(
        parsed.checkpoint,
        ServeSettings(),
        device=parsed.device,
        dtype=parsed.dtype,
        compiled=parsed.compile,
        flags=settings,
    )


def _served_untrained(parsed: argparse.Namespace, settings: list[str]) -> Iterator[Predictor]:
    """A policy with random weights, for each kind of cameras."""
    if not any(setting.startswith("--policy.type") for setting in settings):
        raise ConfigError(f"{settings[0]}: settings of a policy need a checkpoint or --policy.type.")
    from flexor.bench.policy import untrained
    from flexor.config.parse import parse_flags
    from flexor.serve.open import predictor_of
    from flexor.serve.settings import ServeSettings

    flags = parse_flags(settings) | ({"policy.device": parsed.device} if parsed.device else {})
    for cameras in parsed.cameras or ["2x480x640"]:
        robot = argparse.Namespace(cameras=cameras, state=None, action=None)
        policy = untrained(described_run(robot, flags)[0].policy, parsed.dtype)
        yield predictor_of(policy, ServeSettings(), dtype=parsed.dtype, compiled=parsed.compile)


def _device(flags: dict[str, Any]) -> str | None:
    """The only setting that a checkpoint leaves open."""
    device: str | None = flags.pop("policy.device", None)
    if flags:
        raise ConfigError(
            f"--{min(flags)}: a checkpoint has its own settings. Only --policy.device can be given with it."
        )
    return device
