"""A policy on a tiny Qwen2.5-VL, as users write their own: nothing in Flexor knows of it.

The images of all cameras and the task are a conversation. The robot's state and a noisy chunk of actions follow it in
the same sequence, and the last hidden states become the chunk's velocity (flow matching). The language model also
learns to continue the conversation, through a head that shares its weight with the embeddings.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flexor import (
    ACTION,
    STATE,
    Batch,
    ConfigError,
    Kind,
    Loss,
    NoiseSource,
    Normalization,
    Policy,
    PolicyConfig,
    ProcessingStep,
    StepContext,
    mean_over_valid,
    processing_step,
)
from flexor.policies.nn.flow import FlowToNoise, time_embedding
from flexor.policies.nn.rope import Rope
from flexor.policies.nn.transformer import TransformerSize
from flexor.policies.processing.tokenize import TASK_MASK, TASK_TOKENS, Tokenize
from flexor.policies.vlm.qwen2_5_images import ImageGrid, QwenImages, choose_grid
from flexor.policies.vlm.qwen2_5_vision import QwenVisionSize
from flexor.policies.vlm.qwen2_5_vl import QwenVL, QwenVLSize, causal_mask, image_text, next_positions

SPECIAL_TOKENS = "<|im_start|> <|im_end|> <|vision_start|> <|image_pad|> <|vision_end|>"
SIZE = QwenVLSize(
    QwenVisionSize(width=16, depth=2, mlp_width=24, heads=2, output_width=32, window=28, full_attention=(1,)),
    TransformerSize(
        width=32,
        depth=2,
        mlp_width=48,
        heads=4,
        kv_heads=2,
        head_dim=8,
        qkv_bias=True,
        rope_theta=1e6,
        mrope_sections=(1, 1, 2),
    ),
    vocabulary=32,
    image_token=7,  # of the tokenizer: four tokens, then the special ones
    tied=True,
)


@processing_step("tiny_qwen_chat")
@dataclass
class ChatTemplate(ProcessingStep):
    """The task as a conversation that begins with the images."""

    image_tokens: list[int]
    """Tokens of each image."""

    on_host = True
    uses_images = False

    def __call__(self, batch: Batch, context: StepContext | None = None) -> Batch:
        images = "".join(map(image_text, self.image_tokens))
        chats = [f"<|im_start|>user {images} {task}<|im_end|><|im_start|>robot" for task in batch["task"]]
        return {**batch, "task": chats}


@dataclass
class TinyQwenConfig(PolicyConfig):
    trains_in_bf16 = True

    tokenizer_name: str = ""
    """Folder of the tokenizer."""
    chunk_size: int = 4
    """How many actions are predicted at once."""
    tokenizer_max_length: int = 24
    """Tokens of the conversation, images included."""
    denoising_steps: int = 3
    """Integration steps of a prediction."""
    text_loss_weight: float = 0.1
    """Weight of the language model's loss."""
    normalization_mapping: dict[Kind, Normalization] = field(
        default_factory=lambda: {Kind.VISUAL: "IDENTITY", Kind.STATE: "MEAN_STD", Kind.ACTION: "MEAN_STD"}
    )
    """How each kind of feature (VISUAL, STATE, ACTION) is normalised."""

    def validate(self) -> None:
        if self.input_features and not (self.state and self.images):
            raise ConfigError(f"TinyQwen needs {STATE} and a camera; there are {list(self.input_features)}.")

    def optimizer_preset(self) -> dict[str, Any]:
        return {"type": "adamw", "lr": 1e-3, "weight_decay": 1e-4, "grad_clip_norm": 1.0}

    @property
    def action_deltas(self) -> list[int]:
        return list(range(self.chunk_size))

    @property
    def action_steps(self) -> int:
        return self.chunk_size

    @property
    def image_sizes(self) -> list[tuple[int, ...]]:
        return [feature.shape[-2:] for feature in self.images.values()]

    @property
    def grids(self) -> list[ImageGrid]:
        return [choose_grid(*size, min_pixels=28 * 28, max_pixels=8 * 28 * 28) for size in self.image_sizes]

    def steps_before(self, stats: Any) -> list[ProcessingStep]:
        rename, to_batch, *device_steps = super().steps_before(stats)
        chat = ChatTemplate([grid.tokens for grid in self.grids])
        tokenize = Tokenize(self.tokenizer_name, max_length=self.tokenizer_max_length)
        return [rename, to_batch, chat, tokenize, *device_steps]


class TinyQwenPolicy(Policy):
    Config = TinyQwenConfig
    config: TinyQwenConfig

    def __init__(self, config: TinyQwenConfig):
        super().__init__(config)
        width, actions = SIZE.text.width, config.action.shape[0]
        self.vlm = QwenVL(SIZE, config.grids)
        self.prepare_images = QwenImages(config.image_sizes, config.grids)
        self.state_proj = nn.Linear(config.input_features[STATE].shape[0], width)
        self.action_in_proj = nn.Linear(actions, width)
        self.action_out_proj = nn.Linear(width, actions)
        self.flow = FlowToNoise(config.denoising_steps)

    def loss(self, batch: Batch, noise: NoiseSource) -> Loss:
        actions = batch[ACTION]
        end, time = noise.normal("noise", actions.shape), self.flow.times(len(actions), noise)
        t = time[:, None, None]
        suffix = self.embed_suffix(batch, t * end + (1 - t) * actions, time)
        rope, mask = self.layout(batch)
        hidden = self.vlm.language_model(torch.cat((self.embed_prefix(batch), suffix), 1), rope, mask)
        error = (self.action_out_proj(hidden[:, -self.config.chunk_size :]) - (end - actions)).square()
        flow = mean_over_valid(error, batch[f"{ACTION}_is_pad"], batch)
        text = self.text_loss(hidden, batch[TASK_TOKENS], batch[TASK_MASK])
        return Loss(flow + self.config.text_loss_weight * text, {"flow": flow, "text": text})

    def text_loss(self, hidden: Tensor, tokens: Tensor, valid: Tensor) -> Tensor:
        """[B]: how well hidden states predict the next token, if it is a word."""
        is_word = (valid & (tokens != SIZE.image_token))[:, 1:]
        logits = self.vlm.lm_head(hidden[:, : tokens.shape[1] - 1])
        error = F.cross_entropy(logits.transpose(1, 2).float(), tokens[:, 1:], reduction="none")
        return (error * is_word).sum(1) / is_word.sum(1).clamp(min=1)

    def predict(self, batch: Batch, noise: NoiseSource) -> Tensor:
        decoder, (rope, mask) = self.vlm.language_model, self.layout(batch)
        prefix = self.embed_prefix(batch)
        length = prefix.shape[1]
        cache = decoder.prefill(prefix, rope.slice(slice(length)), mask[:, :, :length, :length])

        def velocity(x: Tensor, time: Tensor) -> Tensor:
            suffix, suffix_rope = self.embed_suffix(batch, x, time), rope.slice(slice(length, None))
            return self.action_out_proj(decoder(suffix, suffix_rope, mask[:, :, length:], cache)[:, 1:])

        shape = (len(prefix), self.config.chunk_size, self.config.action.shape[0])
        return self.flow.sample(velocity, shape, noise, batch[STATE])

    def embed_prefix(self, batch: Batch) -> Tensor:
        patches = self.prepare_images([batch[camera] for camera in self.config.images])
        return self.vlm.embed(batch[TASK_TOKENS], patches)

    def embed_suffix(self, batch: Batch, x: Tensor, time: Tensor) -> Tensor:
        """The state and a noisy chunk [B, H, A] as tokens [B, 1 + H, width]."""
        actions = self.action_in_proj(x)
        times = time_embedding(time, actions.shape[-1], 4e-3, 4.0)[:, None]
        return torch.cat((self.state_proj(batch[STATE])[:, None], actions + times), 1)

    def layout(self, batch: Batch) -> tuple[Rope, Tensor]:
        """Positions and mask of the conversation, the state and the chunk."""
        tokens, valid, count = batch[TASK_TOKENS], batch[TASK_MASK], 1 + self.config.chunk_size
        positions = self.vlm.positions(tokens, valid)
        positions = torch.cat((positions, next_positions(positions, valid, count)), 2)
        return self.vlm.language_model.rope(positions), causal_mask(F.pad(valid, (0, count), value=True))

    def shard_units(self) -> list[nn.Module]:
        return self.vlm.blocks()
