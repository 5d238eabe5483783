"""Processing of a batch before the policy, and of actions before the robot.

A pipeline is a list of steps, saved with the weights in LeRobot's format. Training, evaluation, export and the planner
all use the same pipeline. A policy names its steps in `PolicyConfig.steps_before` and `steps_after`. To add a step:
write a class with `@processing_step(name)`, in this folder or in the folder of its policy.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from flexor.core.batch import Batch
from flexor.core.errors import CheckpointError, ConfigError
from flexor.core.foreign_files import MALFORMED, read_json_object
from flexor.core.paths import inside
from flexor.core.rng import NoiseSource
from flexor.core.typed import from_plain

Stats = Mapping[str, Mapping[str, Any]]

PREPROCESSOR = "policy_preprocessor"
POSTPROCESSOR = "policy_postprocessor"


@dataclass(frozen=True)
class StepContext:
    """What a step can use besides the batch."""

    training: bool = False
    """Whether the batch is for training. A step augments only then."""
    noise: NoiseSource | None = None
    """Random numbers that depend on seed, step and sample only. None if there is no seed."""
    keeps_bytes: bool = False
    """Whether the next step takes images as bytes. The pipeline says so."""
    observation: Batch = field(default_factory=dict)
    """For steps after the policy: the observation it acted on, in the robot's units, under the policy's names."""


ACTING = StepContext()


class ProcessingStep:
    """One step of a pipeline. `config` and `state` are saved."""

    name: ClassVar[str]

    on_host: ClassVar[bool] = False
    """Whether the step works on the host, as on words. In training, it and the steps before it run in the loader's
    threads, on several batches at once."""
    uses_images: ClassVar[bool] = True
    """Whether the step reads or changes images. If no step that the loader runs does, they get to the GPU faster."""
    saved: ClassVar[bool] = True
    """Whether checkpoints name the step. One that LeRobot does not have is added again by `PolicyConfig.completed`."""
    keeps_values: ClassVar[bool] = False
    """Whether the step only renames or reshapes: its output is still in the robot's units and on the same device."""
    takes_bytes: ClassVar[bool] = False
    """Whether the step takes images as bytes too, and returns floats. Others only ever see floats on the device."""

    def __call__(self, batch: Batch, context: StepContext = ACTING) -> Batch:
        raise NotImplementedError

    def to(self, device: str) -> None:
        """Set the device that the policy computes on."""

    def split_images(self) -> tuple[ProcessingStep | None, ProcessingStep | None] | None:
        """The step for everything but images, and the step for images; None if it needs both together.

        The loader runs the first on batches whose images it holds back, the second follows on the device.
        """
        return None if self.uses_images else (self, None)

    def prepare(self) -> None:
        """Load what the step needs before a run starts, so that a missing file is reported at once."""

    def connect(self, before: Pipeline) -> None:
        """For steps after the policy: take what they need from the steps before it. Called when both are loaded."""

    def rehearse(self, batch: Batch, context: StepContext = ACTING) -> Batch:
        """A batch of the same shape, for the planner: computed without files and without reading values."""
        return self(batch, context)

    def config(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)} if is_dataclass(self) else {}

    @classmethod
    def from_config(cls, settings: dict[str, Any]) -> ProcessingStep:
        return from_plain(cls, settings, cls.name) if is_dataclass(cls) else cls(**settings)

    def state(self) -> dict[str, Tensor]:
        return {}

    def load_state(self, state: dict[str, Tensor]) -> None:
        pass


STEPS: dict[str, type[ProcessingStep]] = {}
AnyStep = TypeVar("AnyStep", bound=type[ProcessingStep])


def processing_step(name: str) -> Callable[[AnyStep], AnyStep]:
    """Register a step under its name in checkpoints: LeRobot's name, if LeRobot has the step."""

    def register(step: AnyStep) -> AnyStep:
        step.name = name
        STEPS[name] = step
        return step

    return register


@dataclass
class Pipeline:
    """Named steps applied one after the other."""

    name: str
    steps: list[ProcessingStep]
    rehearsal: bool = False

    def __call__(self, batch: Batch, context: StepContext = ACTING) -> Batch:
        for step, following in zip_longest(self.steps, self.steps[1:]):
            context = replace(context, keeps_bytes=following is not None and following.takes_bytes)
            batch = step.rehearse(batch, context) if self.rehearsal else step(batch, context)
        return batch

    def renamed(self, batch: Batch) -> Batch:
        """The batch under the policy's names, in the robot's units."""
        for step in self.steps:
            batch = step(batch) if step.keeps_values else batch
        return batch

    def to(self, device: str) -> Pipeline:
        """Move batches to the device that the policy computes on."""
        for step in self.steps:
            step.to(device)
        return self

    def prepare(self) -> None:
        for step in self.steps:
            step.prepare()

    def connect(self, before: Pipeline) -> Pipeline:
        """For the steps after the policy: show them those before it."""
        for step in self.steps:
            step.connect(before)
        return self

    @property
    def saved_steps(self) -> list[ProcessingStep]:
        return [step for step in self.steps if step.saved]

    def save(self, folder: Path) -> None:
        described = []
        for index, step in enumerate(self.saved_steps):
            entry: dict[str, Any] = {"registry_name": step.name, "config": step.config()}
            state = step.state()
            if state:
                entry["state_file"] = f"{self.name}_step_{index}_{step.name}.safetensors"
                save_file(state, folder / entry["state_file"])
            described.append(entry)
        text = json.dumps({"name": self.name, "steps": described}, indent=2)
        (folder / f"{self.name}.json").write_text(text)

    @classmethod
    def load(cls, folder: Path, name: str) -> Pipeline:
        file = folder / f"{name}.json"
        if not file.is_file():
            raise CheckpointError(
                f"{folder} has no {name}.json, which says how its inputs are normalised. Checkpoints of "
                "LeRobot before 0.4 lack it: convert them with its migrate_policy_normalization script."
            )
        pipeline = cls(name, [load_step(file, entry) for entry in read_steps(file)])
        pipeline.prepare()
        return pipeline


def read_steps(file: Path) -> list[dict[str, Any]]:
    """The entries of a saved pipeline, one per step."""
    try:
        steps = read_json_object(inside(file.parent, file.name))["steps"]
        if not isinstance(steps, list) or not all(isinstance(entry, dict) for entry in steps):
            raise ValueError("its steps are no list of objects")
    except (*MALFORMED, OSError) as error:
        raise CheckpointError(f"{file} does not describe the processing of a policy: {error!r}") from error
    return steps


def _artifacts(file: Path, entry: Mapping[str, Any]) -> dict[str, str]:
    """Settings that name files beside the pipeline, such as a tokenizer that LeRobot saved there, as paths."""
    return {name: str(inside(file.parent, path)) for name, path in (entry.get("artifacts") or {}).items()}


def load_step(file: Path, entry: dict[str, Any]) -> ProcessingStep:
    """The step that an entry of the pipeline in `file` describes, not prepared yet."""
    name = entry.get("registry_name") or entry.get("class")
    if not isinstance(name, str) or name not in STEPS:
        raise CheckpointError(
            f"{file} names the processing step {name!r}, which Flexor does not have. It has: {', '.join(STEPS)}. "
            f"If you have its code, register it in the file of your policy with @flexor.processing_step({name!r}). "
            f"If the policy works without it, delete its entry from {file.name}. Otherwise use it in LeRobot."
        )
    settings = entry.get("config") or {}
    try:
        step = STEPS[name].from_config({**settings, **_artifacts(file, entry)})
    except (ConfigError, *MALFORMED) as error:
        raise CheckpointError(
            f"{file}: the processing step {name!r} does not accept the settings {settings}: {error!r}"
        ) from error
    if "state_file" in entry:
        try:
            step.load_state(load_file(inside(file.parent, entry["state_file"])))
        except (*MALFORMED, OSError, RuntimeError, SafetensorError) as error:
            raise CheckpointError(
                f"{file}: the state of the processing step {name!r} can't be read: {error}"
            ) from error
    return step
