"""Flexor's data loading beside LeRobot's: the same datasets, the same cores, one after the other, in turns.

    python benchmarks/data_vs_lerobot.py [--quick] [--rounds 3] [--cores 1 2 4 8 15] [--dataset.root FOLDER]

The first round runs LeRobot in every setting: LeRobotDataset and StreamingLeRobotDataset, 0 to 16 workers (not more
than twice the cores), pictures as uint8 and as float32, which is its default. Later rounds repeat its two fastest.
Flexor streams one epoch, and in another run goes through two, of which the second reads what the first has kept. Every
measurement is a process of its own, and never two run at once.

Flexor's time counts from opening the dataset to the last batch of the epoch. LeRobot's counts once its workers
are warm. So start-up is charged to us and not to LeRobot. Ratios are to LeRobot's fastest setting in that case.
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import data_sets
import data_verdict
import lerobot_environment
import measuring

HERE = Path(__file__).parent
RESULTS = HERE / "results"
BATCH = 64
STREAM, CACHED = "flexor, streaming", "flexor, second epoch"


@dataclass(frozen=True)
class Case:
    """One dataset, one kind of sample."""

    name: str
    root: Path
    mode: str


def main() -> None:
    args = parse()
    usable = sorted(os.sched_getaffinity(0))
    python = lerobot_environment.lerobot_python()
    torchcodec = lerobot_environment.has_torchcodec(python)
    results = {}
    for count in args.cores:
        if count > len(usable):
            sys.exit(f"--cores {count}: this machine has {len(usable)} cores.")
        bench = Bench(args, usable[:count], python, torchcodec)
        for case in cases(args):
            name = case.name if len(args.cores) == 1 else f"{case.name}, {count} cores"
            results[name] = bench.run(case)
            keep(args, torchcodec, results)
    print(keep(args, torchcodec, results))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small datasets, one round, a few settings")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--seconds", type=float, default=20.0, help="least time a LeRobot setting is measured for"
    )
    parser.add_argument("--timeout", type=float, default=300.0, help="most time a measurement may take")
    parser.add_argument("--cores", type=int, nargs="+", default=[2], help="cores that both programs get")
    parser.add_argument("--cases", nargs="*", help="only these, such as av1_gop2-single")
    parser.add_argument("--tier", default="disk", help="where the second epoch's frames are kept")
    parser.add_argument("--dataset.root", dest="root", type=Path, help="this dataset instead of made ones")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for the results")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.seconds = 1, min(args.seconds, 4.0)
    return args


def cases(args: argparse.Namespace) -> list[Case]:
    if args.root is not None:
        selection = [Case(f"{args.root.name}-{mode}", args.root, mode) for mode in ("single", "sarm")]
    else:
        size = (6, 240) if args.quick else (20, 300)
        combinations = (
            ("av1_gop2", "single"),
            ("av1_gop2", "sarm"),
            ("h264_gop250", "single"),
            ("av1_gop2_96", "single"),
            ("av1_gop2_256", "single"),
        )
        selection = [
            Case(f"{name}-{mode}", data_sets.dataset(name, *size), mode)
            for name, mode in combinations
            if not args.cases or f"{name}-{mode}" in args.cases
        ]
    return [case for case in selection if not args.cases or case.name in args.cases]


class Bench:
    """Runs measurements in turns."""

    def __init__(self, args: argparse.Namespace, cores: list[int], python: Path, torchcodec: bool):
        self.args, self.cores, self.python, self.torchcodec = args, cores, python, torchcodec

    def run(self, case: Case) -> dict[str, list[dict[str, Any]]]:
        """Measurements by setting: one per round."""
        lerobot = self.settings(case)
        measurements: dict[str, list[dict[str, Any]]] = {}
        for number in range(self.args.rounds):
            if number == 1:
                lerobot = {name: lerobot[name] for name in fastest(measurements, list(lerobot))[:2]}
            for name, words in {**self.flexor(case), **lerobot}.items():
                measurements.setdefault(name, []).append(self.measure(case, number, name, words))
        return measurements

    def measure(self, case: Case, number: int, name: str, words: list[object]) -> dict[str, Any]:
        if name in (STREAM, CACHED):
            cache = data_sets.FOLDER / "cache"  # a new one for each run, so that every first epoch decodes
            env = {**os.environ, "FLEXOR_CACHE": str(cache)}
            raw = measuring.measure(words, env, self.cores, self.args.timeout)
            shutil.rmtree(cache, ignore_errors=True)
            result = raw if "error" in raw else flexor_figures(raw)
        else:
            env = lerobot_environment.environment(self.python)
            result = measuring.measure(words, env, self.cores, self.args.timeout)
        rate = result.get("frames_per_s")
        outcome = (
            result.get("error")
            or f"{rate:,.0f} frames/s, first batch {result['first_batch_latency_s']:.1f} s"
        )
        print(f"{case.name}, round {number + 1}, {name}: {outcome}", file=sys.stderr, flush=True)
        return result

    def flexor(self, case: Case) -> dict[str, list[object]]:
        program = [sys.executable, "-m", "flexor", "bench", "data", f"--dataset.root={case.root}", "--json"]
        program += [
            f"--mode={case.mode}",
            f"--batch_size={BATCH}",
            f"--output={data_sets.FOLDER / 'reports'}",
        ]
        return {
            STREAM: [*program, "--dataset.cache.tier=stream"],
            CACHED: [*program, f"--dataset.cache.tier={self.args.tier}", "--epochs=2"],
        }

    def settings(self, case: Case) -> dict[str, list[object]]:
        program = [self.python, HERE / "data_lerobot.py", "--root", case.root, "--mode", case.mode]
        program += ["--batch-size", BATCH, "--seconds", self.args.seconds]
        backend = ["--backend", "torchcodec" if self.torchcodec else "pyav"]
        # Its default of 1000 windows of 16 pictures would take 15 GB in each worker.
        buffer = ["--buffer", 200 if case.mode == "sarm" else 1000]
        most = max(4, 2 * len(self.cores))
        every = (0, 2) if self.args.quick else [n for n in (0, 2, 4, 8, 16) if n <= most]
        commands: dict[str, list[object]] = {}
        for workers in every:
            map_style = [*program, "--kind", "map", "--workers", workers, *backend]
            commands[f"lerobot, map-style, {workers} workers, uint8"] = [*map_style, "--uint8"]
            if workers == 2:
                commands[f"lerobot, map-style, {workers} workers, float32"] = map_style
            if self.torchcodec:  # its streaming has no other way to decode
                stream = [*program, "--kind", "stream", "--workers", workers, *buffer]
                commands[f"lerobot, streaming, {workers} workers, uint8"] = [*stream, "--uint8"]
        return commands


def fastest(results: dict[str, list[dict[str, Any]]], names: list[str]) -> list[str]:
    """Settings that worked, by their median rate."""
    rates = {
        name: [r["frames_per_s"] for r in results.get(name, []) if r.get("frames_per_s")] for name in names
    }
    return sorted((n for n in names if rates[n]), key=lambda n: -statistics.median(rates[n]))


def flexor_figures(report: dict[str, Any]) -> dict[str, Any]:
    """What is kept of our own report: of several epochs, the last."""
    epoch = report["epochs"][-1]
    fields = (
        "of_limit",
        "limit_frames_per_s",
        "samples_per_s",
        "frames_decoded_per_frame_delivered",
        "bound",
        "shares",
    )
    about = (
        "first_batch_latency_s",
        "peak_memory_bytes",
        "peak_memory_without_files_bytes",
        "tier",
        "decode_in",
        "shuffle",
    )
    return {
        "frames_per_s": epoch["frames_per_s_node"],
        **{name: epoch[name] for name in (*fields, "wallclock_s", "cpu_s_per_frame", "cpu_s")},
        **{name: report[name] for name in (*about, "decode_limit_frames_per_s", "memory_limit_frames_per_s")},
        "imported_bytes": report["memory_at_start_bytes"],
    }


def keep(args: argparse.Namespace, torchcodec: bool, results: dict[str, Any]) -> str:
    """Write what there is so far, as JSON and as a page; the page."""
    about = {
        "date": time.strftime("%Y-%m-%d"),
        "command": "python benchmarks/data_vs_lerobot.py" + (" --quick" if args.quick else ""),
        "cores": ", ".join(map(str, args.cores)),
        "batch_size": BATCH,
        "rounds": args.rounds,
        "lerobot": f"0.6.1 with {'torchcodec' if torchcodec else 'PyAV: torchcodec did not load, NOT its best'}",
        **measuring.machine(),
    }
    page = data_verdict.page(about, results, STREAM, CACHED)
    args.output.mkdir(parents=True, exist_ok=True)
    path = args.output / f"{about['date']}_data_vs_lerobot{'_quick' if args.quick else ''}.json"
    path.write_text(json.dumps({**about, "results": results}, indent=1) + "\n")
    path.with_suffix(".md").write_text(page)
    return page


if __name__ == "__main__":
    main()
