"""Time to a good policy: Diffusion Policy on PushT from images, trained from several seeds and evaluated in gym-pusht.

    python benchmarks/pusht.py --data=FOLDER [--seeds 1 2 3] [--at-once 3] [--stop-after 540] [--output FILE.json]

Trains `examples/pusht_diffusion.yaml` once per seed and evaluates each run as soon as it ends: 100 episodes from starts
that are not in the data (the same 100 for every seed). With --stop-after, all runs are stopped after that many seconds;
the same command resumes them, on another machine too if --runs is copied there. Seconds of training are added up.
Everything after `--` is passed to `flexor train`. If several runs share a GPU, NVIDIA's MPS (`nvidia-cuda-mps-control
-d`) lets their kernels run side by side.
"""

import argparse
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

CONFIG = Path(__file__).parents[1] / "examples/pusht_diffusion.yaml"
FLEXOR = [sys.executable, "-m", "flexor"]
FIRST_START = 1_000_000  # seed of the first episode


class SeedRun:
    """The run of one seed: training, perhaps in several parts, then the evaluation in several processes."""

    def __init__(self, seed: int, args: argparse.Namespace):
        self.seed, self.args = seed, args
        self.folder: Path = args.runs / f"seed_{seed}"
        self.clock = args.runs / f"seed_{seed}_seconds.json"
        self.log = args.runs / f"seed_{seed}.log"
        self.training: subprocess.Popen[bytes] | None = None
        self.playing: list[tuple[Path, subprocess.Popen[bytes]]] = []
        self.result: dict[str, Any] | None = None

    def start(self) -> None:
        self.before = json.loads(self.clock.read_text()) if self.clock.exists() else 0.0
        self.started = time.monotonic()
        if self.folder.exists():
            words = ["resume", str(self.folder)]
        else:
            words = ["train", f"--config={CONFIG}", f"--seed={self.seed}", f"--output_dir={self.folder}"]
            words += [f"--dataset.root={self.args.data}"] if self.args.data else []
            words += self.args.flags
        with self.log.open("ab") as log:
            self.training = subprocess.Popen([*FLEXOR, *words], stdout=log, stderr=log)

    @property
    def seconds(self) -> float:
        return self.before + time.monotonic() - self.started

    def look(self, stopping: bool) -> None:
        """Notice that training has ended, and evaluate; notice that the evaluation has ended."""
        if self.training is not None and self.training.poll() is not None:
            code, self.training = self.training.returncode, None
            self.clock.write_text(json.dumps(self.seconds))
            if stopping:
                return
            if code:
                raise SystemExit(f"seed {self.seed} failed:\n{self.log.read_text(errors='replace')[-3000:]}")
            say(f"seed {self.seed}: trained for {self.seconds:.0f} s")
            self.play()
        if self.playing and all(process.poll() is not None for _, process in self.playing):
            self.gather()

    def play(self) -> None:
        per_process = -(-self.args.episodes // self.args.processes)
        for first in range(0, self.args.episodes, per_process):
            out = self.args.runs / f"seed_{self.seed}_from_{first}.json"
            count = min(per_process, self.args.episodes - first)
            words = [*FLEXOR, "eval", str(self.folder), "--env.type=pusht", "--json"]
            words += [f"--eval.n_episodes={count}", f"--eval.batch_size={count}"]
            words += [f"--eval.seed={FIRST_START + first}"]
            with out.open("wb") as results, self.log.open("ab") as log:
                self.playing.append((out, subprocess.Popen(words, stdout=results, stderr=log)))

    def gather(self) -> None:
        results = [json.loads(out.read_text()) for out, _ in self.playing]
        self.playing = []
        episodes = sum(part["episodes"] for part in results)
        self.result = {
            "seed": self.seed,
            "training_minutes": round(json.loads(self.clock.read_text()) / 60, 1),
            "episodes": episodes,
            "mean_best_reward": sum(p["mean_max_reward"] * p["episodes"] for p in results) / episodes,
            "success_rate": sum(p["successes"] for p in results) / episodes,
        }
        say(f"{self.result}")

    @property
    def busy(self) -> bool:
        return self.training is not None or bool(self.playing)


def say(words: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {words}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder of lerobot/pusht; default: from the Hub")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--at-once", type=int, default=1, help="runs that train at the same time")
    parser.add_argument("--stop-after", type=float, default=float("inf"), metavar="SECONDS")
    parser.add_argument("--episodes", type=int, default=100)
    parser.add_argument("--processes", type=int, default=5, help="processes that evaluate a run together")
    parser.add_argument("--runs", type=Path, default=Path("runs/pusht"))
    parser.add_argument("--output", type=Path)
    cut = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args = parser.parse_args(sys.argv[1:cut])
    args.flags = sys.argv[cut + 1 :]
    args.runs.mkdir(parents=True, exist_ok=True)

    ended, stopping = time.monotonic() + args.stop_after, False
    runs = [SeedRun(seed, args) for seed in args.seeds]
    waiting = list(runs)
    try:
        while any(run.busy for run in runs) or (waiting and not stopping):
            if time.monotonic() > ended and not stopping:
                stopping = True
                for run in runs:
                    if run.training:
                        run.training.send_signal(signal.SIGTERM)  # it saves, and can be resumed
            while waiting and not stopping and sum(run.training is not None for run in runs) < args.at_once:
                waiting.pop(0).start()
            time.sleep(0.2)
            for run in runs:
                run.look(stopping)
    finally:
        for process in [p for run in runs for p in (run.training, *(p for _, p in run.playing)) if p]:
            process.terminate()
    report(runs, args)


def report(runs: list[SeedRun], args: argparse.Namespace) -> None:
    import torch

    results = [run.result for run in runs if run.result]
    if len(results) < len(runs):
        say(f"{len(runs) - len(results)} run(s) are not done: the same command resumes them")
    summary = {
        "date": time.strftime("%Y-%m-%d"),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch": torch.__version__,
        "trained_at_once": args.at_once,
        "flags": args.flags,
        "seeds": results,
    }
    if results:
        summary["mean_best_reward"] = sum(each["mean_best_reward"] for each in results) / len(results)
    if args.output:
        args.output.write_text(json.dumps(summary, indent=1))
    print(json.dumps(summary, indent=1))


if __name__ == "__main__":
    main()
