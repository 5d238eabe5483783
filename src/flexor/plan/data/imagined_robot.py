"""A robot described by its cameras, state and actions, for plans without a dataset."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from flexor.core.batch import ACTION, STATE
from flexor.core.errors import ConfigError
from flexor.plan.data.host import Camera, Data
from flexor.policies.base import PolicyConfig
from flexor.policies.features import Kind, PolicyFeature
from flexor.policies.fit import deltas_of


@dataclass(frozen=True)
class Robot:
    cameras: int = 2
    height: int = 480
    width: int = 640
    state: int = 14
    action: int = 14

    def fill_in(self, policy: PolicyConfig) -> PolicyConfig:
        """The policy's settings with this robot's features, as `policies.fit.fit_to_dataset` would set them."""
        images = {
            f"observation.images.camera{i}": PolicyFeature(Kind.VISUAL, (3, self.height, self.width))
            for i in range(self.cameras)
        }
        state = {STATE: PolicyFeature(Kind.STATE, (self.state,))} if self.state else {}
        action = {ACTION: PolicyFeature(Kind.ACTION, (self.action,))}
        policy = replace(policy, input_features={**images, **state}, output_features=action)
        policy.validate()
        return policy

    def describe(self) -> str:
        cameras = "1 camera" if self.cameras == 1 else f"{self.cameras} cameras"
        size = f"{self.height}x{self.width}"
        return f"{cameras} of {size}, a state of {self.state} values, actions of {self.action} values"


USUAL = (
    *(Robot(), Robot(height=256, width=256)),
    *(Robot(cameras=1), Robot(cameras=1, height=480, width=480)),
)


def usual_robot(policy: PolicyConfig, **sizes: int) -> tuple[Robot, PolicyConfig]:
    """The first of the common robots that the policy supports, and the policy's settings for it.

    `sizes` of its state and action, if they are not the usual ones.
    """
    for robot in (replace(usual, **sizes) for usual in USUAL):
        try:
            return robot, robot.fill_in(policy)
        except ConfigError as error:
            refusal = error
    raise ConfigError(
        f"policy.type={policy.type} supports none of the robots in the hardware guide: {refusal}"
    ) from refusal


def imagined_data(policy: PolicyConfig, frames: int) -> Data:
    """A dataset with the cameras of the policy, whose features must be filled in."""
    deltas = deltas_of(policy)
    cameras = (Camera(f.shape[1], f.shape[2], len(deltas.get(n, [0]))) for n, f in policy.images.items())
    return Data(frames, tuple(cameras))


def parse_cameras(text: str) -> tuple[int, int, int]:
    """2x480x640 -> number, height, width."""
    match = re.fullmatch(r"(\d+)x(\d+)x(\d+)", text)
    if not match:
        raise ConfigError(f"--cameras={text} must be NUMBERxHEIGHTxWIDTH, such as 2x480x640.")
    number, height, width = map(int, match.groups())
    return number, height, width
