"""What a policy was trained on, as far as its folder says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from flexor.core.batch import ACTION, STATE
from flexor.core.errors import FlexorError
from flexor.core.foreign_files import MALFORMED, read_json_object
from flexor.core.log import log
from flexor.core.run_files import TRAINING_DATA
from flexor.data.check.summary import CameraSummary, DataSummary, ValueSummary
from flexor.policies.base import PolicyConfig
from flexor.policies.features import Kind
from flexor.policies.fit import IMAGENET
from flexor.policies.pretrained import find_folder, read_config, saved_rename_map
from flexor.policies.processing.normalize import Normalize
from flexor.policies.processing.pipeline import PREPROCESSOR, load_step, read_steps
from flexor.policies.processing.tokenize import TASK_TOKENS, Tokenize

Tokens = Callable[[Sequence[str]], list[tuple[int, ...]]]


@dataclass(frozen=True)
class TrainedOn:
    """Values and cameras are by the policy's names; what is not known is empty."""

    config: PolicyConfig
    values: dict[str, ValueSummary] = field(default_factory=dict)
    cameras: dict[str, CameraSummary] = field(default_factory=dict)
    fps: float | None = None
    tasks: dict[str, int] = field(default_factory=dict)
    action_kind: str | None = None
    rename_map: dict[str, str] = field(default_factory=dict)
    reads_words: bool = False
    tokens: Tokens | None = None
    """The tokens of tasks, if its tokenizer is on this machine."""
    relative: bool = False
    """The policy makes absolute actions relative itself, so that its statistics are of relative ones."""


def read_trained_on(path: str) -> TrainedOn:
    """From the statistics of the policy's processing and from the description of its data, if there is one."""
    folder = find_folder(path, ("*.json", f"{PREPROCESSOR}*.safetensors"))
    config = read_config(str(folder))
    summary = _read_summary(folder / TRAINING_DATA)
    normalize, tokenize, reads_words = _steps(folder)
    values = dict(summary.values) if summary else {}
    cameras = dict(summary.cameras) if summary else {}
    relative = bool(getattr(config, "use_relative_actions", False))
    if normalize is not None:
        for name in (STATE, ACTION):
            if (
                name not in values
                and not (name == ACTION and relative)
                and (ranges := _values(normalize, name))
            ):
                values[name] = ranges
        for name, feature in normalize.features.items():
            if feature.type is Kind.VISUAL and name not in cameras and (look := _look(normalize, name)):
                cameras[name] = look
    return TrainedOn(
        config=config,
        values=values,
        cameras=cameras,
        fps=summary.fps if summary else None,
        tasks=dict(summary.tasks) if summary else {},
        action_kind=summary.action_kind if summary else _kind_by_statistics(values),
        rename_map=saved_rename_map(folder),
        reads_words=reads_words,
        tokens=None if tokenize is None else _tokens_of(tokenize),
        relative=relative,
    )


def _read_summary(file: Path) -> DataSummary | None:
    if not file.is_file():
        return None
    try:
        return DataSummary.of_json(read_json_object(file))
    except (FlexorError, *MALFORMED, OSError) as error:
        log.warning("%s is not used, as it does not describe data: %s", file, error)
        return None


def _steps(folder: Path) -> tuple[Normalize | None, Tokenize | None, bool]:
    """The steps with statistics and with words, and whether there are words."""
    file = folder / f"{PREPROCESSOR}.json"
    normalize, tokenize, reads_words = None, None, False
    for entry in read_steps(file) if file.is_file() else []:
        name = entry.get("registry_name")
        if name == Normalize.name:
            step = load_step(file, entry)
            normalize = step if isinstance(step, Normalize) else None
        elif name == Tokenize.name:
            reads_words = True
            try:
                step = load_step(file, entry)
                step.prepare()
                tokenize = step if isinstance(step, Tokenize) else None
            except (FlexorError, OSError) as error:  # not on this machine: tasks are compared as texts
                log.debug("no tokenizer: %s", error)
    return normalize, tokenize, reads_words


def _values(normalize: Normalize, name: str) -> ValueSummary | None:
    """The ends are the extremes: recorded quantiles are averages of the episodes', which lie closer together."""
    stats = {key: value.flatten().double().numpy() for key, value in normalize.stats.get(name, {}).items()}
    low, high = (
        next((stats[key] for key in keys if key in stats), None) for keys in (("min", "q01"), ("max", "q99"))
    )
    if low is None or high is None:
        if "mean" not in stats or "std" not in stats:
            return None
        low, high = (stats["mean"] + sign * 2 * stats["std"] for sign in (-1, 1))
    mean, std = stats.get("mean", (low + high) / 2), stats.get("std", (high - low) / 4)
    return ValueSummary([], mean.tolist(), std.tolist(), low.tolist(), high.tolist(), [])


def _look(normalize: Normalize, name: str) -> CameraSummary | None:
    """A camera's mean colour; None if its statistics are those of ImageNet."""
    stats = {key: value.flatten().double().numpy() for key, value in normalize.stats.get(name, {}).items()}
    mean, std = stats.get("mean"), stats.get("std")
    if mean is None or std is None or mean.shape != (3,) or np.allclose(mean, IMAGENET["mean"], atol=1e-3):
        return None
    return CameraSummary([[(255 * mean).tolist()]], [[(255 * std).tolist()]])


def _kind_by_statistics(values: dict[str, ValueSummary]) -> str | None:
    """Absolute actions have the statistics of the state, relative ones are small and about zero."""
    if values.keys() < {STATE, ACTION}:
        return None
    state, action = values[STATE], values[ACTION]
    if len(state.mean) != len(action.mean):
        return None
    deviation = np.maximum(np.array(state.std), 1e-9)
    distance = np.abs(np.array(action.mean) - np.array(state.mean)) / deviation
    size = np.array(action.std) / deviation
    if np.mean((distance < 0.5) & (size > 0.5) & (size < 2)) > 0.6:
        return "absolute"
    return None


def _tokens_of(tokenize: Tokenize) -> Tokens:
    def tokens(tasks: Sequence[str]) -> list[tuple[int, ...]]:
        rows = tokenize({tokenize.task_key: list(tasks)})[TASK_TOKENS]
        return [tuple(row) for row in rows.tolist()]

    return tokens
