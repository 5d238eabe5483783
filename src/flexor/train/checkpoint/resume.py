"""Which settings must stay the same when a run resumes, and which may change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from flexor.config.accelerate_flags import accelerate_settings
from flexor.config.parse import DATASETS, build_config, code_in, flatten, read_run
from flexor.config.schedules import SCHEDULES
from flexor.config.schema import TrainConfig
from flexor.core.errors import CheckpointError, ConfigError
from flexor.core.log import log
from flexor.core.published import same_setting
from flexor.core.run_files import PRETRAINED, RUN_CONFIG, TRAINING_STATE
from flexor.core.secrets import HIDDEN
from flexor.core.trust import require_trust, trust
from flexor.core.typed import changeable
from flexor.data.identity import DataIdentity, differences
from flexor.policies.processing.normalize import NormalizationStep, NormalizeByDataset
from flexor.policies.processing.pipeline import Pipeline, ProcessingStep
from flexor.train.checkpoint import folder as checkpoint
from flexor.train.checkpoint.run_record import read_data_files
from flexor.train.checkpoint.state import STATISTICS, TrainState, statistics_by_dataset


def may_change(key: str) -> bool:
    """Whether a run may resume with another value of a setting. Each setting declares this itself."""
    return any(key == name or (name.endswith(".*") and key.startswith(name[:-1])) for name in CHANGEABLE)


CHANGEABLE = changeable(TrainConfig)
NAMED = 3  # differences in a message
# the values of runs from before these settings existed; today's defaults depend on the GPU
EARLIER = {"precision": "no", "channels_last": False}


def resumed_config(folder: Path, flags: Mapping[str, Any]) -> TrainConfig:
    """The run's settings, changed by these flags. Refuses settings that may not change."""
    changes = dict(flags)
    if "output_dir" in changes:
        raise ConfigError(f"A run resumes in its own folder, {folder}: leave output_dir out.")
    saved = {**EARLIER, **flatten(read_run(folder))}
    accelerate = accelerate_settings(changes)
    changes |= {key: value for key, value in accelerate.items() if saved.get(key) != value}
    allowed = sorted({*CHANGEABLE} - {"output_dir"})
    trust(code_in(changes))
    for key in [key for key in changes if not may_change(key)]:
        if not same_setting(saved.get(key), changes[key]):
            raise ConfigError(
                f"{key} can't change when a run resumes. Start a new run from its weights with "
                f"`flexor train --policy.path={folder} ...`. These settings may change: {', '.join(allowed)}."
            )
        saved[key] = changes.pop(key)  # such as a path, of which a pushed run has only the name
    if "dataset.root" in changes and "dataset.repo_id" in saved:
        # the same data in another place, which is checked: it keeps its name
        changes.setdefault("dataset.repo_id", saved["dataset.repo_id"])
    require_trust(code_in({**saved, **changes}), folder / RUN_CONFIG)
    # the checkpoint has the weights: the policy that the run started from may be gone
    policy_path = saved.pop("policy_path", None)
    if not DATASETS & changes.keys():
        _check_roots(folder, saved)
    config = build_config(saved, {**changes, "output_dir": str(folder)})
    return replace(config, policy_path=policy_path)


def _check_roots(folder: Path, saved: Mapping[str, Any]) -> None:
    """Refuse to resume if the settings have only the name of a dataset's folder, or a URL without its password."""
    mix = saved.get("dataset.mix")
    entries = mix if isinstance(mix, list) else [{"root": saved.get("dataset.root")}]
    roots = [str(entry["root"]) for entry in entries if isinstance(entry, dict) and entry.get("root")]
    again = "--dataset.mix=[...], with the root of each dataset" if mix else "--dataset.root=..."
    for root in (part for each in roots for part in each.split(",")):
        if f"://{HIDDEN}@" in root:
            raise ConfigError(
                f"The run in {folder} reads its dataset from {root}. Passwords are not stored with a run: give the "
                f"address again with {again}, or have fsspec add the password (docs/data.md)."
            )
        if "://" not in root and not Path(root).is_absolute():
            raise ConfigError(
                f"The run in {folder} was trained on the folder {root!r} of the machine it was pushed from. Only its "
                f"name is stored on the Hub: say where it is on this machine with {again}."
            )


def continued_config(folder: Path, command: TrainConfig) -> TrainConfig:
    """The settings of a run that has started, when the same command is given again."""
    saved, now = {**EARLIER, **flatten(read_run(folder))}, flatten(command.to_dict())
    default = flatten(TrainConfig(policy=type(command.policy)()).to_dict())
    settings = saved | {k: v for k, v in now.items() if may_change(k) or same_setting(saved.get(k), v)}
    # a run chooses some settings itself (order, features, global batch): its command does not give them
    fixed = [key for key in now if not may_change(key) and now[key] != default.get(key)]
    if named := _differences(saved, now, [key for key in fixed if key in saved]):
        raise CheckpointError(
            f"{folder} already holds a run with other settings: {named}. Choose another --output_dir."
        )
    require_trust(code_in(settings), folder / RUN_CONFIG)
    settings.pop("policy_path", None)
    config = build_config({**settings, "output_dir": str(folder)})
    return replace(config, policy_path=command.policy_path)


def _differences(before: Mapping[str, Any], now: Mapping[str, Any], keys: Sequence[str]) -> str:
    """A text about the settings among `keys` that are not the same."""
    differing = [key for key in keys if not same_setting(before.get(key), now[key])]
    return "; ".join(f"{key} was {before.get(key)!r}, is now {now[key]!r}" for key in differing)


def newest_checkpoint(folder: Path) -> Path:
    newest = checkpoint.newest(folder / "checkpoints")
    if newest is None:
        raise CheckpointError(
            f"{folder} has no complete checkpoint to resume from. Start again in another folder with "
            f"`flexor train --config {folder / RUN_CONFIG} --output_dir=...`."
        )
    checkpoint.verify(newest)
    return newest


def check_same_run(source: Path, state: TrainState) -> None:
    """Refuse to resume from a checkpoint of another dataset or with other settings, and name the difference."""
    config = state.config
    saved = checkpoint.read_state(source, "flexor.json")
    if not isinstance(saved, dict) or not isinstance(saved.get("config"), dict):
        raise CheckpointError(f"{source} is damaged: flexor.json has no settings.")
    _check_same_data(source, saved, state)
    # settings that did not exist when the run started count as their defaults
    default = {**flatten(TrainConfig(policy=type(config.policy)()).to_dict()), **EARLIER}
    before, now = {**default, **flatten(saved["config"])}, flatten(config.to_dict())
    if named := _differences(before, now, [key for key in now if not may_change(key)]):
        raise CheckpointError(f"{source} was trained with other settings: {named}.")
    if before["steps"] != now["steps"] and SCHEDULES[config.scheduler.type or "constant"].stretches:
        log.warning(
            "steps was %d, is now %d: the %s schedule stretches to the new length, so the learning rate jumps here",
            *(before["steps"], now["steps"], now["scheduler.type"]),
        )


def _check_same_data(source: Path, saved: dict[str, Any], state: TrainState) -> None:
    """A run from before contents were saved is compared by episodes, lengths and file sizes."""
    now = state.identity.summary() if state.identity else {}
    before = saved.get("dataset_content")
    before = before if isinstance(before, dict) else {}
    differing = [kind for kind in now if before.get(kind) and now[kind] and before[kind] != now[kind]]
    if saved.get("dataset_fingerprint") == state.fingerprint and not differing:
        return
    named = _changed_data(source, state.identity)
    change = f"changed: {', '.join(named)}" if named else "its episodes, lengths, files or weights differ"
    raise CheckpointError(
        f"The dataset is not the one that {source} was trained on ({change}). Restore that dataset, or start a new run "
        "with --policy.path."
    )


def _changed_data(source: Path, identity: DataIdentity | None) -> list[str]:
    """The files that have changed since the run started, or that differ between two machines."""
    before = read_data_files(source.parent.parent)
    if identity is None or not before:
        return []
    now = identity.to_json()
    named = [name for kind in before if now.get(kind) for name in differences(before[kind] or {}, now[kind])]
    return [*named[:NAMED], *([f"and {len(named) - NAMED} more"] if len(named) > NAMED else [])]


def keep_statistics(source: Path, state: TrainState) -> None:
    """Normalise as before, also if meta/stats.json has changed since: the checkpoint has the run's statistics."""
    changed: list[str] = []
    for pipeline in (state.preprocessor, state.postprocessor):
        saved = Pipeline.load(source / PRETRAINED, pipeline.name)
        steps = pipeline.saved_steps
        if len(saved.steps) != len(steps):
            raise CheckpointError(
                f"{source} is damaged: {pipeline.name}.json has {len(saved.steps)} steps, not {len(steps)}."
            )
        for before, now in zip(saved.steps, steps):
            if differing := _differing(before.state(), now.state()):
                _load_statistics(source, now, before.state())
                changed += differing
    if (file := source / TRAINING_STATE / STATISTICS).is_file():
        by_dataset = load_file(file)
        if differing := _differing(by_dataset, statistics_by_dataset(state.preprocessor)):
            for step in state.preprocessor.steps:
                if isinstance(step, NormalizeByDataset):
                    step.load_by_dataset(by_dataset)
            changed += differing
    if changed:
        log.info(
            "the dataset's statistics have changed since this run started (%s): it continues with those that %s has",
            *(", ".join(changed[:NAMED]), source.name),
        )


def _load_statistics(source: Path, step: ProcessingStep, state: dict[str, Tensor]) -> None:
    missing = step.missing() if isinstance(step, NormalizationStep) else {}
    step.load_state(state)
    if isinstance(step, NormalizationStep) and step.missing() != missing:
        raise CheckpointError(f"{source} is damaged: it lacks statistics of {', '.join(step.missing())}.")


def _differing(before: Mapping[str, Tensor], now: Mapping[str, Tensor]) -> list[str]:
    same = [k for k in before.keys() & now.keys() if torch.equal(before[k].float(), now[k].float())]
    return sorted((before.keys() | now.keys()) - {*same})
