"""Actions relative to the observed state: the policy learns how far to move instead of where to.

`RelativeActions` subtracts the state before normalisation, `AbsoluteActions` adds it again to what was predicted. All
actions of a chunk are relative to the state at its beginning.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor

from flexor.core.batch import ACTION, STATE, Batch
from flexor.core.errors import CheckpointError, ConfigError, FlexorError
from flexor.core.log import warn_once
from flexor.policies.processing.pipeline import (
    ACTING,
    PREPROCESSOR,
    Pipeline,
    ProcessingStep,
    StepContext,
    processing_step,
)


@processing_step("relative_actions_processor")
@dataclass
class RelativeActions(ProcessingStep):
    """Subtracts the state from actions. Comes before normalisation, whose statistics are of relative actions then."""

    uses_images = False
    enabled: bool = False
    exclude_joints: list[str] = field(default_factory=list)
    """Actions whose name contains one of these words, in any case, stay absolute."""
    action_names: list[str] | None = None
    """The names of the actions in the dataset. Without them nothing is excluded."""

    def __call__(self, batch: Batch, context: StepContext = ACTING) -> Batch:
        if not self.enabled or ACTION not in batch:
            return batch
        return {**batch, ACTION: batch[ACTION] - self.offset(batch, batch[ACTION])}

    def offset(self, observation: Batch, action: Tensor) -> Tensor:
        """What is subtracted from actions [B, A] or [B, H, A]; of an action that stays absolute, it is 0."""
        if STATE not in observation:
            raise FlexorError(f"Relative actions require {STATE}, but the batch has none.")
        state = observation[STATE].to(action.device, action.dtype)
        state = state[:, -1] if state.dim() == 3 else state  # of several time steps the last is now
        relative = self.relative(action.shape[-1])
        self.check(len(relative), state.shape[-1])
        offset = F.pad(state, (0, len(relative) - state.shape[-1]))  # [B, A]; also cuts off what is too long
        if not all(relative):
            offset = offset.clone()
            for i, counts in enumerate(relative):
                if not counts:
                    offset[:, i] = 0  # no mask: made on the host, it would have to wait for the GPU
        return offset[:, None] if action.dim() == 3 else offset

    def check(self, actions: int, states: int) -> None:
        """Refuse actions that have no state to be relative to."""
        if any(self.relative(actions)[states:]):
            raise ConfigError(
                f"Relative actions require a state for every action, but {STATE} has {states} values and {ACTION} has "
                f"{actions}: name those without a state in policy.relative_exclude_joints, or set "
                "--policy.use_relative_actions=false."
            )

    def relative(self, actions: int) -> list[bool]:
        """Which of so many actions are relative."""
        words = [str(joint).lower() for joint in self.exclude_joints if joint]
        names = [str(name).lower() for name in self.action_names or []][:actions]
        flags = [not any(word in name for word in words) for name in names]
        return flags + [True] * (actions - len(flags))


@processing_step("absolute_actions_processor")
@dataclass
class AbsoluteActions(ProcessingStep):
    """Adds the observed state to predicted actions. Comes after their normalisation is undone."""

    enabled: bool = False
    relative_step: RelativeActions | None = None
    """The step that made them relative. It is not saved: see `connect`."""

    def __call__(self, batch: Batch, context: StepContext = ACTING) -> Batch:
        if not self.enabled:
            return batch
        if self.relative_step is None:
            raise CheckpointError(
                f"The step {self.name!r} does not know which actions are relative: the processing before the policy "
                f"has no step {RelativeActions.name!r}. If you load the two parts on your own, call "
                "`after.connect(before)`."
            )
        action = batch[ACTION]
        return {**batch, ACTION: action + self.relative_step.offset(context.observation, action)}

    def connect(self, before: Pipeline) -> None:
        steps = [step for step in before.steps if isinstance(step, RelativeActions)]
        self.relative_step = steps[0] if steps else self.relative_step
        if self.enabled and self.relative_step is None:
            raise CheckpointError(
                f"{self.name!r} after the policy requires {RelativeActions.name!r} before it: {PREPROCESSOR}.json "
                f"has only {', '.join(step.name for step in before.steps)}."
            )

    def config(self) -> dict[str, Any]:
        return {"enabled": self.enabled}


BY_STEP = "relative_action"
"""Statistics of relative actions for each step of a chunk, [H, A] each, beside those of absolute ones."""


@dataclass
class RelativeActionSettings:
    """The settings of a policy that can predict relative actions, under LeRobot's names."""

    relative_by_step: ClassVar[bool] = False
    """Whether they have statistics for each step of a chunk, as `BY_STEP`."""

    use_relative_actions: bool = False
    """Learn actions relative to the state at the beginning of a chunk. Their statistics are computed for it."""
    relative_exclude_joints: list[str] = field(default_factory=lambda: ["gripper"])
    """With relative actions: those whose name contains one of these words stay absolute."""
    action_feature_names: list[str] | None = None
    """Names of the actions; by default those of the dataset."""

    def relative_actions(self) -> RelativeActions:
        """The step before normalisation."""
        if self.use_relative_actions and self.relative_exclude_joints:
            self._warn_of_names()
        return RelativeActions(
            self.use_relative_actions, list(self.relative_exclude_joints), self.action_feature_names
        )

    def absolute_actions(self) -> AbsoluteActions:
        """The step after normalisation is undone."""
        return AbsoluteActions(self.use_relative_actions, self.relative_actions())

    def _warn_of_names(self) -> None:
        words, names = ", ".join(self.relative_exclude_joints), self.action_feature_names
        if not names:
            warn_once(
                "policy.relative_exclude_joints=[%s] has no effect: the dataset does not name its actions, so all of "
                "them become relative. Set --policy.action_feature_names=[...] to name them.",
                words,
            )
        elif all(RelativeActions(True, self.relative_exclude_joints, names).relative(len(names))):
            warn_once(
                "policy.relative_exclude_joints=[%s] matches none of the actions (%s): all of them become relative.",
                words,
                ", ".join([*names[:8], *(["..."] if len(names) > 8 else [])]),
            )
