"""The step that turns the task description into tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from flexor.core.batch import Batch
from flexor.core.errors import FlexorError
from flexor.core.log import warn_once
from flexor.policies.hf_transformers import fetch
from flexor.policies.processing.pipeline import ACTING, ProcessingStep, StepContext, processing_step

TASK_TOKENS = "observation.language.tokens"
TASK_MASK = "observation.language.attention_mask"

FILES = ("config.json", "tokenizer.json", "tokenizer_config.json")
"""What most repositories describe a tokenizer with."""


@processing_step("tokenizer_processor")
@dataclass
class Tokenize(ProcessingStep):
    """Turns the task, a sentence per sample, into tokens and a mask that is true for tokens and false for padding.

    padding="max_length" gives every batch the same shape. padding="longest" pads to the longest task of the batch, but
    only when a policy acts: in training it pads to `max_length` too, so that every step has the same shapes, as CUDA
    graphs and compiled code require. To a policy that ignores padding, which all do, it makes no difference.
    """

    on_host = True
    uses_images = False
    tokenizer_name: str
    max_length: int = 512
    task_key: str = "task"
    padding_side: str = "right"
    padding: str = "max_length"
    truncation: bool = True

    _warned = False  # that a task is too long
    _lock = Lock()  # tokenizers of `transformers` set their padding before each call

    @cached_property
    def _tokenizer(self) -> Any:
        return fetch("AutoTokenizer", self.tokenizer_name, FILES)

    def prepare(self) -> None:
        _ = self._tokenizer

    def __call__(self, batch: Batch, context: StepContext = ACTING) -> Batch:
        tasks = tasks_of(batch, self.task_key)
        # a batch has few different tasks, and tokenizers are slow
        numbers = {task: n for n, task in enumerate(dict.fromkeys(tasks))}
        encoding = self._encode(
            list(numbers),
            max_length=self.max_length,
            truncation=self.truncation,
            padding="max_length" if context.training else self.padding,
            padding_side=self.padding_side,
            return_tensors="pt",
        )
        tokens, mask = encoding["input_ids"], encoding["attention_mask"].bool()
        self._check_length(numbers, mask)
        rows = torch.tensor([numbers[task] for task in tasks])
        return _with_tokens(batch, tokens[rows], mask[rows])

    def _encode(self, texts: list[str], **options: Any) -> Any:
        with self._lock:
            return self._tokenizer(texts, **options)

    def _check_length(self, tasks: Iterable[str], mask: Tensor) -> None:
        """Say if the end of a task is cut off: in a prompt with the robot's state it may be the state."""
        if self._warned or mask.shape[1] < self.max_length:
            return
        full = [task for task, row in zip(tasks, mask.all(1).tolist()) if row]
        for task, tokens in zip(full, self._encode(full)["input_ids"] if full else []):
            if len(tokens) > self.max_length and not self._warned:
                self._warned = True
                warn_once(
                    "The task %r has %d tokens, but the policy's maximum is %d: %s. Use a shorter task, or a larger "
                    "policy.tokenizer_max_length if the policy has that setting.",
                    task if len(task) < 200 else f"{task[:200]} ...",
                    len(tokens),
                    self.max_length,
                    "its end is cut off" if self.truncation else "it is not cut off, and may not fit",
                )

    def rehearse(self, batch: Batch, context: StepContext = ACTING) -> Batch:
        shape = len(tasks_of(batch, self.task_key)), self.max_length
        return _with_tokens(
            batch, torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.bool)
        )


def tasks_of(batch: Batch, key: str) -> list[str]:
    tasks: list[str] | None = batch.get(key)
    if not tasks:
        raise FlexorError(f"The policy requires a task description, but the batch has no {key!r}.")
    return tasks


def _with_tokens(batch: Batch, tokens: Tensor, mask: Tensor) -> Batch:
    return {**batch, TASK_TOKENS: tokens, TASK_MASK: mask}
