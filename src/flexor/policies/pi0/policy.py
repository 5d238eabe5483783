"""pi0 (Black et al. 2024, https://arxiv.org/abs/2410.24164) and pi0.5 (https://arxiv.org/abs/2504.16054).

PaliGemma reads the images and the task. An expert, a smaller Gemma, attends to what it has read and predicts how to
move noise towards actions (flow matching). pi0 gives the expert the state as a token of its own; pi0.5 writes it into
the prompt, and tells the expert the time through its norms.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flexor.core.batch import ACTION, STATE, Batch
from flexor.core.errors import FlexorError
from flexor.core.rng import NoiseSource
from flexor.policies.base import Loss, ParamGroup, Policy, without_padding
from flexor.policies.nn.flow import FlowToNoise, time_embedding
from flexor.policies.nn.real_time import held_in
from flexor.policies.nn.recompute import recompute
from flexor.policies.nn.resize import padded, resize_with_padding
from flexor.policies.pi0.config import PaliGemmaConfig, Pi0Config, Pi05Config, PiConfig
from flexor.policies.pi0.paligemma import GEMMA, PALIGEMMA, PaliGemmaWithExpert, Prompt, lower
from flexor.policies.processing.tokenize import TASK_MASK, TASK_TOKENS
from flexor.policies.weight_names import UnusedWeight, WeightNames

PALIGEMMA_MODULE = "model.paligemma_with_expert.paligemma"
LANGUAGE_MODEL = f"{PALIGEMMA_MODULE}.model.language_model"
EMBEDDING = f"{LANGUAGE_MODEL}.embed_tokens.weight"
EXPERT = "model.paligemma_with_expert.gemma_expert"
LANGUAGE_HEAD = f"{PALIGEMMA_MODULE}.lm_head.weight"
EXPERT_HEAD = f"{EXPERT}.lm_head.weight"
OPENPI_NAMES = WeightNames(optional_prefix="model.", aliases={EMBEDDING: [LANGUAGE_HEAD]})
"""openpi's files lack the first part of a name. Where embedding and head are tied, they have only the head."""
PI_NAMES = replace(
    OPENPI_NAMES,
    unused=[  # the language heads: PaliGemma's is its embedding, and the expert never predicts tokens
        UnusedWeight(LANGUAGE_HEAD, torch.clone, [EMBEDDING], before=f"{PALIGEMMA_MODULE}."),
        UnusedWeight(
            EXPERT_HEAD,
            lambda embedding, keys: keys.new_zeros(len(embedding), keys.shape[1]),
            [EMBEDDING, f"{EXPERT}.model.layers.0.self_attn.k_proj.weight"],
            before=f"{EXPERT}.",
        ),
    ],
)


class PiNetwork(nn.Module):
    """The network with its projections: a prompt, a noisy chunk and its time -> a velocity."""

    conditioned: ClassVar[bool]

    def __init__(self, config: PiConfig):
        super().__init__()
        self.config = config
        expert = GEMMA[config.action_expert_variant]
        if self.conditioned:
            expert = replace(expert, condition_dim=expert.width)
        self.paligemma_with_expert = PaliGemmaWithExpert(
            PALIGEMMA[config.paligemma_variant], expert, config.image_resolution[0]
        )
        self.action_in_proj = nn.Linear(config.max_action_dim, expert.width)
        self.action_out_proj = nn.Linear(expert.width, config.max_action_dim)

    def velocity(self, chunk: Tensor, time: Tensor, prompt: Prompt, state: Tensor) -> Tensor:
        """chunk [B, H, A], time [B], state [B, S] -> [B, H, A]."""
        raise NotImplementedError

    def embed(self, time: Tensor) -> Tensor:
        """[B] -> [B, D]."""
        width = self.action_in_proj.out_features
        return time_embedding(time, width, self.config.min_period, self.config.max_period)

    def project(self, acted: Tensor) -> Tensor:
        """What the expert made of a chunk [B, H, D] -> [B, H, A]."""
        return self.action_out_proj(acted.to(self.action_out_proj.weight.dtype))


class Pi0Network(PiNetwork):
    """The state is a token before the actions, which does not see them."""

    conditioned = False

    def __init__(self, config: PiConfig):
        super().__init__(config)
        width = self.action_in_proj.out_features
        self.state_proj = nn.Linear(config.max_state_dim, width)
        self.action_time_mlp_in = nn.Linear(2 * width, width)
        self.action_time_mlp_out = nn.Linear(width, width)

    def velocity(self, chunk: Tensor, time: Tensor, prompt: Prompt, state: Tensor) -> Tensor:
        actions = self.action_in_proj(chunk)  # [B, H, D]
        when = self.embed(time)[:, None].expand_as(actions).to(actions.dtype)
        actions = self.action_time_mlp_in(torch.cat((actions, when), dim=-1))
        actions = self.action_time_mlp_out(F.silu(actions))
        tokens = torch.cat((self.state_proj(state)[:, None], actions), dim=1)
        number = torch.arange(tokens.shape[1], device=tokens.device)
        among = (number[:, None] > 0) | (number[None] == 0)  # all see the state, and actions each other
        acted = self.paligemma_with_expert.act(tokens, among, prompt)
        return self.project(acted[:, 1:])


class Pi05Network(PiNetwork):
    """The state is in the prompt. The time scales, shifts and gates what the expert computes."""

    conditioned = True

    def __init__(self, config: PiConfig):
        super().__init__(config)
        width = self.action_in_proj.out_features
        self.time_mlp_in = nn.Linear(width, width)
        self.time_mlp_out = nn.Linear(width, width)

    def velocity(self, chunk: Tensor, time: Tensor, prompt: Prompt, state: Tensor) -> Tensor:
        when = F.silu(self.time_mlp_in(self.embed(time)))
        condition = F.silu(self.time_mlp_out(when))
        among = torch.ones(1, chunk.shape[1], dtype=torch.bool, device=chunk.device)
        tokens = self.action_in_proj(chunk)
        return self.project(self.paligemma_with_expert.act(tokens, among, prompt, condition))


def camera_images(config: PaliGemmaConfig, batch: Batch) -> Tensor:
    """[B, N, 3, H, W] in -1..1, of the cameras that there are. Others would be masked, so they are left out."""
    there = [camera for camera in config.images if camera in batch]
    if not there:
        raise FlexorError(
            f"{config.type} needs at least one of its cameras ({', '.join(config.images)}), but the batch has only "
            f"{', '.join(batch)}."
        )
    images = [resize_with_padding(batch[camera], *config.image_resolution) for camera in there]
    return torch.stack(images, dim=1) * 2 - 1


def camera_mask(config: PaliGemmaConfig, batch: Batch) -> Tensor | None:
    """[B, N] which of these images are there; None: all. Datasets of a run may have different cameras."""
    there = [camera for camera in config.images if camera in batch]
    masks = {camera: batch.get(f"{camera}_padding_mask") for camera in there}
    if all(mask is None for mask in masks.values()):
        return None
    all_there = torch.ones(len(batch[there[0]]), dtype=torch.bool, device=batch[there[0]].device)
    return torch.stack([all_there if mask is None else mask.bool() for mask in masks.values()], dim=1)


class PiPolicy(Policy):
    """What both have: only their networks and their settings differ."""

    Network: ClassVar[type[PiNetwork]]
    config: PiConfig
    continues_chunks = True
    weight_names = PI_NAMES

    def __init__(self, config: PiConfig):
        super().__init__(config)
        self.model = self.Network(config)
        if config.dtype == "bfloat16":
            lower(self.model.paligemma_with_expert)
        self._freeze()
        self.flow = FlowToNoise(
            config.num_inference_steps,
            (config.time_sampling_beta_alpha, config.time_sampling_beta_beta),
            config.time_sampling_scale,
            config.time_sampling_offset,
        )
        if config.gradient_checkpointing:
            for block in self.shard_units():
                recompute(block)
        if config.compile_model:
            for block in self.shard_units():
                block.forward = torch.compile(block.forward, mode=config.compile_mode)

    def _freeze(self) -> None:
        reader = self.model.paligemma_with_expert.reader
        if self.config.freeze_vision_encoder:
            reader.vision_tower.requires_grad_(False)
        if self.config.train_expert_only:
            reader.requires_grad_(False)

    def loss(self, batch: Batch, noise: NoiseSource) -> Loss:
        actions = batch[ACTION]
        error = self.flow.error(self._velocity(batch), padded(actions, self.config.max_action_dim), noise)
        error = without_padding(error[..., : actions.shape[-1]], batch)
        return Loss(error.mean((1, 2)), {})  # as openpi: without a mask for padded steps

    def predict(self, batch: Batch, noise: NoiseSource) -> Tensor:
        state = batch[STATE]
        shape = (len(state), self.config.chunk_size, self.config.max_action_dim)
        held = held_in(batch, self.config.rtc_config, *shape[1:])
        chunk = self.flow.sample(self._velocity(batch), shape, noise, state, held)
        return chunk[..., : self.config.action.shape[0]]

    def _velocity(self, batch: Batch) -> Callable[[Tensor, Tensor], Tensor]:
        """A function of a chunk and its time. The prompt is read once, here."""
        reader = self.model.paligemma_with_expert.reader
        images, cameras = camera_images(self.config, batch), camera_mask(self.config, batch)
        prompt = reader.read(images, batch[TASK_TOKENS], batch[TASK_MASK], cameras)
        state = padded(batch[STATE], self.config.max_state_dim)
        return partial(self.model.velocity, prompt=prompt, state=state)

    def shard_units(self) -> list[nn.Module]:
        return self.model.paligemma_with_expert.blocks()

    def param_groups(self) -> list[ParamGroup]:
        return [ParamGroup(list(self.parameters()))]  # frozen ones too: LeRobot's optimizer numbers them


class Pi0(PiPolicy):
    Config = Pi0Config
    Network = Pi0Network


class Pi05(PiPolicy):
    Config = Pi05Config
    Network = Pi05Network
