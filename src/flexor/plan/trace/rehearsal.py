"""A run without data: the trainer's own step, on the meta device for a trace, or on a GPU for a measurement."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from flexor.config.optimizer import resolve_optimizer, resolve_scheduler
from flexor.config.schedules import build_scheduler
from flexor.config.schema import TrainConfig
from flexor.core.batch import ACTION, REWARD, SAMPLE_ID, VALID_STEPS, Batch
from flexor.data.frames.features import FeatureFormat
from flexor.data.loader.to_gpu import Staged
from flexor.data.video.planes import PlaneFormat
from flexor.monitor.meters import Meters
from flexor.plan.trace.events import Category, Event, ReadyGradient, SavedWeights, StepEvents, UnitSize
from flexor.plan.trace.features import check_encoded_once, formats_of, reads_features, with_features
from flexor.plan.trace.ops import Phase
from flexor.plan.trace.shortcuts import without_initial_values
from flexor.policies.adapter_files import adapter_tensors
from flexor.policies.adapters import is_adapter
from flexor.policies.base import Policy, PolicyConfig
from flexor.policies.features import Kind
from flexor.policies.fit import deltas_of
from flexor.policies.frozen_in_bf16 import float32_state, store_frozen_in_bf16
from flexor.policies.meta_init import parameters_without_memory, with_memory
from flexor.policies.pretrained import base_policy
from flexor.policies.processing.host_steps import split_processing
from flexor.policies.processing.pipeline import Pipeline
from flexor.policies.quantized import QuantizedLinear, quantize_base
from flexor.train.build import (
    build_augmentation,
    captures_steps,
    keep_copies,
    make_policy,
    may_store_frozen_in_bf16,
)
from flexor.train.checkpoint.state import TrainState
from flexor.train.compile import compile_blocks
from flexor.train.engine.base import Engine
from flexor.train.engine.shard_units import sharding_of
from flexor.train.graph import GraphStep
from flexor.train.optim.bf16_copies import DEVICES
from flexor.train.optim.ema import EMA
from flexor.train.optim.optimizers import build_optimizer
from flexor.train.ranks.split import Split
from flexor.train.step import optimizer_step

META = torch.device("meta")
PASSES = 2  # of a step with gradient accumulation: the first makes gradients, all others add to them
# Statistics with which normalization does not change values.
STATISTICS = {"mean": 0, "std": 1, "min": -1, "max": 1, "q01": -1, "q99": 1, "q10": -1, "q90": 1}


class Watcher(Protocol):
    """An object that is told the current phase of a step: see `trace.OperationTracker`."""

    events: list[Event]
    phase: Phase
    ready: list[ReadyGradient]

    def gradient_ready(self, weight: nn.Parameter, unit: int, leaf: Tensor) -> None: ...

    def name(self, tensors: Iterable[Tensor], category: Category) -> None: ...


class WatchedEngine(Engine):
    """The engine of one process, which reports the current phase of the step."""

    def __init__(self, tracker: Watcher, *settings: Any):
        super().__init__(*settings)
        self.tracker = tracker

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        self.tracker.phase = "forward"
        with super().forward():
            yield

    def backward(self, loss: Tensor) -> None:
        self.tracker.phase = "backward"
        noting = self.device == META and self.exchange is None
        with self._noting_gradients() if noting else contextlib.nullcontext():
            super().backward(loss)
        self.tracker.name(self.gradients(), "gradients")
        self.tracker.phase = "batch"  # of the next pass

    @contextlib.contextmanager
    def _noting_gradients(self) -> Iterator[None]:
        """Note when each gradient of this pass is ready."""
        self.tracker.ready.clear()
        hooks = []
        for unit, weights in enumerate(unit_parameters(self.policy)):
            for weight in filter(lambda weight: weight.requires_grad, weights):
                note = functools.partial(self.tracker.gradient_ready, weight, unit)
                hooks.append(self._leaf_of(weight).register_post_accumulate_grad_hook(note))
        yield
        for hook in hooks:
            hook.remove()

    def clip_grad_norm(self, optimizer: torch.optim.Optimizer, limit: float) -> Tensor:
        self.tracker.phase = "clip"
        return super().clip_grad_norm(optimizer, limit)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        self.tracker.phase = "optimizer"
        super().step(optimizer)
        self.tracker.phase = "ema"


class Rehearsal:
    """Everything that a run has on its GPU, built as the trainer builds it."""

    def __init__(
        self,
        config: TrainConfig,
        batch_size: int,
        accumulation: int,
        tracker: Watcher,
        device: torch.device = META,
        engine: Engine | None = None,
    ):
        """`engine`: that of a rank whose step is measured."""
        optimizer = resolve_optimizer(config.optimizer, config.policy)
        scheduler = resolve_scheduler(config.scheduler, config.policy)
        config = replace(config, optimizer=optimizer, scheduler=scheduler)
        self.config, self.tracker, self.device = config, tracker, device
        self.split = Split(batch_size, accumulation, 1)
        self.passes = min(accumulation, PASSES) if device == META else accumulation
        if engine is not None and engine.sharded:
            self.policy = engine.build(functools.partial(make_policy, config), "later")
        else:
            self.policy = self._make_policy()
        tracker.name(self.policy.buffers(), "buffers")
        tracker.name(self.policy.parameters(), "weights")
        deterministic = config.deterministic and device != META
        engine = engine or WatchedEngine(tracker, device, config.precision, deterministic)
        torch_optimizer = build_optimizer(optimizer, self.policy)
        engine.prepare(self.policy, torch_optimizer)
        if captures_steps(config):
            keep_copies(config, engine, self.split, torch_optimizer)
        if engine.copies:  # made here, since they are not part of every step
            tracker.name(engine.copies.create().values(), "casts")
        if config.compile and device != META:
            compile_blocks(self.policy, device)
        ema = EMA(self.policy, config.ema.decay_at) if config.ema.enable else None
        if ema:
            tracker.name(list(ema.average.values()), "ema")
        self.policy.train()
        processing = rehearsed_processing(config.policy, device)
        self.state = TrainState(
            config=config,
            fingerprint="",
            engine=engine,
            policy=self.policy,
            preprocessor=processing,
            postprocessor=processing,
            optimizer=torch_optimizer,
            scheduler=build_scheduler(scheduler, torch_optimizer, config.steps),
            ema=ema,
            split=self.split,
            augmentation=build_augmentation(config, device),
        )
        self.features = self._features()
        """What steps read instead of images, by camera; empty if they read images."""
        self.meters = Meters()
        eager: Callable = functools.partial(optimizer_step, self.state)
        self.run_step = eager if device == META else GraphStep(self.state)
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.host: Batch | None = None
        self.batches: list[Batch] = []
        self.inputs: tuple[int, ...] = ()  # bytes of each tensor of a pass's batch

    def _features(self) -> dict[str, FeatureFormat]:
        if not reads_features(self.config):
            return {}
        check_encoded_once(self.config, self.policy, self.state.preprocessor)
        before, self.tracker.phase = self.tracker.phase, "host"
        formats = formats_of(self.policy, self.state.engine)
        self.tracker.phase = before
        return formats

    def _make_policy(self) -> Policy:
        if not keeps_float32_on_host(self.config, self.device):
            return policy_on(self.config, self.device)
        self.tracker.phase = "host"  # where the trainer rounds the weights
        policy = policy_on(self.config, self.device)
        self.tracker.phase = "build"
        with_memory(policy, self.device)
        if self.device.type == "cuda":
            _fill(policy)
        return policy

    def steps_to_trace(self) -> list[int]:
        """The first step; a policy that is trained in phases may need more memory in the last."""
        phases = type(self.policy).begin_step is not Policy.begin_step
        return [0, self.config.steps - 1] if phases and self.config.steps > 1 else [0]

    def step(self, number: int) -> StepEvents:
        tracker = self.tracker
        step = StepEvents(number, start=len(tracker.events))
        tracker.phase = "load"
        self.batches = self.load()  # while those of the previous step are still in memory
        step.loaded = len(tracker.events)
        self.inputs = tuple(value.nbytes for value in self.batches[0].values() if isinstance(value, Tensor))
        tracker.phase = "batch"
        self.state.step = number
        self.run_step(self.batches[: self.passes], self.meters)
        step.graph_key, step.ready = self.policy.graph_key(), tuple(tracker.ready)
        if self.device == META:
            self.batches = []
        step.end = len(tracker.events)
        return step

    def load(self) -> list[Batch]:
        """As the loader does it: on a separate stream."""
        if self.host is None:
            images = host_batch(self.config.policy, self.split.batch_size, self.device)
            self.host = with_features(images, self.features)
        with torch.cuda.stream(self.stream) if self.stream else contextlib.nullcontext():
            batches = [to_device(self.host, self.device) for _ in range(self.split.accumulation)]
        if self.stream is None:
            return batches
        current = torch.cuda.current_stream(self.device)
        current.wait_stream(self.stream)
        for tensor in (t for batch in batches for t in batch.values() if isinstance(t, Tensor)):
            tensor.record_stream(current)
        return batches

    def capture(self) -> None:
        """From here on, steps become a CUDA graph, after a few eager ones."""
        self.state.config = replace(self.config, step="graph")
        self.run_step = GraphStep(self.state)

    def saved(self) -> SavedWeights:
        """What `checkpoint.state` writes of the weights."""
        config, raw = self.config, float32_state(self.policy)
        average = self.state.ema.average if self.state.ema else {}
        exported = {name: weight for name, weight in (average or raw).items() if not is_adapter(name)}
        with torch.device(self.device):
            unused = self.policy.weight_names.unused_weights(exported)
        adapters: dict[str, Tensor] = {}
        if config.lora.r and base_policy(config.policy_path):
            adapters = adapter_tensors(average or raw, config.lora)
        files = (raw, average, {**exported, **unused}, adapters)
        return SavedWeights(*(total(tensors.values()) for tensors in files))

    def units(self) -> list[UnitSize]:
        """What FSDP would gather together. What it leaves whole because of its dtype is little, and counts with it."""
        sizes = []
        for parameters in unit_parameters(self.policy):
            groups = (parameters, [p for p in parameters if p.requires_grad])
            sizes.append(UnitSize(*(sum(p.numel() for p in group) for group in groups), *map(total, groups)))
        return sizes


def _fill(policy: Policy) -> None:
    """Random weights, also where they are quantized: computing with zeros or NaN takes another time."""
    for parameter in policy.parameters():
        if parameter.is_floating_point():
            nn.init.normal_(parameter, std=0.02)
        else:
            parameter.random_(1, 100)
    for layer in policy.modules():
        if isinstance(layer, QuantizedLinear):
            layer.weight_scales.fill_(0.02)


def unit_parameters(policy: Policy) -> list[list[nn.Parameter]]:
    """The parameters of each unit of `sharding_of`."""
    counted: set[nn.Parameter] = set()
    units = []
    for unit in sharding_of(policy).units:
        units.append([p for p in unit.parameters() if p not in counted])
        counted |= {*units[-1]}
    return units


def total(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def keeps_float32_on_host(config: TrainConfig, device: torch.device) -> bool:
    """Whether the GPU has frozen weights in bfloat16 or less, and the host the original ones."""
    return config.lora.base is not None or _stores_in_bf16(config, device)


def _stores_in_bf16(config: TrainConfig, device: torch.device) -> bool:
    return device.type in DEVICES and may_store_frozen_in_bf16(config)


def policy_on(config: TrainConfig, device: torch.device = META) -> Policy:
    """The policy as the trainer makes it, with the weights from its constructor.

    If frozen weights are stored in bfloat16 or less, parameters have no memory yet.
    """
    if keeps_float32_on_host(config, device):
        policy = _without_memory(config)
        if config.lora.base_bits:
            quantize_base(policy, config.lora.base_bits, host="meta")
        if _stores_in_bf16(config, device):
            store_frozen_in_bf16(policy, keep_float32=True, host="meta")
        return policy.to(device) if device == META else policy  # tables that are computed on the host
    if device == META:
        policy = _without_memory(config)
    else:
        with device:  # random weights of a large policy take minutes on a CPU
            policy = make_policy(config)
    placed = all(tensor.device == device for tensor in (*policy.parameters(), *policy.buffers()))
    return policy if placed else policy.to(device)


def _without_memory(config: TrainConfig) -> Policy:
    """The policy on the meta device. If its constructor needs values, buffers get real memory, parameters do not."""
    try:
        with META, without_initial_values():
            return make_policy(config)
    except (NotImplementedError, RuntimeError):
        with parameters_without_memory():
            return make_policy(config)


def rehearsed_processing(policy: PolicyConfig, device: torch.device = META) -> Pipeline:
    """The policy's own processing, without files; its statistics do not change values."""
    return rehearsed_pipelines(policy, device)[0]


def rehearsed_pipelines(policy: PolicyConfig, device: torch.device) -> tuple[Pipeline, Pipeline]:
    """The same before and after the policy."""
    features = {**policy.input_features, **policy.output_features}
    shapes = {n: (f.shape[0], 1, 1) if f.type is Kind.VISUAL else f.shape for n, f in features.items()}
    stats = {
        name: {key: np.full(shape, value, np.float32) for key, value in STATISTICS.items()}
        for name, shape in shapes.items()
    }
    before, after = policy.pipelines(stats, str(device))
    return replace(before, rehearsal=True), after


def host_batch(policy: PolicyConfig, batch_size: int, device: torch.device = META) -> Batch:
    """A batch as the loader has it before it goes to the GPU, after the policy's host steps.

    Images are planes, unless host steps use them; everything else is small.
    """
    host_steps, _ = split_processing(rehearsed_processing(policy, device))
    if host_steps is None:
        return _unprocessed_batch(policy, batch_size, device)
    batch = _unprocessed_batch(policy, batch_size, device, planes=not host_steps.uses_images)
    batch = host_steps(batch, step=0)
    if device.type != "cuda":
        return batch
    return {k: v.pin_memory() if isinstance(v, Tensor) and not v.is_pinned() else v for k, v in batch.items()}


def _unprocessed_batch(
    policy: PolicyConfig, batch_size: int, device: torch.device, planes: bool = True
) -> Batch:
    def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return _values((batch_size, *shape), dtype, device)

    deltas = deltas_of(policy)
    batch: Batch = {}
    for name, feature in {**policy.input_features, **policy.output_features}.items():
        steps = [len(deltas[name])] if name in deltas else []
        if name in deltas:
            batch[f"{name}_is_pad"] = zeros(*steps, dtype=torch.bool)
        if feature.type is Kind.VISUAL and not planes:
            depth = policy.takes_depth and feature.shape[0] == 1
            batch[name] = zeros(*steps, *feature.shape, dtype=torch.float32 if depth else torch.uint8)
        elif feature.type is Kind.VISUAL:
            batch[name] = pictures(feature.shape, batch_size, steps, device, policy.takes_depth)
        else:
            batch[name] = zeros(*steps, *feature.shape)
    if REWARD in deltas:
        batch[f"{REWARD}_is_pad"] = zeros(len(deltas[REWARD]), dtype=torch.bool)
        batch[REWARD] = zeros(len(deltas[REWARD]))
    batch |= {name: zeros(1) for name in policy.label_columns}
    batch[SAMPLE_ID] = zeros(dtype=torch.int64)
    batch["task"] = ["do something"] * batch_size
    batch[VALID_STEPS] = float(len(deltas.get(ACTION, [0])))
    return batch


def pictures(
    shape: tuple[int, ...], batch_size: int, steps: list[int], device: torch.device, takes_depth: bool = False
) -> Staged:
    """One camera's images [B, (T,) C, H, W]. All frames are different, which gives the maximum number of bytes.

    If the policy takes depth maps, an image of one channel is one.
    """
    channels, height, width = shape
    layout = {1: "gray12" if takes_depth else "gray", 3: "rgb24", 4: "rgba"}[channels]
    if channels == 3 and not (height % 2 or width % 2):
        layout = "yuv420p"
    format = PlaneFormat(height, width, layout)
    count = batch_size * int(np.prod(steps, dtype=int))
    index = torch.arange(count).reshape(batch_size, *steps)
    index = index.pin_memory() if device.type == "cuda" else index
    return Staged(format, index, _values((count, format.nbytes), torch.uint8, device))


def _values(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros on the host, to be copied to a device; for the meta device uninitialized, which uses no memory."""
    if device == META:
        return torch.empty(shape, dtype=dtype)
    return torch.zeros(shape, dtype=dtype, pin_memory=device.type == "cuda")


def to_device(batch: Batch, device: torch.device) -> Batch:
    def moved(value: Any) -> Any:
        if isinstance(value, Staged):
            return value.on(device)
        return value.to(device, non_blocking=True) if isinstance(value, Tensor) else value

    return {name: moved(value) for name, value in batch.items()}


def loaded_batch(
    policy: PolicyConfig, batch_size: int, features: Mapping[str, FeatureFormat] = MappingProxyType({})
) -> Batch:
    """A batch as the loader copies it to a GPU, on the meta device."""
    return to_device(with_features(host_batch(policy, batch_size), features), META)
