"""Policies whose weights serve other robots than they were trained on: cameras are read one by one, and states and
actions are padded to a fixed size."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Self

from flexor.core.batch import ACTION, STATE
from flexor.core.errors import ConfigError
from flexor.core.log import log
from flexor.policies.base import PolicyConfig
from flexor.policies.features import Kind, PolicyFeature

EMPTY_CAMERA = "observation.images.empty_camera_"
Features = dict[str, PolicyFeature]


@dataclass
class AnyRobotConfig(PolicyConfig):
    """What such policies have, under LeRobot's names."""

    max_state_dim: int = 32
    """States are padded with zeros to this many values."""
    max_action_dim: int = 32
    """Actions are padded with zeros to this many values."""
    empty_cameras: int = 0
    """Number of cameras that the policy has and the robot has not. They are never seen, and cost nothing."""

    @property
    def empty_camera_names(self) -> list[str]:
        """Cameras that no dataset has: LeRobot adds them to the inputs."""
        return [f"{EMPTY_CAMERA}{number}" for number in range(self.empty_cameras)]

    @property
    def images(self) -> Features:
        """The cameras that there are."""
        empty = self.empty_camera_names
        return {name: feature for name, feature in super().images.items() if name not in empty}

    @property
    def resizes_images(self) -> bool:
        """Whether images of any size become those that the network reads."""
        return True

    def can_act_without(self, names: Collection[str]) -> bool:
        """Without some cameras, as in LeRobot, but not without all."""
        return {*names} < {*self.images} or not names

    def accepts_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        if name in self.images and self.resizes_images:
            return len(shape) == 3 and shape[0] == self.images[name].shape[0]
        return super().accepts_shape(name, shape)

    def fit_statistics(self, sizes: Mapping[str, int]) -> None:
        """Take the robot's state size from its statistics: LeRobot leaves that of the first robot in config.json."""
        size = sizes.get(STATE)
        if size is not None and self.state is not None:
            self.input_features[STATE] = replace(self.state, shape=(size,))
            self.check_padding()
        super().fit_statistics(sizes)

    def check_padding(self) -> None:
        """Refuse states and actions that are larger than the weights can take."""
        sizes = {
            STATE: ("max_state_dim", self.state),
            ACTION: ("max_action_dim", self.output_features.get(ACTION)),
        }
        for name, (limit, feature) in sizes.items():
            most = getattr(self, limit)
            if feature is not None and (len(feature.shape) != 1 or feature.shape[0] > most):
                raise ConfigError(
                    f"{name} has the shape {list(feature.shape)}, but {self.type} supports at most "
                    f"policy.{limit}={most} values. Trained weights can't be enlarged: with --policy.path, use fewer "
                    f"values; without it, set a larger policy.{limit}."
                )

    def fitted(self, inputs: Features, outputs: Features) -> Self:
        """These settings for a dataset with other features than the policy was trained on. Logs what differs.

        A camera that the policy knows keeps its place. The dataset's others take the places of those that it lacks.
        """
        if not self.input_features:
            return super().fitted(inputs, outputs)
        theirs = {name: feature for name, feature in inputs.items() if feature.type is Kind.VISUAL}
        cameras = list(self.images) if theirs.keys() >= self.images.keys() else self._placed(list(theirs))
        kept = {*inputs, *self.observed, *self.empty_camera_names} - {*self.images}
        others = {name: feature for name, feature in self.input_features.items() if name in kept}
        changed = replace(
            self,
            input_features={**others, **{name: theirs[name] for name in cameras}},
            output_features=dict(self.output_features) or outputs,
        )
        changed._resize(STATE, changed.input_features, inputs)
        changed._resize(ACTION, changed.output_features, outputs)
        return changed

    def _placed(self, there: list[str]) -> list[str]:
        """The dataset's cameras in the order in which the policy sees them."""
        new = [name for name in there if name not in self.images]
        places: list[str] = []
        for camera in self.images:
            if camera in there:
                places.append(camera)
            elif new:
                places.append(new.pop(0))
                log.info("%s takes the place of the policy's camera %s", places[-1], camera)
            else:
                log.info("the policy's camera %s is left out: the dataset has none for its place", camera)
        for camera in new:
            log.info("%s is a camera more than the policy had", camera)
        return places + new

    def _resize(self, name: str, own: Features, there: Features) -> None:
        """Take the dataset's size of state or action."""
        before, now = own.get(name), there.get(name)
        if before is None or now is None or before.shape == now.shape:
            return
        own[name] = now
        log.info(
            "%s has %s values in the dataset and %s in the policy: padded to %d",
            *(name, *("x".join(map(str, feature.shape)) for feature in (now, before))),
            self.max_state_dim if name == STATE else self.max_action_dim,
        )
