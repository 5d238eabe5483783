"""Trains a FAST tokenizer on the actions of a dataset: `flexor data tokenizer`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from flexor.core.batch import ACTION, STATE
from flexor.core.console import Progress, table
from flexor.core.errors import ConfigError
from flexor.core.typed import to_plain
from flexor.data.dataset import Dataset
from flexor.data.loader.loader import sample_rows
from flexor.policies.base import PolicyConfig
from flexor.policies.features import Kind, Normalization
from flexor.policies.fit import fit_to_dataset, statistics
from flexor.policies.nn.fast_tokens import FastTokenizer, train_fast_tokenizer
from flexor.policies.processing.normalize import Normalize
from flexor.policies.processing.pipeline import Pipeline
from flexor.policies.processing.relative_actions import RelativeActionSettings

BATCH = 4096  # chunks that are read at once
MAX_EVALUATED = 2000  # chunks that the tokenizer is evaluated on


@dataclass
class TokenizerSettings(RelativeActionSettings, PolicyConfig):
    """How the policy will process actions before they become tokens, and how the tokenizer is trained."""

    type: ClassVar[str] = "FAST tokenizer"

    chunk_size: int = 50
    """Steps of a chunk: policy.chunk_size."""
    normalization: Normalization = "MEAN_STD"
    """How actions are normalised: policy.normalization_mapping.ACTION."""
    vocab_size: int = 1024
    """Number of tokens."""
    scale: float = 10.0
    """Coefficients are rounded to multiples of 1 / scale: a larger one is more accurate and takes more tokens."""
    fraction: float = 0.1
    """The fraction of all chunks to train on, sampled at random."""
    seed: int = 0

    def validate(self) -> None:
        for name, low, high in (("chunk_size", 1, 10_000), ("scale", 1e-6, 1e6), ("fraction", 1e-9, 1)):
            if not low <= getattr(self, name) <= high:
                raise ConfigError(f"--{name}={getattr(self, name)} must be from {low:g} to {high:g}.")
        self.normalization_mapping = {Kind.ACTION: self.normalization}

    @property
    def action_deltas(self) -> list[int]:
        return list(range(self.chunk_size))


def tokenizer_of(
    dataset: Dataset, settings: TokenizerSettings, progress: Progress | None = None
) -> tuple[FastTokenizer, dict[str, Any]]:
    """A tokenizer for the dataset's actions, and how well it compresses and restores held-out ones."""
    settings.validate()
    fitted = fit_to_dataset(settings, dataset)
    assert isinstance(fitted, TokenizerSettings)
    settings = fitted
    stats = statistics(dataset, settings, use_imagenet=True)
    actions = Pipeline(
        "actions",
        [
            settings.relative_actions(),
            Normalize({ACTION: settings.action}, {Kind.ACTION: settings.normalization}, stats),
        ],
    )
    rows = np.random.default_rng(settings.seed).permutation(sample_rows(dataset, 0))
    count = max(1, round(settings.fraction * len(rows)))
    training, heldout = np.sort(rows[:count]), rows[count:]
    chunks = _chunks(dataset, settings, actions, training, progress)
    tokenizer = train_fast_tokenizer(chunks, settings.vocab_size, settings.scale)
    evaluated = np.sort((heldout if len(heldout) else rows)[:MAX_EVALUATED])
    measurements = [_measure(tokenizer, batch) for batch in _chunks(dataset, settings, actions, evaluated)]
    lengths, errors = (np.concatenate(arrays) for arrays in zip(*measurements))
    size = settings.chunk_size * settings.action.shape[0]
    return tokenizer, {
        "dataset": dataset.repo_id,
        "normalization_mode": settings.normalization,
        "use_relative_actions": settings.use_relative_actions,
        "relative_exclude_joints": settings.relative_exclude_joints,
        "action_horizon": settings.chunk_size,
        "action_dim": settings.action.shape[0],
        "vocab_size": tokenizer.bpe.get_vocab_size(),
        "scale": tokenizer.scale,
        "num_training_chunks": count,
        "compression_ratio": size / float(lengths.mean()),
        "mean_token_length": float(lengths.mean()),
        "p99_token_length": float(np.percentile(lengths, 99)),
        "max_token_length": int(lengths.max()),
        "error_rms": float(np.sqrt(np.square(errors).mean())),
        "error_max": float(np.abs(errors).max()),
    }


def _chunks(
    dataset: Dataset,
    settings: TokenizerSettings,
    actions: Pipeline,
    rows: np.ndarray,
    progress: Progress | None = None,
) -> Iterator[np.ndarray]:
    """Chunks [n, H, A] as the policy gets them: the last action of an episode is repeated."""
    for first in range(0, len(rows), BATCH):
        frames = dataset.read(rows[first : first + BATCH], {ACTION: settings.action_deltas}, [])
        batch = {name: torch.from_numpy(frames[name]).float() for name in (ACTION, STATE) if name in frames}
        yield actions(batch)[ACTION].numpy()
        if progress is not None:
            progress(min(first + BATCH, len(rows)), len(rows))


def _measure(tokenizer: FastTokenizer, chunks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The number of tokens of each chunk, and the errors of its actions, in units of normalised actions."""
    tokens = tokenizer.encode(chunks)
    restored = tokenizer.decode(tokens, *chunks.shape[1:]).actions
    return np.array([len(row) for row in tokens]), (restored - chunks).ravel()


def save_tokenizer(tokenizer: FastTokenizer, report: dict[str, Any], folder: Path) -> None:
    tokenizer.save(folder)
    (folder / "metadata.json").write_text(json.dumps(to_plain(report), indent=2))


def render(report: dict[str, Any], folder: Path) -> str:
    rows = [
        (
            "trained on",
            f"{report['num_training_chunks']} chunks of {report['action_horizon']} x {report['action_dim']}",
        ),
        ("vocabulary", f"{report['vocab_size']} tokens"),
        (
            "tokens of a chunk",
            f"{report['mean_token_length']:.1f} on average, {report['p99_token_length']:.0f} in 99 % of them, "
            f"at most {report['max_token_length']}",
        ),
        ("compression", f"{report['compression_ratio']:.1f} values per token"),
        ("error", f"{report['error_rms']:.3g} rms, {report['error_max']:.3g} at most (normalised actions)"),
    ]
    use = f"--policy.action_tokenizer_name={folder} --policy.chunk_size={report['action_horizon']}"
    return f"{table(rows)}\n\nTrain with {use}"
