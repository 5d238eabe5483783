"""Which settings must stay the same when a run resumes, and which may change."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from flexor.config.accelerate_flags import accelerate_settings
from flexor.config.parse import build_config, code_in, flatten, parse_flags, read_run
from flexor.config.schedules import SCHEDULES
from flexor.config.schema import TrainConfig
from flexor.core.errors import CheckpointError, ConfigError
from flexor.core.log import log
from flexor.core.run_files import PRETRAINED, RUN_CONFIG
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
    for key in changes:
        if not may_change(key):
            raise ConfigError(
                f"{key} can't change when a run resumes. Start a new run from its weights with "
                f"`flexor train --policy.path={folder} ...`. These settings may change: {', '.join(allowed)}."
            )
    trust(code_in(changes))
    require_trust(code_in({**saved, **changes}), folder / RUN_CONFIG)
    # the checkpoint has the weights: the policy that the run started from may be gone
    policy_path = saved.pop("policy_path", None)
    config = build_config(saved, {**changes, "output_dir": str(folder)})
    config.policy_path = policy_path
    return config


def continued_config(folder: Path, wanted: TrainConfig) -> TrainConfig:
    """The settings of a run that has started, when the same command is given again."""
    saved, now = {**EARLIER, **flatten(read_run(folder))}, flatten(wanted.to_dict())
    default = flatten(TrainConfig(policy=type(wanted.policy)()).to_dict())
    settled = {**saved, **{key: value for key, value in now.items() if may_change(key)}}
    # a run chooses some settings itself (order, features, global batch): its command does not give them
    given = [key for key in now if not may_change(key) and now[key] != default.get(key)]
    differing = [key for key in given if key in saved and saved[key] != now[key]]
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
    differing = [key for key in now if not may_change(key) and now[key] != before.get(key)]
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
