"""What latency costs a robot, and what real-time chunking gets back: the built-in task through `flexor serve`.

    python benchmarks/latency.py [--policy=RUN] [--episodes=100] [--latencies 0 0.2 0.4] [--output FILE.json]

Without --policy, a small ACT that sees the positions of block and disc is trained first, in a minute or two on a CPU.
It is served by `flexor serve` in a process of its own. The robot's time is simulated, so the results do not depend on
this machine: every answer takes exactly --latencies seconds, and the table moves on meanwhile. Players:

- waits: `ChunkPlayer`, which asks when its actions are used up, and waits
- real time: `RealTimePlayer`, which asks before, and says what it will execute meanwhile

`execute` is the number of actions of a chunk that are executed before the next takes over. A robot without an action
stands still. With a block that slides, the table is not the same any more when an answer arrives.
"""

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flexor.core.console import progress, table
from flexor.sim.record import EVAL_SEED_START
from flexor_client import RemotePolicy
from real_time import score_in_real_time

FLEXOR = [sys.executable, "-m", "flexor"]
STATE = "environment_state_agent_pos"
SMALL = {
    "steps": 3000,
    "batch_size": 64,
    "env_eval_freq": 0,
    "policy.chunk_size": 16,
    "policy.n_action_steps": 8,
    "policy.dim_model": 64,
    "policy.dim_feedforward": 256,
}


def train(folder: Path) -> Path:
    """A small policy that sees positions instead of images."""
    data, run = folder / "data", folder / "act"
    subprocess.run([*FLEXOR, "record", str(data), f"--obs-type={STATE}"], check=True)
    words = [f"--{name}={value}" for name, value in SMALL.items()]
    words += ["--dataset.repo_id=local/place", f"--dataset.root={data}", f"--output_dir={run}"]
    subprocess.run([*FLEXOR, "train", "--config=demo", *words], check=True)
    return run


@contextmanager
def served(policy: Path) -> Iterator[str]:
    """The address at which a policy is served."""
    words = ["serve", str(policy), "--device=cpu", "--port=0", "--requests-per-s=100000", "--json"]
    server = subprocess.Popen([*FLEXOR, *words], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        line = server.stdout.readline()
        if not line:
            raise SystemExit(f"`flexor serve {policy}` ended with {server.wait()}")
        yield json.loads(line)["url"]
    finally:
        server.terminate()
        server.wait()


def measure(policy: RemotePolicy, args: argparse.Namespace) -> list[dict[str, Any]]:
    seeds = range(EVAL_SEED_START, EVAL_SEED_START + args.episodes)
    obs_type = STATE if "observation.environment_state" in policy.metadata["inputs"] else "pixels_agent_pos"
    cases = [*itertools.product(args.block_speeds, args.execute, args.latencies, (False, True))]
    report, results = progress("measuring"), []
    for number, (speed, execute, latency, real_time) in enumerate(cases):
        score = score_in_real_time(
            policy,
            seeds,
            latency,
            real_time=real_time,
            execute=execute,
            obs_type=obs_type,
            block_speed=speed,
        )
        player = "real time" if real_time else "waits"
        case = {"block_speed": speed, "execute": execute, "latency_s": latency, "player": player}
        results.append({**case, **asdict(score)})
        report(number + 1, len(cases))
    return results


def as_table(results: list[dict[str, Any]]) -> str:
    rows: list[list[object]] = [["block", "execute", "latency", "player", "success", "moving", "seconds"]]
    for each in results:
        rows.append(
            [
                "lies" if not each["block_speed"] else f"slides {each['block_speed']:g}",
                each["execute"],
                f"{1000 * each['latency_s']:.0f} ms",
                each["player"],
                f"{each['success_rate']:.0%}",
                f"{each['moving']:.0%}",
                f"{each['mean_seconds']:.1f}",
            ]
        )
    return table(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--policy", type=Path, help="a run or checkpoint, trained on the built-in task")
    parser.add_argument("--episodes", type=int, default=100)
    parser.add_argument("--latencies", type=float, nargs="+", default=[0.0, 0.2], metavar="S")
    parser.add_argument("--execute", type=int, nargs="+", default=[1, 4, 8], metavar="N")
    parser.add_argument("--block-speeds", type=float, nargs="+", default=[0.0, 0.03], metavar="V")
    parser.add_argument("--output", type=Path, help="file for the results, as JSON")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = args.policy or train(Path(folder))
        with served(run) as url, RemotePolicy(url) as policy:
            results = measure(policy, args)
    print(as_table(results))
    if args.output:
        args.output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
