"""Evaluation during training: the loss on held-out episodes, the success rate in an environment."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flexor.core.batch import ACTION, BATCH_PLACE, SAMPLE_ID, VALID_STEPS, Batch
from flexor.core.rng import Noise, NoiseSource
from flexor.core.tensors import local
from flexor.data.dataset import Dataset
from flexor.data.loader.loader import sample_rows, to_tensors, valid_steps
from flexor.evaluate.play import play
from flexor.evaluate.rollout import PolicyActor, summarize
from flexor.policies.base import Policy
from flexor.policies.fit import sample_of
from flexor.policies.pretrained import Pretrained
from flexor.policies.weight_names import unique_state
from flexor.train.checkpoint.run_folder import Run
from flexor.train.checkpoint.state import TrainState
from flexor.train.compile import not_compiled


@contextmanager
def exported_weights(state: TrainState) -> Iterator[None]:
    """Inside, the policy has the weights that a checkpoint would export: the moving average (EMA) if there is one.

    bfloat16 weights compute in bfloat16, all others in float32, as after export. So does a policy whose frozen weights
    are stored in bfloat16: after export it may compute in float32. Nothing is compiled.
    """
    config = state.config
    in_bf16 = config.weights_dtype == "bf16" or state.engine.frozen_in_bf16
    was_training = state.policy.training
    state.policy.eval()
    raw: dict[str, Tensor] = {}
    if state.ema:
        raw = {name: local(value).detach().clone() for name, value in unique_state(state.policy).items()}
        _replace(state.policy, state.ema.average)
    try:
        with (
            state.engine.autocast() if in_bf16 else nullcontext(),
            not_compiled() if config.compile else nullcontext(),
        ):
            yield
    finally:
        if raw:
            _replace(state.policy, raw)
        state.policy.train(was_training)


@torch.no_grad()
def _replace(policy: Policy, values: dict[str, Tensor]) -> None:
    """Copy values into the policy. Each rank copies its own shard of each tensor."""
    for name, tensor in unique_state(policy).items():
        local(tensor).copy_(local(values[name]))


@torch.no_grad()
def held_out_loss(state: TrainState, dataset: Dataset, max_samples: int = 0) -> dict[str, float]:
    """Mean loss over held-out samples, and the parts of it that the policy wants reported.

    `max_samples` of them, evenly spread, or all (0). Each rank computes a share.
    """
    config, engine = state.config, state.engine
    rows = sample_rows(dataset, config.policy.drop_last_frames)
    if max_samples and len(rows) > max_samples:
        rows = rows[np.linspace(0, len(rows) - 1, max_samples).astype(int)]
    cameras, deltas = sample_of(config.policy, config.rename_map)
    # over all rows, or the loss would depend on the batch size
    valid = valid_steps(dataset, rows[None], deltas)[0] if ACTION in deltas else None
    names = state.policy.evaluated_parts
    total = torch.zeros(1 + len(names), device=engine.device)
    size = state.split.batch_size
    with exported_weights(state):
        for start in range(0, len(rows), size * engine.world_size):
            part = rows[start + engine.rank * size :][:size]
            # sharded ranks compute together: a rank without rows computes one that does not count
            samples = to_tensors(dataset.read(part if len(part) else rows[:1], deltas, cameras))
            first = start + engine.rank * size
            places = torch.arange(first, first + len(samples[SAMPLE_ID])) / len(rows)
            batch = state.preprocessor({**samples, VALID_STEPS: valid, BATCH_PLACE: places})
            noise = Noise(config.seed, 0, batch[SAMPLE_ID])
            with engine.autocast():
                loss = state.policy.loss(batch, noise)
            values = torch.stack([loss.per_sample, *(loss.parts[name] for name in names)]).float()
            total += values.sum(1) * (len(part) > 0)
    means = (engine.sum(total) / len(rows)).tolist()
    return dict(zip(("held_out_loss", *(f"held_out_{name}" for name in names)), means))


def evaluate(state: TrainState, run: Run) -> dict[str, Any]:
    """Run episodes with the policy as it would be after export.

    Rank 0 runs the environment. The other ranks wait, or compute with rank 0 if the model is sharded.
    """
    config, processes = state.config, state.engine.processes
    summary: dict[str, Any] = {}
    with exported_weights(state):
        if processes.is_main:
            videos = run.videos / f"{state.step:06d}"
            actor = PolicyActor(pretrained_of(state), config.seed)
            try:
                summary = asdict(summarize(play(actor, config.env, config.eval, videos)))
            finally:
                _broadcast(state, None)
        elif state.engine.sharded:
            follow(state)
    return {f"eval_{name}": value for name, value in processes.share(lambda: summary).items()}


def pretrained_of(state: TrainState) -> Pretrained:
    """The run's policy as it would be after export; use it inside `exported_weights`."""
    parts = state.policy, state.preprocessor, state.postprocessor
    return ShardedPretrained(*parts, state) if state.engine.sharded else Pretrained(*parts)


@dataclass
class ShardedPretrained(Pretrained):
    """On rank 0: sends what to compute to the other ranks, because each rank has only a shard of the weights."""

    state: TrainState

    @torch.no_grad()  # not inference mode: sharded weights gathered in it can't be trained afterwards
    def predict(self, batch: Batch, noise: NoiseSource) -> Tensor:
        _broadcast(self.state, (move(batch, "cpu"), noise))
        return self.policy.predict(batch, noise)


@torch.no_grad()
def follow(state: TrainState) -> None:
    """On the other ranks: compute what rank 0 sends, until it sends None."""
    while (inputs := _broadcast(state, None)) is not None:
        batch, noise = inputs
        state.policy.predict(move(batch, state.engine.device), noise.to(state.engine.device))


def _broadcast(state: TrainState, value: Any) -> Any:
    """Send a value from rank 0 to the other ranks, if the model is sharded."""
    return state.engine.processes.share(lambda: value) if state.engine.sharded else None


def move(batch: Batch, device: torch.device | str) -> Batch:
    """The batch on `device`, with the policy's memory, which is a batch within the batch."""

    def moved(value: Any) -> Any:
        if isinstance(value, dict):
            return move(value, device)
        return value.to(device) if isinstance(value, Tensor) else value

    return {key: moved(value) for key, value in batch.items()}
