"""One optimizer step. Training and the planner both run this code."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flexor.core.batch import SAMPLE_ID
from flexor.core.rng import Noise
from flexor.monitor.meters import Meters
from flexor.policies.processing.pipeline import StepContext
from flexor.train.checkpoint.state import TrainState


def optimizer_step(
    state: TrainState, micro_batches: list[dict[str, Any]], meters: Meters
) -> tuple[Tensor, Tensor]:
    """One step: forward and backward for each micro-batch, clip, update.

    Returns this rank's part of the loss, and the norm of the whole gradient.
    """
    config, engine, split = state.config, state.engine, state.split
    total = torch.zeros((), device=engine.device)
    state.policy.begin_step(state.step)
    for micro, batch in enumerate(micro_batches):
        context = StepContext(training=True, noise=Noise(config.seed, state.step, batch[SAMPLE_ID]))
        batch = state.preprocessor(batch, context)
        noise = Noise(config.seed, state.step, batch[SAMPLE_ID])
        first = engine.rank * split.share + micro * split.batch_size  # index in the global batch
        with engine.accumulate(last=micro + 1 == len(micro_batches)):
            with engine.forward(config.seed, state.step, first):
                losses = engine.model(batch, noise)
                loss = losses.per_sample.float().sum() / split.global_batch
            engine.backward(loss)
        total += loss.detach()
        for name, part in losses.parts.items():
            meters.add(
                name, part.detach().float().sum() / split.global_batch * len(micro_batches), summed=True
            )

    assert config.optimizer.grad_clip_norm is not None
    norm = engine.clip_grad_norm(state.optimizer, config.optimizer.grad_clip_norm)
    engine.step(state.optimizer)
    state.scheduler.step()
    if state.ema:
        state.ema.update(state.policy)
    meters.add("loss", total, summed=True)
    meters.add("grad_norm", norm)
    return total, norm
