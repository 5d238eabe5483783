"""Which settings must stay the same when a run resumes, and which may change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from flexor.config.accelerate_flags import accelerate_settings
from flexor.config.parse import DATASETS, build_config, code_in, flatten, parse_flags, read_run
from flexor.config.schedules import SCHEDULES
from flexor.config.schema import TrainConfig
from flexor.core.errors import CheckpointError, ConfigError
from flexor.core.log import log
from flexor.core.published import same_setting
from flexor.core.run_files import PRETRAINED, RUN_CONFIG
from flexor.core.secrets import HIDDEN
from flexor.core.trust import require_trust, trust
from flexor.core.typed import changeable
from flexor.policies.processing.pipeline import PREPROCESSOR, Pipeline
from flexor.train.checkpoint import folder as checkpoint


def may_change(key: str) -> bool:
    """Whether a run may resume with another value of a setting. Each setting declares this itself."""
    return any(key == known or (known.endswith(".*") and key.startswith(known[:-1])) for known in CHANGEABLE)


CHANGEABLE = changeable(TrainConfig)
# What runs did before these settings existed; today's defaults depend on the GPU.
EARLIER = {"precision": "no", "channels_last": False}


def resumed_config(folder: Path, argv: Sequence[str]) -> TrainConfig:
    """The run's settings with the changes in `argv`. Refuses settings that may not change."""
    changes = parse_flags(argv)
    if "output_dir" in changes:
        raise ConfigError(f"A run resumes in its own folder, {folder}: leave output_dir out.")
    saved = {**EARLIER, **flatten(read_run(folder))}
    said = accelerate_settings(changes)
    changes |= {key: value for key, value in said.items() if saved.get(key) != value}
    allowed = sorted({*CHANGEABLE} - {"output_dir"})
    trust(code_in(changes))
    for key in [key for key in changes if not may_change(key)]:
        if not same_setting(saved.get(key), changes[key]):
            raise ConfigError(
                f"{key} can't change when a run resumes. Start a new run from its weights with "
                f"`flexor train --policy.path={folder} ...`. These settings may change: {', '.join(allowed)}."
            )
        saved[key] = changes.pop(key)  # such as a path, of which a pushed run has only the name
    require_trust(code_in({**saved, **changes}), folder / RUN_CONFIG)
    # the checkpoint has the weights: the policy that the run started from may be gone
    policy_path = saved.pop("policy_path", None)
    if not DATASETS & changes.keys():
        _check_roots(folder, saved)
    config = build_config(saved, {**changes, "output_dir": str(folder)})
    config.policy_path = policy_path
    return config


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


def continued_config(folder: Path, wanted: TrainConfig) -> TrainConfig:
    """The settings of a run that has started, when the same command is given again."""
    saved, now = {**EARLIER, **flatten(read_run(folder))}, flatten(wanted.to_dict())
    default = flatten(TrainConfig(policy=type(wanted.policy)()).to_dict())
    same = {
        key: value for key, value in now.items() if may_change(key) or same_setting(saved.get(key), value)
    }
    settled = {**saved, **same}
    # a run chooses some settings itself (order, features, global batch): its command does not give them
    given = [key for key in now if not may_change(key) and now[key] != default.get(key)]
    differing = [key for key in given if key in saved and not same_setting(saved[key], now[key])]
    if differing:
        named = "; ".join(f"{key} was {saved[key]!r}, is now {now[key]!r}" for key in differing)
        raise CheckpointError(
            f"{folder} already holds a run with other settings: {named}. Choose another --output_dir."
        )
    require_trust(code_in(settled), folder / RUN_CONFIG)
    settled.pop("policy_path", None)
    config = build_config({**settled, "output_dir": str(folder)})
    config.policy_path = wanted.policy_path
    return config


def newest_checkpoint(folder: Path) -> Path:
    found = checkpoint.newest(folder / "checkpoints")
    if found is None:
        raise CheckpointError(
            f"{folder} has no complete checkpoint to resume from. Start again in another folder with "
            f"`flexor train --config {folder / RUN_CONFIG} --output_dir=...`."
        )
    checkpoint.verify(found)
    return found


def check_same_run(found: Path, config: TrainConfig, fingerprint: str, preprocessor: Pipeline) -> None:
    """Refuse to resume with another dataset or other settings, and name the difference."""
    saved = checkpoint.read_state(found, "flexor.json")
    if saved["dataset_fingerprint"] != fingerprint:
        raise CheckpointError(
            f"The dataset is not the one that {found} was trained on (its episodes, lengths, files "
            "or weights differ). Restore that dataset, or start a new run with --policy.path."
        )
    # settings that did not exist when the run started count as their defaults
    default = {**flatten(TrainConfig(policy=type(config.policy)()).to_dict()), **EARLIER}
    before, now = {**default, **flatten(saved["config"])}, flatten(config.to_dict())
    differing = [key for key in now if not may_change(key) and not same_setting(before.get(key), now[key])]
    if differing:
        named = "; ".join(f"{key} was {before.get(key)!r}, is now {now[key]!r}" for key in differing)
        raise CheckpointError(f"{found} was trained with other settings: {named}.")
    _check_statistics(found, preprocessor)
    if before["steps"] != now["steps"] and SCHEDULES[config.scheduler.type or "constant"].stretches:
        log.warning(
            "steps was %d, is now %d: the %s schedule stretches to the new length, so the learning rate jumps here",
            before["steps"],
            now["steps"],
            now["scheduler.type"],
        )


def _check_statistics(found: Path, preprocessor: Pipeline) -> None:
    """Inputs must be normalised as before. The dataset's fingerprint does not include meta/stats.json."""
    saved = Pipeline.load(found / PRETRAINED, PREPROCESSOR)
    for before, now in zip(saved.steps, preprocessor.steps, strict=True):
        was, is_ = before.state(), now.state()
        differing = [k for k in is_ if k not in was or not torch.equal(was[k].float(), is_[k].float())]
        if differing:
            raise CheckpointError(
                f"The dataset's statistics are not those that {found} was trained with "
                f"({', '.join(differing[:3])} differ): restore meta/stats.json, or start a new run with "
                "--policy.path."
            )
