"""Learning the built-in task from a sparse reward: success on 100 unseen starts, from several seeds, one at a time.

    python benchmarks/sac_place.py [--seeds 0 1 2] [--help-by scripted] [--images] [--output FILE.json] [-- FLAGS]

Trains `sac_place` without help, or with --help-by scripted, and evaluates each run without noise on 100 starts that
neither demonstrations nor training have. With --images it is `sac_place_images`: two cameras of 128x128, for a GPU. A
run on a CPU is a function of its seed, so its success can be measured on a busy machine; its time can't. So the
processor's time is given too: such a run uses one core, and takes about that long on an idle machine. Everything after
`--` is passed to `flexor train`.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

FLEXOR = [sys.executable, "-m", "flexor"]
FIRST_START = 1_000_000  # seed of the first episode of the evaluation


def processor_s() -> float:
    """Of all processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def train(seed: int, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    config = "sac_place_images" if args.images else "sac_place"
    words = [*FLEXOR, "train", f"--config={config}", f"--seed={seed}", f"--output_dir={folder}"]
    words += [f"--rl.intervener={args.help_by}", *args.flags]
    before, started = processor_s(), time.perf_counter()
    with folder.with_suffix(".log").open("wb") as log:
        subprocess.run(words, stdout=log, stderr=log, check=True)
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    return {
        "seed": seed,
        "steps": last["step"],
        "updates": last["updates"],
        "wall_s": round(time.perf_counter() - started, 1),
        "processor_s": round(processor_s() - before, 1),
        "success_in_training": last["success_rate"],
        "help": last["intervention_rate"],
        "expected_return": last["first_q"],
        "discounted_return": last["discounted_return"],
    }


def evaluate(folder: Path, episodes: int) -> float:
    words = [*FLEXOR, "eval", str(folder), f"--eval.n_episodes={episodes}", "--json"]
    done = subprocess.run([*words, f"--eval.seed={FIRST_START}"], capture_output=True, check=True)
    return float(json.loads(done.stdout)["success_rate"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--help-by", choices=["none", "scripted"], default="none")
    parser.add_argument("--images", action="store_true", help="from two cameras, on a GPU")
    parser.add_argument("--episodes", type=int, default=100)
    parser.add_argument("--runs", type=Path, default=Path("runs/sac_place_benchmark"))
    parser.add_argument("--output", type=Path)
    cut = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args = parser.parse_args(sys.argv[1:cut])
    args.flags = sys.argv[cut + 1 :]
    args.runs.mkdir(parents=True, exist_ok=True)
    results = []
    for seed in args.seeds:
        folder = args.runs / f"{'images' if args.images else 'state'}_{args.help_by}_{seed}"
        result = train(seed, folder, args)
        results.append({**result, "success_rate": evaluate(folder, args.episodes)})
        print(json.dumps(results[-1]), flush=True)
    summary = {
        "date": time.strftime("%Y-%m-%d"),
        "help_by": args.help_by,
        "images": args.images,
        "flags": args.flags,
        "lowest_success_rate": min(each["success_rate"] for each in results),
        "seeds": results,
    }
    if args.output:
        args.output.write_text(json.dumps(summary, indent=1))


if __name__ == "__main__":
    main()
