"""A U-Net over time that denoises a chunk of actions, conditioned on observations by FiLM.

Convolutions cover a few time steps, halving the sequence widens their range, and skip connections restore
detail (Janner et al. 2022, https://arxiv.org/abs/2205.09991). The observations scale and shift every
channel (FiLM, Perez et al. 2018, https://arxiv.org/abs/1709.07871). Parameter names are LeRobot's.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flexor.kernels.norm_mish import norm_mish
from flexor.policies.nn.diffusion import StepEmbedding


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
        halve = [Conv1d(width, width, 3, 2, 1) for width in widths[:-1]]
        self.down_modules = nn.ModuleList(
            nn.ModuleList([*pair(*stage), down]) for stage, down in zip(stages, [*halve, nn.Identity()])
        )
        self.mid_modules = nn.ModuleList(pair(widths[-1], widths[-1]))
        self.up_modules = nn.ModuleList(
            # twice the width: the output of the stage below, and the skip connection
            nn.ModuleList([*pair(2 * wide, narrow), ConvTranspose1d(narrow, narrow, 4, 2, 1)])
            for narrow, wide in reversed(stages[1:])
        )
        self.final_conv = nn.Sequential(
            ConvBlock(widths[0], widths[0], kernel_size, groups=8), Conv1d(widths[0], action_dim, 1)
        )

    def blocks(self) -> list[nn.Module]:
        """The residual blocks, which hold nearly all weights."""
        return [module for module in self.modules() if isinstance(module, ResidualBlock)]

    def forward(self, x: Tensor, level: Tensor, condition: Tensor) -> Tensor:
        condition = F.mish(torch.cat((self.diffusion_step_encoder(level), condition), -1))
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
            # as flat images: only of those does torch keep the memory format
            x = torch.cat((x[:, :, None], skips.pop()[:, :, None]), 1).squeeze(2)
            x = double(second(first(x, condition), condition))
        block, last = self.final_conv.children()
        return last(block(x, rounded=True)).transpose(1, 2)


class ResidualBlock(nn.Module):
    """x [B, inputs, H] and a condition [B, C], after its Mish, -> [B, outputs, H]."""

    def __init__(
        self, inputs: int, outputs: int, condition_dim: int, kernel_size: int, groups: int, film_scale: bool
    ):
        super().__init__()
        self.film_scale = film_scale
        self.conv1 = ConvBlock(inputs, outputs, kernel_size, groups)
        self.cond_encoder = nn.Sequential(nn.Mish(), nn.Linear(condition_dim, outputs * (1 + film_scale)))
        self.conv2 = ConvBlock(outputs, outputs, kernel_size, groups)
        self.residual_conv = Conv1d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        film = self.cond_encoder[1](condition)  # [B, outputs (twice with scale)]; all blocks share the Mish
        out = self.conv1(x, film, rounded=True)
        return self.conv2(out, residual=self.residual_conv(x))


class ConvBlock(nn.Module):
    """Convolution over time, group normalisation, Mish; optionally FiLM or a residual."""

    def __init__(self, inputs: int, outputs: int, kernel_size: int, groups: int):
        super().__init__()
        self.block = nn.Sequential(
            Conv1d(inputs, outputs, kernel_size, padding=kernel_size // 2),
            nn.GroupNorm(groups, outputs),
            nn.Mish(),
        )

    def forward(
        self, x: Tensor, film: Tensor | None = None, residual: Tensor | None = None, rounded: bool = False
    ) -> Tensor:
        convolution, norm, _ = self.block
        return norm_mish(norm, convolution(x), film, residual, rounded)


class Conv1d(nn.Conv1d):
    """A convolution over time that reads channels-last sequences without copying them.

    torch copies the input of a one-dimensional convolution twice on a GPU if the weight is in channels-last format:
    it makes it contiguous, then channels-last. As a flat image it is not copied.
    """

    def forward(self, x: Tensor) -> Tensor:
        if not flat_image(x, self.weight):
            return super().forward(x)
        stride, padding = (1, *self.stride), (0, int(self.padding[0]))
        return F.conv2d(x[:, :, None], self.weight[:, :, None], self.bias, stride, padding).squeeze(2)


class ConvTranspose1d(nn.ConvTranspose1d):
    """The transposed convolution, which upsamples."""

    def forward(self, x: Tensor, output_size: list[int] | None = None) -> Tensor:
        if output_size is not None or not flat_image(x, self.weight):
            return super().forward(x, output_size)
        stride, padding = (1, *self.stride), (0, int(self.padding[0]))
        out = F.conv_transpose2d(x[:, :, None], self.weight[:, :, None], self.bias, stride, padding)
        return out.squeeze(2)


def flat_image(x: Tensor, weight: Tensor) -> bool:
    """Whether to compute as an image of height 1. Only in training: autocast caches casts of weights, not of views.

    On the meta device, a plan asks what a GPU does.
    """
    channels_last = weight.stride()[1:] == (1, weight.shape[1])
    return x.device.type in ("cuda", "meta") and channels_last and torch.is_grad_enabled()
