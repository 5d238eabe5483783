"""GR00T N1.7 (NVIDIA 2025, https://arxiv.org/abs/2503.14734): a vision-language model, and a transformer that denoises.

Qwen3-VL reads camera images and the task, up to its 16th layer. A diffusion transformer attends to what it has read and
turns noise into a chunk of actions (flow matching). By default only this transformer and what is around it is trained:
nothing of the frozen model is kept for gradients.

Parameter names and settings are LeRobot's, so either program can load the other's checkpoints.
"""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flexor.core.batch import ACTION, IMAGE_FEATURES, STATE, Batch
from flexor.core.errors import ConfigError, FlexorError
from flexor.core.log import log
from flexor.core.rng import NoiseSource
from flexor.core.weight_files import load_tensors
from flexor.policies.adapters import is_adapter
from flexor.policies.base import Loss, ParamGroup, Policy, action_padding, mean_over_valid, without_padding
from flexor.policies.groot.config import GrootConfig
from flexor.policies.groot.images import all_images
from flexor.policies.groot.network import GrootNetwork, ObservationContext
from flexor.policies.groot.processing import EMBODIMENT, PROMPT, PROMPT_MASK
from flexor.policies.image_encoder import ImageEncoder
from flexor.policies.nn.flow import FlowMatching
from flexor.policies.nn.real_time import GUIDANCE_WEIGHTS, PREVIOUS
from flexor.policies.nn.resize import padded
from flexor.policies.weight_names import unique_state

PREFIX = "_groot_model."  # of weights; a base model has them without it
NO_DECAY = ("bias", "layernorm", "rmsnorm")  # in names of parameters without weight decay


class Groot(Policy):
    Config = GrootConfig
    config: GrootConfig
    continues_chunks = True

    def __init__(self, config: GrootConfig):
        super().__init__(config)
        size = config.size()
        self._groot_model = GrootNetwork(size, config.grids)
        self._groot_model.freeze(config.tuned)
        self.prepare_images = all_images(config.image_sizes, config.geometry)
        self.flow = FlowMatching(time_beta=size.beta, time_max=size.time_max)
        dropout = config.state_dropout_prob
        self.state_dropout = size.state_dropout if dropout is None else dropout
        self.steps = config.num_inference_timesteps or size.steps

    @property
    def head(self) -> nn.Module:
        return self._groot_model.action_head

    def loss(self, batch: Batch, noise: NoiseSource) -> Loss:
        is_pad, size = action_padding(batch), self._groot_model.size
        actions = padded(batch[ACTION], size.action) * ~is_pad[..., None]
        steps = actions.shape[1]
        actions = F.pad(actions, (0, 0, 0, max(0, self.config.training_horizon - steps)))
        context = self._read(batch, noise)
        error = self.flow.error(partial(self._velocity, context=context), actions, noise)
        error = without_padding(error[:, :steps, : batch[ACTION].shape[-1]], batch)
        return Loss(mean_over_valid(error, is_pad, batch), {})

    def _velocity(self, noisy_actions: Tensor, time: Tensor, context: ObservationContext) -> Tensor:
        bucket = (time * self._groot_model.size.time_buckets).long()
        return self._groot_model.action_head.velocity(noisy_actions, bucket, context)

    def predict(self, batch: Batch, noise: NoiseSource) -> Tensor:
        size, config, state = self._groot_model.size, self.config, batch[STATE]
        context = self._groot_model.remember(self._read(batch))
        x = noise.normal("x", (len(state), size.horizon, size.action)).to(state)
        strength: Tensor | float = 1.0
        if PREVIOUS in batch:
            x, strength = self._continued(x, batch)
        for step in range(self.steps):
            bucket = int(step / self.steps * size.time_buckets)
            time = torch.full((len(x),), bucket, device=x.device)
            velocity = self._groot_model.action_head.velocity(x, time, context)
            x = x + velocity * strength / self.steps
        return x[:, : len(config.action_deltas), : config.action.shape[0]]

    def _continued(self, x: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Real-time chunking: the chunk begins as the last one goes on, and how strongly each action may change.

        Those that are executed before it arrives do not change. After them actions change more and more, and from the
        end of the last chunk on freely.
        """
        previous = batch[PREVIOUS][:, : x.shape[1]]
        target = F.pad(previous.to(x), (0, x.shape[2] - previous.shape[2], 0, x.shape[1] - previous.shape[1]))
        weights = batch[GUIDANCE_WEIGHTS][..., None].to(x)  # 1 for actions that are executed, 0 for free ones
        weights = F.pad(weights, (0, 0, 0, x.shape[1] - weights.shape[-2]))
        rate = self.config.rtc_ramp_rate or self._groot_model.size.ramp_rate
        strength = torch.expm1(-rate * (1 - weights)) / math.expm1(-rate)
        return torch.where(weights > 0, target, x), strength

    def _read(self, batch: Batch, noise: NoiseSource | None = None) -> ObservationContext:
        """`noise`: to hide states, in training."""
        network = self._groot_model
        embodiment = batch[EMBODIMENT][:1]
        hidden = network.vlm.hidden(batch[PROMPT], batch[PROMPT_MASK], self._image_features(batch, noise))
        vector = padded(batch[STATE], network.size.state)[:, None]
        state = network.action_head.state_encoder(vector, embodiment)
        if noise is not None and self.training and self.state_dropout > 0:
            is_visible = noise.uniform("state_dropout", (len(state),)) >= self.state_dropout
            state = state * is_visible.to(state)[:, None, None]
        return network.context(hidden, batch[PROMPT], batch[PROMPT_MASK], state, embodiment)

    def _image_features(self, batch: Batch, noise: NoiseSource | None) -> Tensor:
        """Of all cameras, [B, N, feature_width]."""
        names = [f"{IMAGE_FEATURES}{camera}" for camera in self.config.images]
        if names[0] in batch:
            return torch.cat([batch[name] for name in names], 1)
        position = None
        if noise is not None and self.training and self.config.crops_randomly:  # all views of a sample alike
            position = noise.uniform("crop", (len(batch[STATE]), 2)).to(batch[STATE])
        images = zip(self.prepare_images, self._images(batch))
        patches = [prepare(image, position) for prepare, image in images]
        return self._groot_model.vlm.model.visual(patches)

    def _images(self, batch: Batch) -> list[Tensor]:
        """[B, 3, H, W] of each camera."""
        config = self.config
        for camera, size in zip(config.images, config.image_sizes):
            if camera not in batch:
                raise FlexorError(
                    f"GR00T was trained on {', '.join(config.images)}, but {camera} is missing in the observation."
                )
            if batch[camera].shape[-2:] != size:
                height, width = batch[camera].shape[-2:]
                raise FlexorError(
                    f"{camera} has {height} x {width} pixels, but this GR00T takes {size[0]} x {size[1]} of it."
                )
        return [batch[camera] for camera in config.images]

    def image_encoder(self) -> ImageEncoder:
        config = self.config
        return ImageEncoder(
            self._groot_model.vlm.image_encoder(), {"geometry": str(config.geometry)}, config.crops_randomly
        )

    def encode_images(self, images: Tensor, camera: str) -> Tensor:
        number = list(self.config.images).index(camera)
        patches = self.prepare_images[number](images)
        return self._groot_model.vlm.model.visual.encode(patches, self.config.grids[number])

    def load_backbone(self) -> None:
        config = self.config
        if not config.load_base_model:
            log.warning(
                "policy.load_base_model=false: the vision-language model is random: it was never trained on images "
                "and text"
            )
            return
        try:
            weights = {n: tensor for n, tensor in unique_state(self).items() if not is_adapter(n)}
            head = f"{PREFIX}backbone.model.lm_head.weight"
            embedding = f"{PREFIX}backbone.model.model.language_model.embed_tokens.weight"
            weights[embedding] = weights.pop(head)  # named after the head, which the files need not have
            load_tensors(config.base_files, {n.removeprefix(PREFIX): t for n, t in weights.items()})
        except ConfigError as error:
            raise ConfigError(
                f"A new GR00T starts from the weights of a base model, which can't be loaded: {error} Put its files "
                "into a folder and name it with --policy.base_model_path=FOLDER, or start from a trained policy with "
                "--policy.path. To train on random weights instead, set --policy.load_base_model=false."
            ) from error

    def shard_units(self) -> list[nn.Module]:
        return self._groot_model.blocks()

    def param_groups(self) -> list[ParamGroup]:
        """With and without weight decay, as LeRobot tells them apart by name."""
        norms = {p for m in self.modules() if isinstance(m, nn.LayerNorm) for p in m.parameters()}
        trained = [
            (name, p) for name, p in self.named_parameters() if p.requires_grad or self._is_unused(name)
        ]
        decayed = {name for name, p in trained if p not in norms and not _is_norm(name)}
        return [
            ParamGroup([p for name, p in trained if name in decayed]),
            ParamGroup([p for name, p in trained if name not in decayed], {"weight_decay": 0.0}),
        ]

    def _is_unused(self, name: str) -> bool:
        """Whether LeRobot's optimizer numbers a parameter that never gets a gradient."""
        vlm = f"{PREFIX}backbone.model.model."
        if name.startswith(f"{vlm}language_model.norm."):
            return self.config.tune_llm
        return self.config.tune_visual and name.startswith(f"{vlm}visual.")


def _is_norm(name: str) -> bool:
    lowered = name.lower()
    return any(word in lowered for word in NO_DECAY) or any(
        part == "norm" or part.endswith("_norm") for part in lowered.split(".")
    )
