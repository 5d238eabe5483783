"""pi0-FAST (Pertsch et al. 2025, https://arxiv.org/abs/2501.09747): PaliGemma writes actions as tokens.

It reads images and a prompt with the state in it, all of which see each other, and writes the tokens of a chunk one
after the other, each of which sees what was read and what is written before it.
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
from flexor.policies.base import Loss, ParamGroup
from flexor.policies.nn.fast_tokens import FastTokenizer, load_fast_tokenizer
from flexor.policies.nn.kv_cache import StaticKVCache
from flexor.policies.nn.recompute import recompute
from flexor.policies.nn.siglip import SiglipVision
from flexor.policies.nn.transformer import Transformer
from flexor.policies.pi0.paligemma import PALIGEMMA, PaliGemma, Prompt, lower
from flexor.policies.pi0.policy import OPENPI_NAMES, camera_images, camera_mask
from flexor.policies.pi0_fast.action_tokens import ACTION_TOKEN_MASK, ACTION_TOKENS, ActionWords
from flexor.policies.pi0_fast.config import Pi0FastConfig
from flexor.policies.processing.tokenize import TASK_MASK, TASK_TOKENS
from flexor.policies.stepwise import StepwisePolicy

AT_ONCE = 1024  # tokens whose logits are computed together: a token has 257,152 of them
ASKED_EVERY = 8  # steps of writing after which the host asks whether all have ended: it waits for the answer


class WritingPaliGemma(nn.Module):
    """PaliGemma with its language head."""

    def __init__(self, config: Pi0FastConfig):
        super().__init__()
        size = PALIGEMMA[config.paligemma_variant]
        self.lm_head = nn.Linear(size.language.width, size.vocabulary, bias=False)
        nn.init.normal_(self.lm_head.weight, std=0.02)
        self.model = PaliGemma(size, config.image_resolution[0])
        self.model.language_model.requires_grad_(True)  # unlike pi0, it uses all of it

    @property
    def language(self) -> Transformer:
        return self.model.language_model

    def losses(self, prompt: Prompt, tokens: Tensor) -> Tensor:
        """The cross-entropy [B, T - 1] of each token but the first of [B, T]."""
        steps = tokens.shape[1] - 1
        causal = torch.ones(steps, steps, dtype=torch.bool, device=tokens.device).tril()
        among = causal.expand(len(tokens), -1, -1)
        mask = torch.cat((prompt.there[:, None].expand(-1, steps, -1), among), dim=2)[:, None]
        positions = prompt.there.sum(1, keepdim=True) + torch.arange(steps, device=tokens.device)
        x = self.language.embed_tokens(tokens[:, :-1]).to(self.language.dtype)
        written = self.language(x, self.language.rope(positions), mask, prompt.layers)
        pairs = zip(written.flatten(0, 1).split(AT_ONCE), tokens[:, 1:].flatten().split(AT_ONCE))
        # recomputed in the backward pass: the logits of a batch take more memory than all else
        parts = [
            checkpoint(self._cross_entropy, *pair, use_reentrant=False, preserve_rng_state=False)
            for pair in pairs
        ]
        return torch.cat(parts).unflatten(0, (len(tokens), steps))

    def _cross_entropy(self, written: Tensor, tokens: Tensor) -> Tensor:
        """written [N, D], tokens [N] -> [N]."""
        return F.cross_entropy(self.logits(written).float(), tokens, reduction="none")

    def logits(self, written: Tensor) -> Tensor:
        return self.lm_head(written.to(self.lm_head.weight.dtype))

    def next(self, written: Written) -> Tensor:
        """The logits [B, V] of what follows the last word, which is added to what is read."""
        written.there.index_fill_(1, written.place, True)
        x = self.language.embed_tokens(written.word[:, None]).to(self.language.dtype)
        rope = self.language.rope(written.positions)
        return self.logits(self.language(x, rope, written.there[:, None, None], written.layers)[:, 0])


@dataclass
class Written:
    """What was read and written so far, in memory for the longest chunk. Only `next` and `add` change it, in place."""

    layers: list[StaticKVCache]
    there: Tensor
    """What has been read and written, [B, P + T]."""
    word: Tensor
    """The last word, [B]."""
    words: Tensor
    """[B, T]"""
    ended: Tensor
    """[B]"""
    place: Tensor
    """Of the last word in `there`, [1]; the same tensor as in `layers`."""
    positions: Tensor
    """Of the last word, without padding, [B, 1]."""
    draws: Tensor | None
    """Uniform numbers [T, B] for each word; None if the most likely one is taken."""

    @classmethod
    def after(cls, prompt: Prompt, beginning: int, room: int, draws: Tensor | None) -> Written:
        """Only the beginning is written."""
        there = prompt.there
        rows, read = there.shape
        place = torch.full((1,), read, device=there.device)
        return cls(
            layers=[StaticKVCache.allocate(layer, room, place) for layer in prompt.layers],
            there=torch.cat((there, there.new_zeros(rows, room)), 1),
            word=torch.full((rows,), beginning, device=there.device),
            words=torch.zeros(rows, room, dtype=torch.int64, device=there.device),
            ended=torch.zeros(rows, dtype=torch.bool, device=there.device),
            place=place,
            positions=there.sum(1, keepdim=True),
            draws=draws,
        )

    @property
    def step(self) -> Tensor:
        """The number [1] of the next word."""
        return self.place - (self.there.shape[1] - self.words.shape[1])

    def add(self, word: Tensor, stop: int) -> None:
        self.words.index_copy_(1, self.step, word[:, None])
        self.word.copy_(word)
        self.ended.logical_or_(word == stop)
        self.place.add_(1)
        self.positions.add_(1)


class Pi0Fast(StepwisePolicy):
    Config = Pi0FastConfig
    weight_names = OPENPI_NAMES
    config: Pi0FastConfig

    def __init__(self, config: Pi0FastConfig):
        super().__init__(config)
        inner = nn.ModuleDict({"paligemma": WritingPaliGemma(config)})  # LeRobot's names
        self.model = nn.ModuleDict({"paligemma_with_expert": inner})
        if config.dtype == "bfloat16":
            lower(self.writer)
        if config.gradient_checkpointing:
            for block in self.shard_units():
                recompute(block)
        if config.compile_model:
            for block in self.shard_units():
                block.forward = torch.compile(block.forward, mode=config.compile_mode)

    @property
    def writer(self) -> WritingPaliGemma:
        return self.model["paligemma_with_expert"]["paligemma"]  # type: ignore[index]

    @cached_property
    def fast(self) -> FastTokenizer:
        return load_fast_tokenizer(self.config.action_tokenizer_name)

    @cached_property
    def words(self) -> ActionWords:
        return self.config.action_words()

    def loss(self, batch: Batch, noise: NoiseSource) -> Loss:
        if ACTION_TOKENS not in batch:
            raise FlexorError(
                f"pi0_fast learns from {ACTION_TOKENS}, which its processing makes of actions, but the batch has only "
                f"{', '.join(batch)}."
            )
        errors = self.writer.losses(self._prompt(batch), batch[ACTION_TOKENS])
        per_sample = mean_of_tokens(errors, batch[ACTION_TOKEN_MASK][:, 1:])
        return Loss(per_sample, {"ce_loss": per_sample.detach()})

    @property
    def most_parts(self) -> int:
        return -(-self.config.max_decoding_steps // ASKED_EVERY)

    def begin(self, batch: Batch, noise: NoiseSource) -> Written:
        prompt, room = self._prompt(batch), self.most_parts * ASKED_EVERY
        draws = None
        if self.config.temperature > 0:
            rows = len(prompt.there)
            draws = torch.stack([noise.uniform(f"word {step}", (rows,)) for step in range(room)])
        return Written.after(prompt, self.words.beginning, room, draws)

    def advance(self, state: Written) -> None:
        for _ in range(ASKED_EVERY):
            logits = self.writer.next(state).float()
            draw = None if state.draws is None else state.draws.index_select(0, state.step)[0]
            state.add(self._choose(logits, draw), self.words.stop)

    def ended(self, state: Written) -> bool:
        return bool(state.ended.all())

    def written(self, state: Written) -> Tensor:
        """The words [B, T] that follow the beginning."""
        return state.words[:, : min(int(state.step), self.config.max_decoding_steps)]

    def actions(self, state: Written) -> Tensor:
        words = self.written(state)
        found = [self.words.read(row) for row in words.tolist()]
        decoded = self.fast.decode(
            [tokens for tokens, _ in found], self.config.chunk_size, self.config.action.shape[0]
        )
        wrong = [problem for problem in decoded.problems if problem]
        if self.config.validate_action_token_prefix:
            wrong += ['they do not begin with "Action: "' for _, begins in found if not begins]
        if wrong:
            log.warning(
                "of %d chunks, the tokens of %d are not those of a whole chunk (%s): actions are made of what is valid",
                *(len(found), min(len(wrong), len(found)), wrong[0]),
            )
        return torch.from_numpy(decoded.actions).to(words.device)

    def _prompt(self, batch: Batch) -> Prompt:
        images, cameras = camera_images(self.config, batch), camera_mask(self.config, batch)
        return self.writer.model.read(images, batch[TASK_TOKENS], batch[TASK_MASK], cameras)

    def _choose(self, logits: Tensor, draw: Tensor | None) -> Tensor:
        """A word [B] by its logits [B, V] and a uniform number [B]: the most likely one if there is none."""
        if draw is None:
            return logits.argmax(-1)
        likely = (logits / self.config.temperature).softmax(-1).cumsum(-1)
        return torch.searchsorted(likely, draw.to(logits)[:, None] * likely[:, -1:]).squeeze(1)

    def shard_units(self) -> list[nn.Module]:
        vision = self.writer.model.vision_tower["vision_model"]
        assert isinstance(vision, SiglipVision)
        return [*vision.layers(), *self.writer.language.layers]

    def param_groups(self) -> list[ParamGroup]:
        return [ParamGroup(list(self.parameters()))]


def mean_of_tokens(errors: Tensor, mask: Tensor) -> Tensor:
    """[B, T] -> [B], the mean of each sample's own tokens, as in openpi.

    LeRobot's mean is over all tokens of a batch, so that its loss depends on how samples are split into batches.
    """
    return (errors * mask).sum(1) / mask.sum(1).clamp(min=1)
