"""Ten made faults, and whether Flexor names each: `flexor eval --open_loop` and `flexor data check --policy.path`.

    python benchmarks/made_faults.py [--work FOLDER] [--steps 800] [--json FILE]

Records the built-in task with two cameras and two tasks, trains a small SmolVLA from scratch on it (two minutes on two
CPU cores), and records other episodes: healthy ones, and the same with one fault each. Both commands are run on each. A
fault counts as named if its verdict is the first one of either command and no other fault is named before it; on the
healthy episodes, neither may have a verdict. With --work, the data and the policy are kept and used again.
"""

import argparse
import contextlib
import io
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from flexor.cli.main import main as flexor
from flexor.data.format.writer import DatasetWriter
from flexor.sim.drawing import Painter
from flexor.sim.expert import Disturbance, expert_action
from flexor.sim.task import BLOCK_HALF, FPS, GOAL_RADIUS, PlaceEnv, State, advance

FRONT, SIDE = "observation.images.front", "observation.images.side"
STATE, ACTION = "observation.state", "action"
PUT, HOME = "Put the red block on the disc.", "Go home and close the gripper."
HOME_PLACE, NEAR, REST, LONGEST = (-0.7, 0.6), 0.03, 8, 88
JOINTS = ["x", "y", "opening"]
TEST_SEED = 100_000
ROWS = (0.55, -0.55)  # of the block and the disc in a picture

Frame = dict[str, np.ndarray]


@dataclass(frozen=True)
class Episode:
    task: str
    frames: list[Frame]


def features() -> dict[str, dict[str, Any]]:
    picture = {"dtype": "video", "shape": (32, 32, 3), "names": ["height", "width", "channels"]}
    values = {"dtype": "float32", "shape": (3,), "names": JOINTS}
    return {FRONT: picture, SIDE: picture, STATE: values, ACTION: values}


class Cameras:
    """Two pictures of the built-in task, each along one axis: the front camera shows x, the side camera y."""

    def __init__(self) -> None:
        self.painter = Painter(32, BLOCK_HALF, GOAL_RADIUS)

    def draw(self, state: State) -> Frame:
        front, side = (self._along(state, axis) for axis in (0, 1))
        return {FRONT: front, SIDE: 255 - side}

    def _along(self, state: State, axis: int) -> np.ndarray:
        block, disc = (state.block[axis], ROWS[0]), (state.goal[axis], ROWS[1])
        gripper = (state.gripper[axis], 0.0)
        return self.painter.draw(gripper, state.opening, block, [(disc, 0)], state.grasped, None)


def demonstrate(env: PlaceEnv, cameras: Cameras, seed: int, task: str) -> Episode:
    """An episode whose actions are where the gripper is led next, as with a leader arm."""
    disturbance = Disturbance(seed, 1.0)
    env.reset(seed=seed)
    frames: list[Frame] = []
    rest = REST
    while rest and len(frames) < LONGEST:
        state = env.state
        target = expert_action(state) if task == PUT else np.array([*HOME_PLACE, -1.0], np.float32)
        led = advance(state, target)
        frames.append(
            {
                **cameras.draw(state),
                STATE: np.array([*state.gripper, state.opening], np.float32),
                ACTION: np.array([*led.gripper, led.opening], np.float32),
            }
        )
        _, _, success, _, _ = env.step(disturbance.apply(target))
        arrived = np.hypot(state.gripper[0] - HOME_PLACE[0], state.gripper[1] - HOME_PLACE[1]) < NEAR
        rest = rest - 1 if (success if task == PUT else arrived) else REST
    return Episode(task, frames)


def demonstrations(count: int, seed: int) -> list[Episode]:
    env, cameras = PlaceEnv(32), Cameras()
    return [demonstrate(env, cameras, seed + number, (PUT, HOME)[number % 2]) for number in range(count)]


def write(root: Path, episodes: Sequence[Episode], fps: int = FPS) -> Path:
    settings = {"codec": "h264", "crf": 12, "pix_fmt": "yuv444p"}
    with DatasetWriter(root, fps, features(), robot_type="flexor_place", **settings) as writer:
        for episode in episodes:
            for frame in episode.frames:
                writer.add_frame(frame)
            writer.save_episode(episode.task)
    return root


# --- faults: each takes episodes and gives others


def changed(episodes: Sequence[Episode], change: Callable[[Frame], Frame]) -> list[Episode]:
    return [replace(episode, frames=[{**f, **change(f)} for f in episode.frames]) for episode in episodes]


def scaled(episodes: Sequence[Episode], factors: Sequence[float]) -> list[Episode]:
    factor = np.array(factors, np.float32)
    return changed(episodes, lambda frame: {name: frame[name] * factor for name in (STATE, ACTION)})


def swap_cameras(episodes: Sequence[Episode]) -> list[Episode]:
    return changed(episodes, lambda frame: {FRONT: frame[SIDE], SIDE: frame[FRONT]})


def shuffle_words(episodes: Sequence[Episode]) -> list[Episode]:
    tasks = [episode.task for episode in episodes]
    order = np.random.default_rng(0).permutation(len(tasks))
    return [replace(episode, task=tasks[place]) for episode, place in zip(episodes, order)]


def flip_sign(episodes: Sequence[Episode]) -> list[Episode]:
    return scaled(episodes, [-1, 1, 1])


def degrees(episodes: Sequence[Episode]) -> list[Episode]:
    return scaled(episodes, [180 / np.pi] * 3)


def permute_joints(episodes: Sequence[Episode]) -> list[Episode]:
    return changed(episodes, lambda frame: {name: frame[name][[1, 0, 2]] for name in (STATE, ACTION)})


def halve_rate(episodes: Sequence[Episode]) -> list[Episode]:
    """Every second frame, each with the action that leads to the next one."""
    return [
        replace(
            episode,
            frames=[
                {**now, ACTION: then[ACTION]} for now, then in zip(episode.frames[::2], episode.frames[1::2])
            ],
        )
        for episode in episodes
    ]


def make_relative(episodes: Sequence[Episode]) -> list[Episode]:
    return changed(episodes, lambda frame: {ACTION: frame[ACTION] - frame[STATE]})


def blank_camera(episodes: Sequence[Episode]) -> list[Episode]:
    return changed(episodes, lambda frame: {FRONT: np.zeros_like(frame[FRONT])})


def still_state(episodes: Sequence[Episode]) -> list[Episode]:
    return changed(episodes, lambda frame: {STATE: np.zeros_like(frame[STATE])})


def unseen_task(episodes: Sequence[Episode]) -> list[Episode]:
    return [replace(episode, task="Bring the cup to the sink.") for episode in episodes]


@dataclass(frozen=True)
class Fault:
    make: Callable[[Sequence[Episode]], list[Episode]]
    verdicts: tuple[str, ...]  # the right ones
    fps: int = FPS


FAULTS = {
    "cameras swapped": Fault(swap_cameras, ("cameras-swapped",)),
    "words shuffled": Fault(shuffle_words, ("words-shuffled",)),
    "sign of a joint flipped": Fault(flip_sign, ("sign-flipped",)),
    "degrees for radians": Fault(degrees, ("other-units",)),
    "order of joints permuted": Fault(permute_joints, ("joints-permuted",)),
    "frame rate halved": Fault(halve_rate, ("other-frame-rate",), FPS // 2),
    "relative for absolute actions": Fault(make_relative, ("action-kind",)),
    "camera blank": Fault(blank_camera, ("blank-camera",)),
    "state constant": Fault(still_state, ("state-constant", "state-never-changes")),
    "task unseen": Fault(unseen_task, ("task-unseen",)),
}


# --- the two commands on each


def run_json(*words: str) -> dict[str, Any]:
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        flexor([*words, "--json"])
    result: dict[str, Any] = json.loads(output.getvalue())
    return result


def train(data: Path, run: Path, steps: int) -> None:
    flags = {
        "config": "smolvla_place",
        "dataset.repo_id": "null",
        "dataset.root": data,
        "output_dir": run,
        "steps": steps,
        "batch_size": 16,
        "save_freq": steps,
        "env.type": "null",
        "policy.chunk_size": 16,
        "policy.device": "cpu",
        "optimizer.lr": 1e-3,
        "scheduler.peak_lr": 1e-3,
        "scheduler.num_warmup_steps": 30,
        "scheduler.num_decay_steps": steps,
    }
    with contextlib.redirect_stdout(sys.stderr):
        flexor(["train", *(f"--{name}={value}" for name, value in flags.items())])


def ask(run: Path, data: Path, page: Path) -> dict[str, Any]:
    """The verdicts of both commands."""
    started = time.perf_counter()
    loop = run_json("eval", str(run), "--open_loop", f"--dataset.root={data}", f"--output={page}")
    seconds = time.perf_counter() - started
    check = run_json("data", "check", str(data), f"--policy.path={run}")
    return {
        "open_loop": [verdict["kind"] for verdict in loop["verdicts"]],
        "data_check": [problem["kind"] for problem in check["problems"]],
        "score": round(loop["score"], 4),
        "beats_all_baselines": loop["beats_all_baselines"],
        "seconds": round(seconds, 1),
    }


def judge(run: Path, episodes: Sequence[Episode], work: Path) -> dict[str, Any]:
    data = work / "tested"
    results: dict[str, Any] = {}
    for name, fault in {"healthy": Fault(list, ()), **FAULTS}.items():
        shutil.rmtree(data, ignore_errors=True)
        write(data, fault.make(episodes), fault.fps)
        result = ask(run, data, work / f"{name.replace(' ', '_')}.html")
        verdicts = [*result["open_loop"][:1], *result["data_check"][:1]]
        right = [verdict in fault.verdicts for verdict in verdicts]
        result["right"] = all(right) and bool(right) if fault.verdicts else not verdicts
        results[name] = result
        print(f"{'right' if result['right'] else 'WRONG'}  {name}: {result}", file=sys.stderr, flush=True)
    return results


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--work", type=Path, help="folder for data, policy and pages; default: a temporary one"
    )
    parser.add_argument("--episodes", type=int, default=240, help="demonstrations to train on")
    parser.add_argument("--tested", type=int, default=30, help="other episodes, in which the faults are made")
    parser.add_argument("--steps", type=int, default=900)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        work = args.work or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        run, seconds = work / "run", None
        if not run.exists():
            write(work / "train", demonstrations(args.episodes, 0))
            started = time.perf_counter()
            train(work / "train", run, args.steps)
            seconds = round(time.perf_counter() - started, 1)
        results = judge(run, demonstrations(args.tested, TEST_SEED), work)
    right = sum(result["right"] for name, result in results.items() if name != "healthy")
    summary = {
        "right_verdicts": right,
        "faults": len(FAULTS),
        "healthy_is_quiet": results["healthy"]["right"],
        "training_seconds": seconds,
        "results": results,
    }
    if args.json:
        args.json.write_text(json.dumps(summary, indent=1) + "\n")
    quiet = "no verdict" if summary["healthy_is_quiet"] else "A VERDICT"
    print(f"{right} of {len(FAULTS)} faults are named rightly; {quiet} on the healthy episodes")
    return 0 if right == len(FAULTS) and summary["healthy_is_quiet"] else 1


if __name__ == "__main__":
    sys.exit(main())
