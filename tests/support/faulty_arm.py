"""Small datasets of an arm with six joints and a gripper, with the faults that recordings have."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from flexor.data.format.writer import DatasetWriter

JOINTS = ["base", "shoulder", "elbow", "roll", "pitch", "yaw", "gripper"]
TOP, WRIST = "observation.images.top", "observation.images.wrist"
EPISODES, LENGTH = 8, 15

Fault = Callable[[int, np.ndarray, np.ndarray], None]


def write_arm(
    root: Path,
    *faults: Fault,
    blank: Sequence[int] = (),
    frozen: Sequence[int] = (),
    cameras: bool = False,
    stored_as: str = "video",
) -> Path:
    """Faults change the states and actions [T, 7] of an episode.

    `blank`: episodes in which the wrist camera is off; `frozen`: in which it shows the same image from frame 3 on.
    """
    features: dict = {
        name: {"dtype": "float32", "shape": (7,), "names": JOINTS} for name in ("observation.state", "action")
    }
    for name in (TOP, WRIST) if cameras else ():
        features[name] = {"dtype": stored_as, "shape": (32, 32, 3), "names": ["height", "width", "channels"]}
    with DatasetWriter(root, 10, features, codec="h264") as writer:
        for episode in range(EPISODES):
            states, actions = trajectory(episode)
            for fault in faults:
                fault(episode, states, actions)
            for number in range(LENGTH):
                frame = {"observation.state": states[number], "action": actions[number]}
                for name in (TOP, WRIST) if cameras else ():
                    at = min(number, 3) if name == WRIST and episode in frozen else number
                    frame[name] = image(episode, at, name == WRIST and episode in blank)
                writer.add_frame(frame)
            writer.save_episode("pick")
    return root


def trajectory(episode: int) -> tuple[np.ndarray, np.ndarray]:
    """Joints in radians that swing by different amounts, and a gripper that closes."""
    rng = np.random.default_rng(episode)
    time = np.linspace(0, 1, LENGTH)[:, None]
    swing, rest = rng.uniform(0.5, 1.5, (2, 6)) * rng.choice([-1, 1], 6)
    joints = rest + swing * np.sin(3 * time + rng.uniform(0, 1, 6))
    gripper = (time > rng.uniform(0.3, 0.6)).astype(float)
    states = np.concatenate([joints, gripper], 1).astype(np.float32)
    return states, (states + rng.normal(0, 0.02, states.shape)).astype(np.float32)


def image(episode: int, number: int, blank: bool) -> np.ndarray:
    y, x = np.mgrid[0:32, 0:32]
    waves = [np.sin(x / 5 + number / 3 + c) + np.cos(y / 4 + episode) for c in range(3)]
    return np.zeros((32, 32, 3), np.uint8) if blank else (127 + 55 * np.stack(waves, -1)).astype(np.uint8)


def scaled(factor: float, episodes: Sequence[int], dimensions: slice) -> Fault:
    def fault(episode: int, states: np.ndarray, actions: np.ndarray) -> None:
        if episode in episodes:
            states[:, dimensions] *= factor
            actions[:, dimensions] *= factor

    return fault


def still(dimension: int) -> Fault:
    def fault(episode: int, states: np.ndarray, actions: np.ndarray) -> None:
        actions[:, dimension] = 0.25

    return fault


def glitch(episode: int, frame: int, dimension: int) -> Fault:
    def fault(number: int, states: np.ndarray, actions: np.ndarray) -> None:
        if number == episode:
            states[frame, dimension] = 1e6

    return fault


def change_statistics(root: Path, feature: str, change: Callable[[str, np.ndarray], np.ndarray]) -> Path:
    """As if they were those of another dataset."""
    path = root / "meta" / "stats.json"
    stats = json.loads(path.read_text())
    for name, value in stats[feature].items():
        if name != "count":
            stats[feature][name] = change(name, np.array(value)).tolist()
    path.write_text(json.dumps(stats))
    return root
