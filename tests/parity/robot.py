"""A robot of LeRobot's gets its actions from Flexor's server, through flexor_client in LeRobot's environment."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from parity.limits import Row
from support.serving import CHUNK, numbers, serving

CLIENT = Path(__file__).parents[2] / "client/src"
PACKAGES = ("msgpack", "websockets")  # what flexor-client needs and LeRobot does not bring


def rows(lerobot: Path, folder: Path) -> Iterator[Row]:
    has = subprocess.run([lerobot, "-c", f"import {', '.join(PACKAGES)}"], capture_output=True, check=False)
    if has.returncode:
        install = [lerobot, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*install, "--target", folder / "packages", *PACKAGES], check=True)
    paths = [str(CLIENT), str(folder / "packages"), os.environ.get("PYTHONPATH", "")]
    with serving(numbers()) as (url, _):
        done = subprocess.run(
            [lerobot, "-m", "parity.robot_lerobot", url, folder / "robot.json"],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        raise RuntimeError(f"robot_lerobot failed:\n{(done.stdout + done.stderr)[-3000:]}")
    results = json.loads((folder / "robot.json").read_text())
    yield Row("robot: observations named as in LeRobot's datasets", float(not results["names"]))
    yield Row("robot: actions of one that waits", _waits(results["waits"]))
    yield Row("robot: actions in real time", _real_time(results["real time"]))
    steps = np.abs(np.diff([[1.0, -1.0], *results["limited"]["sent"]], axis=0))
    yield Row("robot: limited steps", float(max(steps.max() - 0.5, 0.0)), 1e-6)


def _waits(result: dict) -> float:
    """A chunk is the state plus 0, 1, 2, 3; the robot goes there, but not beyond 6."""
    joints, sent, did = np.array([1.0, -1.0]), [], []
    for step in range(len(result["sent"])):
        if step % CHUNK == 0:
            start = joints
        sent.append(start + step % CHUNK)
        joints = np.minimum(sent[-1], 6)
        did.append(joints)
    return float(np.abs(np.array(result["sent"]) - sent).max() + np.abs(np.array(result["did"]) - did).max())


def _real_time(result: dict) -> float:
    """Steps that are not those of a chunk, and held ones after the first action: there must be none."""
    did = result["did"]
    first = next(number for number, action in enumerate(did) if action is not None)
    idle = sum(action is None for action in did[first:])
    moved = np.diff([action[0] for action in did[first:] if action is not None])
    return float(idle > len(did) // 2) + float((np.abs(moved) > 6).any()) + float(len(result["sent"]) < 3)
