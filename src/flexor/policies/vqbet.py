"""VQ-BeT: the Vector-Quantized Behavior Transformer (Lee et al. 2024, https://arxiv.org/abs/2403.03181).

It is trained in two phases. First an auto-encoder learns a small vocabulary of action chunks: two codes
stand for a chunk, roughly. Then it is frozen, and a causal transformer over the last observations learns to
name the codes and to correct them by an offset. Sampling codes keeps ways of doing a task apart that a mean
would mix up; acting takes one pass, unlike diffusion. The price: the vocabulary must be trained first,
and a poor one limits everything after it.

Parameter names and settings are LeRobot's, so checkpoints go both ways.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flexor.batch import ACTION, STATE, Batch
from flexor.errors import ConfigError
from flexor.policies.base import (
    MOST_DROPOUT,
    Kind,
    Loss,
    NoiseSource,
    Normalization,
    ParamGroup,
    Policy,
    PolicyConfig,
)
from flexor.policies.blocks.adam import AdamSettings
from flexor.policies.blocks.gpt import GPT
from flexor.policies.blocks.vision import RgbEncoder, VisionSettings
from flexor.policies.blocks.vq import VQVAE, mlp

FOCUS = 2.0  # how much less the focal loss cares about codes that are predicted well
COMMITMENT_WEIGHT = 5.0
TOKENS_PER_STEP = 3  # picture, state, and one that asks for actions


@dataclass
class VQBeTConfig(VisionSettings, AdamSettings, PolicyConfig):
    """Defaults are those for PushT, as LeRobot sets them."""

    type: ClassVar[str] = "vqbet"

    n_obs_steps: int = 5
    """How many observations, up to the current one, the policy sees."""
    n_action_pred_token: int = 3
    """How many chunks are predicted from now on, each beginning one step later; the first one is executed."""
    action_chunk_size: int = 5
    """How many actions two codes stand for, and are executed before the policy looks again."""
    normalization_mapping: dict[Kind, Normalization] = field(
        default_factory=lambda: {Kind.VISUAL: "IDENTITY", Kind.STATE: "MIN_MAX", Kind.ACTION: "MIN_MAX"}
    )
    """How each kind of feature (VISUAL, STATE, ACTION) is normalised."""
    crop_shape: tuple[int, int] | None = (84, 84)
    n_vqvae_training_steps: int = 20000
    """Optimizer steps of the first phase, which trains the action vocabulary alone (at least one)."""
    vqvae_n_embed: int = 16
    """Codes in each of the two codebooks."""
    vqvae_embedding_dim: int = 256
    """Size of a code."""
    vqvae_enc_hidden_dim: int = 128
    """Width of the auto-encoder of actions."""
    gpt_block_size: int = 500
    """Tokens the transformer has positions for: at least 3 n_obs_steps + n_action_pred_token - 1."""
    gpt_input_dim: int = 512
    """Size of a token: a picture's or a state's projection."""
    gpt_output_dim: int = 512
    """Size of a feature, from which codes and offsets are predicted."""
    gpt_n_layer: int = 8
    """Layers of the transformer."""
    gpt_n_head: int = 8
    """Attention heads."""
    gpt_hidden_dim: int = 512
    """Width of the transformer."""
    dropout: float = 0.1
    """Dropout in the transformer."""
    offset_loss_weight: float = 10000.0
    """Weight of the offset's error in the loss."""
    primary_code_loss_weight: float = 5.0
    """Weight of the first code's loss."""
    secondary_code_loss_weight: float = 0.5
    """Weight of the second code's loss."""
    bet_softmax_temperature: float = 0.1
    """Of the sampling of codes: near 0 the likeliest, 1 as likely as predicted."""
    sequentially_select: bool = False
    """Predict the second code knowing the first one, instead of both at once."""
    optimizer_vqvae_lr: float = 1e-3
    """Learning rate of the first phase."""
    optimizer_vqvae_weight_decay: float = 1e-4
    """Weight decay of the first phase."""
    scheduler_warmup_steps: int = 500
    """Steps of warm-up at the beginning of the second phase (--scheduler.num_warmup_steps takes precedence)."""

    def __post_init__(self) -> None:
        # LeRobot counts tokens by the features that are declared: declare only what there is a token for
        self.input_features = {**self.images, **({STATE: self.state} if self.state else {})}

    def validate(self) -> None:
        self.require(1, "n_obs_steps", "n_action_pred_token", "action_chunk_size")
        self.require(1, "vqvae_n_embed", "vqvae_embedding_dim", "vqvae_enc_hidden_dim")
        self.require(1, "gpt_input_dim", "gpt_output_dim", "gpt_n_layer", "gpt_n_head", "gpt_hidden_dim")
        self.require(0, "dropout", high=MOST_DROPOUT)
        if self.bet_softmax_temperature <= 0:
            raise ConfigError(
                f"policy.bet_softmax_temperature={self.bet_softmax_temperature} must be more than 0; "
                "1e-3 always takes the likeliest code."
            )
        if self.gpt_hidden_dim % self.gpt_n_head:
            raise ConfigError(
                f"policy.gpt_hidden_dim={self.gpt_hidden_dim} must be a multiple of "
                f"policy.gpt_n_head={self.gpt_n_head}."
            )
        tokens = TOKENS_PER_STEP * self.n_obs_steps + self.n_action_pred_token - 1
        if self.gpt_block_size < tokens:
            raise ConfigError(
                f"policy.gpt_block_size={self.gpt_block_size} is too small for the {tokens} tokens of "
                f"policy.n_obs_steps={self.n_obs_steps} and policy.n_action_pred_token={self.n_action_pred_token}."
            )
        cameras = {name: camera.shape for name, camera in self.images.items()}
        self.check_vision(cameras)
        if self.output_features and (len(cameras) != 1 or self.state is None):
            raise ConfigError(
                f"VQ-BeT looks at one camera and {STATE}; here are {', '.join(self.input_features) or 'neither'}. "
                "Name the two in policy.input_features, with their type and shape."
            )

    def scheduler_preset(self) -> dict[str, Any]:
        return {
            "type": "vqbet",
            "num_warmup_steps": self.scheduler_warmup_steps,
            "num_vqvae_training_steps": self.n_vqvae_training_steps,
        }

    @property
    def observation_deltas(self) -> list[int]:
        return list(range(1 - self.n_obs_steps, 1))

    @property
    def chunks(self) -> int:
        """How many chunks of a sample are predicted: one from each observation on, and the future ones."""
        return self.n_obs_steps + self.n_action_pred_token - 1

    @property
    def action_deltas(self) -> list[int]:
        first = 1 - self.n_obs_steps
        return list(range(first, first + self.chunks + self.action_chunk_size - 1))

    @property
    def action_steps(self) -> int:
        return self.action_chunk_size

    @property
    def uses_all_parameters(self) -> bool:
        return False  # the phases train one part each


class VQBeT(Policy):
    Config = VQBeTConfig
    config: VQBeTConfig

    def __init__(self, config: VQBeTConfig):
        super().__init__(config)
        self.vqbet = VQBeTModel(config)
        self.discretizing: bool | None = None  # whether this is the first phase; None until a step begins

    @property
    def vqvae(self) -> VQVAE:
        return self.vqbet.action_head.vqvae_model

    def begin_step(self, step: int) -> None:
        """The phase follows from the step, unless the weights came with a vocabulary that is trained."""
        if self.discretizing is None:  # read once: it makes a GPU wait
            self.discretizing = not self.vqvae.discretized.item()
        last = max(1, self.config.n_vqvae_training_steps) - 1
        if self.discretizing and step >= last:
            self.vqvae.finish()  # at the beginning of the last step, for a checkpoint right after it
        self.discretizing = self.discretizing and step <= last
        if self.discretizing:
            self.vqvae.begin_step()

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
            error + COMMITMENT_WEIGHT * commitment,
            {"recon_l1_error": error, "commitment_loss": commitment},
        )

    def _behavior_loss(self, batch: Batch, chunks: Tensor, noise: NoiseSource) -> Loss:
        config = self.config
        features = self.vqbet(batch, noise)
        said = self.vqbet.action_head(features, noise)
        codes = self.vqvae.encode(chunks)  # [B, T, 2]
        primary, secondary = focal_loss(said.logits, codes).mean(1).unbind(-1)
        code_loss = config.primary_code_loss_weight * primary + config.secondary_code_loss_weight * secondary
        offset_loss = (chunks - said.actions).abs().mean((1, 2))
        right_primary, right_secondary = (codes == said.codes).float().mean(1).unbind(-1)
        parts = {
            "classification_loss": code_loss,
            "offset_loss": offset_loss,
            "equal_primary_code_rate": right_primary,
            "equal_secondary_code_rate": right_secondary,
            "vq_action_error": (chunks - said.decoded).abs().mean((1, 2)),
            "action_mse_error": (chunks - said.actions).square().mean((1, 2)),
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
        """In LeRobot's order, by which a saved optimizer's state is numbered."""
        model, head = self.vqbet, self.vqbet.action_head
        matrices, rest = model.policy.decay_groups()
        encoders = [model.rgb_encoder, model.state_projector, model.rgb_feature_projector]
        others = [p for module in encoders for p in module.parameters()]
        heads = [
            p for module in (head.map_to_cbet_preds_offset, *head.code_heads()) for p in module.parameters()
        ]
        vocabulary = {
            "weight_decay": self.config.optimizer_vqvae_weight_decay,
            "lr": self.config.optimizer_vqvae_lr,
        }
        return [
            ParamGroup([*matrices, *others, model.action_token, *heads]),
            ParamGroup(list(self.vqvae.parameters()), vocabulary),
            ParamGroup(rest, {"weight_decay": 0.0}),
        ]


class VQBeTModel(nn.Module):
    """Observations to features, one for each chunk; each observation is followed by a token that asks for actions."""

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
        state, pictures = batch[STATE], batch[self.camera]  # [B, O, S], [B, O, 3, H, W]
        steps = state.shape[1]
        assert steps == self.config.n_obs_steps
        ask = self.action_token.expand(len(state), -1, -1)
        seen = self.rgb_feature_projector(self.rgb_encoder(pictures, noise))
        tokens = torch.stack((seen, self.state_projector(state), ask.expand(-1, steps, -1)), dim=2)
        future = ask.expand(-1, self.config.n_action_pred_token - 1, -1)
        features = self.policy(torch.cat((tokens.flatten(1, 2), future), dim=1))
        asked = TOKENS_PER_STEP * steps
        answers = features[:, TOKENS_PER_STEP - 1 : asked : TOKENS_PER_STEP]
        return torch.cat((answers, features[:, asked:]), dim=1)


@dataclass
class Said:
    """What the head makes of features, for each of T chunks."""

    logits: Tensor  # [B, T, 2, C], of the codes
    codes: Tensor  # [B, T, 2], drawn from them
    decoded: Tensor  # [B, T, H * A]: the actions they stand for
    actions: Tensor  # [B, T, H * A]: with the offset


class VQBeTHead(nn.Module):
    """Codes and offsets from features, with the auto-encoder that knows what codes stand for."""

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

    def forward(self, features: Tensor, noise: NoiseSource) -> Said:
        shape = (*features.shape[:2], VQVAE.CODEBOOKS, self.config.vqvae_n_embed)  # [B, T, 2, C]
        uniform = noise.uniform("codes", shape).to(features.device)
        if self.config.sequentially_select:
            first = self.map_to_cbet_preds_primary_bin(features)
            primary = self._draw(first, uniform[:, :, 0])
            known = torch.cat((features, F.one_hot(primary, shape[-1]).to(features)), dim=-1)
            second = self.map_to_cbet_preds_secondary_bin(known)
            logits = torch.stack((first, second), dim=2)
            codes = torch.stack((primary, self._draw(second, uniform[:, :, 1])), dim=2)
        else:
            logits = self.map_to_cbet_preds_bin(features).view(shape)
            codes = self._draw(logits, uniform)
        offsets = self.map_to_cbet_preds_offset(features).view(*shape, -1)  # [B, T, 2, C, H * A]
        index = codes[..., None, None].expand(*codes.shape, 1, offsets.shape[-1])
        offset = offsets.gather(3, index).sum((2, 3))  # both codes' together
        decoded = self.vqvae_model.decode(codes)
        return Said(logits, codes, decoded, decoded + offset)

    def _draw(self, logits: Tensor, uniform: Tensor) -> Tensor:
        """One of C codes at random: the largest of logits with Gumbel noise added is distributed like them."""
        gumbel = -(-uniform.log()).log()
        return (logits.float() / self.config.bet_softmax_temperature + gumbel).argmax(-1)


def focal_loss(logits: Tensor, target: Tensor) -> Tensor:
    """logits [..., C], target [...] -> cross-entropy that fades where the target is likely already.

    (Lin et al. 2017, https://arxiv.org/abs/1708.02002.)
    """
    log_p = logits.float().log_softmax(-1).gather(-1, target[..., None])[..., 0]
    return -((1 - log_p.exp()) ** FOCUS) * log_p
