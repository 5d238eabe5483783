"""The step that turns the task description into tokens."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from flexor.core.batch import Batch
from flexor.core.errors import FlexorError
from flexor.policies.hf_transformers import fetch
from flexor.policies.processing.pipeline import ACTING, ProcessingStep, StepContext, processing_step

TASK_TOKENS = "observation.language.tokens"
TASK_MASK = "observation.language.attention_mask"


@processing_step("tokenizer_processor")
@dataclass
class Tokenize(ProcessingStep):
    """Turns the task, a sentence per sample, into tokens and a mask that is true for tokens and false for padding."""

    on_host = True
    tokenizer_name: str
    max_length: int = 512
    task_key: str = "task"
    padding_side: str = "right"
    padding: str = "max_length"
    truncation: bool = True

    @cached_property
    def _tokenizer(self) -> Any:
        return fetch("AutoTokenizer", self.tokenizer_name)

    def prepare(self) -> None:
        _ = self._tokenizer

    def __call__(self, batch: Batch, context: StepContext = ACTING) -> Batch:
        tasks = self._tasks(batch)
        distinct = list(dict.fromkeys(tasks))  # a batch has few, and a tokenizer is slow
        found = self._tokenizer(
            distinct,
            max_length=self.max_length,
            truncation=self.truncation,
            padding=self.padding,
            padding_side=self.padding_side,
            return_tensors="pt",
        )
        which = torch.tensor([distinct.index(task) for task in tasks])
        return _with_tokens(batch, found["input_ids"][which], found["attention_mask"][which].bool())

    def rehearse(self, batch: Batch, context: StepContext = ACTING) -> Batch:
        shape = len(self._tasks(batch)), self.max_length
        return _with_tokens(
            batch, torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.bool)
        )

    def _tasks(self, batch: Batch) -> list[str]:
        tasks: list[str] | None = batch.get(self.task_key)
        if not tasks:
            raise FlexorError(
                f"The policy requires a task description, but the batch has no {self.task_key!r}."
            )
        return tasks


def _with_tokens(batch: Batch, tokens: Tensor, mask: Tensor) -> Batch:
    return {**batch, TASK_TOKENS: tokens, TASK_MASK: mask}
