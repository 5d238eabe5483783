"""The transformer of X-VLA: tokens of noisy actions beside those of images and words, and a robot's soft prompts.

A domain is a kind of robot or dataset. It has its own layers from and to actions, and its own soft prompts: learned
tokens. All else is shared by all domains. Every token attends to every other. Parameter names are LeRobot's.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flexor.policies.nn.autocast import autocast_type

LONGEST_PERIOD = 100.0  # of the sines that encode the time


class DomainWeights(NamedTuple):
    """A linear layer of each sample's own domain."""

    weight: Tensor  # [B, inputs, outputs]
    bias: Tensor  # [B, 1, outputs]

    def __call__(self, x: Tensor) -> Tensor:
        """[B, S, inputs] -> [B, S, outputs]."""
        return torch.matmul(x, self.weight) + self.bias


class DomainLinear(nn.Module):
    """A linear layer for each domain; their weights are the rows of a table."""

    def __init__(self, inputs: int, outputs: int, domains: int):
        super().__init__()
        self.inputs, self.outputs = inputs, outputs
        self.fc = nn.Embedding(domains, inputs * outputs)
        self.bias = nn.Embedding(domains, outputs)
        nn.init.xavier_uniform_(self.fc.weight)
        nn.init.zeros_(self.bias.weight)

    def of(self, domain: Tensor) -> DomainWeights:
        """The layers of the samples' domains [B]."""
        weight = self.fc(domain).unflatten(1, (self.inputs, self.outputs))
        return DomainWeights(weight, self.bias(domain)[:, None])


class JointAttention(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, width]."""
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [B, heads, S, width / heads]
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout)
        return self.proj(mixed.transpose(1, 2).flatten(2))


class DropoutMLP(nn.Module):
    def __init__(self, width: int, hidden: int, dropout: float):
        super().__init__()
        self.dropout = dropout
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.dropout(F.gelu(self.fc1(x), approximate="tanh"), self.dropout, self.training)
        return F.dropout(self.fc2(hidden), self.dropout, self.training)


class SoftPromptedBlock(nn.Module):
    def __init__(self, size: SoftPromptedSize):
        super().__init__()
        width = size.width
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)
        self.attn = JointAttention(width, size.heads, size.dropout)
        self.mlp = DropoutMLP(width, int(width * size.mlp_ratio), size.dropout)

    def forward(self, x: Tensor) -> Tensor:
        dtype = autocast_type(x)  # of the norms' outputs: cast once, for all layers that get them
        x = x + self.attn(self.norm1(x).to(dtype))
        return x + self.mlp(self.norm2(x).to(dtype))


class SoftPromptedSize(NamedTuple):
    width: int
    depth: int
    heads: int
    mlp_ratio: float
    domains: int
    action: int
    state: int
    """0: without the robot's state."""
    time: int
    """Channels of the embedded time."""
    prompts: int
    """Soft prompts of a domain."""
    positions: int
    """The longest sequence without soft prompts."""
    features: int
    """Channels of the vision-language model's tokens."""
    hetero: bool
    """Whether each domain has its own projections of these."""
    dropout: float


class ActionContext(NamedTuple):
    """What actions attend to, and the layers of their domain. Computed once per observation."""

    state: Tensor  # [B, state]
    tokens: Tensor  # of images, words and soft prompts, [B, C, width]
    encoder: DomainWeights
    decoder: DomainWeights


class SoftPromptedTransformer(nn.Module):
    def __init__(self, size: SoftPromptedSize):
        super().__init__()
        self.size = size
        width, domains = size.width, size.domains
        self.pos_emb = nn.Parameter(torch.empty(1, size.positions, width))
        self.blocks = nn.ModuleList(SoftPromptedBlock(size) for _ in range(size.depth))
        self.vlm_proj = self._projection()
        self.aux_visual_proj = self._projection()
        self.norm = nn.LayerNorm(width)
        self.action_encoder = DomainLinear(size.action + size.time + size.state, width, domains)
        self.action_decoder = DomainLinear(width, size.action, domains)
        nn.init.normal_(self.pos_emb, std=0.02)
        if size.prompts:
            self.soft_prompt_hub = nn.Embedding(domains, size.prompts * width)
            nn.init.normal_(self.soft_prompt_hub.weight, std=0.02)
        self.apply(_initialize)

    def _projection(self) -> nn.Linear | DomainLinear:
        size = self.size
        if size.hetero:
            return DomainLinear(size.features, size.width, size.domains)
        return nn.Linear(size.features, size.width)

    def context(
        self, features: Tensor, auxiliary: Tensor, state: Tensor, domain: Tensor, actions: int
    ) -> ActionContext:
        """Of encoded tokens [B, F, features], further images [B, A, features], states [B, S] and domains [B].

        `actions`: how many tokens come before them.
        """
        x = torch.cat(
            (
                _projected(self.vlm_proj, features, domain),
                _projected(self.aux_visual_proj, auxiliary, domain),
            ),
            1,
        )
        x = x + self.pos_emb[:, actions : actions + x.shape[1]]
        if self.size.prompts:
            prompts = self.soft_prompt_hub(domain).unflatten(1, (self.size.prompts, self.size.width))
            x = torch.cat((x, prompts), 1)
        return ActionContext(state, x, self.action_encoder.of(domain), self.action_decoder.of(domain))

    def forward(self, noisy: Tensor, time: Tensor, context: ActionContext) -> Tensor:
        """Noisy actions [B, H, action] at times [B] -> actions [B, H, action]."""
        count = noisy.shape[1]
        conditions = torch.cat((context.state, time_embedding(time, self.size.time)), 1)
        tokens = torch.cat((noisy, conditions[:, None].expand(-1, count, -1)), 2)
        x = context.encoder(tokens) + self.pos_emb[:, :count]
        x = torch.cat((x, context.tokens), 1)
        for block in self.blocks:
            x = block(x)
        return context.decoder(self.norm(x[:, :count]))


def _projected(projection: nn.Module, x: Tensor, domain: Tensor) -> Tensor:
    return projection.of(domain)(x) if isinstance(projection, DomainLinear) else projection(x)


def time_embedding(time: Tensor, width: int) -> Tensor:
    """Times [B] -> [B, width]: cosines, then sines; the last channel of an odd width is 0."""
    half = width // 2
    channel = torch.arange(half, dtype=time.dtype, device=time.device)
    angle = time[:, None] * torch.exp(-math.log(LONGEST_PERIOD) * channel / half)
    return F.pad(torch.cat((angle.cos(), angle.sin()), 1), (0, width % 2))


def _initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.xavier_uniform_(module.weight)
        nn.init.zeros_(module.bias)
