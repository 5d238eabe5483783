"""ACT: the Action Chunking Transformer (Zhao et al. 2023, https://arxiv.org/abs/2304.13705).

A transformer takes the camera images and the robot's state, and predicts the next `chunk_size` actions at
once. In training, a second small transformer, the encoder of a variational auto-encoder, also sees the true
actions and adds a latent "style" variable. At inference the style is zero, its mean.

Parameter names and settings are LeRobot's, so either program can load the other's checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flexor.core.batch import ACTION, ENV_STATE, STATE, Batch
from flexor.core.rng import NoiseSource
from flexor.policies.act.config import ACTIVATIONS, ACTConfig
from flexor.policies.base import Loss, ParamGroup, Policy, action_padding, mean_over_valid
from flexor.policies.nn.attention import Attention, sinusoidal_positions, sinusoidal_positions_2d
from flexor.policies.nn.resnet import FrozenBatchNorm2d, ResNet


class ACT(Policy):
    Config = ACTConfig
    config: ACTConfig

    def __init__(self, config: ACTConfig):
        super().__init__(config)
        self.model = ACTModel(config)

    def loss(self, batch: Batch, noise: NoiseSource) -> Loss:
        config = self.config
        latent = mean = log_variance = None
        if config.use_vae and self.training:
            mean, log_variance = self.model.encode_style(batch)
            epsilon = noise.normal("latent", tuple(mean.shape)).to(mean)
            latent = mean + (log_variance / 2).exp() * epsilon

        predicted = self.model(batch, latent)
        error = F.l1_loss(predicted, batch[ACTION], reduction="none")
        l1 = mean_over_valid(error, action_padding(batch), batch)
        if mean is None or log_variance is None:
            return Loss(l1, {"l1_loss": l1})
        kl = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(-1)
        return Loss(l1 + config.kl_weight * kl, {"l1_loss": l1, "kld_loss": kl})

    def predict(self, batch: Batch, noise: NoiseSource) -> Tensor:
        return self.model(batch, None)

    def load_backbone(self) -> None:
        if self.config.images and self.config.pretrained_backbone_weights is not None:
            self.model.backbone.load_imagenet(self.config.pretrained_backbone_weights)

    def shard_units(self) -> list[nn.Module]:
        units = [*self.model.encoder.layers, *self.model.decoder.layers]
        if self.config.use_vae:
            units += self.model.vae_encoder.layers
        return [self.model.backbone, *units] if self.config.images else units

    def param_groups(self) -> list[ParamGroup]:
        named = [(name, p) for name, p in self.named_parameters() if p.requires_grad]
        backbone = [p for name, p in named if name.startswith("model.backbone")]
        rest = [p for name, p in named if not name.startswith("model.backbone")]
        return [ParamGroup(rest), ParamGroup(backbone, {"lr": self.config.optimizer_lr_backbone})]


class ACTModel(nn.Module):
    """The two transformers and their inputs. Tokens: [latent, state, environment state, pixels...].

    Parameters are registered in LeRobot's order: a saved optimizer state is numbered by it.
    """

    vae_encoder_pos_enc: Tensor

    def __init__(self, config: ACTConfig):
        super().__init__()
        self.config = config
        dim = config.dim_model
        self.low_dim_keys = [key for key in (STATE, ENV_STATE) if key in config.input_features]

        if config.use_vae:
            self._build_vae_encoder(config)
        if config.images:
            self._build_cameras(config)
        self.encoder = Encoder(config, config.n_encoder_layers)
        self.decoder = Decoder(config)
        if config.state:
            self.encoder_robot_state_input_proj = nn.Linear(config.state.shape[0], dim)
        if config.environment_state:
            self.encoder_env_state_input_proj = nn.Linear(config.environment_state.shape[0], dim)
        self.encoder_latent_input_proj = nn.Linear(config.latent_dim, dim)
        if config.images:
            self.encoder_img_feat_input_proj = nn.Conv2d(self.backbone.out_channels, dim, 1)
        self.encoder_1d_feature_pos_embed = nn.Embedding(1 + len(self.low_dim_keys), dim)
        self.decoder_pos_embed = nn.Embedding(config.chunk_size, dim)
        self.action_head = nn.Linear(dim, config.action.shape[0])

        for parameter in [*self.encoder.parameters(), *self.decoder.parameters()]:
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)

    def _build_vae_encoder(self, config: ACTConfig) -> None:
        dim = config.dim_model
        self.vae_encoder = Encoder(config, config.n_vae_encoder_layers)
        self.vae_encoder_cls_embed = nn.Embedding(1, dim)
        if config.state:
            self.vae_encoder_robot_state_input_proj = nn.Linear(config.state.shape[0], dim)
        self.vae_encoder_action_input_proj = nn.Linear(config.action.shape[0], dim)
        self.vae_encoder_latent_output_proj = nn.Linear(dim, 2 * config.latent_dim)
        tokens = 1 + config.chunk_size + (config.state is not None)
        self.register_buffer("vae_encoder_pos_enc", sinusoidal_positions(tokens, dim)[None])

    def _build_cameras(self, config: ACTConfig) -> None:
        self.backbone = ResNet(
            config.vision_backbone, FrozenBatchNorm2d, config.replace_final_stride_with_dilation
        )
        positions = [
            sinusoidal_positions_2d(*self.backbone.feature_map_size(*camera.shape[1:]), config.dim_model)
            for camera in config.images.values()
        ]
        self.register_buffer("camera_positions", torch.cat(positions), persistent=False)  # [pixels, D]

    def encode_style(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The latent's mean and log variance [B, L], from the state and the true actions."""
        actions = batch[ACTION]
        tokens = [self.vae_encoder_cls_embed.weight.expand(len(actions), 1, -1)]
        if self.config.state:
            tokens.append(self.vae_encoder_robot_state_input_proj(batch[STATE])[:, None])
        mask = ~action_padding(batch)  # [B, H]
        mask = F.pad(mask, (len(tokens), 0), value=True)
        tokens.append(self.vae_encoder_action_input_proj(actions))
        encoded = self.vae_encoder(torch.cat(tokens, 1), self.vae_encoder_pos_enc, mask)
        mean, log_variance = self.vae_encoder_latent_output_proj(encoded[:, 0]).chunk(2, dim=-1)
        return mean, log_variance

    def forward(self, batch: Batch, latent: Tensor | None) -> Tensor:
        """Actions [B, chunk, A] from observations and a latent [B, L] (None: its prior's mean, zero)."""
        tokens, positions = self._observe(batch, latent)
        memory = self.encoder(tokens, positions)
        queries = self.decoder_pos_embed.weight.expand(len(memory), -1, -1)
        return self.action_head(self.decoder(queries, memory, positions))

    def _observe(self, batch: Batch, latent: Tensor | None) -> tuple[Tensor, Tensor]:
        """Tokens [B, S, D] and their positions [1, S, D]."""
        observed = [batch[key] for key in (*self.low_dim_keys, *self.config.images)]
        if latent is None:
            latent = observed[0].new_zeros(len(observed[0]), self.config.latent_dim)
        tokens = [self.encoder_latent_input_proj(latent)[:, None]]
        if self.config.state:
            tokens.append(self.encoder_robot_state_input_proj(batch[STATE])[:, None])
        if self.config.environment_state:
            tokens.append(self.encoder_env_state_input_proj(batch[ENV_STATE])[:, None])
        positions = [self.encoder_1d_feature_pos_embed.weight]
        if self.config.images:
            tokens.extend(self._encode_cameras([batch[key] for key in self.config.images]))
            positions.append(self.get_buffer("camera_positions").to(positions[0].dtype))
        return torch.cat(tokens, 1), torch.cat(positions)[None]

    def _encode_cameras(self, images: list[Tensor]) -> list[Tensor]:
        """One [B, h * w, D] per camera. Cameras of one size go through the backbone together."""
        if len({image.shape for image in images}) == 1:
            features = self.encoder_img_feat_input_proj(self.backbone(torch.cat(images)))
            maps = features.chunk(len(images))
        else:
            maps = tuple(self.encoder_img_feat_input_proj(self.backbone(image)) for image in images)
        return [features.flatten(2).transpose(1, 2) for features in maps]


class Encoder(nn.Module):
    def __init__(self, config: ACTConfig, depth: int):
        super().__init__()
        self.layers = nn.ModuleList(EncoderLayer(config) for _ in range(depth))
        self.norm = nn.LayerNorm(config.dim_model) if config.pre_norm else nn.Identity()

    def forward(self, x: Tensor, positions: Tensor, mask: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = layer(x, positions, mask)
        return self.norm(x)


class Decoder(nn.Module):
    def __init__(self, config: ACTConfig):
        super().__init__()
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.n_decoder_layers))
        self.norm = nn.LayerNorm(config.dim_model)

    def forward(self, query_positions: Tensor, memory: Tensor, memory_positions: Tensor) -> Tensor:
        x = torch.zeros_like(query_positions)
        for layer in self.layers:
            x = layer(x, query_positions, memory, memory_positions)
        return self.norm(x)


class _Layer(nn.Module):
    """What encoder and decoder layers share: residual sub-layers, normalised before or after."""

    def __init__(self, config: ACTConfig, cross_attention: bool = False):
        super().__init__()
        dim = config.dim_model
        self.pre_norm = config.pre_norm
        self.self_attn = Attention(dim, config.n_heads, config.dropout)
        if cross_attention:
            self.multihead_attn = Attention(dim, config.n_heads, config.dropout)
        self.linear1 = nn.Linear(dim, config.dim_feedforward)
        self.linear2 = nn.Linear(config.dim_feedforward, dim)
        self.dropout = nn.Dropout(config.dropout)
        self.activation = ACTIVATIONS[config.feedforward_activation]
        for i in (1, 2, 3) if cross_attention else (1, 2):
            self.add_module(f"norm{i}", nn.LayerNorm(dim))

    def _attend(self, x: Tensor, positions: Tensor, mask: Tensor | None = None) -> Tensor:
        positioned = x + positions
        return self.self_attn(positioned, positioned, x, mask)

    def _feed_forward(self, x: Tensor) -> Tensor:
        return self.linear2(self.dropout(self.activation(self.linear1(x))))

    def _residual(self, index: int, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        norm = self.get_submodule(f"norm{index}")
        if self.pre_norm:
            return x + self.dropout(sublayer(norm(x)))
        return norm(x + self.dropout(sublayer(x)))


class EncoderLayer(_Layer):
    def forward(self, x: Tensor, positions: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self._residual(1, x, lambda h: self._attend(h, positions, mask))
        return self._residual(2, x, self._feed_forward)


class DecoderLayer(_Layer):
    def __init__(self, config: ACTConfig):
        super().__init__(config, cross_attention=True)

    def forward(self, x: Tensor, positions: Tensor, memory: Tensor, memory_positions: Tensor) -> Tensor:
        keys = memory + memory_positions
        x = self._residual(1, x, lambda h: self._attend(h, positions))
        x = self._residual(2, x, lambda h: self.multihead_attn(h + positions, keys, memory))
        return self._residual(3, x, self._feed_forward)
