"""VQ-BeT: the Vector-Quantized Behavior Transformer (Lee et al. 2024, https://arxiv.org/abs/2403.03181).

It is trained in two phases. First an auto-encoder learns a small vocabulary of action chunks: two codes
approximate a chunk. Then it is frozen, and a causal transformer over the last observations learns to predict
the codes and an offset that corrects them. Sampling codes keeps the modes of the demonstrations
separate, which a mean would average. Inference takes one forward pass, unlike diffusion. The drawback: the vocabulary
must be trained first, and a poor one limits the policy.

Parameter names and settings are LeRobot's, so either program can load the other's checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flexor.core.batch import ACTION, STATE, Batch
from flexor.core.rng import NoiseSource
from flexor.policies.base import Loss, ParamGroup, Policy
from flexor.policies.nn.camera import RgbEncoder
from flexor.policies.vqbet.config import TOKENS_PER_STEP, VQBeTConfig
from flexor.policies.vqbet.gpt import GPT
from flexor.policies.vqbet.vector_quantizer import VQVAE, mlp

FOCAL_GAMMA = 2.0  # exponent of the focal loss: the larger, the less well-predicted codes count
COMMITMENT_WEIGHT = 5.0


class VQBeT(Policy):
    Config = VQBeTConfig
    config: VQBeTConfig

    def __init__(self, config: VQBeTConfig):
        super().__init__(config)
        self.vqbet = VQBeTModel(config)
        self.discretizing: bool | None = None  # in the vocabulary phase; None before the first step

    @property
    def vqvae(self) -> VQVAE:
        return self.vqbet.action_head.vqvae_model

    def begin_step(self, step: int) -> None:
        """The step determines the phase, unless the loaded weights already have a trained vocabulary."""
        if self.discretizing is None:  # read once: it synchronises with the GPU
            self.discretizing = not self.vqvae.discretized.item()
        last = max(1, self.config.n_vqvae_training_steps) - 1
        if self.discretizing and step >= last:
            self.vqvae.finish()  # at the beginning of the last step, for a checkpoint right after it
        self.discretizing = self.discretizing and step <= last
        if self.discretizing:
            self.vqvae.begin_step()

    def graph_key(self) -> str | None:
        return None if self.discretizing else "behavior"  # the vocabulary phase updates codes on the host

    def loss(self, batch: Batch, noise: NoiseSource) -> Loss:
        chunks = self.vqbet.chunks_of(batch[ACTION])  # [B, T, H * A]
        discretizing = self.discretizing
        if discretizing is None:
            discretizing = not self.vqvae.discretized.item()
        return self._vocabulary_loss(chunks) if discretizing else self._behavior_loss(batch, chunks, noise)

    def _vocabulary_loss(self, chunks: Tensor) -> Loss:
        reconstruction, commitment = self.vqvae(chunks)
        error = (chunks - reconstruction).abs().mean((1, 2))
        commitment = commitment.mean(1)
        return Loss(
            error + COMMITMENT_WEIGHT * commitment, {"recon_l1_error": error, "commitment_loss": commitment}
        )

    def _behavior_loss(self, batch: Batch, chunks: Tensor, noise: NoiseSource) -> Loss:
        config = self.config
        features = self.vqbet(batch, noise)
        output = self.vqbet.action_head(features, noise)
        codes = self.vqvae.encode(chunks)  # [B, T, 2]
        primary, secondary = focal_loss(output.logits, codes).mean(1).unbind(-1)
        code_loss = config.primary_code_loss_weight * primary + config.secondary_code_loss_weight * secondary
        offset_loss = (chunks - output.actions).abs().mean((1, 2))
        primary_accuracy, secondary_accuracy = (codes == output.codes).float().mean(1).unbind(-1)
        parts = {
            "classification_loss": code_loss,
            "offset_loss": offset_loss,
            "equal_primary_code_rate": primary_accuracy,
            "equal_secondary_code_rate": secondary_accuracy,
            "vq_action_error": (chunks - output.decoded).abs().mean((1, 2)),
            "action_mse_error": (chunks - output.actions).square().mean((1, 2)),
        }
        return Loss(code_loss + config.offset_loss_weight * offset_loss, parts)

    def predict(self, batch: Batch, noise: NoiseSource) -> Tensor:
        now = self.config.n_obs_steps - 1
        features = self.vqbet(batch, noise)[:, now : now + 1]  # later chunks are for training only
        actions = self.vqbet.action_head(features, noise).actions
        return actions.view(len(actions), self.config.action_chunk_size, -1)

    def load_backbone(self) -> None:
        self.vqbet.rgb_encoder.load_imagenet()

    def shard_units(self) -> list[nn.Module]:
        return [self.vqbet.rgb_encoder.backbone, *self.vqbet.policy.blocks]

    def param_groups(self) -> list[ParamGroup]:
        """In LeRobot's order: a saved optimizer state is numbered by it."""
        model, head = self.vqbet, self.vqbet.action_head
        matrices, no_decay = model.policy.decay_groups()
        encoders = [model.rgb_encoder, model.state_projector, model.rgb_feature_projector]
        encoder_params = [p for module in encoders for p in module.parameters()]
        heads = [
            p for module in (head.map_to_cbet_preds_offset, *head.code_heads()) for p in module.parameters()
        ]
        vocabulary = {
            "weight_decay": self.config.optimizer_vqvae_weight_decay,
            "lr": self.config.optimizer_vqvae_lr,
        }
        return [
            ParamGroup([*matrices, *encoder_params, model.action_token, *heads]),
            ParamGroup(list(self.vqvae.parameters()), vocabulary),
            ParamGroup(no_decay, {"weight_decay": 0.0}),
        ]


class VQBeTModel(nn.Module):
    """Observations to features, one per chunk. Each observation is followed by an action query token."""

    select_target_actions_indices: Tensor  # [T, H]: which actions make up which chunk

    def __init__(self, config: VQBeTConfig):
        super().__init__()
        self.config = config
        (camera,), state = config.images.values(), config.state
        assert state is not None
        self.camera = next(iter(config.images))
        self.rgb_encoder = RgbEncoder(config, camera.shape)
        self.action_token = nn.Parameter(torch.randn(1, 1, config.gpt_input_dim))
        self.state_projector = mlp(state.shape[0], config.gpt_input_dim)
        self.rgb_feature_projector = mlp(self.rgb_encoder.feature_dim, config.gpt_input_dim)
        self.policy = GPT(
            config.gpt_input_dim,
            config.gpt_output_dim,
            dim=config.gpt_hidden_dim,
            heads=config.gpt_n_head,
            layers=config.gpt_n_layer,
            block_size=config.gpt_block_size,
            dropout=config.dropout,
        )
        self.action_head = VQBeTHead(config)
        actions = torch.arange(len(config.action_deltas))
        windows = actions.unfold(0, config.action_chunk_size, 1)
        self.register_buffer("select_target_actions_indices", windows.contiguous())

    def chunks_of(self, actions: Tensor) -> Tensor:
        """Actions [B, T + H - 1, A] -> every chunk of them [B, T, H * A]."""
        return actions[:, self.select_target_actions_indices].flatten(2)

    def forward(self, batch: Batch, noise: NoiseSource) -> Tensor:
        """Features [B, T, D]."""
        state, images = batch[STATE], batch[self.camera]  # [B, O, S], [B, O, 3, H, W]
        steps = state.shape[1]
        assert steps == self.config.n_obs_steps
        query = self.action_token.expand(len(state), -1, -1)
        image_tokens = self.rgb_feature_projector(self.rgb_encoder(images, noise))
        tokens = torch.stack((image_tokens, self.state_projector(state), query.expand(-1, steps, -1)), dim=2)
        future = query.expand(-1, self.config.n_action_pred_token - 1, -1)
        features = self.policy(torch.cat((tokens.flatten(1, 2), future), dim=1))
        observed_tokens = TOKENS_PER_STEP * steps
        current = features[:, TOKENS_PER_STEP - 1 : observed_tokens : TOKENS_PER_STEP]
        return torch.cat((current, features[:, observed_tokens:]), dim=1)


@dataclass
class HeadOutput:
    """The output of the head for each of T chunks."""

    logits: Tensor  # [B, T, 2, C], of the codes
    codes: Tensor  # [B, T, 2], drawn from them
    decoded: Tensor  # [B, T, H * A]: the actions they stand for
    actions: Tensor  # [B, T, H * A]: with the offset


class VQBeTHead(nn.Module):
    """Predicts codes and offsets from features. Includes the auto-encoder that decodes the codes."""

    def __init__(self, config: VQBeTConfig):
        super().__init__()
        self.config = config
        size = config.action.shape[0] * config.action_chunk_size
        codes, features = config.vqvae_n_embed, config.gpt_output_dim
        self.vqvae_model = VQVAE(size, config.vqvae_enc_hidden_dim, config.vqvae_embedding_dim, codes)
        if config.sequentially_select:
            self.map_to_cbet_preds_primary_bin = mlp(features, codes)
            self.map_to_cbet_preds_secondary_bin = mlp(features + codes, codes)
        else:
            self.map_to_cbet_preds_bin = mlp(features, VQVAE.CODEBOOKS * codes)
        self.map_to_cbet_preds_offset = mlp(features, VQVAE.CODEBOOKS * codes * size)

    def code_heads(self) -> list[nn.Module]:
        if self.config.sequentially_select:
            return [self.map_to_cbet_preds_primary_bin, self.map_to_cbet_preds_secondary_bin]
        return [self.map_to_cbet_preds_bin]

    def forward(self, features: Tensor, noise: NoiseSource) -> HeadOutput:
        shape = (*features.shape[:2], VQVAE.CODEBOOKS, self.config.vqvae_n_embed)  # [B, T, 2, C]
        uniform = noise.uniform("codes", shape).to(features.device)
        if self.config.sequentially_select:
            first = self.map_to_cbet_preds_primary_bin(features)
            primary = self._draw(first, uniform[:, :, 0])
            conditioned = torch.cat((features, F.one_hot(primary, shape[-1]).to(features)), dim=-1)
            second = self.map_to_cbet_preds_secondary_bin(conditioned)
            logits = torch.stack((first, second), dim=2)
            codes = torch.stack((primary, self._draw(second, uniform[:, :, 1])), dim=2)
        else:
            logits = self.map_to_cbet_preds_bin(features).view(shape)
            codes = self._draw(logits, uniform)
        offsets = self.map_to_cbet_preds_offset(features).view(*shape, -1)  # [B, T, 2, C, H * A]
        index = codes[..., None, None].expand(*codes.shape, 1, offsets.shape[-1])
        offset = offsets.gather(3, index).sum((2, 3))  # sum over both codes
        decoded = self.vqvae_model.decode(codes)
        return HeadOutput(logits, codes, decoded, decoded + offset)

    def _draw(self, logits: Tensor, uniform: Tensor) -> Tensor:
        """Sample one of C codes: the argmax of logits plus Gumbel noise has the distribution of the logits."""
        gumbel = -(-uniform.log()).log()
        return (logits.float() / self.config.bet_softmax_temperature + gumbel).argmax(-1)


def focal_loss(logits: Tensor, target: Tensor) -> Tensor:
    """logits [..., C], target [...] -> cross-entropy, reduced where the target is already likely.

    (Lin et al. 2017, https://arxiv.org/abs/1708.02002.)
    """
    log_p = logits.float().log_softmax(-1).gather(-1, target[..., None])[..., 0]
    return -((1 - log_p.exp()) ** FOCAL_GAMMA) * log_p
