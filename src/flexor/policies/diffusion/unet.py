"""A U-Net over time that denoises a chunk of actions, conditioned on observations by FiLM.

Convolutions cover a few time steps, halving the sequence widens their range, and skip connections restore
detail (Janner et al. 2022, https://arxiv.org/abs/2205.09991). The observations scale and shift every
channel (FiLM, Perez et al. 2018, https://arxiv.org/abs/1709.07871). Parameter names are LeRobot's.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class ConditionalUnet1d(nn.Module):
    """Noisy actions [B, H, A], their noise level [B] and a condition [B, C] -> [B, H, A].

    Halves the sequence `len(widths) - 1` times.
    """

    def __init__(
        self,
        action_dim: int,
        condition_dim: int,
        widths: tuple[int, ...],
        kernel_size: int,
        groups: int,
        step_dim: int,
        film_scale: bool,
    ):
        super().__init__()

        def pair(inputs: int, outputs: int) -> list[nn.Module]:
            settings = (step_dim + condition_dim, kernel_size, groups, film_scale)
            return [ResidualBlock(inputs, outputs, *settings), ResidualBlock(outputs, outputs, *settings)]

        self.diffusion_step_encoder = nn.Sequential(
            StepEmbedding(step_dim),
            nn.Linear(step_dim, 4 * step_dim),
            nn.Mish(),
            nn.Linear(4 * step_dim, step_dim),
        )
        stages = list(zip((action_dim, *widths), widths))
        halve = [nn.Conv1d(width, width, 3, 2, 1) for width in widths[:-1]]
        self.down_modules = nn.ModuleList(
            nn.ModuleList([*pair(*stage), down]) for stage, down in zip(stages, [*halve, nn.Identity()])
        )
        self.mid_modules = nn.ModuleList(pair(widths[-1], widths[-1]))
        self.up_modules = nn.ModuleList(
            # twice the width: the output of the stage below, and the skip connection
            nn.ModuleList([*pair(2 * wide, narrow), nn.ConvTranspose1d(narrow, narrow, 4, 2, 1)])
            for narrow, wide in reversed(stages[1:])
        )
        self.final_conv = nn.Sequential(
            ConvBlock(widths[0], widths[0], kernel_size, groups=8),
            nn.Conv1d(widths[0], action_dim, 1),
        )

    def blocks(self) -> list[nn.Module]:
        """The residual blocks, in which nearly all weights are."""
        return [module for module in self.modules() if isinstance(module, ResidualBlock)]

    def forward(self, x: Tensor, level: Tensor, condition: Tensor) -> Tensor:
        condition = torch.cat((self.diffusion_step_encoder(level), condition), -1)
        x = x.transpose(1, 2)  # [B, A, H]
        skips = []
        for stage in self.down_modules:
            first, second, halve = stage.children()
            x = second(first(x, condition), condition)
            skips.append(x)
            x = halve(x)
        for block in self.mid_modules:
            x = block(x, condition)
        for stage in self.up_modules:
            first, second, double = stage.children()
            x = torch.cat((x, skips.pop()), 1)
            x = double(second(first(x, condition), condition))
        return self.final_conv(x).transpose(1, 2)


class ResidualBlock(nn.Module):
    """x [B, inputs, H] and a condition [B, C] -> [B, outputs, H]."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        condition_dim: int,
        kernel_size: int,
        groups: int,
        film_scale: bool,
    ):
        super().__init__()
        self.film_scale = film_scale
        self.conv1 = ConvBlock(inputs, outputs, kernel_size, groups)
        self.cond_encoder = nn.Sequential(nn.Mish(), nn.Linear(condition_dim, outputs * (1 + film_scale)))
        self.conv2 = ConvBlock(outputs, outputs, kernel_size, groups)
        self.residual_conv = nn.Conv1d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        out = self.conv1(x)
        modulation = self.cond_encoder(condition)[..., None]  # [B, outputs (twice with scale), 1]
        if self.film_scale:
            scale, shift = modulation.chunk(2, dim=1)
            out = scale * out + shift
        else:
            out = out + modulation
        return self.conv2(out) + self.residual_conv(x)


class ConvBlock(nn.Module):
    """Convolution over time, group normalisation, Mish."""

    def __init__(self, inputs: int, outputs: int, kernel_size: int, groups: int):
        super().__init__()
        self.block = nn.Sequential(
            nn.Conv1d(inputs, outputs, kernel_size, padding=kernel_size // 2),
            nn.GroupNorm(groups, outputs),
            nn.Mish(),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x)


class StepEmbedding(nn.Module):
    """Levels [B] -> [B, dim]: sines, then cosines, of wavelengths from 2 pi to 10000 x 2 pi."""

    def __init__(self, dim: int):
        super().__init__()
        self.waves = dim // 2

    def forward(self, level: Tensor) -> Tensor:
        exponent = torch.arange(self.waves, device=level.device) * (-math.log(10_000) / (self.waves - 1))
        angle = level[:, None] * exponent.exp()
        return torch.cat((angle.sin(), angle.cos()), -1)
