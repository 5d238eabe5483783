"""Steps that write the prompt of a vision-language model: they come before the step that tokenises it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from flexor.core.batch import STATE, Batch
from flexor.core.errors import ConfigError, FlexorError
from flexor.policies.processing.pipeline import ACTING, ProcessingStep, StepContext, processing_step
from flexor.policies.processing.tokenize import tasks_of

BIN_EDGES = np.linspace(-1, 1, 257)[:-1]  # 256 bins from -1 to 1; the last one has no upper end


@processing_step("smolvla_new_line_processor")
@dataclass
class AddNewLine(ProcessingStep):
    """Every task ends with a new line: the language model was trained on prompts that do."""

    on_host = True
    uses_images = False

    def __call__(self, batch: Batch, context: StepContext = ACTING) -> Batch:
        tasks = batch.get("task")
        if not tasks:
            return batch
        return {**batch, "task": [task if task.endswith("\n") else f"{task}\n" for task in tasks]}


@processing_step("pi0_new_line_processor")
@dataclass
class AddNewLinePi0(AddNewLine):
    """The same under the name that checkpoints of pi0 use."""


@processing_step("pi05_prepare_state_tokenizer_processor_step")
@dataclass
class StateInPrompt(ProcessingStep):
    """Write the state into the prompt, each value as the number of its bin. Comes after normalisation."""

    on_host = True
    uses_images = False
    ending: ClassVar[str] = ";\nAction: "

    max_state_dim: int = 32
    """Part of LeRobot's settings. The state is written as it is, without padding, as LeRobot does."""
    task_key: str = "task"

    def __call__(self, batch: Batch, context: StepContext = ACTING) -> Batch:
        tasks, state = self._inputs(batch)
        bins = np.digitize(state.float().cpu().numpy(), BIN_EDGES) - 1  # below -1 is bin -1, as in LeRobot
        prompts = [
            f"Task: {_cleaned(task)}, State: {' '.join(map(str, row))}{self.ending}"
            for task, row in zip(tasks, bins.tolist(), strict=True)
        ]
        return {**batch, self.task_key: prompts}

    def rehearse(self, batch: Batch, context: StepContext = ACTING) -> Batch:
        self._inputs(batch)
        return batch

    def _inputs(self, batch: Batch) -> tuple[list[str], Tensor]:
        if STATE not in batch:
            raise FlexorError(
                f"The policy writes {STATE} into its prompt, but the batch has none: record one with each frame."
            )
        tasks = tasks_of(batch, self.task_key)
        if batch[STATE].dim() != 2:
            raise FlexorError(
                f"The policy writes {STATE} [batch, values] into its prompt, but it has the shape "
                f"{list(batch[STATE].shape)}: only the current state can be written."
            )
        return tasks, batch[STATE]


@processing_step("pi0_fast_prepare_state_tokenizer_processor_step")
@dataclass
class StateInPromptFast(StateInPrompt):
    """The same for pi0_fast, whose actions begin with "Action: " themselves."""

    ending = ";\n"


@processing_step("render_generation_prompt_processor")
@dataclass
class GenerationPrompt(ProcessingStep):
    """Of later releases of LeRobot: the prompt of a request for text. Nobody asks for text here, so it does nothing."""

    on_host = True
    uses_images = False

    recipe: dict[str, Any] | None = None

    def __call__(self, batch: Batch, context: StepContext = ACTING) -> Batch:
        return batch


@processing_step("render_messages_processor")
@dataclass
class LanguageRecipe(ProcessingStep):
    """Of later releases of LeRobot: what a policy was trained to say, which changes its prompt. Refused."""

    recipe: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        raise ConfigError(
            "The policy was trained with a language recipe, which Flexor does not have: use it in LeRobot."
        )


def _cleaned(task: str) -> str:
    return task.strip().replace("_", " ").replace("\n", " ")
