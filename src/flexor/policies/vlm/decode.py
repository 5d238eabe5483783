"""Decoders that predict token by token: their loss, and the state of a sequence that they continue."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flexor.policies.nn.kv_cache import KVCache, StaticKVCache
from flexor.policies.nn.transformer import Transformer

LOSS_CHUNK = 1024  # tokens whose logits are computed together: a token has a quarter of a million of them
SEGMENT = 8  # tokens after which the host asks whether all samples are finished: it waits for the answer


def to_logits(head: nn.Linear, hidden: Tensor) -> Tensor:
    """Hidden states [..., D] -> [..., V]."""
    return head(hidden.to(head.weight.dtype))


def token_losses(head: nn.Linear, hidden: Tensor, tokens: Tensor) -> Tensor:
    """The cross-entropy [B, T] of tokens [B, T], each predicted by a hidden state [B, T, D]."""

    def cross_entropy(hidden: Tensor, tokens: Tensor) -> Tensor:
        return F.cross_entropy(to_logits(head, hidden).float(), tokens, reduction="none")

    chunks = zip(hidden.flatten(0, 1).split(LOSS_CHUNK), tokens.flatten().split(LOSS_CHUNK))
    # recomputed in the backward pass: the logits of a batch take more memory than all else
    losses = [
        checkpoint(cross_entropy, *chunk, use_reentrant=False, preserve_rng_state=False) for chunk in chunks
    ]
    return torch.cat(losses).unflatten(0, tokens.shape)


def mean_over_tokens(token_losses: Tensor, mask: Tensor) -> Tensor:
    """[B, T] -> [B], the mean over each sample's own tokens, as in openpi.

    LeRobot's mean is over all tokens of a batch, so its loss depends on how samples are split into batches.
    """
    return (token_losses * mask).sum(1) / mask.sum(1).clamp(min=1)


@dataclass
class DecodeState:
    """The prefix and the tokens decoded so far, in memory for the longest answer, which is only changed in place."""

    kv_cache: list[StaticKVCache]
    mask: Tensor
    """Which entries of the cache are filled and not padding, [B, P + T]."""
    token: Tensor
    """The last token, [B]."""
    tokens: Tensor
    """[B, T]"""
    finished: Tensor
    """[B]"""
    cursor: Tensor
    """The last token's index in the cache, [1]; the same tensor as in `kv_cache`."""
    position: Tensor
    """The last token's position, which padding does not count for, as the decoder takes it: [B, 1] or [3, B, 1]."""
    uniforms: Tensor | None
    """Uniform numbers [T, B] to sample tokens with; None takes the most likely one."""

    @classmethod
    def begin(
        cls,
        prefix: Sequence[KVCache],
        mask: Tensor,
        token: Tensor,
        position: Tensor,
        max_tokens: int,
        uniforms: Tensor | None = None,
    ) -> DecodeState:
        """After a prefix with this mask [B, P], only one token [B] is decoded, at this position."""
        batch, length = mask.shape
        cursor = torch.full((1,), length, device=mask.device)
        return cls(
            kv_cache=[StaticKVCache.allocate(layer, max_tokens, cursor) for layer in prefix],
            mask=torch.cat((mask, mask.new_zeros(batch, max_tokens)), 1),
            token=token,
            tokens=torch.zeros(batch, max_tokens, dtype=torch.int64, device=mask.device),
            finished=torch.zeros(batch, dtype=torch.bool, device=mask.device),
            cursor=cursor,
            position=position,
            uniforms=uniforms,
        )

    @property
    def step(self) -> Tensor:
        """The number [1] of the next token."""
        return self.cursor - (self.mask.shape[1] - self.tokens.shape[1])

    def next_logits(self, decoder: Transformer, head: nn.Linear) -> Tensor:
        """The logits [B, V] of what follows the last token, whose keys and values are added to the cache."""
        self.mask.index_fill_(1, self.cursor, True)
        x = decoder.embed_tokens(self.token[:, None]).to(decoder.dtype)
        hidden = decoder(x, decoder.rope(self.position), self.mask[:, None, None], self.kv_cache)
        return to_logits(head, hidden[:, 0])

    def append(self, token: Tensor, end: int) -> None:
        """Add a token [B] to each sample."""
        self.tokens.index_copy_(1, self.step, token[:, None])
        self.token.copy_(token)
        self.finished.logical_or_(token == end)
        self.cursor.add_(1)
        self.position.add_(1)


Sampler = Callable[[Tensor, Tensor | None], Tensor]  # logits [B, V], uniform numbers [B] -> tokens [B]


def decode_segment(
    state: DecodeState, decoder: Transformer, head: nn.Linear, sample: Sampler, end: int
) -> None:
    """Decode the next tokens. Changes the state's tensors in place."""
    for _ in range(SEGMENT):
        logits = state.next_logits(decoder, head).float()
        uniform = None if state.uniforms is None else state.uniforms.index_select(0, state.step)[0]
        state.append(sample(logits, uniform), end)
