"""Whether a policy learns as well in fp8 as in bf16: the built-in task with two discs, of which words name one.

    python benchmarks/fp8_learns.py [--width 1024] [--steps 8000] [--episodes 200] [--runs FOLDER] [--output FILE.json]

Trains an X-VLA of this width from scratch, once in each precision, from the same weights and on the same samples, and
plays the same episodes with both. Writes success rates and losses, and a page with the curves side by side
(`flexor report`). If it is stopped, the same command resumes the runs.

With --emulated, a CPU computes what a GPU does in fp8, for narrow layers too, such as
`--emulated --width 128 --batch_size 8 --steps 400`.
"""

import argparse
import contextlib
import io
import json
import statistics
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any
from unittest.mock import patch

import yaml

from flexor.cli.main import main as flexor
from flexor.config import for_gpu
from flexor.policies import fp8

PRECISIONS = ("bf16", "fp8")
FIRST_START = 1_000_000  # seed of the first episode
PART = 0.1  # of the steps, whose mean loss is reported


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """The built-in run, with wider transformers."""
    text = resources.files("flexor.config.builtin").joinpath("xvla_place.yaml").read_text()
    run: dict[str, Any] = yaml.safe_load(text)
    width, heads = args.width, max(4, args.width // 64)
    policy = run["policy"] | {"hidden_size": width, "num_heads": heads}
    florence = policy["florence_config"]
    florence["vision_config"]["projection_dim"] = width
    florence["text_config"] |= {
        "d_model": width,
        "encoder_attention_heads": heads,
        "encoder_ffn_dim": 4 * width,
    }
    rate = args.lr or min(1e-3, 0.2 / width)
    schedule = run["scheduler"] | {"peak_lr": rate, "num_decay_steps": args.steps}
    schedule["num_warmup_steps"] = min(schedule["num_warmup_steps"], args.steps // 10)
    changed = {
        "steps": args.steps,
        "batch_size": args.batch_size,
        "optimizer": {"lr": rate},
        "scheduler": schedule,
        "policy": policy,
    }
    return run | changed | {"save_freq": max(1, args.steps // 4), "log_freq": max(1, args.steps // 400)}


@contextlib.contextmanager
def emulated(width: int) -> Iterator[None]:
    """Inside, a CPU may train in fp8, and narrow layers do."""
    with (
        patch.object(for_gpu, "multiplies_in", lambda *_: True),
        patch.object(fp8, "LEAST_WIDTH", min(fp8.LEAST_WIDTH, width / 2)),
    ):
        yield


def train(precision: str, args: argparse.Namespace) -> Path:
    folder: Path = args.runs / precision
    config = args.runs / "config.yaml"
    config.write_text(yaml.safe_dump(settings(args), sort_keys=False))
    if (folder / "config.yaml").is_file():
        code = flexor(["resume", str(folder)])
    else:
        code = flexor(["train", f"--config={config}", f"--precision={precision}", f"--output_dir={folder}"])
    if code:
        raise SystemExit(code)
    return folder


def play(folder: Path, episodes: int) -> dict[str, Any]:
    words = [
        "eval",
        str(folder),
        "--env.type=place",
        "--env.kwargs={targets: 2}",
        f"--eval.seed={FIRST_START}",
    ]
    words += [f"--eval.n_episodes={episodes}", "--eval.videos=0", "--json"]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        if code := flexor(words):
            raise SystemExit(code)
    return dict(json.loads(printed.getvalue()))


def figures(folder: Path, episodes: int) -> dict[str, Any]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    curve = [(line["step"], line["loss"]) for line in lines if "loss" in line and "step" in line]
    last = max(1, round(PART * len(curve)))
    played = play(folder, episodes)
    return {
        "success_rate": played["success_rate"],
        "episodes": played["episodes"],
        "mean_loss_at_the_end": statistics.mean(loss for _, loss in curve[-last:]),
        "losses": curve,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=1024, help="of the transformers; a multiple of 64")
    parser.add_argument("--steps", type=int, default=8000)
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--lr", type=float, help="default: 0.2 / width")
    parser.add_argument("--episodes", type=int, default=200)
    parser.add_argument("--emulated", action="store_true", help="on a CPU")
    parser.add_argument("--runs", type=Path, default=Path("runs/fp8_learns"))
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    args.runs.mkdir(parents=True, exist_ok=True)
    with emulated(args.width) if args.emulated else contextlib.nullcontext():
        folders = {precision: train(precision, args) for precision in PRECISIONS}
    result = {precision: figures(folder, args.episodes) for precision, folder in folders.items()}
    flexor(["report", *map(str, folders.values()), "--output", str(args.runs / "report.html")])
    if args.output:
        args.output.write_text(json.dumps(result, indent=1))
    print("| precision | success | mean loss at the end |\n| --- | --- | --- |")
    for precision, run in result.items():
        share = f"{run['success_rate']:.1%} of {run['episodes']}"
        print(f"| {precision} | {share} | {run['mean_loss_at_the_end']:.4f} |")


if __name__ == "__main__":
    main()
