"""The interface of every policy: one config dataclass, and one module with `loss` and `predict`."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import register_dataclass

from flexor.core.batch import ACTION, ACTION_LENGTH, STATE, VALID_STEPS, Batch
from flexor.core.errors import ConfigError
from flexor.core.rng import NoiseSource
from flexor.core.typed import setting
from flexor.policies.adapters import ALL_LINEAR
from flexor.policies.calibration import Calibration
from flexor.policies.features import Kind, Normalization, PolicyFeature
from flexor.policies.image_encoder import ImageEncoder
from flexor.policies.lerobot_settings import LerobotSetting
from flexor.policies.processing.normalize import Normalize, Unnormalize
from flexor.policies.processing.pipeline import POSTPROCESSOR, PREPROCESSOR, Pipeline, ProcessingStep, Stats
from flexor.policies.processing.rename_and_move import RenameObservations, ToBatch, ToDevice, with_renaming
from flexor.policies.weight_names import WeightNames

MOST_DROPOUT = 0.99  # dropout of 1 would leave nothing to learn from


@dataclass
class PolicyConfig:
    """Settings every policy has, under LeRobot's names."""

    type: ClassVar[str]
    lerobot_type: ClassVar[str] = ""
    """What LeRobot calls the type, if that is another name."""
    learns_online: ClassVar[bool] = False
    """Whether the policy learns from rewards while it acts (`flexor.rl`), not from a dataset alone."""
    processor_names: ClassVar[tuple[str, str]] = (PREPROCESSOR, POSTPROCESSOR)
    """What the files with the processing before and after the policy are called."""
    calibration: ClassVar[Calibration | None] = None
    """None: calibration skips the policy."""
    trains_in_bf16: ClassVar[bool] = False
    """Whether the policy learns as well in bf16 mixed precision as in float32, and faster: then it is its default on
    GPUs that support it."""
    reads_camera_masks: ClassVar[bool] = False
    """Whether the policy ignores images that a sample does not have: `<camera>_padding_mask` [B] is False there."""

    draws_by_place: ClassVar[bool] = False
    """Whether what a sample draws in training depends on its place in the global batch: `BATCH_PLACE` is then in it."""
    takes_depth: ClassVar[bool] = False
    """Whether depth maps are inputs of the policy: float32 [1, H, W], in the unit of dataset.depth_output_unit."""
    same_operations: ClassVar[bool] = True
    """Whether a step has the same operations for every batch size of at least 2. Otherwise a plan traces each one."""

    unknown_to_lerobot: ClassVar[frozenset[str]] = frozenset()
    """Settings that LeRobot does not have: they are not written into its files."""
    only_in_lerobot: ClassVar[Mapping[str, LerobotSetting]] = MappingProxyType({})
    """Settings that LeRobot's policy has, and this one does not."""
    ignores_unknown_settings: ClassVar[bool] = False
    """Whether a checkpoint may have settings of later releases of LeRobot: they are left out, with a warning."""

    n_obs_steps: int = 1
    """Number of observations the policy uses, the current one included."""
    input_features: dict[str, PolicyFeature] = field(default_factory=dict)
    """Inputs of the policy; by default those of the dataset."""
    output_features: dict[str, PolicyFeature] = field(default_factory=dict)
    """Outputs of the policy; by default those of the dataset."""
    normalization_mapping: dict[Kind, Normalization] = field(default_factory=dict)
    """How each kind of feature (VISUAL, STATE, ACTION) is normalised."""
    device: str | None = setting(None, may_change=True)
    """Device: cpu, cuda, cuda:1 or mps. By default the best one available."""
    push_to_hub: bool | None = setting(None, may_change=True)
    """Push the policy to the Hub at the end of the run; default: if repo_id is given."""
    repo_id: str | None = setting(None, may_change=True)
    """Repository on the Hub that the policy is pushed to: USER/NAME. It is created if it does not exist."""
    private: bool | None = setting(None, may_change=True)
    """Make a new repository private; default: as its owner has set on the Hub."""
    tags: list[str] | None = setting(None, may_change=True)
    """More tags of the model card, such as [so101, kitchen]."""
    license: str | None = setting(None, may_change=True)
    """Licence in the model card, such as mit; default: apache-2.0."""

    def validate(self) -> None:
        """Refuse impossible settings; called before anything is built."""

    def require(self, low: float, *names: str, high: float = inf) -> None:
        """Refuse named settings that are not from `low` to `high`. None is allowed."""
        for name in names:
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                allowed = f"at least {low:g}" if high == inf else f"from {low:g} to {high:g}"
                raise ConfigError(f"policy.{name}={value} must be {allowed}.")

    def check_one_observation(self) -> None:
        if self.n_obs_steps != 1:
            raise ConfigError(
                f"policy.n_obs_steps={self.n_obs_steps}: {self.type} supports one observation only; set it to 1."
            )

    def missing_input(self, required: str) -> ConfigError:
        """The error of a dataset that lacks what the policy requires."""
        return ConfigError(
            f"{self.type} requires {required}; the dataset has {', '.join(self.input_features)}."
        )

    def check_untrained(self) -> None:
        """Refuse to train a new policy without weights (--policy.path), if that needs to be said explicitly."""

    def fitted(self, inputs: dict[str, PolicyFeature], outputs: dict[str, PolicyFeature]) -> Self:
        """These settings with a dataset's features, unless they have features already."""
        return replace(
            self,
            input_features=self.input_features or inputs,
            output_features=self.output_features or outputs,
        )

    def acting_dtypes(self, stored: Mapping[str, torch.dtype]) -> dict[str, torch.dtype]:
        """The types of weights when the policy acts, and in files that are only for acting, where they may differ from
        `stored`, those in its checkpoint."""
        return {}

    def lora_targets(self) -> list[str] | str:
        """The layers that get an adapter if `lora.target_modules` is not set, in its words."""
        return ALL_LINEAR

    def optimizer_preset(self) -> dict[str, Any]:
        """Default settings of the optimizer."""
        raise NotImplementedError

    def lerobot_optimizer(self) -> dict[str, Any]:
        """LeRobot's type and further settings of AdamW with the same groups of parameters, where they differ."""
        return {}

    def scheduler_preset(self) -> dict[str, Any]:
        """Default settings of the learning-rate schedule."""
        return {"type": "constant"}

    def steps_before(self, stats: Stats) -> list[ProcessingStep]:
        """Processing steps before the policy: for observations, and in training also for actions."""
        features = {**self.input_features, **self.output_features}
        return [
            RenameObservations(),
            ToBatch(),
            ToDevice(),
            Normalize(features, self.normalization_mapping, stats),
        ]

    def steps_after(self, stats: Stats) -> list[ProcessingStep]:
        """Processing steps for predicted actions, before the robot gets them."""
        return [Unnormalize(self.output_features, self.normalization_mapping, stats), ToDevice("cpu")]

    def pipelines(
        self, stats: Stats, device: str, rename_map: Mapping[str, str] | None = None
    ) -> tuple[Pipeline, Pipeline]:
        """The processing before and after the policy, which computes on `device`."""
        before_name, after_name = self.processor_names
        before = Pipeline(before_name, self.steps_before(stats)).to(device)
        if rename_map:
            before = with_renaming(before, rename_map)
        return before, Pipeline(after_name, self.steps_after(stats))

    @property
    def ensemble_coefficient(self) -> float | None:
        """If given, the policy predicts at every step, and overlapping chunks are averaged.

        The weight of a chunk is exp(-coefficient * i), where i = 0 is the oldest.
        """
        return None

    @property
    def observation_deltas(self) -> list[int] | None:
        """Steps of observations relative to now; None for the current one without a time dimension."""
        return None

    @property
    def action_deltas(self) -> list[int]:
        """Steps of actions relative to now."""
        raise NotImplementedError

    @property
    def reward_deltas(self) -> list[int] | None:
        """Steps of rewards (`next.reward`) relative to now; None for a policy that learns without them."""
        return None

    @property
    def label_columns(self) -> Sequence[str]:
        """Columns of the dataset that the loss reads besides inputs, outputs and rewards: a number per sample."""
        return ()

    @property
    def action_steps(self) -> int:
        """Number of actions of a chunk that are executed before the next prediction."""
        raise NotImplementedError

    @property
    def uses_all_parameters(self) -> bool:
        """Whether each step uses every parameter. If not, and without a `graph_key()`, ranks agree on which it uses."""
        return True

    @property
    def moves_weights(self) -> bool:
        """Whether the policy itself updates some weights, besides the optimizer, such as those of a target network."""
        return False

    @property
    def computes_with_bf16_copies(self) -> bool:
        """Whether autocast casts all trained matrices, at every use: see `train/optim/bf16_copies.py`."""
        return False

    @property
    def stores_frozen_in_bf16(self) -> bool:
        """Whether autocast casts all frozen matrices, at every use: see `policies/frozen_in_bf16.py`."""
        return False

    @property
    def drop_last_frames(self) -> int:
        """Number of frames at the end of an episode at which no sample starts."""
        return 0

    @property
    def images(self) -> dict[str, PolicyFeature]:
        return {k: f for k, f in self.input_features.items() if f.type is Kind.VISUAL}

    def view_images(self, images: Tensor, camera: str, noise: NoiseSource | None = None) -> Tensor:
        """A camera's images [B, ..., 3, H, W] in 0..1, sized and cropped for the network; `noise`: of training."""
        return images

    @property
    def state(self) -> PolicyFeature | None:
        return self.input_features.get(STATE)

    @property
    def environment_state(self) -> PolicyFeature | None:
        return next((f for f in self.input_features.values() if f.type is Kind.ENV), None)

    @property
    def observed(self) -> dict[str, PolicyFeature]:
        """The inputs the policy uses; a dataset may have more."""
        low_dim = {k: f for k, f in self.input_features.items() if k == STATE or f.type is Kind.ENV}
        return {**low_dim, **self.images}

    def for_lerobot(self) -> Self:
        """These settings as LeRobot can read them, for the same policy."""
        return self

    def check_columns(self, columns: Mapping[str, Any]) -> None:
        """Refuse a dataset whose columns, numpy arrays by name, the policy can't learn from."""

    def with_saved_steps(self, steps: Sequence[Mapping[str, Any]]) -> Self:
        """The settings of a checkpoint, completed by its processing before the policy: `registry_name` and `config`."""
        return self

    def with_saved_files(self, folder: Path) -> Self:
        """The settings of a checkpoint, completed by what `save_files` has written into its folder."""
        return self

    def save_files(self, folder: Path) -> None:
        """Write what a checkpoint needs besides its settings, processing and weights."""

    def completed(self, steps: Sequence[ProcessingStep]) -> list[ProcessingStep]:
        """A checkpoint's steps before the policy, with those that it lacks, and with what these settings change."""
        return list(steps)

    def can_act_without(self, names: Collection[str]) -> bool:
        """Whether these inputs may be missing in an observation."""
        return not names

    def accepts_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether an input may have this shape in an observation."""
        return shape == self.observed[name].shape

    def fit_statistics(self, sizes: Mapping[str, int]) -> None:
        """Refuse statistics, {name: number of values}, that were saved for other inputs and outputs."""
        features = {**self.observed, **self.output_features}
        for name, size in sizes.items():
            feature = features.get(name)
            if feature is not None and feature.shape != (size,):
                shape = list(feature.shape)
                raise ConfigError(f"The statistics of {name} have {size} values; it was trained on {shape}.")

    @property
    def action(self) -> PolicyFeature:
        if ACTION not in self.output_features:
            raise ConfigError(f"The policy has no output named {ACTION!r}; it has {[*self.output_features]}.")
        return self.output_features[ACTION]


class ChunkConfig(PolicyConfig):
    """What policies have that predict a chunk from the current observation on.

    Not a dataclass: a policy declares the two fields, in the order of LeRobot's config.json.
    """

    chunk_size: int
    """Number of actions predicted at once."""
    n_action_steps: int
    """Number of actions of a chunk that are executed before the next prediction."""

    def validate(self) -> None:
        self.require(1, "chunk_size", "n_action_steps")
        self.check_one_observation()
        if self.n_action_steps > self.chunk_size:
            raise ConfigError(
                f"policy.n_action_steps={self.n_action_steps} is more than policy.chunk_size={self.chunk_size}: "
                "only predicted actions can be executed."
            )

    @property
    def action_deltas(self) -> list[int]:
        return list(range(self.chunk_size))

    @property
    def action_steps(self) -> int:
        return self.n_action_steps


@dataclass
class Loss:
    """A loss per sample. The batch's loss is the mean of `per_sample`; `parts` are only logged."""

    per_sample: Tensor  # [B]
    parts: dict[str, Tensor]  # name -> [B]


register_dataclass(Loss)  # so that FSDP finds the tensors in the result of a forward pass


@dataclass
class ParamGroup:
    """Parameters with the same optimizer settings; `overrides` are those that differ from the run's."""

    params: list[nn.Parameter]
    overrides: dict[str, Any] = field(default_factory=dict)
    factors: dict[str, float] = field(default_factory=dict)
    """What the run's settings are multiplied by."""
    name: str | None = None
    """Its name in the optimizer's state, where LeRobot's groups have names."""


class Policy(nn.Module):
    """A policy: a config dataclass and a module. It does not depend on how it is trained."""

    Config: ClassVar[type[PolicyConfig]]
    continues_chunks: bool = False
    """Whether `predict` can continue the last chunk: see `nn/real_time.py`."""
    weight_names: ClassVar[WeightNames] = WeightNames()
    """How the names of its weights in files differ from those here."""
    evaluated_parts: ClassVar[tuple[str, ...]] = ()
    """Parts of the loss that are reported for held-out episodes, too."""
    optimizes_frozen: ClassVar[bool] = False
    """Whether the optimizer gets frozen parameters too, without an effect: LeRobot's numbers them."""

    def __init__(self, config: PolicyConfig):
        super().__init__()
        config.validate()
        self.config = config
        self.float32_weights: dict[str, Tensor] = {}  # in host memory, of weights stored in bfloat16 or less

    def loss(self, batch: Batch, noise: NoiseSource) -> Loss:
        raise NotImplementedError

    def predict(self, batch: Batch, noise: NoiseSource) -> Tensor:
        """A normalised action chunk [B, H, A] for the observations in `batch`; its first action is the one for now.

        Observations are as in training, but without the future ones of `observation_deltas`.
        """
        raise NotImplementedError

    def forward(self, batch: Batch, noise: NoiseSource) -> Loss:
        """The loss. Wrappers such as DDP call this."""
        return self.loss(batch, noise)

    def image_encoder(self) -> ImageEncoder | None:
        """What `encode_images` depends on; None: the policy has nothing that sees each image alone.

        If none of its weights is trained, a run may encode each image once (`train/encode_images.py`).
        """
        return None

    def encode_images(self, images: Tensor, camera: str) -> Tensor:
        """Processed images of a camera [N, C, H, W] -> their features [N, ...].

        `loss` takes features [B, (T,) ...] instead of images, as `core.batch.IMAGE_FEATURES` and the camera's name.
        They are stored in the type that they have: see `image_encoder.for_linear_layer`.
        """
        raise NotImplementedError

    def begin_step(self, step: int) -> None:
        """Called before every optimizer step, for a policy that trains in phases or updates a target network."""

    def graph_key(self) -> Hashable | None:
        """Steps with the same key run the same code, so that they can be replayed as one CUDA graph; None: they don't.

        Asked after `begin_step`, which is never part of the graph. A policy that has one must say.
        """
        return "step" if type(self).begin_step is Policy.begin_step else None

    def load_backbone(self) -> None:
        """Load pretrained parts of a new policy; not called when a checkpoint is loaded."""

    def cast_to_act(self, stored: Mapping[str, torch.dtype]) -> None:
        """Cast the weights of a policy that only acts to `Config.acting_dtypes`."""
        for name, dtype in self.config.acting_dtypes(stored).items():
            parameter = self.get_parameter(name)
            parameter.data = parameter.data.to(dtype)

    @property
    def needs_autocast(self) -> bool:
        """Whether it needs autocast to predict in bfloat16. One that computes in the types of its weights does not."""
        return True

    def shard_units(self) -> list[nn.Module]:
        """The blocks that are sharded, compiled, and recomputed under activation checkpointing, one by one."""
        return []

    def param_groups(self) -> list[ParamGroup]:
        return [ParamGroup([p for p in self.parameters() if p.requires_grad or self.optimizes_frozen])]


def without_padding(error: Tensor, batch: Mapping[str, Any]) -> Tensor:
    """error [B, H, A] whose mean over A is that over the actions' own length, where datasets have different ones."""
    length = batch.get(ACTION_LENGTH)
    if length is None:
        return error
    width = error.shape[-1]
    valid = torch.arange(width, device=error.device) < length[:, None]  # [B, A]
    return error * (valid * (width / length[:, None]))[:, None].to(error.dtype)


def action_padding(batch: Mapping[str, Any]) -> Tensor:
    """[B, H] which actions lie outside of their episode. A batch that does not say has none."""
    is_pad: Tensor | None = batch.get(f"{ACTION}_is_pad")
    return torch.zeros_like(batch[ACTION][..., 0], dtype=torch.bool) if is_pad is None else is_pad


def mean_over_valid(error: Tensor, is_pad: Tensor, batch: Mapping[str, Any]) -> Tensor:
    """error [B, H, A] -> [B], whose mean over the global batch is the mean over its unpadded steps."""
    valid = ~is_pad  # [B, H]
    valid_steps: float | Tensor | None = batch.get(VALID_STEPS)
    steps: float | Tensor
    if valid_steps is None:
        steps = valid.sum(1).float().mean().clamp(min=1e-6)
    else:
        steps = valid_steps.clamp(min=1e-6) if isinstance(valid_steps, Tensor) else max(valid_steps, 1e-6)
    return (error * valid[..., None]).sum((1, 2)) / (steps * error.shape[-1])
