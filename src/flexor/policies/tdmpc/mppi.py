"""Planning with a learned model: MPPI, fitted by the cross-entropy method, as TD-MPC plans.

Many action sequences, drawn from a normal distribution and from the learned policy, are evaluated in the
model. The next iteration samples around the best of them. A decision costs `cem_iterations` x samples x
horizon evaluations of small networks. It needs no gradients and can leave local optima.

Sequences are valued as in FOWM (Feng et al. 2023, https://arxiv.org/abs/2310.16029, equation 4): critics
disagree where the model has no data, so the standard deviation of their values is subtracted.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flexor.core.rng import NoiseSource
from flexor.policies.tdmpc.config import TDMPCConfig
from flexor.policies.tdmpc.world_model import LatentWorld


def plan(
    model: LatentWorld, config: TDMPCConfig, latent: Tensor, noise: NoiseSource, previous: Tensor | None
) -> tuple[Tensor, Tensor]:
    """A sequence of actions [B, H, A], and the mean [B, H, A] that the next plan of the episode starts from."""
    batch, actions = len(latent), config.action.shape[0]
    policy_sequences = _policy_sequences(model, config, latent, noise)  # [B, P, H, A]
    mean = torch.zeros(batch, config.horizon, actions, device=latent.device)
    if previous is not None:
        mean[:, :-1] = previous[:, 1:]  # one step has passed
    std = torch.full_like(mean, config.max_std)
    for iteration in range(config.cem_iterations):
        name = f"plan/{iteration}"
        epsilon = noise.normal(f"{name}/samples", (batch, config.n_gaussian_samples, *mean.shape[1:]))
        sampled = (mean[:, None] + std[:, None] * epsilon.to(mean)).clamp(-1, 1)
        candidates = torch.cat([sampled, policy_sequences], 1)  # [B, N, H, A]
        value = _evaluate(model, config, latent, candidates, noise, name).nan_to_num(0)  # [B, N]
        elite_values, index = value.topk(config.n_elites, dim=1)
        elites = candidates.take_along_dim(index[:, :, None, None], 1)  # [B, K, H, A]
        weights = (config.elite_weighting_temperature * elite_values).softmax(1)  # [B, K]
        weight = weights[:, :, None, None]
        elite_mean = (weight * elites).sum(1)
        std = (weight * (elites - elite_mean[:, None]).square()).sum(1).sqrt()
        std = std.clamp(config.min_std, config.max_std)
        mean = config.gaussian_mean_momentum * mean + (1 - config.gaussian_mean_momentum) * elite_mean
    return _sample_elite(elites, weights, noise), mean


def _policy_sequences(model: LatentWorld, config: TDMPCConfig, latent: Tensor, noise: NoiseSource) -> Tensor:
    """Sequences of the learned policy with a little noise: [B, P, H, A]."""
    batch, count, actions = len(latent), config.n_pi_samples, config.action.shape[0]
    epsilon = noise.normal("plan/policy", (batch, count, config.horizon, actions)).to(latent.device)
    latent = latent[:, None].expand(-1, count, -1)
    sequence = []
    for t in range(config.horizon if count else 0):
        sequence.append(model.act(latent) + config.min_std * epsilon[:, :, t])
        latent, _ = model.step(latent, sequence[-1])
    return torch.stack(sequence, 2) if sequence else epsilon


def _evaluate(
    model: LatentWorld, config: TDMPCConfig, latent: Tensor, actions: Tensor, noise: NoiseSource, name: str
) -> Tensor:
    """The values [B, N] of sequences [B, N, H, A]: their rewards, then the critics' value of the last state."""
    batch, count, horizon, width = actions.shape
    latent = latent[:, None].expand(-1, count, -1)
    uncertainty_coeff = config.uncertainty_regularizer_coeff
    total = torch.zeros(batch, count, device=actions.device)
    discount = 1.0
    for t in range(horizon):
        action = actions[:, :, t]
        if uncertainty_coeff > 0:
            total = total - discount * uncertainty_coeff * model.values(latent, action).std(-1)
        latent, reward = model.step(latent, action)
        total = total + discount * reward
        discount *= config.discount
    epsilon = noise.normal(f"{name}/last", (batch, count, width)).to(actions)
    values = model.values(latent, model.act(latent) + config.min_std * epsilon)  # [B, N, E]
    total = total + discount * lower_of_two(values, noise, f"{name}/critics")
    if uncertainty_coeff > 0:
        total = total - discount * uncertainty_coeff * values.std(-1)
    return total


def lower_of_two(values: Tensor, noise: NoiseSource, name: str) -> Tensor:
    """The lower of two critics drawn at random per sample (perhaps the same one twice): [B, N, E] -> [B, N]."""
    batch, _, critics = values.shape
    if critics > 2:
        index = noise.integers(name, (batch, 2), critics).to(values.device)
        values = values.take_along_dim(index[:, None, :], 2)
    return values.amin(-1)


def _sample_elite(elites: Tensor, weights: Tensor, noise: NoiseSource) -> Tensor:
    """One of the sequences [B, K, H, A], drawn by weight [B, K]. Drawing keeps some exploration."""
    uniform = noise.uniform("plan/choice", (len(elites), 1)).to(weights)
    index = (weights.cumsum(1) < uniform).sum(1, keepdim=True).clamp(max=weights.shape[1] - 1)
    return elites.take_along_dim(index[:, :, None, None], 1)[:, 0]
