"""Actions as words of PaliGemma: the step that writes them for training, and what reads them at inference.

A chunk is written as: beginning, "Action: ", its FAST tokens, "|". FAST tokens take the last words of PaliGemma's
vocabulary, which are hardly used otherwise, in reverse order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from flexor.core.batch import ACTION, Batch
from flexor.core.errors import FlexorError
from flexor.core.log import warn_once
from flexor.policies.hf_transformers import fetch
from flexor.policies.nn.fast_tokens import FastTokenizer, load_fast_tokenizer
from flexor.policies.processing.pipeline import ACTING, ProcessingStep, StepContext, processing_step
from flexor.policies.processing.tokenize import FILES

ACTION_TOKENS = "action.tokens"
ACTION_TOKEN_MASK = "action.token_mask"  # noqa: S105  (not a password)


class ActionWords(NamedTuple):
    """The words around a chunk, and the last of those that are FAST tokens."""

    beginning: int
    prefix: list[int]
    end: list[int]
    stop: int
    """The first word of `end`."""
    first: int
    """The word of FAST token 0; that of token n is n before it."""

    @classmethod
    def load(cls, name: str, skipped: int) -> ActionWords:
        """From PaliGemma's tokenizer, of whose vocabulary the last `skipped` words are left out."""
        tokenizer = fetch("AutoTokenizer", name, FILES, add_eos_token=True, add_bos_token=False)
        prefix = tokenizer.encode("Action: ", add_special_tokens=False)
        stop = tokenizer.convert_tokens_to_ids("|")
        return cls(
            tokenizer.bos_token_id, prefix, tokenizer.encode("|"), stop, tokenizer.vocab_size - 1 - skipped
        )

    def write(self, tokens: Sequence[int]) -> list[int]:
        """The words of a chunk's FAST tokens."""
        return [self.beginning, *self.prefix, *(self.first - token for token in tokens), *self.end]

    def read(self, words: list[int]) -> tuple[list[int], bool]:
        """The FAST tokens in words that follow the beginning, and whether they have the prefix."""
        words = words[: words.index(self.stop)] if self.stop in words else words
        begins = words[: len(self.prefix)] == self.prefix
        kept, place = [], 0
        while place < len(words):
            if words[place : place + len(self.prefix)] == self.prefix:
                place += len(self.prefix)
            else:
                kept.append(self.first - words[place])
                place += 1
        return kept, begins


@processing_step("action_tokenizer_processor")
@dataclass
class TokenizeActions(ProcessingStep):
    """Writes a chunk of normalised actions as words, and a mask that is true for words and false for padding."""

    on_host = True
    uses_images = False

    action_tokenizer_name: str
    trust_remote_code: bool = True
    """Part of LeRobot's settings. Flexor runs no code of a tokenizer."""
    max_action_tokens: int = 256
    fast_skip_tokens: int = 128
    paligemma_tokenizer_name: str = "google/paligemma-3b-pt-224"

    @cached_property
    def _fast(self) -> FastTokenizer:
        return load_fast_tokenizer(self.action_tokenizer_name)

    @cached_property
    def _words(self) -> ActionWords:
        return ActionWords.load(self.paligemma_tokenizer_name, self.fast_skip_tokens)

    def prepare(self) -> None:
        _ = self._fast, self._words

    def __call__(self, batch: Batch, context: StepContext = ACTING) -> Batch:
        if ACTION not in batch:
            return batch
        actions = batch[ACTION]
        if actions.dim() != 3:
            raise FlexorError(
                f"Chunks of actions [B, H, A] become tokens, but {list(actions.shape)} was given."
            )
        values = actions.float().cpu().numpy()
        written = [self._words.write(tokens) for tokens in self._fast.encode(values)]
        if self._fast.outside(values):
            warn_once(
                "Some actions are beyond the range of the FAST tokenizer %s, and are cut to it: are they normalised as "
                "the tokenizer expects? Train one on these actions with `flexor data tokenizer`.",
                self.action_tokenizer_name,
            )
        if max(map(len, written)) > self.max_action_tokens:
            warn_once(
                "Some chunks of actions have more than policy.max_action_tokens=%d tokens: their end is cut off. Use a "
                "larger value, a smaller policy.chunk_size, or a tokenizer trained on these actions (`flexor data "
                "tokenizer`).",
                self.max_action_tokens,
            )
        tokens = torch.zeros(len(written), self.max_action_tokens, dtype=torch.int64)
        mask = torch.zeros(tokens.shape, dtype=torch.bool)
        for row, there, words in zip(tokens, mask, written):
            kept = words[: self.max_action_tokens]
            row[: len(kept)] = torch.tensor(kept)
            there[: len(kept)] = True
        return {**batch, ACTION_TOKENS: tokens, ACTION_TOKEN_MASK: mask}

    def rehearse(self, batch: Batch, context: StepContext = ACTING) -> Batch:
        if ACTION not in batch:
            return batch
        shape = len(batch[ACTION]), self.max_action_tokens
        tokens, mask = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.bool)
        return {**batch, ACTION_TOKENS: tokens, ACTION_TOKEN_MASK: mask}
