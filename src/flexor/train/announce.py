"""What a run logs before it starts: the policy, the dataset, and which rank runs where."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from flexor.core.log import log
from flexor.data.dataset import Dataset
from flexor.data.mixture.mixed import MixedDataset
from flexor.train.checkpoint.state import TrainState
from flexor.train.engine.base import Engine


def introduce(state: TrainState, training: Dataset, held_out: Dataset | None, found: Path | None) -> None:
    """Log in a few lines what is about to be trained."""
    config = state.config
    parameters = list(state.policy.parameters())
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    total = sum(p.numel() for p in parameters)
    log.info(
        "%s: %.1f M parameters, %.1f M trained, on %s, precision %s",
        config.policy.type,
        total / 1e6,
        trained / 1e6,
        state.engine.device if state.engine.world_size == 1 else f"{state.engine.world_size} processes",
        state.engine.precision,
    )
    _introduce_ranks(state.engine)
    held = f" and {len(held_out.episodes)} held out" if held_out is not None else ""
    log.info("%s: %d episodes, %d frames%s", training.repo_id, len(training.episodes), len(training), held)
    if isinstance(training, MixedDataset):
        _introduce_members(training)
    rates = ", ".join(f"{group['initial_lr']:g}" for group in state.optimizer.param_groups)
    log.info(
        "steps %d to %d, %d samples each (%s), %s lr %s",
        state.step,
        config.steps,
        state.split.global_batch,
        state.split,
        config.optimizer.type,
        rates,
    )
    log.info("run folder %s%s", config.output_dir, f", resuming from {found.name}" if found else "")


def _introduce_members(training: MixedDataset) -> None:
    """Log what each dataset has, and its share of the samples."""
    member = training.member_of(training.episodes.index)
    frames = np.bincount(member, training.episodes.length, len(training.members))
    weights = [frames[i] if m.weight is None else m.weight for i, m in enumerate(training.members)]
    for number, one in enumerate(training.members):
        log.info(
            "  %s: %d episodes, %d frames, %.1f %% of the samples%s",
            one.name,
            (member == number).sum(),
            frames[number],
            100 * weights[number] / sum(weights),
            f", {len(one.episode_weights)} episodes with weights" if one.episode_weights else "",
        )


def _introduce_ranks(engine: Engine) -> None:
    """Log which rank runs on which device of which host, and what is sharded."""
    if not engine.processes.joined:
        return
    cuda = engine.device.type == "cuda"
    name = f"{engine.device} ({torch.cuda.get_device_name(engine.device)})" if cuda else "cpu"
    for rank, (host, device) in enumerate(engine.processes.gather((engine.processes.host, name))):
        log.info("rank %d: %s on %s", rank, device, host)
    log.info("%s: %s", engine.strategy, engine.describe())
