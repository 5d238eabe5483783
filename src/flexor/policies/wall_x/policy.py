"""WALL-X (Zhai et al. 2025, https://arxiv.org/abs/2509.11766): a vision-language model with experts for actions.

Qwen2.5-VL reads camera images, the task and the robot's state. A chunk of noisy actions follows, a token each, which
attend to each other and have feed-forward layers of their own. Their last hidden states become the velocity that turns
noise into actions (flow matching). Nothing before them attends to them, so the prompt is read once for all integration
steps.

Parameter names and settings are LeRobot's, so either program can load the other's checkpoints.
"""

from __future__ import annotations

from functools import cached_property, partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flexor.core.batch import ACTION, ACTION_LENGTH, IMAGE_FEATURES, STATE, Batch
from flexor.core.errors import ConfigError, FlexorError
from flexor.core.log import log
from flexor.core.rng import NoiseSource
from flexor.policies.autoregressive import AutoregressivePolicy
from flexor.policies.base import Loss
from flexor.policies.hf_transformers import fetch
from flexor.policies.image_encoder import ImageEncoder
from flexor.policies.nn.fast_tokens import FastTokenizer, load_fast_tokenizer
from flexor.policies.nn.flow import FlowMatching
from flexor.policies.nn.real_time import prefix_guidance
from flexor.policies.nn.recompute import recompute
from flexor.policies.nn.resize import padded
from flexor.policies.processing.tokenize import FILES
from flexor.policies.vlm.decode import SEGMENT, DecodeState, decode_segment, mean_over_tokens, token_losses
from flexor.policies.wall_x.answer import ANSWER_MASK, ActionWords
from flexor.policies.wall_x.config import WallXConfig
from flexor.policies.wall_x.files import load_weights
from flexor.policies.wall_x.images import WallXImages
from flexor.policies.wall_x.network import ChunkContext, WallXNetwork
from flexor.policies.wall_x.prompt import PROMPT, PROMPT_MASK, STATE_MASK


class Values(NamedTuple):
    """States or actions, padded, and which of their values are real: not padding, not missing (NaN)."""

    values: Tensor  # [B, ..., A]
    real: Tensor


class WallX(AutoregressivePolicy):
    Config = WallXConfig
    config: WallXConfig
    optimizes_frozen = True

    def __init__(self, config: WallXConfig):
        super().__init__(config)
        self.model = WallXNetwork(config.model_size(), config.grids)
        if config.model_dtype == torch.bfloat16:
            self.model.cast_to_bf16()
        self.model.freeze_unused(config.writes_tokens)
        self.continues_chunks = not config.writes_tokens
        self.prepare_images = WallXImages(config.grids)
        self.flow = FlowMatching(steps=config.num_denoise_steps, time_beta=(1.5, 1.0), time_max=0.999)
        if config.gradient_checkpointing:
            for block in self.shard_units():
                recompute(block)

    @property
    def writes_tokens(self) -> bool:
        return self.config.writes_tokens

    def loss(self, batch: Batch, noise: NoiseSource) -> Loss:
        if self.writes_tokens:
            return self._loss_of_words(batch)
        actions = self._rounded(self._actions(batch))
        velocity = partial(
            self.model.velocity,
            context=self._read(batch),
            real=actions.real,
            rounds=self.config.round_actions,
        )
        error = self.flow.error(velocity, actions.values, noise) * actions.real
        return Loss(error.mean((1, 2)), {})

    def _loss_of_words(self, batch: Batch) -> Loss:
        if ANSWER_MASK not in batch:
            raise FlexorError(
                f"WALL-X learns from {ANSWER_MASK}, which its processing makes of actions, but the batch has only "
                f"{', '.join(batch)}."
            )
        tokens, learned = batch[PROMPT], batch[ANSWER_MASK]
        hidden = self.model.read(self._embed_prompt(batch, tokens), tokens, batch[PROMPT_MASK])
        answer = learned.shape[1]
        losses = token_losses(self.model.lm_head, hidden[:, -answer - 1 : -1], tokens[:, -answer:])
        return Loss(mean_over_tokens(losses, learned), {})

    def predict(self, batch: Batch, noise: NoiseSource) -> Tensor:
        if self.writes_tokens:
            return super().predict(batch, noise)
        config, state = self.config, batch[STATE]
        context = self.model.prefill(self._read(batch))
        shape = (len(state), config.chunk_size, config.max_action_dim)
        width = config.action.shape[0]
        real = padded(state.new_ones(*shape[:2], width), config.max_action_dim)
        velocity = partial(self.model.velocity, context=context, real=real)
        guidance = prefix_guidance(batch, config.rtc_config, *shape[1:])
        return self.flow.sample(velocity, shape, noise, state, guidance)[..., :width]

    @cached_property
    def fast(self) -> FastTokenizer:
        return load_fast_tokenizer(self.config.action_tokenizer_path or "")

    @cached_property
    def words(self) -> ActionWords:
        name = self.config.tokenizer_name
        return ActionWords.of(fetch("AutoTokenizer", name, FILES), name)

    @property
    def max_segments(self) -> int:
        return -(-self.config.max_decoding_steps // SEGMENT)

    def prefill(self, batch: Batch, noise: NoiseSource) -> DecodeState:
        length = batch[STATE_MASK].shape[1]  # without an answer, if there is one
        tokens, mask = batch[PROMPT][:, :length], batch[PROMPT_MASK][:, :length]
        return self.model.begin_answer(
            self._embed_prompt(batch, tokens), tokens, mask, self.max_segments * SEGMENT
        )

    def decode_segment(self, state: DecodeState) -> None:
        decode_segment(
            state, self.model.model, self.model.lm_head, lambda logits, _: logits.argmax(-1), self.words.end
        )

    def is_finished(self, state: DecodeState) -> bool:
        return bool(state.finished.all())

    def decode_actions(self, state: DecodeState) -> Tensor:
        config = self.config
        tokens = state.tokens[:, : min(int(state.step), config.max_decoding_steps)]
        rows = [self.words.decode(row) for row in tokens.tolist()]
        decoded = self.fast.decode(rows, config.chunk_size, config.action.shape[0])
        problems = [problem for problem in decoded.problems if problem]
        if problems:
            log.warning(
                "of %d chunks, the tokens of %d are not those of a full chunk (%s): actions are decoded from the valid "
                "ones",
                *(len(rows), len(problems), problems[0]),
            )
        return torch.from_numpy(decoded.actions).to(tokens.device)

    def image_encoder(self) -> ImageEncoder:
        settings = {"grids": self.config.grids, "dtype": str(self.config.model_dtype)}
        return ImageEncoder(self.model.image_encoder(), settings)

    def encode_images(self, images: Tensor, camera: str) -> Tensor:
        number = list(self.config.images).index(camera)
        patches = self.prepare_images.of_camera(images, number).to(self.model.decoder.dtype)
        return self.model.vision.encode_alone(patches, self.config.grids[number])

    def _read(self, batch: Batch) -> ChunkContext:
        tokens = batch[PROMPT]
        prefix = self._embed_prompt(batch, tokens[:, : batch[STATE_MASK].shape[1]])
        return self.model.context(prefix, tokens, batch[PROMPT_MASK])

    def _embed_prompt(self, batch: Batch, tokens: Tensor) -> Tensor:
        """A prompt's tokens [B, S], or those of a prompt and its answer -> [B, S, width]."""
        state_mask = batch[STATE_MASK]
        state_mask = F.pad(state_mask, (0, tokens.shape[1] - state_mask.shape[1]))
        state = self.model.embed_state(*self._rounded(with_real(batch[STATE], self.config.max_state_dim)))
        return self.model.embed_prompt(tokens, self._embed_cameras(batch), state_mask, state)

    def _embed_cameras(self, batch: Batch) -> Tensor:
        """[B, N, width]."""
        names = [f"{IMAGE_FEATURES}{camera}" for camera in self.config.images]
        features = [batch[name] for name in names if name in batch]
        if features:
            return torch.cat(features, 1)
        patches = self.prepare_images(self._images(batch))
        return self.model.embed_images(patches.to(self.model.decoder.dtype))

    def _images(self, batch: Batch) -> list[Tensor]:
        """[B, 3, H, W] of each camera."""
        images = []
        for camera, size in self.config.image_sizes.items():
            if camera not in batch:
                raise FlexorError(
                    f"WALL-X was trained on {', '.join(self.config.images)}, but {camera} is missing in the "
                    "observation."
                )
            if batch[camera].shape[-2:] != size:
                height, width = batch[camera].shape[-2:]
                raise FlexorError(
                    f"{camera} has {height} x {width} pixels, but this WALL-X takes {size[0]} x {size[1]} of it."
                )
            images.append(batch[camera])
        return images

    def _actions(self, batch: Batch) -> Values:
        actions = with_real(batch[ACTION], self.config.max_action_dim)
        length = batch.get(ACTION_LENGTH)  # where datasets have different ones
        if length is None:
            return actions
        number = torch.arange(self.config.max_action_dim, device=actions.real.device)
        return actions._replace(real=actions.real * (number < length[:, None])[:, None])

    def _rounded(self, values: Values) -> Values:
        """As LeRobot's are: to the type of the words' embeddings."""
        if not self.config.round_actions:
            return values
        return values._replace(values=values.values.to(self.model.decoder.dtype).to(values.values.dtype))

    def load_backbone(self) -> None:
        config = self.config
        if not config.load_vlm_weights:
            log.warning(
                "policy.load_vlm_weights=false: the model is random: it was never trained on anything"
            )
            return
        try:
            load_weights(config.model_files, self.model)
        except ConfigError as error:
            raise ConfigError(
                f"A new WALL-X starts from the weights of a published one, which can't be loaded: {error} Put its "
                "config.json, model.safetensors, tokenizer.json and tokenizer_config.json into a folder and name it "
                "with --policy.pretrained_name_or_path=FOLDER, or start from a trained policy with --policy.path. To "
                "train a random model instead, set --policy.load_vlm_weights=false."
            ) from error

    @property
    def needs_autocast(self) -> bool:
        return self.model.decoder.dtype != torch.bfloat16

    def shard_units(self) -> list[nn.Module]:
        return self.model.blocks()


def with_real(values: Tensor, size: int) -> Values:
    """Values [B, ..., n] with zeros at their end, where they are not real, nor where they are NaN."""
    real = ~values.isnan()
    return Values(padded(values.nan_to_num(nan=0.0), size), padded(real.to(values.dtype), size))
