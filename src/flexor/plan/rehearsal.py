"""A run without data and without memory: the trainer's own step on the meta device, for a plan to watch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flexor.batch import ACTION, REWARD, SAMPLE_ID, VALID_STEPS, Batch
from flexor.config import TrainConfig
from flexor.data.planes import PlaneFormat
from flexor.data.staging import Staged
from flexor.monitor.meters import Meters
from flexor.plan.trace import Step, Tracker
from flexor.policies import policy_class
from flexor.policies.base import Kind, Policy, PolicyConfig
from flexor.policies.blocks.recompute import recompute
from flexor.policies.processing import TASK_MASK, TASK_TOKENS, Normalize, Pipeline, ToDevice
from flexor.train.build import deltas_of
from flexor.train.engine import Engine
from flexor.train.optim import EMA, build_optimizer, build_scheduler, resolve_optimizer, resolve_scheduler
from flexor.train.settle import Split
from flexor.train.sharding import parameters_without_memory
from flexor.train.state import TrainState

META = torch.device("meta")
PASSES = 2  # of a step that accumulates gradients: the first makes them, all others add to them
STATISTICS = ("mean", "std", "min", "max", "q01", "q99", "q10", "q90")


class WatchedEngine(Engine):
    """The engine of one process, which says what the step is at."""

    def __init__(self, precision: str, tracker: Tracker):
        super().__init__(META, precision)
        self.tracker = tracker

    @contextlib.contextmanager
    def forward(self, seed: int, step: int, first: int) -> Iterator[None]:
        self.tracker.phase = "forward"
        with super().forward(seed, step, first):
            yield

    def backward(self, loss: Tensor) -> None:
        self.tracker.phase = "backward"
        super().backward(loss)
        gradients = [p.grad for p in self.policy.parameters() if p.grad is not None]
        self.tracker.name(gradients, "gradients")
        self.tracker.phase = "batch"  # of the next pass

    def clip_grad_norm(self, optimizer: torch.optim.Optimizer, limit: float) -> Tensor:
        self.tracker.phase = "clip"
        return super().clip_grad_norm(optimizer, limit)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        self.tracker.phase = "optimizer"
        super().step(optimizer)
        self.tracker.phase = "ema"


class Rehearsal:
    """Everything that a run has on its GPU, built as the trainer builds it."""

    def __init__(self, config: TrainConfig, batch_size: int, accumulation: int, tracker: Tracker):
        optimizer = resolve_optimizer(config.optimizer, config.policy)
        scheduler = resolve_scheduler(config.scheduler, config.policy)
        config = replace(config, optimizer=optimizer, scheduler=scheduler)
        self.config, self.tracker = config, tracker
        self.split = Split(batch_size, accumulation, 1)
        self.passes = min(accumulation, PASSES)
        self.policy = make_policy(config)
        tracker.name(self.policy.buffers(), "buffers")
        tracker.name(self.policy.parameters(), "weights")
        engine = WatchedEngine(config.precision, tracker)
        made = build_optimizer(optimizer, self.policy)
        engine.prepare(self.policy, made)
        ema = EMA(self.policy, config.ema.decay) if config.ema.enable else None
        if ema:
            tracker.name(list(ema.average.values()), "ema")
        self.policy.train()
        before = preprocessor(config.policy)
        self.state = TrainState(
            config=config,
            fingerprint="",
            engine=engine,
            policy=self.policy,
            preprocessor=before,
            postprocessor=before,
            optimizer=made,
            scheduler=build_scheduler(scheduler, made, config.steps),
            ema=ema,
            split=self.split,
        )
        self.meters = Meters()

    def steps_to_see(self) -> list[int]:
        """The first step; a policy that is trained in phases may need more memory in the last."""
        phases = type(self.policy).begin_step is not Policy.begin_step
        return [0, self.config.steps - 1] if phases and self.config.steps > 1 else [0]

    def step(self, number: int) -> Step:
        from flexor.train.loop import optimizer_step  # which plans before it trains

        tracker = self.tracker
        step = Step(number, start=len(tracker.events))
        tracker.phase = "load"
        batches = [
            loaded_batch(self.config.policy, self.split.batch_size) for _ in range(self.split.accumulation)
        ]
        step.loaded = len(tracker.events)
        tracker.phase = "batch"
        self.state.step = number
        optimizer_step(self.state, batches[: self.passes], self.meters)
        del batches
        step.end = len(tracker.events)
        return step

    def units(self) -> list[int]:
        """Bytes of the weights that each block has alone, and what is left of the policy."""
        seen: set[int] = set()
        sizes = []
        for unit in [*self.policy.shard_units(), self.policy]:
            own = [p for p in unit.parameters() if id(p) not in seen]
            seen |= {id(p) for p in own}
            sizes.append(sum(p.numel() * p.element_size() for p in own))
        return sizes


def make_policy(config: TrainConfig) -> Policy:
    """The policy on the meta device. Constructors that need values get them, for buffers only."""
    make = policy_class(config.policy.type)
    try:
        with META:
            policy = make(config.policy)
    except (NotImplementedError, RuntimeError):
        with parameters_without_memory():
            policy = make(config.policy)
    policy = policy.to(META)
    if config.activation_checkpointing:
        for unit in policy.shard_units():
            recompute(unit)
    return policy


def preprocessor(policy: PolicyConfig) -> Pipeline:
    """What happens to a batch on the GPU; words have become tokens before (see `loaded_batch`)."""
    features = {**policy.input_features, **policy.output_features}
    stats = {
        name: dict.fromkeys(
            STATISTICS, np.zeros((f.shape[0], 1, 1) if f.type is Kind.VISUAL else f.shape, np.float32)
        )
        for name, f in features.items()
    }
    return Pipeline("plan", [ToDevice("meta"), Normalize(features, policy.normalization_mapping, stats)])


def loaded_batch(policy: PolicyConfig, batch_size: int) -> Batch:
    """A batch as the loader brings it to the GPU: pictures were planes and are bytes, everything else is small."""
    deltas = deltas_of(policy)
    batch: Batch = {}
    for name, feature in {**policy.input_features, **policy.output_features}.items():
        steps = [len(deltas[name])] if name in deltas else []
        if name in deltas:
            batch[f"{name}_is_pad"] = _moved(batch_size, *steps, dtype=torch.bool)
        if feature.type is Kind.VISUAL:
            batch[name] = pictures(feature.shape, batch_size, steps)
        else:
            batch[name] = _moved(batch_size, *steps, *feature.shape)
    if REWARD in deltas:
        batch[f"{REWARD}_is_pad"] = _moved(batch_size, len(deltas[REWARD]), dtype=torch.bool)
        batch[REWARD] = _moved(batch_size, len(deltas[REWARD]))
    batch[SAMPLE_ID] = _moved(batch_size, dtype=torch.int64)
    batch["task"] = ["do something"] * batch_size
    batch[VALID_STEPS] = float(len(deltas.get(ACTION, [0])))
    words = getattr(policy, "tokenizer", None)
    if words:
        batch[TASK_TOKENS] = _moved(batch_size, words["max_length"], dtype=torch.int64)
        batch[TASK_MASK] = _moved(batch_size, words["max_length"], dtype=torch.bool)
    return batch


def _moved(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype).to(META)


def pictures(shape: tuple[int, ...], batch_size: int, steps: list[int]) -> Any:
    """One camera's pictures [B, (T,) C, H, W], each frame another: as many bytes as there can be."""
    channels, height, width = shape
    layout = {1: "gray", 3: "rgb24", 4: "rgba"}[channels]
    if channels == 3 and not (height % 2 or width % 2):
        layout = "yuv420p"
    format = PlaneFormat(height, width, layout)
    index = np.arange(batch_size * int(np.prod(steps, dtype=int))).reshape(batch_size, *steps)
    return Staged(format, index, torch.empty((index.size, format.nbytes), dtype=torch.uint8)).on(META)
