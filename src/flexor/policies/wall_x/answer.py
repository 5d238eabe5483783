"""Chunks of actions as words, which follow the prompt in fast mode: their FAST tokens, and the end of the turn.

FAST token 7 is the word <|action_token_7|> of WALL-X's tokenizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from flexor.core.batch import ACTION, ACTION_LENGTH, Batch
from flexor.core.errors import ConfigError
from flexor.core.log import warn_once
from flexor.policies.nn.fast_tokens import FastTokenizer, load_fast_tokenizer
from flexor.policies.processing.pipeline import ACTING, StepContext
from flexor.policies.wall_x.prompt import MOST_TOKENS, PROMPT, PROMPT_MASK, TokenizePrompt

ANSWER_MASK = "answer_mask"  # [B, R], True for the words that are learned, which follow the prompt
END = "<|im_end|>"
ANSWER_TOKENS = 32
"""Answers are padded to a multiple of this, so that steps have the same shapes."""
USUAL_ANSWER = 64  # tokens, for a plan
MOST_STEPS = 32
"""Steps of a chunk that LeRobot writes as words."""


@dataclass(frozen=True)
class ActionWords:
    """The words that stand for FAST tokens: they are neighbours in the vocabulary."""

    first: int
    count: int
    end: int

    @classmethod
    def of(cls, tokenizer: Any, name: str) -> ActionWords:
        first, end, *_ = tokenizer.convert_tokens_to_ids(["<|action_token_0|>", END])
        words = tokenizer.get_added_vocab()
        count = sum(word.startswith("<|action_token_") for word in words)
        last = words.get(f"<|action_token_{count - 1}|>")
        if not count or last != first + count - 1:
            raise ConfigError(
                f"The tokenizer of {name} has no words <|action_token_0|>, <|action_token_1|>, ... one after the "
                "other, which policy.prediction_mode=fast requires. Use policy.prediction_mode=diffusion, or the "
                "tokenizer of a WALL-X that was trained in fast mode."
            )
        return cls(first, count, end)

    def decode(self, words: Sequence[int]) -> list[int]:
        """The FAST tokens among what was written until the end of the turn."""
        words = list(words)
        written = words[: words.index(self.end)] if self.end in words else words
        return [word - self.first for word in written if self.first <= word < self.first + self.count]


@dataclass
class TokenizeAnswer(TokenizePrompt):
    """The prompt, and in training the chunk that follows it."""

    action_tokenizer: str = ""

    name = "wall_x_answer"

    @cached_property
    def words(self) -> ActionWords:
        return ActionWords.of(self.tokenizer, self.tokenizer_name)

    @cached_property
    def fast(self) -> FastTokenizer:
        fast = load_fast_tokenizer(self.action_tokenizer)
        if (count := fast.bpe.get_vocab_size()) > self.words.count:
            raise ConfigError(
                f"policy.action_tokenizer_path={self.action_tokenizer} has {count} tokens, but the tokenizer of "
                f"{self.tokenizer_name} has words for only {self.words.count} of them."
            )
        return fast

    def prepare(self) -> None:
        _ = self.fast

    def __call__(self, batch: Batch, context: StepContext = ACTING) -> Batch:
        batch = super().__call__(batch, context)
        if ACTION not in batch:
            return batch
        answers = self._answers(batch)
        room = max(1, MOST_TOKENS - batch[PROMPT].shape[1])
        if max(map(len, answers)) > room:
            warn_once(
                "Some chunks of actions have more than the %d tokens that are left after the prompt: their end is cut "
                "off. Use a smaller policy.chunk_size, or a tokenizer trained on these actions (`flexor data "
                "tokenizer`).",
                room,
            )
        answers = [answer[:room] for answer in answers]
        length = -(-max(map(len, answers)) // ANSWER_TOKENS) * ANSWER_TOKENS
        tokens = torch.tensor([answer + [0] * (length - len(answer)) for answer in answers])
        mask = torch.arange(length) < torch.tensor([len(answer) for answer in answers])[:, None]
        return _with_answers(batch, tokens, mask)

    def _answers(self, batch: Batch) -> list[list[int]]:
        ending = self.encode(f"{END}\n")
        widths = batch.get(ACTION_LENGTH)  # where datasets have different ones
        actions = batch[ACTION].float().cpu().numpy()
        answers = []
        for number, chunk in enumerate(actions):
            real = ~np.isnan(chunk[0])
            if widths is not None:
                real &= np.arange(len(real)) < int(widths[number])
            [fast_tokens] = self.fast.encode(np.nan_to_num(chunk[None, :, real], nan=0.0))
            answers.append([*(self.words.first + token for token in fast_tokens), *ending])
        return answers

    def rehearse(self, batch: Batch, context: StepContext = ACTING) -> Batch:
        batch = super().rehearse(batch, context)
        if ACTION not in batch:
            return batch
        tokens = torch.zeros(len(batch[PROMPT]), USUAL_ANSWER, dtype=torch.int64)
        return _with_answers(batch, tokens, tokens.bool())


def _with_answers(batch: Batch, tokens: torch.Tensor, mask: torch.Tensor) -> Batch:
    prompt, prompt_mask = torch.cat((batch[PROMPT], tokens), 1), torch.cat((batch[PROMPT_MASK], mask), 1)
    return {**batch, PROMPT: prompt, PROMPT_MASK: prompt_mask, ANSWER_MASK: mask}
