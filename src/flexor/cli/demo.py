"""`flexor demo`: train a policy that solves the built-in task, and measure its success rate."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from flexor.config.parse import build_config, flatten, parse_flags, read_file, read_run
from flexor.config.schema import EvalConfig, TrainConfig
from flexor.core.console import print_result, progress, table
from flexor.core.devices import find_device
from flexor.core.errors import ConfigError
from flexor.core.option_parser import OptionParser
from flexor.core.output_paths import check_output_folder
from flexor.core.run_files import RUN_CONFIG
from flexor.evaluate.play import play
from flexor.evaluate.rollout import Actor, ExpertActor, PolicyActor, Summary, summarize
from flexor.plan.preflight import Preflight
from flexor.policies.pretrained import Pretrained, load_pretrained
from flexor.rl.run import train_online
from flexor.train.build import build_policy
from flexor.train.checkpoint.run_folder import open_run
from flexor.train.engine.base import Engine
from flexor.train.loop import train

SUMMARY = "summary.json"
DEMOS = ("demo", "sac_place")  # names of runs that a demo may replace


def run(arguments: list[str]) -> int:
    parser = OptionParser(
        prog="flexor demo",
        description="Record demonstrations, train a policy and evaluate it on the built-in task, in minutes on a CPU. "
        "Settings of `flexor train` are accepted.",
    )
    parser.add_argument(
        "--output-dir",
        "--output_dir",
        type=Path,
        default=Path("runs/demo"),
        help="folder for the run (default: runs/demo)",
    )
    parser.add_argument(
        "--rl",
        action="store_true",
        help="learn from a sparse reward instead, with 20 demonstrations and a scripted helper (settings: sac_place)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parsed, settings = parser.parse_known_args(arguments)
    summary, text = run_demo(parsed.output_dir, settings, "sac_place" if parsed.rl else "demo")
    print_result(summary, parsed.json, text)
    return 0


def run_demo(
    folder: Path, settings: Sequence[str] = (), packaged: str = "demo"
) -> tuple[dict[str, Any], str]:
    """Record, train, and compare the policy with the expert and an untrained policy. Writes a video and a summary.

    `packaged`: the settings that come with Flexor.
    """
    started = time.perf_counter()
    flags = {**parse_flags(settings), "output_dir": str(folder)}
    config = build_config(flatten(read_file(packaged)), flags)
    if not config.save_checkpoint:
        raise ConfigError(
            "save_checkpoint=false: the demo evaluates the policy that it saved. Leave out this setting."
        )
    check_output_folder(folder, "--output-dir")
    _clear(folder)
    result = train_online(config) if config.policy.learns_online else train(config, preflight=Preflight())

    device = str(find_device(config.policy.device))
    trained = load_pretrained(str(result.checkpoint), device)
    scores = {
        "trained policy": _score(config, PolicyActor(trained, config.seed), folder / "videos"),
        "untrained policy": _score(config, PolicyActor(_untrained(config, trained, device), config.seed)),
        "expert": _score(config, ExpertActor()),
    }
    video = next((folder / "videos").glob("*success.mp4"), None) or next(
        (folder / "videos").glob("*.mp4"), None
    )
    summary = {
        "success_rate": scores["trained policy"].success_rate,
        "untrained_success_rate": scores["untrained policy"].success_rate,
        "expert_success_rate": scores["expert"].success_rate,
        "episodes": config.eval.n_episodes,
        "wall_clock_s": round(time.perf_counter() - started, 1),
        "training_s": round(result.seconds, 1),
        "checkpoint": str(result.checkpoint),
        "video": str(video) if video else None,
    }
    (folder / SUMMARY).write_text(json.dumps(summary, indent=2) + "\n")
    return summary, _text(scores, summary, folder)


def _clear(folder: Path) -> None:
    """Remove an earlier demo from the folder, but nothing else, and not while it is still running."""
    if not folder.exists():
        return
    is_run = (folder / RUN_CONFIG).is_file()
    if (is_run and read_run(folder).get("job_name") not in DEMOS) or (not is_run and any(folder.iterdir())):
        raise ConfigError(f"{folder} contains files that are not a demo. Choose another --output-dir.")
    if is_run:
        with open_run(folder, resume=True):
            shutil.rmtree(folder)


def _untrained(config: TrainConfig, trained: Pretrained, device: str) -> Pretrained:
    """The same policy with its initial weights."""
    config = replace(config, policy=trained.policy.config)  # which has the features of the dataset
    policy = build_policy(config, Engine(find_device(device)))
    return replace(trained, policy=policy.eval())


def _score(config: TrainConfig, actor: Actor, videos: Path | None = None) -> Summary:
    settings: EvalConfig = replace(config.eval, videos=config.eval.videos if videos else 0)
    return summarize(play(actor, config.env, settings, videos, progress("evaluating")))


def _text(scores: dict[str, Summary], summary: dict[str, Any], folder: Path) -> str:
    rows: list[list[object]] = [["", "success", "95 % interval", "mean steps"]]
    for name, score in scores.items():
        interval = f"{score.success_low:.0%} to {score.success_high:.0%}"
        rows.append([name, f"{score.success_rate:.0%}", interval, f"{score.mean_steps:.0f}"])
    return "\n".join(
        [
            "",
            f"{summary['episodes']} episodes from initial states that are not in the dataset:",
            "",
            table(rows),
            "",
            f"took        {summary['wall_clock_s']:.0f} s, of which training {summary['training_s']:.0f} s",
            f"video       {summary['video']}",
            f"checkpoint  {summary['checkpoint']}",
            f"summary     {folder / SUMMARY}",
        ]
    )
