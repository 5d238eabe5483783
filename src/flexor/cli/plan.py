"""`flexor plan`: its flags, and which report it prints."""

from __future__ import annotations

import argparse
import gc
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexor.cli.flags import ROBOT, described_run, names_dataset, robot_flags
from flexor.core.console import GREEN, RED, print_json, print_text, progress
from flexor.core.errors import ConfigError
from flexor.core.log import log
from flexor.core.option_parser import OptionParser
from flexor.core.output_paths import check_output_file
from flexor.plan.data import FPS, FRAMES

if TYPE_CHECKING:
    from flexor.config.schema import TrainConfig
    from flexor.plan.compare import Comparison
    from flexor.plan.data.host import Data
    from flexor.plan.site.hardware import GPU, Hardware

VERDICTS = {r"\A\S+ fits(?= on )": GREEN, r"DOES NOT FIT": RED}


def parser() -> OptionParser:
    flags = OptionParser(
        prog="flexor plan",
        description="Estimate what a run needs before you start it: memory and time on any GPU, cost, and requirements "
        "for the host. No GPU is needed. All settings of `flexor train` are accepted. Without a dataset, describe one "
        "with the flags below.",
    )
    _site_flags(flags.add_argument_group("where"))
    data = flags.add_argument_group("a dataset that is not recorded yet")
    data.add_argument("--frames", type=int, metavar="N", help=f"number of frames (default {FRAMES})")
    robot_flags(data)
    data.add_argument("--fps", type=float, metavar="HZ", help=f"frames per second (default {FPS:g})")
    robot = flags.add_argument_group("the robot that runs the policy")
    robot.add_argument(
        "--rate-hz",
        type=float,
        metavar="HZ",
        help="actions per second (default: those of the dataset, or --fps)",
    )
    robot.add_argument(
        "--executed",
        type=int,
        metavar="N",
        help="actions executed of each chunk (default: the policy's setting)",
    )
    faces = flags.add_argument_group("what to print")
    faces.add_argument("--json", action="store_true", help="print one JSON object")
    faces.add_argument("--html", type=Path, metavar="FILE", help="also write a page with plots")
    faces.add_argument(
        "--table",
        action="store_true",
        help="print a hardware guide, in Markdown, for all policies and GPUs, or those of --policy.type=a,b and "
        "--gpu=A,B",
    )
    faces.add_argument(
        "--calibrate",
        action="store_true",
        help="measure this machine's GPU and host for a few minutes; later plans use the result",
    )
    flags.add_argument(
        "--bench",
        type=Path,
        metavar="FILE",
        help="report of `flexor bench data` about this data, for its loading speed",
    )
    return flags


def _site_flags(where: argparse._ArgumentGroup) -> None:
    where.add_argument(
        "--gpu",
        metavar="NAME[,NAME]",
        help="GPU, or several to compare (default: this machine's GPU, or all if it has none)",
    )
    where.add_argument("--gpus", type=int, metavar="N", help="GPUs per node (default 1)")
    where.add_argument("--nodes", type=int, default=1, metavar="N", help="number of nodes (default 1)")
    where.add_argument(
        "--interconnect",
        metavar="NAME|GB/S",
        help="between the GPUs of a node: nvlink, pcie, or GB/s in one direction (default: the fastest the GPU has)",
    )
    where.add_argument(
        "--network",
        metavar="NAME|GBIT",
        help="between nodes: ethernet (100 Gbit/s per node, the default), infiniband (400 Gbit/s per GPU), or with "
        "other Gbit/s per node, such as ethernet:25",
    )
    where.add_argument("--gpus-file", type=Path, metavar="FILE", help="your own GPUs and prices (TOML)")
    where.add_argument(
        "--price", type=float, metavar="USD/H", help="price of all nodes together, instead of the list price"
    )


def run(arguments: list[str]) -> int:
    gc.disable()  # a plan makes little garbage, and searching for it takes a tenth of the time
    try:
        return _run(arguments)
    finally:
        gc.enable()


def _run(arguments: list[str]) -> int:
    parsed, settings = parser().parse_known_args(arguments)
    from flexor.config.parse import parse_flags, plans_to_learn_online
    from flexor.plan.site.hardware import load_hardware

    hardware = load_hardware(parsed.gpus_file)
    if parsed.html:
        from flexor.pages.page import check_writable, write_page

        check_writable(parsed.html, "--html")
    if parsed.calibrate:
        return _calibrate(hardware)
    if parsed.price is not None and not parsed.price > 0:
        raise ConfigError(f"--price={parsed.price:g} must be above 0.")
    flags = parse_flags(settings)
    if parsed.table:
        return _table(parsed, flags, hardware)
    if plans_to_learn_online(flags):
        return _online(parsed, flags, hardware)
    study = _study(parsed, flags, hardware)
    from flexor.plan.show import as_json, report

    if parsed.html:
        from flexor.plan.show.html import page

        write_page(parsed.html, page(study))
        log.info("wrote %s", parsed.html)
    if parsed.json:
        print_json(as_json.to_json(study))
    else:
        print_text(report.render(study), colours=VERDICTS)
    return 0 if study.plan.fits else 1


def _table(parsed: argparse.Namespace, flags: dict[str, Any], hardware: Hardware) -> int:
    """All policies on all GPUs, or those that --policy.type and --gpu name."""
    from flexor.plan.show.table import hardware_guide
    from flexor.policies import POLICIES, policy_class

    kinds = [kind.strip() for kind in str(flags.pop("policy.type", ",".join(POLICIES))).split(",")]
    if flags:
        raise ConfigError(
            f"--table plans policies with their default settings: leave out --{min(flags)}, or plan without --table."
        )
    for kind in kinds:
        if policy_class(kind).Config.learns_online:  # an error if there is no such policy
            raise ConfigError(
                f"--table has policies that learn from a dataset: plan policy.type={kind} without --table."
            )
    gpus = [hardware.find(name) for name in parsed.gpu.split(",")] if parsed.gpu else []
    guide = hardware_guide(hardware, kinds, gpus, progress("planning"))
    print_text(guide.rstrip("\n"))
    return 0


def _online(parsed: argparse.Namespace, flags: dict[str, Any], hardware: Hardware) -> int:
    """A run that learns while it acts, on the GPUs that --gpu names, this machine's, or all that can be planned."""
    from flexor.rl.planning import plan_gpus
    from flexor.rl.planning_report import render, to_json

    for flag in ("html", "nodes", "gpus", "bench", "price"):
        if getattr(parsed, flag) not in (None, 1):
            raise ConfigError(
                f"--{flag} has no effect on a plan of a run that learns while it acts: leave it out."
            )
    config, actions, demonstrations, assumed = _online_job(parsed, flags)
    gpus, here = _gpus(parsed.gpu, hardware)
    plans = plan_gpus(config, actions, demonstrations, gpus or [*hardware.gpus.values()], here)
    rate = parsed.rate_hz or parsed.fps or FPS
    if parsed.json:
        print_json({**to_json(plans[0], rate, assumed), "gpus": [to_json(plan, rate) for plan in plans]})
    else:
        print_text(render(plans, rate, assumed), colours=VERDICTS)
    return 0 if plans[0].fits else 1


def _online_job(parsed: argparse.Namespace, flags: dict[str, Any]) -> tuple[TrainConfig, int, int, str]:
    """The settings with the policy's features, the numbers in an action, demonstrated steps, and what was assumed."""
    from flexor.cli.flags import described_run
    from flexor.config.parse import config_from_flags
    from flexor.rl.planning import fitted_to_environment

    described = any(getattr(parsed, name) is not None for name in ROBOT)
    if not described and {"env.type", "config"} & flags.keys():
        return *fitted_to_environment(config_from_flags(flags)), ""
    parsed.cameras = parsed.cameras or "2x128x128"
    config, robot = described_run(parsed, {"env.type": "planned", **flags})
    demonstrations = parsed.frames or 0
    discrete = getattr(config.policy, "num_discrete_actions", None) is not None
    assumed = f"{robot.describe()}, {demonstrations:,} steps of demonstrations"
    return config, robot.action + discrete, demonstrations, assumed


def _study(parsed: argparse.Namespace, flags: dict[str, Any], hardware: Hardware) -> Comparison:
    from flexor.plan.compare import study

    config, data, assumed = _job(parsed, flags)
    gpus, here = _gpus(parsed.gpu, hardware)
    for name in ("gpus", "nodes", "frames", "executed"):
        value = getattr(parsed, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name}={value} must be at least 1.")
    speed = None
    if parsed.bench:
        from flexor.core.foreign_files import MALFORMED, read_json_object
        from flexor.plan.data.host import measured_speed

        try:
            speed = measured_speed(data, read_json_object(parsed.bench))
        except (OSError, *MALFORMED) as error:
            raise ConfigError(
                f"--bench={parsed.bench} is not a readable report of `flexor bench data`: {error}."
            ) from error
    return study(
        config,
        data,
        hardware,
        gpus,
        here=here,
        count=parsed.gpus,
        nodes=parsed.nodes,
        interconnect=parsed.interconnect,
        network=parsed.network,
        price=parsed.price,
        speed=speed,
        rate_hz=parsed.rate_hz or parsed.fps or data.fps or FPS,
        executed=parsed.executed,
        assumed=assumed,
    )


def _job(parsed: argparse.Namespace, flags: dict[str, Any]) -> tuple[TrainConfig, Data, str]:
    """The settings with the policy's features filled in, the data, and what was assumed about the data."""
    from flexor.config.parse import config_from_flags

    if names_dataset(parsed, flags, ("frames", "fps", *ROBOT)):
        from flexor.plan.data.from_dataset import open_for_plan

        return *open_for_plan(config_from_flags(flags)), ""
    from flexor.plan.data.imagined_robot import imagined_data

    config, robot = described_run(parsed, flags)
    frames = parsed.frames or FRAMES
    return config, imagined_data(config.policy, frames), f"{frames:,} frames, {robot.describe()}"


def _gpus(names: str | None, hardware: Hardware) -> tuple[list[GPU], bool]:
    """The selected GPUs (an empty list means all), and whether they are this machine's."""
    from flexor.plan.site.hardware import gpu_here

    if names:
        return [hardware.find(name) for name in names.split(",")], False
    gpu = gpu_here(hardware)
    return ([gpu], True) if gpu else ([], False)


def _calibrate(hardware: Hardware) -> int:
    from flexor.plan.site.hardware import gpu_here

    gpu = gpu_here(hardware)
    if gpu is None or gpu.maker != "nvidia":
        raise ConfigError("--calibrate requires an NVIDIA GPU, but PyTorch sees none on this machine.")
    from flexor.plan.speed.calibrate import calibrate
    from flexor.plan.speed.speeds import file_of, save

    check_output_file(file_of(gpu), "$FLEXOR_CACHE")
    speeds = calibrate(gpu, log.info)
    save(speeds, file_of(gpu))
    print_text(
        f"{gpu.name}: predicted step times were within {speeds.spread_gpu:.0%} where the GPU is the bottleneck, and "
        f"within {speeds.spread_host:.0%} where the host is. Saved to {file_of(gpu)}; later plans use it."
    )
    return 0
