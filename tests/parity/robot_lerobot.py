"""A robot of LeRobot's, driven by flexor_client from a server: run where lerobot is installed.

    python -m parity.robot_lerobot URL OUT.json      # in tests/

LeRobot's own mock robot is among its tests, and neither its wheel nor its source distribution has it. So this is the
smallest subclass of its `Robot`.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from lerobot.robots import Robot, RobotConfig
from lerobot.utils.feature_utils import build_dataset_frame, hw_to_dataset_features

from flexor_client import ActionLimits, ChunkPlayer, RealTimePlayer, RemotePolicy, RobotNames, drive

FPS, STEPS, LARGEST = 50, 12, 6.0


@RobotConfig.register_subclass("two_joints")
@dataclass(kw_only=True)
class TwoJointsConfig(RobotConfig):
    pass


class TwoJoints(Robot):
    """Goes where it is told at once, up to 6. `weight` is observed, but not commanded."""

    config_class = TwoJointsConfig
    name = "two_joints"

    def __init__(self, config: TwoJointsConfig):
        super().__init__(config)
        self._connected = False
        self.joints = {"a.pos": 1.0, "b.pos": -1.0}
        self.sent: list[list[float]] = []

    @property
    def observation_features(self) -> dict:
        return {"a.pos": float, "b.pos": float, "weight": float, "top": (8, 8, 3)}

    @property
    def action_features(self) -> dict:
        return {"a.pos": float, "b.pos": float}

    @property
    def is_connected(self) -> bool:
        return self._connected

    @property
    def is_calibrated(self) -> bool:
        return True

    def connect(self, calibrate: bool = True) -> None:
        self._connected = True

    def disconnect(self) -> None:
        self._connected = False

    def calibrate(self) -> None: ...

    def configure(self) -> None: ...

    def get_observation(self) -> dict:
        assert self._connected
        return {**self.joints, "weight": 1.0, "top": np.full((8, 8, 3), 9, np.uint8)}

    def send_action(self, action: dict) -> dict:
        assert self._connected
        self.joints = {name: min(float(value), LARGEST) for name, value in action.items()}
        self.sent.append([action["a.pos"], action["b.pos"]])
        return dict(self.joints)


def same_names(robot: Robot) -> bool:
    """Whether a policy gets a robot's observation as LeRobot's datasets have it."""
    observed = robot.get_observation()
    features = hw_to_dataset_features(robot.observation_features, "observation")
    theirs, ours = (
        build_dataset_frame(features, observed, "observation"),
        RobotNames(robot).observation(observed),
    )
    actions = hw_to_dataset_features(robot.action_features, "action")["action"]["names"]
    return (
        theirs.keys() == ours.keys()
        and all(
            np.array_equal(theirs[name], ours[name]) and theirs[name].dtype == ours[name].dtype
            for name in ours
        )
        and actions == RobotNames(robot).actions
    )


def main(url: str, out: Path) -> None:
    results: dict = {}
    for kind in ("waits", "real time", "limited"):
        robot, steps = TwoJoints(TwoJointsConfig(id="one", calibration_dir=out.parent)), []
        with robot, RemotePolicy(url, reconnect_s=0) as policy:
            results["names"] = same_names(robot)
            limits = ActionLimits(step=0.5) if kind == "limited" else None
            player = (
                RealTimePlayer(policy, FPS) if kind == "real time" else ChunkPlayer(policy, limits=limits)
            )
            report = drive(
                robot,
                player,
                fps=FPS,
                steps=STEPS,
                on_step=lambda observed, did, steps=steps: steps.append((observed, did)),
            )
        states = [observed["observation.state"].tolist() for observed, _ in steps]
        did = [None if action is None else action.tolist() for _, action in steps]
        results[kind] = {"sent": robot.sent, "states": states, "did": did, "held": report.idle_steps}
    out.write_text(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
