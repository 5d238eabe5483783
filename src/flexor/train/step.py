"""One optimizer step: what is trained, planned and measured. `graph.py` replays it as CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flexor.core.batch import BATCH_PLACE, SAMPLE_ID, SAMPLE_WEIGHT, VALID_STEPS, Batch
from flexor.core.rng import Noise
from flexor.monitor.meters import Meters
from flexor.policies.nn.recompute import DROPOUT
from flexor.policies.processing.pipeline import StepContext
from flexor.train.checkpoint.state import TrainState


@dataclass
class StepFigures:
    """This rank's part of the loss and of its parts, and the norm of the whole gradient."""

    loss: Tensor
    norm: Tensor
    parts: dict[str, Tensor]


def optimizer_step(
    state: TrainState,
    micro_batches: list[Batch],
    meters: Meters,
    compute: Callable[[TrainState, list[Batch]], StepFigures] | None = None,
) -> tuple[Tensor, Tensor]:
    """One step: forward and backward for each micro-batch, clip, update; by `compute` instead of `compute_step`.

    Returns this rank's part of the loss, and the norm of the whole gradient.
    """
    state.policy.begin_step(state.step)
    figures = (compute or compute_step)(state, with_places(state, micro_batches))
    state.scheduler.step()
    for name, part in figures.parts.items():
        meters.add(name, part, summed=True)
    meters.add("loss", figures.loss, summed=True)
    meters.add("grad_norm", figures.norm)
    return figures.loss, figures.norm


def compute_step(state: TrainState, micro_batches: list[Batch]) -> StepFigures:
    """What the device does, operation by operation, with batches that went through `state.host_steps`."""
    set_rates(state)
    total = torch.zeros((), device=state.engine.device)
    parts: dict[str, Tensor] = {}
    for micro, batch in enumerate(micro_batches):
        seed_dropout(state, micro)
        last = micro + 1 == len(micro_batches)
        with state.engine.accumulate(last):
            noise = Noise(state.config.seed, state.step, batch[SAMPLE_ID])
            loss, new_parts = forward_backward(state, on_device(batch, state.engine.device), noise)
        if not last:
            state.times.mark("backward")
        total += loss
        for name, part in new_parts.items():
            parts[name] = parts[name] + part if name in parts else part
    state.engine.finish_backward(state.times)
    norm = update_weights(state)
    state.times.mark("optimizer")
    return StepFigures(total, norm, parts)


def set_rates(state: TrainState) -> None:
    """Write what changes from step to step to where the step reads it."""
    state.engine.set_learning_rates(state.optimizer)
    if state.ema:
        state.ema.begin_step()


def with_places(state: TrainState, micro_batches: list[Batch]) -> list[Batch]:
    """The micro-batches with the places of their samples in the global batch, if the policy needs them."""
    if not state.config.policy.draws_by_place:
        return micro_batches
    total = state.split.global_batch
    return [
        {**batch, BATCH_PLACE: (torch.arange(len(batch[SAMPLE_ID])) + _first_place(state, micro)) / total}
        for micro, batch in enumerate(micro_batches)
    ]


def _first_place(state: TrainState, micro: int) -> int:
    """The place of a micro-batch's first sample in the global batch."""
    return state.engine.rank * state.split.share + micro * state.split.batch_size


def seed_dropout(state: TrainState, micro: int) -> None:
    """Dropout depends on the step and the place in the global batch."""
    state.engine.seed_dropout(state.config.seed, state.step, _first_place(state, micro))
    DROPOUT.begin_pass()


def on_device(batch: Batch, device: torch.device) -> Batch:
    """On a GPU, and in its plan, the one number of a batch becomes a tensor: a CUDA graph needs it as one."""
    valid = batch.get(VALID_STEPS)
    if device.type not in ("cuda", "meta") or valid is None:
        return batch
    return {**batch, VALID_STEPS: torch.full((), valid, dtype=torch.float64, device=device)}


def forward_backward(state: TrainState, batch: Batch, noise: Noise) -> tuple[Tensor, dict[str, Tensor]]:
    """One micro-batch: its gradients are accumulated. Returns its share of the loss, and of the loss's parts."""
    engine, split = state.engine, state.split
    prepared = state.device_preprocessor(batch, StepContext(training=True, noise=noise))
    if noise.sample_ids.device != engine.device:
        noise = noise.to(engine.device)
    with engine.forward():
        losses = engine.model(prepared, noise)
        loss = _weighted(losses.per_sample, prepared).sum() / split.global_batch
    state.times.mark("forward")
    engine.backward(loss)
    parts = {n: _weighted(p.detach(), prepared).sum() / split.global_batch for n, p in losses.parts.items()}
    return loss.detach(), parts


def _weighted(per_sample: Tensor, batch: Batch) -> Tensor:
    """Losses [B] times the weights of their samples, which the loader scales to a mean of 1 over the global batch."""
    weight = batch.get(SAMPLE_WEIGHT)
    return per_sample.float() if weight is None else per_sample.float() * weight


def update_weights(state: TrainState) -> Tensor:
    """Clip and apply the gradient, and move the average of the weights; the norm of the gradient."""
    limit = state.config.optimizer.grad_clip_norm
    assert limit is not None
    norm = state.engine.clip_grad_norm(state.optimizer, limit)
    state.engine.step(state.optimizer)
    if state.ema:
        state.ema.update(state.policy)
    return norm
