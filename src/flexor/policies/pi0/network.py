"""The network of pi0 and pi0.5: PaliGemma, the action expert, and the projections that connect it to a robot."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flexor.policies.nn.flow import time_embedding
from flexor.policies.nn.transformer import Transformer, TransformerSize
from flexor.policies.pi0.config import PiConfig
from flexor.policies.vlm.backbone import PrefixCache, decode_suffix
from flexor.policies.vlm.paligemma import GEMMA, PALIGEMMA, PaliGemma, PaliGemmaSize


class PaliGemmaWithExpert(nn.Module):
    """PaliGemma, and a smaller Gemma that attends to its cache: the action expert. Names are LeRobot's."""

    def __init__(self, size: PaliGemmaSize, expert: TransformerSize, image: int):
        super().__init__()
        paligemma = PaliGemma(size, image)
        paligemma.language_model.freeze_unused_by_prefill()
        paligemma.language_model.embed_tokens.rounds_output = (
            True  # in `prefill`, the only place that uses it
        )
        self.paligemma = nn.ModuleDict({"model": paligemma})
        self.gemma_expert = nn.ModuleDict({"model": Transformer(expert)})

    @property
    def vlm(self) -> PaliGemma:
        return self.paligemma["model"]  # type: ignore[return-value]

    @property
    def expert(self) -> Transformer:
        return self.gemma_expert["model"]  # type: ignore[return-value]

    def blocks(self) -> list[nn.Module]:
        decoder = self.vlm.decoder
        return [*self.vlm.vision_blocks(), decoder.embed_tokens, *decoder.layers, *self.expert.layers]


class PiNetwork(nn.Module):
    """A noisy chunk, its time and a prefix -> a velocity (flow matching)."""

    adaptive_norms: ClassVar[bool]
    """Whether the expert's norms depend on the time."""

    def __init__(self, config: PiConfig):
        super().__init__()
        self.config = config
        expert = GEMMA[config.action_expert_variant]
        if self.adaptive_norms:
            expert = replace(expert, condition_dim=expert.width)
        self.paligemma_with_expert = PaliGemmaWithExpert(
            PALIGEMMA[config.paligemma_variant], expert, config.image_resolution[0]
        )
        self.action_in_proj = nn.Linear(config.max_action_dim, expert.width)
        self.action_out_proj = nn.Linear(expert.width, config.max_action_dim)

    def velocity(self, noisy_actions: Tensor, time: Tensor, prefix: PrefixCache, state: Tensor) -> Tensor:
        """Noisy actions [B, H, A] at a time [B], state [B, S] -> their velocity [B, H, A]."""
        raise NotImplementedError

    def embed_time(self, time: Tensor) -> Tensor:
        """[B] -> [B, D]."""
        width = self.action_in_proj.out_features
        return time_embedding(time, width, self.config.min_period, self.config.max_period)

    def expert_output(
        self, tokens: Tensor, suffix_mask: Tensor, prefix: PrefixCache, condition: Tensor | None = None
    ) -> Tensor:
        """The expert's hidden states [B, S, D] of tokens [B, S, D], in the type of the projection after it."""
        hidden = decode_suffix(self.paligemma_with_expert.expert, tokens, suffix_mask, prefix, condition)
        return hidden.to(self.action_out_proj.weight.dtype)


class Pi0Network(PiNetwork):
    """The state is a token before the actions.

    The suffix mask, rows attend to columns:

                  state  actions
        state   |   1     0  0
        actions |   1     1  1
                |   1     1  1
    """

    adaptive_norms = False

    def __init__(self, config: PiConfig):
        super().__init__(config)
        width = self.action_in_proj.out_features
        self.state_proj = nn.Linear(config.max_state_dim, width)
        self.action_time_mlp_in = nn.Linear(2 * width, width)
        self.action_time_mlp_out = nn.Linear(width, width)

    def velocity(self, noisy_actions: Tensor, time: Tensor, prefix: PrefixCache, state: Tensor) -> Tensor:
        actions = self.action_in_proj(noisy_actions)  # [B, H, D]
        time_embeds = self.embed_time(time)[:, None].expand_as(actions).to(actions.dtype)
        actions = self.action_time_mlp_in(torch.cat((actions, time_embeds), dim=-1))
        actions = self.action_time_mlp_out(F.silu(actions))
        tokens = torch.cat((self.state_proj(state)[:, None], actions), dim=1)
        token = torch.arange(tokens.shape[1], device=tokens.device)
        suffix_mask = (token[:, None] > 0) | (token == 0)
        hidden = self.expert_output(tokens, suffix_mask, prefix)
        return self.action_out_proj(hidden[:, 1:].contiguous())


class Pi05Network(PiNetwork):
    """The state is in the prompt, and all actions attend to each other. The time conditions the expert's norms."""

    adaptive_norms = True

    def __init__(self, config: PiConfig):
        super().__init__(config)
        width = self.action_in_proj.out_features
        self.time_mlp_in = nn.Linear(width, width)
        self.time_mlp_out = nn.Linear(width, width)

    def velocity(self, noisy_actions: Tensor, time: Tensor, prefix: PrefixCache, state: Tensor) -> Tensor:
        hidden = F.silu(self.time_mlp_in(self.embed_time(time)))
        condition = F.silu(self.time_mlp_out(hidden))
        tokens = self.action_in_proj(noisy_actions)
        suffix_mask = torch.ones(1, tokens.shape[1], dtype=torch.bool, device=tokens.device)
        return self.action_out_proj(self.expert_output(tokens, suffix_mask, prefix, condition))
