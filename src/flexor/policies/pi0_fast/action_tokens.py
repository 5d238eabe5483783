"""Actions in PaliGemma's vocabulary: the processing step that encodes them for training, and their decoding.

A chunk is encoded as: <bos>, "Action: ", its FAST tokens, "|". FAST tokens take the last tokens of PaliGemma's
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


class ActionVocabulary(NamedTuple):
    """The tokens of PaliGemma that a chunk is encoded with."""

    bos: int
    prefix: list[int]
    suffix: list[int]
    end: int
    """The first token of `suffix`."""
    first: int
    """Stands for FAST token 0; `first - n` stands for FAST token n."""

    @classmethod
    def load(cls, name: str, skipped: int) -> ActionVocabulary:
        """From PaliGemma's tokenizer, of whose vocabulary the last `skipped` tokens are left out."""
        tokenizer = fetch("AutoTokenizer", name, FILES, add_eos_token=True, add_bos_token=False)
        prefix = tokenizer.encode("Action: ", add_special_tokens=False)
        end = tokenizer.convert_tokens_to_ids("|")
        first = tokenizer.vocab_size - 1 - skipped
        return cls(tokenizer.bos_token_id, prefix, tokenizer.encode("|"), end, first)

    def encode(self, fast_tokens: Sequence[int]) -> list[int]:
        return [self.bos, *self.prefix, *(self.first - token for token in fast_tokens), *self.suffix]

    def decode(self, tokens: list[int]) -> tuple[list[int], bool]:
        """The FAST tokens in what follows <bos>, and whether it has the prefix."""
        tokens = tokens[: tokens.index(self.end)] if self.end in tokens else tokens
        has_prefix = tokens[: len(self.prefix)] == self.prefix
        fast_tokens, place = [], 0
        while place < len(tokens):
            if tokens[place : place + len(self.prefix)] == self.prefix:
                place += len(self.prefix)
            else:
                fast_tokens.append(self.first - tokens[place])
                place += 1
        return fast_tokens, has_prefix


@processing_step("action_tokenizer_processor")
@dataclass
class TokenizeActions(ProcessingStep):
    """Encodes a chunk of normalised actions as tokens, with a mask that is False for padding."""

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
    def _vocabulary(self) -> ActionVocabulary:
        return ActionVocabulary.load(self.paligemma_tokenizer_name, self.fast_skip_tokens)

    def prepare(self) -> None:
        _ = self._fast, self._vocabulary

    def __call__(self, batch: Batch, context: StepContext = ACTING) -> Batch:
        if ACTION not in batch:
            return batch
        actions = batch[ACTION]
        if actions.dim() != 3:
            raise FlexorError(
                f"Chunks of actions [B, H, A] become tokens, but {list(actions.shape)} was passed."
            )
        values = actions.float().cpu().numpy()
        encoded = [self._vocabulary.encode(fast_tokens) for fast_tokens in self._fast.encode(values)]
        if self._fast.outside(values):
            warn_once(
                "Some actions are beyond the range of the FAST tokenizer %s: they take more tokens, and those below it "
                "are clipped. Are they normalised as the tokenizer expects? Train one on these actions with "
                "`flexor data tokenizer`.",
                self.action_tokenizer_name,
            )
        if max(map(len, encoded)) > self.max_action_tokens:
            warn_once(
                "Some chunks of actions have more than policy.max_action_tokens=%d tokens: their end is cut off. Use a "
                "larger value, a smaller policy.chunk_size, or a tokenizer trained on these actions (`flexor data "
                "tokenizer`).",
                self.max_action_tokens,
            )
        tokens = torch.zeros(len(encoded), self.max_action_tokens, dtype=torch.int64)
        mask = torch.zeros(tokens.shape, dtype=torch.bool)
        for row, row_mask, chunk in zip(tokens, mask, encoded):
            length = min(len(chunk), self.max_action_tokens)
            row[:length] = torch.tensor(chunk[:length])
            row_mask[:length] = True
        return {**batch, ACTION_TOKENS: tokens, ACTION_TOKEN_MASK: mask}

    def rehearse(self, batch: Batch, context: StepContext = ACTING) -> Batch:
        if ACTION not in batch:
            return batch
        shape = len(batch[ACTION]), self.max_action_tokens
        tokens, mask = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.bool)
        return {**batch, ACTION_TOKENS: tokens, ACTION_TOKEN_MASK: mask}
