"""Ten made faults, and whether Flexor names each: `flexor eval --open_loop` and `flexor data check --policy.path`.

    python benchmarks/made_faults.py [--work FOLDER] [--json FILE]

Records the built-in task with two cameras, and trains two small policies from scratch, each in a few minutes on two CPU
cores: a Diffusion Policy on one task, and a SmolVLA on two tasks that differ in their words. Then it records other
episodes: healthy ones, and the same with one fault each. Both commands are run on each. A fault is named rightly if the
first verdict of each command that has one is that fault; the healthy episodes must get no verdict of either. A third
policy is trained on words that say nothing, and must be said to ignore them. With --work, data and policies are kept,
and used again.
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
from flexor.policies.nn import resnet
from flexor.sim.drawing import Painter
from flexor.sim.expert import Disturbance, expert_action
from flexor.sim.task import BLOCK_HALF, FPS, GOAL_RADIUS, PlaceEnv, State, advance

FRONT, SIDE = "observation.images.front", "observation.images.side"
STATE, ACTION = "observation.state", "action"
PUT, HOME = "Put the red block on the disc.", "Go home and close the gripper."
HOME_PLACE, NEAR, REST, LONGEST = (-0.7, 0.6), 0.03, 8, 88
JOINTS = ["x", "y", "opening"]
TEST_SEED = 100_000
SMALL_RESNET = "resnet_small"  # ResNet-18 with a block less in each stage, and a quarter of its channels
resnet.ARCHITECTURES[SMALL_RESNET] = resnet.Architecture((1, 1, 1, 1), bottleneck=False, width=16)
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


def demonstrations(count: int, seed: int, tasks: Sequence[str]) -> list[Episode]:
    env, cameras = PlaceEnv(32), Cameras()
    return [demonstrate(env, cameras, seed + number, tasks[number % len(tasks)]) for number in range(count)]


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


ONE_TASK = {
    "healthy": Fault(list, ()),
    "cameras swapped": Fault(swap_cameras, ("cameras-swapped",)),
    "sign of a joint flipped": Fault(flip_sign, ("sign-flipped",)),
    "degrees for radians": Fault(degrees, ("other-units",)),
    "order of joints permuted": Fault(permute_joints, ("joints-permuted",)),
    "frame rate halved": Fault(halve_rate, ("other-frame-rate",), FPS // 2),
    "relative for absolute actions": Fault(make_relative, ("action-kind",)),
    "camera blank": Fault(blank_camera, ("blank-camera",)),
    "state constant": Fault(still_state, ("state-constant", "state-never-changes")),
}
TWO_TASKS = {
    "healthy, two tasks": Fault(list, ()),
    "words shuffled": Fault(shuffle_words, ("words-shuffled",)),
    "task unseen": Fault(unseen_task, ("task-unseen",)),
}
WITHOUT_WORDS = {"trained on shuffled words": Fault(list, ("words-ignored",))}


@dataclass(frozen=True)
class Study:
    """A policy, and the faults that it is tested with."""

    name: str
    tasks: tuple[str, ...]
    faults: dict[str, Fault]
    flags: dict[str, Any]
    spoil: Callable[[Sequence[Episode]], list[Episode]] = list
    """What is done to the episodes that it is trained on."""


SHARED = {"env.type": "null", "policy.device": "cpu", "scheduler.num_warmup_steps": 30, "log_freq": 100}
DIFFUSION = {
    **SHARED,
    "config": "diffusion_place",
    "steps": 1000,
    "batch_size": 32,
    "policy.horizon": 16,
    "policy.vision_backbone": SMALL_RESNET,
    "optimizer.lr": 1e-3,
}
SMOLVLA = {
    **SHARED,
    "config": "smolvla_place",
    "dataset.repo_id": "null",
    "steps": 900,
    "batch_size": 16,
    "policy.chunk_size": 16,
    "optimizer.lr": 1e-3,
    "scheduler.peak_lr": 1e-3,
    "scheduler.num_decay_steps": 900,
}
STUDIES = (
    Study("one_task", (PUT,), ONE_TASK, DIFFUSION),
    Study("two_tasks", (PUT, HOME), TWO_TASKS, SMOLVLA),
    Study("without_words", (PUT, HOME), WITHOUT_WORDS, SMOLVLA, shuffle_words),
)


# --- the two commands on each


def run_json(*words: str) -> dict[str, Any]:
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        flexor([*words, "--json"])
    result: dict[str, Any] = json.loads(output.getvalue())
    return result


def train(study: Study, work: Path, episodes: int) -> float | None:
    """Seconds that it took; None if it was trained before."""
    run, data = work / study.name / "run", work / study.name / "train"
    if run.exists():
        return None
    shutil.rmtree(data, ignore_errors=True)
    write(data, study.spoil(demonstrations(episodes, 0, study.tasks)))
    flags = {**study.flags, "save_freq": study.flags["steps"], "dataset.root": data, "output_dir": run}
    started = time.perf_counter()
    with contextlib.redirect_stdout(sys.stderr):
        flexor(["train", *(f"--{name}={value}" for name, value in flags.items())])
    return round(time.perf_counter() - started, 1)


def ask(run: Path, data: Path, page: Path) -> dict[str, Any]:
    """The verdicts of both commands."""
    started = time.perf_counter()
    loop = run_json("eval", str(run), "--open_loop", f"--dataset.root={data}", f"--output={page}")
    seconds = time.perf_counter() - started
    check = run_json("data", "check", str(data), f"--policy.path={run}")
    return {
        "open_loop": [verdict["kind"] for verdict in loop["verdicts"]],
        "data_check": [*dict.fromkeys(problem["kind"] for problem in check["problems"])],
        "score": round(loop["score"], 4),
        "beats_all_baselines": loop["beats_all_baselines"],
        "seconds": round(seconds, 1),
    }


def judge(study: Study, work: Path, tested: int) -> dict[str, Any]:
    folder = work / study.name
    episodes = demonstrations(tested, TEST_SEED, study.tasks)
    data, results = folder / "tested", {}
    for name, fault in study.faults.items():
        shutil.rmtree(data, ignore_errors=True)
        write(data, fault.make(episodes), fault.fps)
        result = ask(folder / "run", data, folder / f"{name.replace(' ', '_')}.html")
        verdicts = [*result["open_loop"][:1], *result["data_check"][:1]]
        right = [verdict in fault.verdicts for verdict in verdicts]
        result["right"] = bool(right) and all(right) if fault.verdicts else not verdicts
        results[name] = result
        print(f"{'right' if result['right'] else 'WRONG'}  {name}: {result}", file=sys.stderr, flush=True)
    return results


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--work", type=Path, help="folder for data, policies and pages; default: a temporary one"
    )
    parser.add_argument(
        "--episodes", type=int, default=200, help="demonstrations that each policy is trained on"
    )
    parser.add_argument("--tested", type=int, default=24, help="other episodes, in which the faults are made")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    args = parser.parse_args()
    results: dict[str, Any] = {}
    seconds: dict[str, float | None] = {}
    with contextlib.ExitStack() as stack:
        work = args.work or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for study in STUDIES:
            seconds[study.name] = train(study, work, args.episodes)
            results |= judge(study, work, args.tested)
    healthy = [name for name in results if name.startswith("healthy")]
    faults = [name for name in results if name not in healthy]
    right, quiet = (
        sum(results[name]["right"] for name in faults),
        all(results[name]["right"] for name in healthy),
    )
    summary = {
        "right_verdicts": right,
        "faults": len(faults),
        "healthy_is_quiet": quiet,
        "training_seconds": seconds,
        "results": results,
    }
    if args.json:
        args.json.write_text(json.dumps(summary, indent=1) + "\n")
    silence = "no verdict" if quiet else "A VERDICT"
    print(f"{right} of {len(faults)} faults are named rightly; {silence} on the healthy episodes")
    return 0 if right == len(faults) and quiet else 1


if __name__ == "__main__":
    sys.exit(main())
