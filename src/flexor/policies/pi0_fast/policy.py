"""pi0-FAST (Pertsch et al. 2025, https://arxiv.org/abs/2501.09747): PaliGemma predicts actions as tokens.

The prefix is images and a prompt with the state in it, whose tokens all attend to each other. Action tokens follow one
by one; each attends to the prefix and to the action tokens before it.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor, nn

from flexor.core.batch import Batch
from flexor.core.errors import FlexorError
from flexor.core.log import log
from flexor.core.rng import NoiseSource
from flexor.policies.autoregressive import AutoregressivePolicy
from flexor.policies.base import Loss
from flexor.policies.image_encoder import ImageEncoder
from flexor.policies.nn.fast_tokens import FastTokenizer, load_fast_tokenizer
from flexor.policies.nn.transformer import Transformer
from flexor.policies.pi0_fast.action_tokens import ACTION_TOKEN_MASK, ACTION_TOKENS, ActionVocabulary
from flexor.policies.pi0_fast.config import Pi0FastConfig
from flexor.policies.vlm.backbone import PrefixCache, decode_suffix
from flexor.policies.vlm.decode import SEGMENT, DecodeState, decode_segment, mean_over_tokens, token_losses
from flexor.policies.vlm.paligemma import PALIGEMMA, PaliGemma
from flexor.policies.vlm.paligemma_names import OPENPI_NAMES
from flexor.policies.vlm.paligemma_policy import (
    apply_settings,
    encode_images,
    image_encoder,
    prefill_batch,
)


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
        return token_losses(self.lm_head, decode_suffix(self.decoder, x, causal_mask, prefix), tokens[:, 1:])


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
        position = prefix.mask.sum(1, keepdim=True)
        token = torch.full((len(position),), self.vocabulary.bos, device=position.device)
        return DecodeState.begin(prefix.layers, prefix.mask, token, position, max_tokens, uniforms)

    def decode_segment(self, state: DecodeState) -> None:
        paligemma = self.paligemma
        decode_segment(state, paligemma.decoder, paligemma.lm_head, self._sample, self.vocabulary.end)

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
