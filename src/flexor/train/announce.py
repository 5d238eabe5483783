"""What a run logs before it starts: the policy, the dataset, and which rank runs where."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from flexor.core.log import log
from flexor.data.dataset import Dataset
from flexor.data.mixture.mixed import MixedDataset
from flexor.data.settings import ImageTransformsConfig
from flexor.policies.augment.operations import describe_transforms
from flexor.train.checkpoint.state import TrainState
from flexor.train.engine.base import Engine

PRECISIONS = {"no": "float32"}


def log_setup(state: TrainState, training: Dataset, held_out: Dataset | None, resumed: Path | None) -> None:
    """Log in a few lines what is about to be trained; `resumed`: from which checkpoint."""
    config = state.config
    parameters = list(state.policy.parameters())
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    total = sum(p.numel() for p in parameters)
    part = "all" if trained == total else f"{trained / 1e6:.1f} M"
    device = state.engine.device if state.engine.world_size == 1 else f"{state.engine.world_size} processes"
    precision = PRECISIONS.get(state.engine.precision, state.engine.precision)
    log.info(
        "%s: %.1f M parameters, %s trained, on %s in %s",
        *(config.policy.type, total / 1e6, part, device, precision),
    )
    _log_ranks(state.engine)
    also = f" and {len(held_out.episodes)} held out" if held_out is not None else ""
    log.info("%s: %d episodes, %d frames%s", training.repo_id, len(training.episodes), len(training), also)
    if isinstance(training, MixedDataset):
        _log_members(training)
    if state.augmentation is not None:
        log.info("image augmentation: %s", describe_transforms(config.dataset.image_transforms))
    elif replace(config.dataset.image_transforms, enable=True) != ImageTransformsConfig(enable=True):
        log.warning(
            "dataset.image_transforms is set, but images are not augmented: --dataset.image_transforms.enable=true "
            "is missing"
        )
    if config.env.type and config.env_eval_freq > config.steps:
        text = "env.type=%s has no effect in a run of %d steps with env_eval_freq=%d"
        log.info(text, config.env.type, config.steps, config.env_eval_freq)
    rates = ", ".join(dict.fromkeys(f"{group['initial_lr']:g}" for group in state.optimizer.param_groups))
    batch = f"{state.split.global_batch} samples each{state.split.parts}"
    optimizer = config.optimizer.type
    if state.step < config.steps:
        log.info(
            "steps %d to %d of %s, %s, learning rate %s", state.step, config.steps, batch, optimizer, rates
        )
    else:
        log.info("this run is finished, at step %d; --steps=N trains longer", state.step)
    log.info("run folder %s%s", config.output_dir, f", resuming from {resumed.name}" if resumed else "")


def _log_members(training: MixedDataset) -> None:
    """Log what each dataset has, and its share of the samples."""
    member = training.member_of(training.episodes.index)  # of each episode
    frames = np.bincount(member, training.episodes.length, len(training.members))
    weights = [frames[i] if m.weight is None else m.weight for i, m in enumerate(training.members)]
    for i, m in enumerate(training.members):
        weighted = f", {len(m.episode_weights)} episodes with weights" if m.episode_weights else ""
        counts = (member == i).sum(), frames[i], 100 * weights[i] / sum(weights)
        log.info("  %s: %d episodes, %d frames, %.1f %% of the samples%s", m.name, *counts, weighted)


def _log_ranks(engine: Engine) -> None:
    """Log which rank runs on which device of which host, and what is sharded."""
    if not engine.processes.joined:
        return
    cuda = engine.device.type == "cuda"
    name = f"{engine.device} ({torch.cuda.get_device_name(engine.device)})" if cuda else "cpu"
    for rank, (host, device) in enumerate(engine.processes.gather((engine.processes.host, name))):
        log.info("rank %d: %s on %s", rank, device, host)
    log.info("%s: %s", engine.strategy, engine.describe())
