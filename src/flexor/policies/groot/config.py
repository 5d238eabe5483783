"""The settings of GR00T N1.7, under LeRobot's names."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

from flexor.core.errors import CheckpointError, ConfigError
from flexor.core.foreign_files import MALFORMED, read_json_object
from flexor.core.log import log
from flexor.core.model_files import ModelFiles
from flexor.core.paths import inside
from flexor.core.typed import from_plain, to_plain
from flexor.policies.base import MOST_DROPOUT
from flexor.policies.cross_embodiment import CrossEmbodimentConfig, Features
from flexor.policies.features import Kind, Normalization
from flexor.policies.groot.images import ImageSettings
from flexor.policies.groot.lerobot_names import OLD_DEFAULTS, ONLY_IN_LEROBOT, UNKNOWN_TO_LEROBOT
from flexor.policies.groot.modalities import Modalities
from flexor.policies.groot.network import TunedParts
from flexor.policies.groot.processing import (
    EMBODIMENTS,
    DecodeActions,
    EncodePrompt,
    PackInputs,
    UnpackActions,
    as_statistics,
)
from flexor.policies.groot.relative import groups_of_dataset
from flexor.policies.groot.sidecars import settings_of_base, settings_of_steps
from flexor.policies.groot.size import BACKBONE, BASE_MODEL, GrootSize, describe_base, read_size
from flexor.policies.hf_transformers import resolve_builtin
from flexor.policies.lerobot_settings import LerobotSetting
from flexor.policies.nn.adam import AdamSettings
from flexor.policies.processing.pipeline import ProcessingStep, Stats
from flexor.policies.processing.relative_actions import BY_STEP, RelativeActionSettings
from flexor.policies.vlm.qwen2_5_images import ImageGrid

NATIVE_HORIZON = 40
LIBERO, LIBERO_STEPS = "libero_sim", 8
OWN_FILE = (
    "groot.json"  # in a checkpoint: the base model's config.json, and settings that LeRobot has no place for
)
IN_OWN_FILE = ("image_min_pixels", "image_max_pixels", "random_crop", "state_dropout_prob", "use_percentiles")


@dataclass
class GrootConfig(AdamSettings, ImageSettings, RelativeActionSettings, CrossEmbodimentConfig):
    """Defaults are LeRobot's."""

    type: ClassVar[str] = "groot"
    optimizer_type: ClassVar[str] = "adamw"
    trains_in_bf16: ClassVar[bool] = True
    relative_by_step: ClassVar[bool] = True
    ignores_unknown_settings: ClassVar[bool] = True
    unknown_to_lerobot: ClassVar[frozenset[str]] = UNKNOWN_TO_LEROBOT
    only_in_lerobot: ClassVar[Mapping[str, LerobotSetting]] = ONLY_IN_LEROBOT

    chunk_size: int = 40
    n_action_steps: int = 40
    max_state_dim: int = 132
    max_action_dim: int = 132
    base_model_path: str | None = None
    """The base model: a Hub repository or a folder with NVIDIA's files. A new policy starts from its weights. Default:
    nvidia/GR00T-N1.7-3B."""
    base_config: dict[str, Any] | None = None
    """The sizes of the base model, as in its config.json; default: those of policy.base_model_path. A checkpoint has
    them, so it never needs the base model again."""
    load_base_model: bool = True
    """Start a new policy from the weights of policy.base_model_path. false starts from random weights."""
    processor_name: str | None = None
    """The tokenizer that reads the task: a Hub repository or a folder. Default: nvidia/Cosmos-Reason2-2B, whose licence
    you must accept; that of Qwen/Qwen3-VL-2B-Instruct is the same."""
    action_decode_transform: str | None = "auto"
    """What happens to predicted actions last: libero turns a gripper from 0..1 into -1 or 1, none changes nothing.
    auto: libero for policy.embodiment_tag=libero_sim."""
    embodiment_tag: str = "new_embodiment"
    """Which kind of robot this is: each has layers of its own."""
    embodiment_ids: dict[str, int] | None = None
    """The number of each embodiment; default: those of the base model."""
    tune_llm: bool = False
    """Train the language model."""
    tune_visual: bool = False
    """Train the image encoder."""
    tune_projector: bool = True
    """Train the layers from and to states and actions."""
    tune_diffusion_model: bool = True
    """Train the transformer that denoises actions."""
    tune_vlln: bool = True
    """Train the layers between the vision-language model and this transformer."""
    tune_top_llm_layers: int = 0
    """Train the last layers of the language model, so many."""
    num_inference_timesteps: int | None = None
    """Integration steps at inference; default: those of the base model, 4."""
    rtc_ramp_rate: float | None = None
    """Real-time chunking: how fast actions after those of the last chunk become free; default: that of the base model,
    6."""
    rtc_config: dict[str, Any] | None = None
    """Settings of real-time chunking: {execution_horizon: 10}, the actions of the last chunk that guide the new one."""
    use_flash_attention: bool = False
    """No effect: attention is computed by torch's fused kernels."""
    relative_exclude_joints: list[str] = field(default_factory=list)
    """With relative actions: those whose name contains one of these words stay absolute."""
    use_percentiles: bool = False
    """Scale states and actions by the 1st and 99th percentile of the dataset, instead of its least and greatest
    values, as NVIDIA does."""
    clip_outliers: bool = True
    """Limit scaled states and actions to -1..1."""
    state_dropout_prob: float | None = None
    """Share of samples whose state is hidden in training; default: that of the base model, 0.2."""
    formalize_language: bool = True
    """Read tasks in small letters, without punctuation."""
    modalities: dict[str, Any] | None = None
    """How the base model scales the states and actions of policy.embodiment_tag: read from its folder."""
    video_modality_keys: list[str] | None = None
    """The cameras in their order, without observation.images.; default: by name."""
    optimizer_betas: tuple[float, float] = (0.9, 0.999)
    optimizer_weight_decay: float = 1e-5
    warmup_ratio: float = 0.05
    """Warm-up steps until the full learning rate, as a share of policy.max_steps (--scheduler.num_warmup_steps takes
    precedence)."""
    max_steps: int = 10_000
    """What policy.warmup_ratio is a share of. The length of the run is --steps."""
    use_bf16: bool = True
    """No effect: --precision says in which type a run computes."""
    model_params_fp32: bool = True
    """No effect: trained weights are float32, and frozen ones are stored in bfloat16 where --precision=bf16 uses them
    so."""
    normalization_mapping: dict[Kind, Normalization] = field(
        default_factory=lambda: {Kind.VISUAL: "IDENTITY", Kind.STATE: "IDENTITY", Kind.ACTION: "IDENTITY"}
    )

    def validate(self) -> None:
        for name, (old, new) in OLD_DEFAULTS.items():
            if getattr(self, name) == old:
                log.warning("policy.%s=%d becomes %d: it is the default of GR00T N1.5", name, old, new)
                setattr(self, name, new)
        super().validate()
        self.require(0, "tune_top_llm_layers", "warmup_ratio", "max_steps")
        self.require(1, "num_inference_timesteps")
        self.require(1e-6, "rtc_ramp_rate")
        self.require(0, "state_dropout_prob", high=MOST_DROPOUT)
        self.check_geometry()
        if self.action_decode_transform not in (None, "", "none", "auto", "libero"):
            raise ConfigError(
                f"policy.action_decode_transform={self.action_decode_transform!r} is not known: use auto, none or "
                "libero."
            )
        if self.tag_number is None:
            log.warning(
                "policy.embodiment_tag=%s is not among the base model's, %s: it gets the number 0, as in LeRobot",
                *(self.embodiment_tag, ", ".join(self.embodiments)),
            )
        self._check_size(self.size())

    def _check_size(self, size: GrootSize) -> None:
        for name, expected in (("max_state_dim", size.state), ("max_action_dim", size.action)):
            if getattr(self, name) != expected:
                raise ConfigError(
                    f"policy.{name}={getattr(self, name)}, but the base model has {expected}: set it to that."
                )
        if max(len(self.action_deltas), self.training_horizon) > (size.positions or size.horizon) or (
            len(self.action_deltas) > size.horizon
        ):
            raise ConfigError(
                f"policy.chunk_size={self.chunk_size} is more than the base model's action_horizon={size.horizon}: "
                "set it to that."
            )
        if (number := self.tag_number or 0) >= size.embodiments:
            raise ConfigError(
                f"policy.embodiment_tag={self.embodiment_tag} has the number {number}, but the base model has layers "
                f"for {size.embodiments} embodiments only."
            )

    @cached_property
    def _size(self) -> GrootSize:
        return read_size(self.described_base(), self._base_label)

    def size(self) -> GrootSize:
        return self._size

    def described_base(self) -> dict[str, Any]:
        """The base model's config.json, with that of its vision-language model."""
        if self.base_config is not None:
            return self.base_config
        return describe_base(self.base_name, self._base_label)

    @property
    def base_name(self) -> str:
        return self.base_model_path or BASE_MODEL

    @property
    def _base_label(self) -> str:
        return (
            "policy.base_config"
            if self.base_config is not None
            else f"policy.base_model_path={self.base_name}"
        )

    @property
    def base_files(self) -> ModelFiles:
        return ModelFiles(resolve_builtin(self.base_name), f"policy.base_model_path={self.base_name}")

    @property
    def tuned(self) -> TunedParts:
        return TunedParts(
            self.tune_llm,
            self.tune_visual,
            self.tune_projector,
            self.tune_diffusion_model,
            self.tune_vlln,
            self.tune_top_llm_layers,
        )

    @property
    def embodiments(self) -> dict[str, int]:
        return EMBODIMENTS if self.embodiment_ids is None else self.embodiment_ids

    @property
    def tag_number(self) -> int | None:
        return self.embodiments.get(self.embodiment_tag)

    @property
    def decode_transform(self) -> str | None:
        if self.action_decode_transform == "auto":
            return "libero" if self.embodiment_tag == LIBERO else None
        return None if self.action_decode_transform in (None, "", "none") else self.action_decode_transform

    @property
    def action_deltas(self) -> list[int]:
        return list(range(min(self.chunk_size, self.tag_horizon or NATIVE_HORIZON)))

    @property
    def action_steps(self) -> int:
        """NVIDIA executes half of LIBERO's chunks."""
        most = LIBERO_STEPS if self.tag_horizon and self.embodiment_tag == LIBERO else NATIVE_HORIZON
        return min(self.n_action_steps, len(self.action_deltas), most)

    @property
    def drop_last_frames(self) -> int:
        return len(self.action_deltas) - 1

    @property
    def images(self) -> Features:
        """The cameras, in the order in which the policy sees them."""
        cameras = super().images
        ordered = [name for key in self.video_modality_keys or [] for name in _named(key) if name in cameras]
        return {name: cameras[name] for name in ordered or sorted(cameras)}

    @property
    def image_sizes(self) -> list[tuple[int, int]]:
        """Height and width of each camera's images."""
        return [(feature.shape[1], feature.shape[2]) for feature in self.images.values()]

    @property
    def grids(self) -> list[ImageGrid]:
        """The patches of each camera's images."""
        return [self.geometry.grid(size) for size in self.image_sizes]

    @property
    def resizes_images(self) -> bool:
        return False

    def can_act_without(self, names: Collection[str]) -> bool:
        return not names

    @property
    def computes_with_bf16_copies(self) -> bool:
        return True

    @property
    def stores_frozen_in_bf16(self) -> bool:
        return True

    def for_lerobot(self) -> Self:
        return replace(self, base_model_path=self.base_name, action_decode_transform=self.decode_transform)

    def steps_before(self, stats: Stats) -> list[ProcessingStep]:
        rename, to_batch, to_device, _ = super().steps_before(stats)
        groups, more = self.groups_of(stats)
        pack = PackInputs(
            action_horizon=self.training_horizon,
            valid_action_horizon=min(self.tag_horizon or NATIVE_HORIZON, self.training_horizon),
            max_state_dim=self.max_state_dim,
            max_action_dim=self.max_action_dim,
            formalize_language=self.formalize_language,
            embodiment_tag=self.embodiment_tag,
            embodiment_mapping=dict(self.embodiments),
            state_dropout_prob=more.get("state_dropout_prob") or 0.0,
            clip_outliers=self.clip_outliers,
            use_percentiles=bool(more.get("use_percentiles")),
            video_modality_keys=self.video_modality_keys,
            raw_stats=more.get("raw_stats"),
            modality_config=more.get("modality_config"),
            stats=self.scaled_by(stats) if groups is None else groups.flat_statistics(),
        )
        encode = EncodePrompt(
            self.processor_name or BACKBONE,
            image_crop_size=None if self.image_crop_size is None else list(self.image_crop_size),
            image_target_size=list(self.image_target_size),
            shortest_image_edge=self.shortest_image_edge,
            crop_fraction=self.crop_fraction,
            use_albumentations=self.use_albumentations,
            letter_box_transform=self.letter_box_transform,
        )
        return [rename, to_batch, pack, self._adapted(encode), to_device]

    def steps_after(self, stats: Stats) -> list[ProcessingStep]:
        to_device = super().steps_after(stats)[-1]
        width = self.action.shape[0]
        groups, more = self.groups_of(stats)
        if groups is not None:
            names = ("raw_stats", "modality_config", "use_percentiles", "use_relative_action")
            settings = {name: more[name] for name in names}
            return [
                DecodeActions(width, action_decode_transform=self.decode_transform, **settings),
                to_device,
            ]
        unpack = UnpackActions(
            env_action_dim=width,
            clip_normalized_action=True,
            libero_gripper_action=self.decode_transform == "libero",
            stats=self.scaled_by(stats),
        )
        return [unpack, to_device]

    def groups_of(self, stats: Stats) -> tuple[Modalities | None, Mapping[str, Any]]:
        """How states and actions are scaled, and as a checkpoint has it; None: by the range of the dataset.

        By the base model's statistics, if it has some of this robot, or by those of relative actions.
        """
        more = self.modalities or {}
        names = ("raw_stats", "modality_config", "use_percentiles")
        groups = Modalities(*(more[name] for name in names)) if more else None
        if groups is not None and (groups.states or groups.actions):
            if self.use_relative_actions and not more["use_relative_action"]:
                raise ConfigError(
                    "policy.use_relative_actions=true, but the base model has statistics of absolute actions for "
                    f"policy.embodiment_tag={self.embodiment_tag}: choose another tag, such as new_embodiment."
                )
            return groups, more
        if self.use_relative_actions and BY_STEP in stats:
            relative = self.relative_actions().relative(self.action.shape[0])
            more = {**more, **groups_of_dataset(self.action_feature_names or [], relative, stats)}
            return Modalities(*(more[name] for name in names)), more
        return None, more

    @property
    def tag_horizon(self) -> int | None:
        """Actions of a chunk that mean something for this embodiment."""
        config = (self.modalities or {}).get("modality_config") or {}
        return len((config.get("action") or {}).get("delta_indices") or []) or None

    @property
    def training_horizon(self) -> int:
        """Actions in training: those after a chunk are zeros that are not learned."""
        return (self.modalities or {}).get("max_action_horizon") or min(self.chunk_size, NATIVE_HORIZON)

    def scaled_by(self, stats: Stats) -> dict[str, dict[str, Any]]:
        """The statistics that states and actions are scaled by, as `min` and `max`."""
        scaled = as_statistics(stats)
        if not self.use_percentiles:
            return scaled
        for key, values in scaled.items():
            if missing := [name for name in ("q01", "q99") if name not in values]:
                raise ConfigError(
                    f"policy.use_percentiles=true, but the dataset's statistics of {key} lack {', '.join(missing)}: "
                    "recompute them with `flexor data stats DIR`, or leave policy.use_percentiles out."
                )
        return {
            key: {**values, "min": values["q01"].clone(), "max": values["q99"].clone()}
            for key, values in scaled.items()
        }

    def completed(self, steps: Sequence[ProcessingStep]) -> list[ProcessingStep]:
        return [self._adapted(step) for step in steps]

    def _adapted(self, step: ProcessingStep) -> ProcessingStep:
        if isinstance(step, EncodePrompt):
            tokens = [grid.tokens for grid in self.grids]
            return replace(step, image_tokens=tokens, vocabulary=self.size().backbone.vocabulary)
        return step

    def save_files(self, folder: Path) -> None:
        settings = {name: to_plain(getattr(self, name)) for name in IN_OWN_FILE}
        content = {"base_config": self.described_base(), **settings}
        (folder / OWN_FILE).write_text(json.dumps(content, indent=2))

    def with_saved_files(self, folder: Path) -> Self:
        """Also the sizes of the base model, if Flexor wrote the checkpoint."""
        file = inside(folder, OWN_FILE)
        if not file.is_file():
            return self
        try:
            content = read_json_object(file)
            settings = {name: content[name] for name in ("base_config", *IN_OWN_FILE) if name in content}
            typed = from_plain(type(self), settings, OWN_FILE)
        except (ConfigError, *MALFORMED) as error:
            raise CheckpointError(f"{file} can't be read: {error!r}") from error
        return self._completed({name: getattr(typed, name) for name in settings})

    def with_saved_steps(self, steps: Sequence[Mapping[str, Any]]) -> Self:
        """How images are cropped, and what embodiments there are, is in a checkpoint's processing."""
        configs = {step.get("registry_name"): step.get("config") or {} for step in steps}
        names = (PackInputs.name, EncodePrompt.name, DecodeActions.name)
        return self._completed(settings_of_steps(*(configs.get(name, {}) for name in names)))

    def with_base_processing(self) -> Self:
        """With the settings in the base model's folder, if it is one, unless a checkpoint had them."""
        folder = Path(resolve_builtin(self.base_name))
        if self.embodiment_ids is not None or not folder.is_dir():
            return self
        return self._completed(settings_of_base(folder, self.embodiment_tag))

    def _completed(self, settings: Mapping[str, Any]) -> Self:
        """With these settings where nothing else was said."""
        return replace(self, **{n: v for n, v in settings.items() if getattr(self, n) == _default(n)})

    def fitted(self, inputs: Features, outputs: Features) -> Self:
        return super(GrootConfig, self.with_base_processing()).fitted(inputs, outputs)

    def optimizer_preset(self) -> dict[str, Any]:
        return super().optimizer_preset() | {"grad_clip_norm": 1.0}

    def scheduler_preset(self) -> dict[str, Any]:
        return {"type": "cosine", "num_warmup_steps": math.ceil(self.max_steps * self.warmup_ratio)}

    def lora_targets(self) -> list[str] | str:
        """Queries and values of the transformer that denoises actions."""
        return r"_groot_model\.action_head\.model\..*\.to_(q|v)"


def _named(key: str) -> list[str]:
    """Names of a camera that a base model calls `key`. LIBERO's datasets have another one for the wrist's."""
    return [f"observation.images.{name}" for name in ([key, "image2"] if key == "wrist_image" else [key])]


def _default(name: str) -> Any:
    return GrootConfig.__dataclass_fields__[name].default
