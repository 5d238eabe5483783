"""Residual vector quantisation (Zeghidour et al. 2021, https://arxiv.org/abs/2107.03312), and an auto-encoder with it.

A vector is replaced by the nearest code of a codebook, its residual by the nearest code of a second codebook, and so
on: two codebooks of 16 codes represent 256 vectors. Codes are not trained by gradients. Each follows the mean of the
vectors mapped to it (an exponential moving average). So it matters which vectors are counted together:

- The counts and sums of an optimizer step are those of the global batch: they are summed over ranks and
  micro-batches. `begin_step` starts a new step. Within a step, all vectors are mapped to the codes as they were
  when the step began.
- After the last micro-batch the buffers are final for this step. Nothing is left for the next step, so a checkpoint
  between two steps holds everything.

Nothing here is random: as in LeRobot's VQ-BeT, codes start as random weights, and unused codes are not replaced.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

DECAY = 0.8  # of the moving average, per optimizer step
EPSILON = 1e-5  # added to every count, so that nothing is divided by zero


@dataclass
class StepStatistics:
    """A codebook at the start of an optimizer step, and what was mapped to each code since."""

    codes: Tensor  # [C, D]
    cluster_size: Tensor  # [C]
    embed_avg: Tensor  # [C, D]
    mapped: Tensor  # [C, 1 + D]: how many vectors, and their sum


class Codebook(nn.Module):
    """Codes and their moving averages, as buffers with a leading dimension of one (LeRobot's shapes)."""

    embed: Tensor
    embed_avg: Tensor
    cluster_size: Tensor

    def __init__(self, size: int, dim: int):
        super().__init__()
        codes = nn.init.kaiming_uniform_(torch.empty(1, size, dim))
        self.register_buffer("initted", torch.ones(1))  # LeRobot's checkpoints have it; always true here
        self.register_buffer("cluster_size", torch.zeros(1, size))
        self.register_buffer("embed_avg", codes.clone())
        self.register_buffer("embed", codes)
        self.step: StepStatistics | None = None

    def begin_step(self) -> None:
        self.step = self._empty_statistics()

    def _empty_statistics(self) -> StepStatistics:
        codes = self.embed[0].clone()
        zeros = codes.new_zeros(len(codes), 1 + codes.shape[1])
        return StepStatistics(codes, self.cluster_size[0].clone(), self.embed_avg[0].clone(), zeros)

    def forward(self, x: Tensor, learn: bool) -> tuple[Tensor, Tensor]:
        """Vectors [N, D] -> the nearest code [N, D] and its index [N]; `learn` updates the codes."""
        if not learn:
            return self._nearest(x, self.embed[0])
        # without `begin_step`, every forward pass is a step
        step = self.step or self._empty_statistics()
        quantized, index = self._nearest(x, step.codes)
        self._update(x.detach(), index, step)
        return quantized, index

    @staticmethod
    def _nearest(x: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
        # squared, without |x|^2, which is the same for all codes
        distance = codes.square().sum(-1) - 2 * x.detach() @ codes.T
        index = distance.argmin(-1)
        return codes[index], index

    def _update(self, x: Tensor, index: Tensor, step: StepStatistics) -> None:
        one_hot = F.one_hot(index, len(step.codes)).to(x)  # [N, C]
        mapped = torch.cat((one_hot.sum(0)[:, None], one_hot.T @ x), dim=1)
        step.mapped += _sum_over_ranks(mapped)
        count, total = step.mapped[:, 0], step.mapped[:, 1:]
        size = step.cluster_size.lerp(count, 1 - DECAY)
        average = step.embed_avg.lerp(total, 1 - DECAY)
        smoothed = (size + EPSILON) / (size.sum() + len(size) * EPSILON) * size.sum()
        self.cluster_size[0] = size
        self.embed_avg[0] = average
        self.embed[0] = average / smoothed[:, None]


def _sum_over_ranks(values: Tensor) -> Tensor:
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(values)
    return values


class ResidualVQ(nn.Module):
    """A sequence of codebooks; each quantises the residual of the one before."""

    freeze_codebook: Tensor

    def __init__(self, dim: int, layers: int, size: int):
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"_codebook": Codebook(size, dim)}) for _ in range(layers))
        self.register_buffer("freeze_codebook", torch.tensor(False))

    @property
    def codebooks(self) -> list[Codebook]:
        return [module for module in self.layers.modules() if isinstance(module, Codebook)]

    def forward(self, x: Tensor, learn: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Vectors [..., D] -> quantised [..., D], codes [..., layers], and in training the commitment loss [...].

        Gradients pass through as if nothing had been quantised.
        """
        with torch.autocast(x.device.type, enabled=False):  # bfloat16 can't distinguish close codes
            shape, residual = x.shape, x.float().flatten(0, -2)
            out = commitment = torch.zeros_like(residual)
            codes = []
            for codebook in self.codebooks:
                quantized, index = codebook(residual, learn)
                if self.training:
                    commitment = commitment + (quantized - residual).square()
                    quantized = residual + (quantized - residual).detach()
                out = out + quantized
                residual = residual - quantized.detach()
                codes.append(index)
        return (
            out.view(shape),
            torch.stack(codes, -1).view(*shape[:-1], -1),
            commitment.mean(-1).view(shape[:-1]),
        )

    def vectors(self, codes: Tensor) -> Tensor:
        """The vectors [..., D] of codes [..., layers]."""
        vectors_per_codebook = [codebook.embed[0][codes[..., i]] for i, codebook in enumerate(self.codebooks)]
        return torch.stack(vectors_per_codebook).sum(0)


class VQVAE(nn.Module):
    """An auto-encoder with a quantised latent: it learns a few vectors that represent all actions."""

    CODEBOOKS = 2
    discretized: Tensor

    def __init__(self, inputs: int, hidden: int, latent: int, codes: int):
        super().__init__()
        self.register_buffer("discretized", torch.tensor(False))  # trained, and frozen from then on
        self.vq_layer = ResidualVQ(latent, self.CODEBOOKS, codes)
        self.encoder = mlp(inputs, hidden, hidden, latent)
        self.decoder = mlp(latent, hidden, hidden, inputs)

    def begin_step(self) -> None:
        for codebook in self.vq_layer.codebooks:
            codebook.begin_step()

    def finish(self) -> None:
        """Mark it as trained, in buffers that are saved."""
        self.discretized.fill_(True)
        self.vq_layer.freeze_codebook.fill_(True)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Vectors [..., inputs] -> their reconstruction and the commitment loss [...]; training updates the codes."""
        latent, _, commitment = self.vq_layer(self.encoder(x), learn=self.training)
        return self.decoder(latent), commitment

    @torch.no_grad()
    def encode(self, x: Tensor) -> Tensor:
        """Vectors [..., inputs] -> codes [..., 2]."""
        return self.vq_layer(self.encoder(x), learn=False)[1]

    @torch.no_grad()
    def decode(self, codes: Tensor) -> Tensor:
        """Codes [..., 2] -> vectors [..., inputs]."""
        return self.decoder(self.vq_layer.vectors(codes))


def mlp(*sizes: int) -> nn.Sequential:
    """Linear layers of these sizes with ReLU between them."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])
