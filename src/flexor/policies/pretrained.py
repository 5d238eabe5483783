"""The `pretrained_model/` folder, in LeRobot's format: either program can load the other's policies."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from flexor.core.batch import ACTION, MEMORY, Batch
from flexor.core.errors import CheckpointError, ConfigError, FlexorError
from flexor.core.foreign_files import MALFORMED, read_json_object
from flexor.core.log import log, warn_once
from flexor.core.manifest import verify_policy
from flexor.core.model_files import ModelFiles
from flexor.core.paths import inside
from flexor.core.rng import Noise, NoiseSource
from flexor.core.run_files import (
    CHECKPOINTS,
    POLICY_CONFIG,
    PRETRAINED,
    SHARDS,
    TRAINING_STATE,
    WEIGHTS,
    find_last,
    newest_checkpoints,
)
from flexor.core.tensors import copy_part
from flexor.core.trust import is_trusted, settled
from flexor.core.typed import Partial, from_plain, to_plain
from flexor.core.weight_files import WeightFiles
from flexor.policies import BUILT_IN, LEROBOT_TYPES, make_policy, policy_class
from flexor.policies.adapter_files import base_of, merge_adapter
from flexor.policies.adapters import init_adapters, is_adapter
from flexor.policies.base import Policy, PolicyConfig
from flexor.policies.check_weights import check_ties, names_in_file
from flexor.policies.external import is_code, is_loaded, short_name
from flexor.policies.frozen_in_bf16 import float32_state, round_frozen
from flexor.policies.lerobot_settings import without_lerobot_settings
from flexor.policies.meta_init import parameters_without_memory, with_memory
from flexor.policies.nn.real_time import GUIDANCE_WEIGHTS, PREVIOUS, RealTimeSettings
from flexor.policies.predict_graph import PredictGraphs
from flexor.policies.processing.normalize import NormalizationStep
from flexor.policies.processing.pipeline import PREPROCESSOR, Pipeline, StepContext, read_steps
from flexor.policies.processing.rename_and_move import RenameObservations
from flexor.policies.sizes import check_sizes

# Keys of LeRobot's config.json that do not describe the policy, such as where it is uploaded.
LEROBOT_ONLY = {
    "use_amp": False,
    "use_peft": False,
    "push_to_hub": False,
    "repo_id": None,
    "private": None,
    "tags": None,
    "license": None,
    "pretrained_path": None,
    "pretrained_revision": None,
}


@dataclass
class Pretrained:
    """A policy with the processing it was trained with. Calls share no state: see `session.Session`."""

    policy: Policy
    preprocessor: Pipeline
    postprocessor: Pipeline

    def __post_init__(self) -> None:
        for step in (*self.preprocessor.steps, *self.postprocessor.steps):
            if isinstance(step, NormalizationStep):
                self.policy.config.fit_statistics(step.sizes())

    def chunk(
        self,
        observation: Mapping[str, np.ndarray],
        task: Sequence[str],
        noise: Noise | None = None,
        memory: Batch | None = None,
        previous: np.ndarray | None = None,
        delay: int | Sequence[int] = 0,
        left: Sequence[int] | None = None,
    ) -> np.ndarray:
        """Actions [B, H, A] for observations [B, (T,) ...] of B robots, both in the robots' units.

        `memory` is the policy's state of these robots; the policy updates it. `previous` [B, K, A] are the remaining
        actions of the last chunk, of which the robots will have executed `delay` when they get this one: the new chunk
        continues it (real-time chunking). Where robots differ, `delay` has a value for each, and `left` the number of
        valid actions among the K; 0 for a robot without a last chunk.
        """
        tensors = {name: _as_tensor(value) for name, value in observation.items()}
        noise = noise or Noise(0, 0, torch.arange(len(task)))
        observed: Batch = {**tensors, "task": list(task)}
        inputs = observed if previous is None else {**observed, ACTION: self._continued(previous)}
        batch = {
            **self.preprocessor(inputs, StepContext(noise=noise)),
            MEMORY: {} if memory is None else memory,
        }
        if previous is not None:
            batch[PREVIOUS] = batch.pop(ACTION)
            batch[GUIDANCE_WEIGHTS] = self.guidance_weights(
                previous.shape[1] if left is None else left, delay
            ).to(batch[PREVIOUS])
        if self.policy.training:
            self.policy.eval()
        device = next(self.policy.parameters()).device
        actions = self.predict(batch, noise.to(device))
        context = StepContext(noise=noise, observation=self.preprocessor.renamed(observed))
        chunk: np.ndarray = self.postprocessor({ACTION: actions}, context)[ACTION].float().numpy()
        return chunk

    def guidance_weights(self, remaining: int | Sequence[int], delay: int | Sequence[int]) -> Tensor:
        """How much the last chunk guides each action of a new one: [H], or [B, H] where robots differ."""
        config = self.policy.config
        settings = RealTimeSettings.of(getattr(config, "rtc_config", None))
        chunk = len(config.action_deltas)
        if isinstance(remaining, int) and isinstance(delay, int):
            return settings.guidance_weights(chunk, remaining, delay)
        count = len(delay) if isinstance(remaining, int) else len(remaining)  # type: ignore[arg-type]
        remaining_of = [remaining] * count if isinstance(remaining, int) else remaining
        delays = [delay] * count if isinstance(delay, int) else delay
        return torch.stack(
            [settings.guidance_weights(chunk, *pair) for pair in zip(remaining_of, delays, strict=True)]
        )

    def _continued(self, previous: np.ndarray) -> Tensor:
        kind, actions = self.policy.config.type, self.policy.config.action.shape[0]
        if not self.policy.continues_chunks:
            raise FlexorError(
                f"policy.type={kind} can't continue a chunk that is being executed: only policies that denoise "
                "chunks can (smolvla, pi0, pi05, eo1, xvla, groot, wall_x). Leave out `previous`."
            )
        if previous.ndim != 3 or not previous.shape[1] or previous.shape[2] != actions:
            raise FlexorError(
                f"`previous` must be actions [robots, at least 1, {actions}], but is {list(previous.shape)}."
            )
        return torch.from_numpy(np.ascontiguousarray(previous, np.float32))

    @torch.inference_mode()
    def predict(self, batch: Batch, noise: NoiseSource) -> Tensor:
        """The policy's prediction, normalised."""
        if next(self.policy.parameters()).is_cuda and isinstance(noise, Noise):
            return self.graphs(batch, noise)
        return self.policy.predict(batch, noise)

    @functools.cached_property
    def graphs(self) -> PredictGraphs:
        return PredictGraphs(self.policy)


def _as_tensor(value: np.ndarray) -> Tensor:
    """The array as a tensor, without a copy unless a stride is negative, which torch does not support."""
    return torch.from_numpy(value if min(value.strides, default=0) >= 0 else np.ascontiguousarray(value))


def find_folder(path: str, files: Sequence[str] = ("*.json", "*.safetensors")) -> Path:
    """A run, a checkpoint, a `pretrained_model` folder or a Hub repository (REPO or REPO@REVISION).

    `files` are those downloaded from a repository.
    """
    local = find_last(Path(path))
    newest = newest_checkpoints(local / CHECKPOINTS)
    for folder in (local, local / PRETRAINED, *(folder / PRETRAINED for folder in newest)):
        if (folder / POLICY_CONFIG).is_file():
            return folder
    if local.exists():
        raise CheckpointError(
            f"{path} holds no policy: there is no {POLICY_CONFIG} in it or in its {PRETRAINED} folder."
        )
    return ModelFiles(path, path, error=CheckpointError).folder(files, ignored=[f"{CHECKPOINTS}/*"])


def base_policy(path: str | None) -> str | None:
    """Where other programs find the policy that a run started from: a folder with its weights, or a Hub repository."""
    if path is None or not Path(path).exists():
        return path
    return str(find_folder(path).resolve())


def read_config(path: str, overrides: dict[str, Any] | None = None) -> PolicyConfig:
    """The policy's settings in a checkpoint, with overrides."""
    folder = find_folder(path, ("*.json",))
    try:
        settings = read_json_object(inside(folder, POLICY_CONFIG))
        saved_type = str(settings.pop("type"))
    except (*MALFORMED, OSError) as error:
        raise CheckpointError(
            f"{folder / POLICY_CONFIG} is not a policy's configuration: {error!r}. A model that policies start from "
            "is named by a setting of theirs, such as --policy.base_model_path."
        ) from error
    changes = dict(overrides or {})
    cls = policy_class(_policy_type(folder, saved_type, changes.pop("type", None))).Config
    settings = {key: value for key, value in settings.items() if key not in LEROBOT_ONLY}
    settings = without_lerobot_settings(cls.only_in_lerobot, settings, folder / POLICY_CONFIG)
    changes = without_lerobot_settings(cls.only_in_lerobot, changes)
    # LeRobot declares replace_final_stride_with_dilation a number, and writes 0 for false
    switches = [name for name, declared in get_type_hints(cls).items() if declared is bool]
    settings |= {name: bool(settings[name]) for name in switches if settings.get(name) in (0, 1)}
    for key, value in changes.items():
        if isinstance(value, Partial):
            changes[key] = {**settings.get(key, {}), **value}
    try:
        settings = _without_unknown_settings(folder, cls, settings)
        config = from_plain(cls, {**settings, **changes}, "policy")
        config = config.with_saved_files(folder)
        check_sizes(config)
        if (file := folder / f"{cls.processor_names[0]}.json").is_file():
            config = config.with_saved_steps(read_steps(file))
        config.validate()
    except MALFORMED as error:
        raise CheckpointError(f"{folder / POLICY_CONFIG} makes no {cls.type} policy: {error!r}") from error
    return config


def _without_unknown_settings(
    folder: Path, cls: type[PolicyConfig], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """The settings without those that the policy does not have. They are refused, unless it ignores them."""
    settings_of_policy = {field.name for field in fields(cls)}
    unknown = [name for name in settings if name not in settings_of_policy]
    if unknown and not cls.ignores_unknown_settings:
        raise CheckpointError(
            f"{folder / POLICY_CONFIG} has settings that Flexor does not know: {', '.join(unknown)}. They may be of "
            "another version of LeRobot. If the policy works without them, delete them from the file."
        )
    if unknown:
        warn_once(
            "%s has settings that Flexor does not know, which have no effect: %s",
            *(folder / POLICY_CONFIG, ", ".join(unknown)),
        )
    return {name: value for name, value in settings.items() if name in settings_of_policy}


def _policy_type(folder: Path, saved: str, requested: str | None) -> str:
    """The policy type in a checkpoint. Refuses a type that would run code the user did not name."""
    saved = LEROBOT_TYPES.get(saved, saved)
    if requested is not None:
        moved = is_code(saved) and is_code(requested) and short_name(saved) == short_name(requested)
        if settled(requested) != saved and not moved:
            raise ConfigError(
                f"policy.type={requested}, but {folder} holds a policy of type {saved}: leave policy.type out."
            )
        return settled(requested)
    if is_code(saved) and not is_loaded(saved) and not is_trusted(saved):
        raise CheckpointError(
            f"The policy in {folder} is not built into Flexor: its {POLICY_CONFIG} says that its code is {saved}. Code "
            "that only a checkpoint names is not run. If you have that code and trust it, name it yourself: "
            f"--policy.type={saved}, or its path on this machine, or --trust={saved}."
        )
    return saved


def save_pretrained(
    folder: Path,
    config: PolicyConfig,
    weights: Mapping[str, Tensor] | None,
    before: Pipeline,
    after: Pipeline,
) -> None:
    """Write the folder, without weights if they are None. The caller renames it into place."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / POLICY_CONFIG).write_text(json.dumps(as_lerobot(config), indent=4))
    if weights is not None:
        save_weights(config.type, weights, folder / WEIGHTS)
    before.save(folder)
    after.save(folder)
    config.save_files(folder)


def as_lerobot(config: PolicyConfig) -> dict[str, Any]:
    """The policy's settings as LeRobot writes them."""
    plain = to_plain(config.for_lerobot())
    ours = {name: value for name, value in plain.items() if name not in config.unknown_to_lerobot}
    theirs = {name: value for name, value in LEROBOT_ONLY.items() if name not in config.unknown_to_lerobot}
    return {"type": config.lerobot_type or config.type, **ours, **theirs}


def save_weights(kind: str, weights: Mapping[str, Tensor], file: Path) -> None:
    """Write the weights of a policy of this type as LeRobot's file has them."""
    weights = {name: weight.detach().cpu().contiguous() for name, weight in weights.items()}
    save_file({**weights, **policy_class(kind).weight_names.unused_weights(weights)}, file)


def load_pretrained(path: str, device: str = "cpu", overrides: dict[str, Any] | None = None) -> Pretrained:
    """A policy ready for inference, with its processing, on `device`."""
    folder = find_folder(path)
    verify(folder)
    config = read_config(str(folder), overrides)
    before_name, after_name = config.processor_names
    before = Pipeline.load(folder, before_name)
    before = replace(before, steps=config.completed(before.steps)).to(device)
    before.prepare()
    after = Pipeline.load(folder, after_name).connect(before)
    with without_initial_weights(config):
        policy = make_policy(config)
    policy.cast_to_act(stored_dtypes(policy, folder))
    if torch.device(device).type == "cpu" and not policy.needs_autocast:
        log.info(
            "the policy acts in bfloat16, like its checkpoint. Most CPUs are faster with --policy.dtype=float32"
        )
    with_memory(policy, device)
    load_weights(policy, folder)
    return Pretrained(policy.eval(), before, after)


def verify(folder: Path) -> None:
    """Refuse a policy whose files differ from its manifest, if it has one; also the base policy of adapters."""
    verify_policy(folder)
    base = base_of(folder)
    if base is not None:
        verify(find_folder(base))


def saved_rename_map(folder: Path) -> dict[str, str]:
    """The `rename_map` that the policy in a folder was trained with."""
    file = folder / f"{PREPROCESSOR}.json"
    if not file.is_file():
        return {}
    renaming = [step for step in read_steps(file) if step.get("registry_name") == RenameObservations.name]
    config = renaming[0].get("config") if renaming else None
    names = config.get("rename_map") if isinstance(config, dict) else None
    return {str(name): str(new) for name, new in names.items()} if isinstance(names, dict) else {}


def without_initial_weights(config: PolicyConfig) -> AbstractContextManager[None]:
    """A context in which a policy is built without initial weights, because they are loaded next.

    Billions of random numbers would take minutes. A user's own policy gets them: its constructor may need the values.
    """
    return parameters_without_memory() if config.type in BUILT_IN else nullcontext()


def check_weights(policy: Policy, folder: Path) -> dict[str, str]:
    """Refuse weights that are not the policy's, before the policy takes memory: its settings could make it huge.

    Returns the name in the file of each weight.
    """
    base = base_of(folder)
    if base is not None:  # adapters alone, of PEFT
        return check_weights(policy, find_folder(base))
    weights = WeightFiles(folder)
    if not weights.file.is_file() and (folder.parent / TRAINING_STATE / SHARDS).is_dir():
        raise CheckpointError(
            f"{folder.parent} was saved in shards, without {WEIGHTS}: create it with `flexor export {folder.parent}`."
        )
    return names_in_file(policy, _weights_of(policy), weights)


def stored_dtypes(policy: Policy, folder: Path) -> dict[str, torch.dtype]:
    """The types of the policy's weights in its file, which is checked."""
    base = base_of(folder)
    if base is not None:
        return stored_dtypes(policy, find_folder(base))
    names, described = check_weights(policy, folder), WeightFiles(folder).described()
    return {name: described[stored].dtype for name, stored in names.items()}


def load_weights(policy: Policy, folder: Path) -> None:
    """Load weights into a policy, each rank its shard. Adapters get their initial values."""
    base = base_of(folder)
    if base is not None:
        load_weights(policy, find_folder(base))
        merge_adapter(_weights_of(policy), folder)
        round_frozen(policy)
        return
    names, weights = check_weights(policy, folder), WeightFiles(folder)
    check_ties(policy, names, weights)
    tensors, transposed = _weights_of(policy), policy.weight_names.transposed
    weights.fill({name: tensor for name, tensor in tensors.items() if names[name] not in transposed}, names)
    for name in [name for name in tensors if names[name] in transposed]:
        copy_part(tensors[name], weights.read(names[name]).mT)
    init_adapters(policy)
    round_frozen(policy)


def _weights_of(policy: Policy) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in float32_state(policy).items() if not is_adapter(name)}
