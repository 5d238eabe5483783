"""pi0-FAST (Pertsch et al. 2025, https://arxiv.org/abs/2501.09747): PaliGemma predicts actions as tokens.

The prefix is images and a prompt with the state in it, whose tokens all attend to each other. Action tokens follow one
by one; each attends to the prefix and to the action tokens before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flexor.core.batch import Batch
from flexor.core.errors import FlexorError
from flexor.core.log import log
from flexor.core.rng import NoiseSource
from flexor.policies.autoregressive import AutoregressivePolicy
from flexor.policies.base import Loss
from flexor.policies.image_encoder import ImageEncoder
from flexor.policies.nn.fast_tokens import FastTokenizer, load_fast_tokenizer
from flexor.policies.nn.kv_cache import StaticKVCache
from flexor.policies.nn.transformer import Transformer
from flexor.policies.pi0_fast.action_tokens import ACTION_TOKEN_MASK, ACTION_TOKENS, ActionVocabulary
from flexor.policies.pi0_fast.config import Pi0FastConfig
from flexor.policies.vlm.backbone import PrefixCache, decode_suffix
from flexor.policies.vlm.paligemma import PALIGEMMA, PaliGemma
from flexor.policies.vlm.paligemma_names import OPENPI_NAMES
from flexor.policies.vlm.paligemma_policy import (
    apply_settings,
    encode_images,
    image_encoder,
    prefill_batch,
)

LOSS_CHUNK = 1024  # tokens whose logits are computed together: a token has 257,152 of them
SEGMENT = 8  # tokens after which the host asks whether all samples are finished: it waits for the answer


class PaliGemmaWithHead(nn.Module):
    """PaliGemma with its language head."""

    def __init__(self, config: Pi0FastConfig):
        super().__init__()
        size = PALIGEMMA[config.paligemma_variant]
        self.lm_head = nn.Linear(size.language.width, size.vocabulary, bias=False)
        nn.init.normal_(self.lm_head.weight, std=0.02)
        self.model = PaliGemma(size, config.image_resolution[0])

    @property
    def decoder(self) -> Transformer:
        return self.model.decoder

    def token_losses(self, prefix: PrefixCache, tokens: Tensor) -> Tensor:
        """The cross-entropy [B, T - 1] of each token but the first of [B, T]."""
        steps = tokens.shape[1] - 1
        causal_mask = torch.ones(steps, steps, dtype=torch.bool, device=tokens.device).tril()
        x = self.decoder.embed_tokens(tokens[:, :-1])
        hidden = decode_suffix(self.decoder, x, causal_mask, prefix)
        chunks = zip(hidden.flatten(0, 1).split(LOSS_CHUNK), tokens[:, 1:].flatten().split(LOSS_CHUNK))
        # recomputed in the backward pass: the logits of a batch take more memory than all else
        losses = [
            checkpoint(self._cross_entropy, *chunk, use_reentrant=False, preserve_rng_state=False)
            for chunk in chunks
        ]
        return torch.cat(losses).unflatten(0, (len(tokens), steps))

    def _cross_entropy(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """hidden [N, D], tokens [N] -> [N]."""
        return F.cross_entropy(self.logits(hidden).float(), tokens, reduction="none")

    def logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head(hidden.to(self.lm_head.weight.dtype))

    def next_logits(self, state: DecodeState) -> Tensor:
        """The logits [B, V] of what follows the last token, whose keys and values are added to the cache."""
        state.mask.index_fill_(1, state.cursor, True)
        x = self.decoder.embed_tokens(state.token[:, None]).to(self.decoder.dtype)
        rope = self.decoder.rope(state.position)
        return self.logits(self.decoder(x, rope, state.mask[:, None, None], state.kv_cache)[:, 0])


@dataclass
class DecodeState:
    """The prefix and the tokens decoded so far, in memory for the longest chunk, which is only changed in place."""

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
    """The last token's position, which padding does not count for, [B, 1]."""
    uniforms: Tensor | None
    """Uniform numbers [T, B] to sample tokens with; None takes the most likely one."""

    @classmethod
    def begin(cls, prefix: PrefixCache, bos: int, max_tokens: int, uniforms: Tensor | None) -> DecodeState:
        """Only the token of the beginning is decoded."""
        batch, length = prefix.mask.shape
        device = prefix.mask.device
        cursor = torch.full((1,), length, device=device)
        return cls(
            kv_cache=[StaticKVCache.allocate(layer, max_tokens, cursor) for layer in prefix.layers],
            mask=torch.cat((prefix.mask, prefix.mask.new_zeros(batch, max_tokens)), 1),
            token=torch.full((batch,), bos, device=device),
            tokens=torch.zeros(batch, max_tokens, dtype=torch.int64, device=device),
            finished=torch.zeros(batch, dtype=torch.bool, device=device),
            cursor=cursor,
            position=prefix.mask.sum(1, keepdim=True),
            uniforms=uniforms,
        )

    @property
    def step(self) -> Tensor:
        """The number [1] of the next token."""
        return self.cursor - (self.mask.shape[1] - self.tokens.shape[1])

    def append(self, token: Tensor, end: int) -> None:
        """Add a token [B] to each sample."""
        self.tokens.index_copy_(1, self.step, token[:, None])
        self.token.copy_(token)
        self.finished.logical_or_(token == end)
        self.cursor.add_(1)
        self.position.add_(1)


class Pi0Fast(AutoregressivePolicy):
    Config = Pi0FastConfig
    optimizes_frozen = True
    weight_names = OPENPI_NAMES
    config: Pi0FastConfig

    def __init__(self, config: Pi0FastConfig):
        super().__init__(config)
        # LeRobot's names
        paligemma_with_expert = nn.ModuleDict({"paligemma": PaliGemmaWithHead(config)})
        self.model = nn.ModuleDict({"paligemma_with_expert": paligemma_with_expert})
        apply_settings(config, self.paligemma, self.shard_units())

    @property
    def paligemma(self) -> PaliGemmaWithHead:
        return self.model["paligemma_with_expert"]["paligemma"]  # type: ignore[index]

    @cached_property
    def fast(self) -> FastTokenizer:
        return load_fast_tokenizer(self.config.action_tokenizer_name)

    @cached_property
    def vocabulary(self) -> ActionVocabulary:
        return ActionVocabulary.load(self.config.text_tokenizer_name, self.config.fast_skip_tokens)

    def loss(self, batch: Batch, noise: NoiseSource) -> Loss:
        if ACTION_TOKENS not in batch:
            raise FlexorError(
                f"pi0_fast learns from {ACTION_TOKENS}, which its processing makes of actions, but the batch has only "
                f"{', '.join(batch)}."
            )
        token_losses = self.paligemma.token_losses(self._prefix(batch), batch[ACTION_TOKENS])
        per_sample = mean_over_tokens(token_losses, batch[ACTION_TOKEN_MASK][:, 1:])
        return Loss(per_sample, {"ce_loss": per_sample.detach()})

    @property
    def max_segments(self) -> int:
        return -(-self.config.max_decoding_steps // SEGMENT)

    def prefill(self, batch: Batch, noise: NoiseSource) -> DecodeState:
        prefix, max_tokens = self._prefix(batch), self.max_segments * SEGMENT
        uniforms = None
        if self.config.temperature > 0:
            size = (len(prefix.mask),)
            uniforms = torch.stack([noise.uniform(f"word {step}", size) for step in range(max_tokens)])
        return DecodeState.begin(prefix, self.vocabulary.bos, max_tokens, uniforms)

    def decode_segment(self, state: DecodeState) -> None:
        for _ in range(SEGMENT):
            logits = self.paligemma.next_logits(state).float()
            uniform = None if state.uniforms is None else state.uniforms.index_select(0, state.step)[0]
            state.append(self._sample(logits, uniform), self.vocabulary.end)

    def is_finished(self, state: DecodeState) -> bool:
        return bool(state.finished.all())

    def decoded_tokens(self, state: DecodeState) -> Tensor:
        """The tokens [B, T] that follow the beginning."""
        return state.tokens[:, : min(int(state.step), self.config.max_decoding_steps)]

    def decode_actions(self, state: DecodeState) -> Tensor:
        tokens = self.decoded_tokens(state)
        rows = [self.vocabulary.decode(row) for row in tokens.tolist()]
        decoded = self.fast.decode(
            [fast_tokens for fast_tokens, _ in rows], self.config.chunk_size, self.config.action.shape[0]
        )
        problems = [problem for problem in decoded.problems if problem]
        if self.config.validate_action_token_prefix:
            problems += ['they do not begin with "Action: "' for _, has_prefix in rows if not has_prefix]
        if problems:
            log.warning(
                "of %d chunks, the tokens of %d are not those of a full chunk (%s): actions are decoded from the valid "
                "ones",
                *(len(rows), min(len(problems), len(rows)), problems[0]),
            )
        return torch.from_numpy(decoded.actions).to(tokens.device)

    def _prefix(self, batch: Batch) -> PrefixCache:
        return prefill_batch(self.paligemma.model, self.config, batch)

    def _sample(self, logits: Tensor, uniform: Tensor | None) -> Tensor:
        """A token [B] by its logits [B, V] and a uniform number [B]; without one, the most likely token."""
        if uniform is None:
            return logits.argmax(-1)
        cumulative = (logits / self.config.temperature).softmax(-1).cumsum(-1)
        return torch.searchsorted(cumulative, uniform.to(logits)[:, None] * cumulative[:, -1:]).squeeze(1)

    def image_encoder(self) -> ImageEncoder:
        return image_encoder(self.paligemma.model, self.config)

    def encode_images(self, images: Tensor, camera: str) -> Tensor:
        return encode_images(self.paligemma.model, self.config, images)

    def shard_units(self) -> list[nn.Module]:
        return self.paligemma.model.blocks()


def mean_over_tokens(token_losses: Tensor, mask: Tensor) -> Tensor:
    """[B, T] -> [B], the mean over each sample's own tokens, as in openpi.

    LeRobot's mean is over all tokens of a batch, so its loss depends on how samples are split into batches.
    """
    return (token_losses * mask).sum(1) / mask.sum(1).clamp(min=1)
