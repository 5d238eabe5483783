"""Policies whose weights fit robots other than those they were trained on: cameras are encoded one by one, and states
and actions are padded to a fixed size."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Self

from flexor.core.batch import ACTION, STATE
from flexor.core.errors import ConfigError
from flexor.core.log import log
from flexor.policies.base import ChunkConfig
from flexor.policies.features import Kind, PolicyFeature

EMPTY_CAMERA = "observation.images.empty_camera_"
Features = dict[str, PolicyFeature]


@dataclass
class CrossEmbodimentConfig(ChunkConfig):
    """The settings that these policies share, under LeRobot's names."""

    max_state_dim: int = 32
    """States are padded with zeros to this many values."""
    max_action_dim: int = 32
    """Actions are padded with zeros to this many values."""

    def validate(self) -> None:
        super().validate()
        self.require(1, "max_state_dim", "max_action_dim")
        if self.input_features and not (self.images and (self.state or not self.reads_state)):
            state = f"{STATE} and " if self.reads_state else ""
            raise self.missing_input(f"{state}a camera (observation.images...)")
        self.check_padding()

    @property
    def empty_camera_names(self) -> list[str]:
        """Cameras that no dataset has: LeRobot adds them to the inputs."""
        return []

    @property
    def images(self) -> Features:
        """The cameras without the empty ones."""
        empty = self.empty_camera_names
        return {name: feature for name, feature in super().images.items() if name not in empty}

    @property
    def reads_state(self) -> bool:
        """Whether the policy needs the robot's state."""
        return True

    def most_values(self, name: str) -> tuple[int, str]:
        """How many values the state or the action may have, and the setting that says so."""
        setting = "max_state_dim" if name == STATE else "max_action_dim"
        return getattr(self, setting), f"policy.{setting}"

    @property
    def resizes_images(self) -> bool:
        """Whether the policy resizes images to the network's input size."""
        return True

    def can_act_without(self, names: Collection[str]) -> bool:
        """As in LeRobot, some cameras may be missing, but not all."""
        return {*names} < {*self.images} or not names

    def accepts_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        if name in self.images and self.resizes_images:
            return len(shape) == 3 and shape[0] == self.images[name].shape[0]
        return super().accepts_shape(name, shape)

    def fit_statistics(self, sizes: Mapping[str, int]) -> None:
        """Set the state's size from the statistics: in LeRobot's config.json it is that of the first robot."""
        size = sizes.get(STATE)
        if size is not None and self.state is not None:
            self.input_features[STATE] = replace(self.state, shape=(size,))
            self.check_padding()
        super().fit_statistics(sizes)

    def check_padding(self) -> None:
        """Refuse states and actions that are larger than the weights support."""
        for name, feature in {STATE: self.state, ACTION: self.output_features.get(ACTION)}.items():
            most, setting = self.most_values(name)
            if feature is not None and (len(feature.shape) != 1 or feature.shape[0] > most):
                raise ConfigError(
                    f"{name} has the shape {list(feature.shape)}, but {self.type} supports at most "
                    f"{setting}={most} values. Trained weights can't be enlarged: with --policy.path, use "
                    f"fewer values; without it, set a larger {setting}."
                )

    def fitted(self, inputs: Features, outputs: Features) -> Self:
        """These settings for a dataset with features other than those of the training. Logs the differences.

        A camera of the policy keeps its position. The dataset's other cameras take the positions of missing ones.
        """
        if not self.input_features:
            return super().fitted(inputs, outputs)
        dataset_cameras = {name: feature for name, feature in inputs.items() if feature.type is Kind.VISUAL}
        cameras = (
            list(self.images)
            if dataset_cameras.keys() >= self.images.keys()
            else self._camera_order(list(dataset_cameras))
        )
        retained = {*inputs, *self.observed, *self.empty_camera_names} - {*self.images}
        other_inputs = {name: feature for name, feature in self.input_features.items() if name in retained}
        changed = replace(
            self,
            input_features={**other_inputs, **{name: dataset_cameras[name] for name in cameras}},
            output_features=dict(self.output_features) or outputs,
        )
        changed._resize(STATE, changed.input_features, inputs)
        changed._resize(ACTION, changed.output_features, outputs)
        return changed

    def _camera_order(self, dataset_cameras: list[str]) -> list[str]:
        """The dataset's cameras in the policy's order."""
        new = [name for name in dataset_cameras if name not in self.images]
        places: list[str] = []
        for camera in self.images:
            if camera in dataset_cameras:
                places.append(camera)
            elif new:
                places.append(new.pop(0))
                log.info("%s takes the place of the policy's camera %s", places[-1], camera)
            else:
                log.info("the policy's camera %s is left out: the dataset has none for its place", camera)
        for camera in new:
            log.info("%s is an additional camera: the policy had none for it", camera)
        return places + new

    def _resize(self, name: str, features: Features, dataset_features: Features) -> None:
        """Set the size of the state or the action to the dataset's."""
        old, new = features.get(name), dataset_features.get(name)
        if old is None or new is None or old.shape == new.shape:
            return
        features[name] = new
        log.info(
            "%s has %s values in the dataset and %s in the policy: padded to %d",
            *(name, *("x".join(map(str, feature.shape)) for feature in (new, old))),
            self.most_values(name)[0],
        )


@dataclass
class EmptyCamerasConfig(CrossEmbodimentConfig):
    """With places for cameras that no dataset has."""

    empty_cameras: int = 0
    """Number of cameras that the policy has but the robot does not. They are never encoded, and cost nothing."""

    def validate(self) -> None:
        super().validate()
        self.require(0, "empty_cameras")

    @property
    def empty_camera_names(self) -> list[str]:
        return [f"{EMPTY_CAMERA}{number}" for number in range(self.empty_cameras)]
