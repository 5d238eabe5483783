"""What a run that learns while it acts needs: memory with its buffer, disk for its records, and time.

The learner's own update is traced on the meta device, as `flexor plan` traces a training step.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch

from flexor.config.schema import TrainConfig
from flexor.core.errors import ConfigError
from flexor.core.machine import free_memory, usable_cores
from flexor.core.rng import Noise
from flexor.plan.memory.allocator import Peak, replay
from flexor.plan.memory.memory import Parallelism, context_of, is_captured, usable
from flexor.plan.plan import WORKSTATION, Host
from flexor.plan.site.hardware import GPU
from flexor.plan.speed.time import StepTime, step_time
from flexor.plan.trace.cuda_on_meta import CudaOnMeta
from flexor.plan.trace.events import SavedWeights, StepEvents, Trace
from flexor.plan.trace.rehearsal import META, policy_on, rehearsed_pipelines, total
from flexor.plan.trace.shortcuts import without_compiler
from flexor.plan.trace.trace import OperationTracker
from flexor.policies.pretrained import Pretrained
from flexor.policies.sac.config import SACConfig
from flexor.rl.buffer import ReplayBuffer
from flexor.rl.environment import action_limits, fitted, open_env, spec_of
from flexor.rl.graph import WARM_UP
from flexor.rl.learner import Learner
from flexor.rl.records import record_type
from flexor.train.datasets import build_datasets

ROWS = 64  # of the buffer in a trace: how many there are changes nothing
GATHERED_PER_S = (
    2e9  # bytes of a batch that a host takes from its memory and sends to the GPU: a guess, not measured
)
PROCESS = 3_000_000_000  # bytes of host memory of a process with torch and CUDA

Storage = Literal["cuda", "cpu", "file"]


@dataclass(frozen=True)
class OnlinePlan:
    """What a run needs on one GPU."""

    config: TrainConfig
    gpu: GPU
    host: Host
    demonstrations: int
    storage: Storage
    buffer: int
    """Bytes."""
    peak: Peak
    context: int
    update: StepTime
    gathering_s: float
    """Of an update's batches, in host memory."""
    records: int
    """Bytes on disk at the end."""
    checkpoint: int
    parameters: int
    reasons: tuple[str, ...]
    """Why it does not fit."""

    @property
    def fits(self) -> bool:
        return not self.reasons

    @property
    def gpu_memory(self) -> int:
        return self.peak.reserved + self.context + (self.buffer if self.storage == "cuda" else 0)

    @property
    def host_memory(self) -> int:
        return PROCESS + (self.buffer if self.storage == "cpu" else 0)

    @property
    def disk(self) -> int:
        """Records, the buffer if it is in a file, and two checkpoints."""
        return self.records + 2 * self.checkpoint + (self.buffer if self.storage == "file" else 0)

    @property
    def update_s(self) -> float:
        return self.update.seconds + self.gathering_s

    def seconds(self, rate_hz: float) -> float:
        """Of the whole run, with an environment that makes so many steps per second by itself."""
        updates = self.config.rl.updates
        learning = 0.0 if updates == "max" else updates * self.update_s
        return self.config.steps * (1 / rate_hz + learning)


def plan_online(
    config: TrainConfig, actions: int, demonstrations: int, gpu: GPU, host: Host, trace: Trace | None = None
) -> OnlinePlan:
    """Plan a run. Its policy's features must be filled in. `actions`: numbers in an action of the environment.

    `trace`: of `trace_updates` for a GPU of the same kind, if there is one.
    """
    policy = config.policy
    assert isinstance(policy, SACConfig)
    if gpu.compute_capability is None:
        raise ConfigError(f"--gpu={gpu.name}: plans of policy.type=sac are for NVIDIA GPUs.")
    layout = record_type(policy.observed, actions)
    buffer = buffer_bytes(layout, config.rl.observations, demonstrations)
    trace = trace or trace_updates(config, gpu, layout)
    context, settings = context_of(gpu), config.rl.with_preset()
    storage = _storage(config, buffer, usable(gpu) - context)
    graphed = config if storage == "cuda" else replace(config, step="eager")
    graph = is_captured(graphed, gpu, trace, Parallelism())
    peak = replay(trace, WARM_UP, expandable=True, graph=graph)
    rows = config.rl.batch_size * int(settings["utd_ratio"])
    sent = rows * 2 * layout.itemsize  # what was observed before and after each step
    plan = OnlinePlan(
        *(config, gpu, host, demonstrations, storage, buffer, peak, context),
        update=step_time(trace, gpu, config=graphed),
        gathering_s=0.0 if storage == "cuda" else sent / GATHERED_PER_S,
        records=_records(layout, config.steps),
        checkpoint=trace.saved.raw,
        parameters=trace.parameters,
        reasons=(),
    )
    return replace(plan, reasons=tuple(_reasons(plan)))


def plan_gpus(
    config: TrainConfig, actions: int, demonstrations: int, gpus: Sequence[GPU], here: bool
) -> list[OnlinePlan]:
    """A plan for each NVIDIA GPU, those that fit first. `here`: on this machine."""
    host = Host(usable_cores(), free_memory(), WORKSTATION.disk, "this machine") if here else WORKSTATION
    layout = record_type(config.policy.observed, actions)
    traces: dict[object, Trace] = {}
    plans = []
    for gpu in gpus:
        if gpu.compute_capability is None and len(gpus) > 1:
            continue
        kind = gpu.compute_capability
        if kind is not None and kind not in traces:
            traces[kind] = trace_updates(config, gpu, layout)
        plans.append(plan_online(config, actions, demonstrations, gpu, host, traces.get(kind)))
    return sorted(plans, key=lambda plan: not plan.fits) if len(gpus) > 1 else plans


def fitted_to_environment(config: TrainConfig) -> tuple[TrainConfig, int, int]:
    """The settings with the features of the run's environment, its actions, and the steps of its demonstrations."""
    policy, dataset = config.policy, config.dataset
    assert isinstance(policy, SACConfig)
    with closing(open_env(config.env)) as env:
        config = replace(config, policy=fitted(policy, spec_of(env)))
        actions = len(action_limits(env)[0])
    if dataset.repo_id is None and dataset.root is None and dataset.mix is None:
        return config, actions, 0
    return config, actions, len(build_datasets(dataset)[0])


def buffer_bytes(layout: np.dtype[Any], capacity: int, demonstrations: int) -> int:
    """Of the buffer's tensors, by the buffer itself: on the meta device they take no memory."""
    return (
        ReplayBuffer(layout, capacity, np.zeros(0, layout), META).nbytes() + demonstrations * layout.itemsize
    )


def _records(layout: np.dtype[Any], steps: int) -> int:
    return steps * layout.itemsize  # and one more per episode


def _storage(config: TrainConfig, buffer: int, memory: int) -> Storage:
    """As the run chooses it."""
    storage = config.rl.storage
    if storage != "auto":
        return storage
    return "cuda" if buffer <= memory / 2 else "cpu"


def _reasons(plan: OnlinePlan) -> list[str]:
    reasons = []
    smaller = "choose a smaller --rl.capacity, smaller images"
    if plan.gpu_memory > usable(plan.gpu):
        need = f"{_gb(plan.gpu_memory)} of GPU memory, and {plan.gpu.name} has {_gb(usable(plan.gpu))}"
        setting = "--rl.storage=cpu" if plan.storage == "cuda" else "a smaller --rl.batch_size"
        reasons.append(f"it needs {need}: {smaller}, or {setting}")
    if plan.host_memory > plan.host.memory:
        need = f"{_gb(plan.host_memory)} of host memory, and there are {_gb(plan.host.memory)} ({plan.host.source})"
        reasons.append(f"it needs {need}: {smaller}, or --rl.storage=file")
    if plan.disk > plan.host.disk:
        need = f"{_gb(plan.disk)} of disk, and there are {_gb(plan.host.disk)} ({plan.host.source})"
        reasons.append(f"it needs {need}: take fewer --steps or smaller images")
    return reasons


def _gb(size: int) -> str:
    return f"{size / 1e9:.3g} GB"


@without_compiler()
def trace_updates(config: TrainConfig, gpu: GPU, layout: np.dtype[Any]) -> Trace:
    """The first two updates: drawing their batches, all losses, optimizers and averages."""
    tracker = OperationTracker("meta", gpu.compute_capability)
    cuda = CudaOnMeta(gpu.compute_capability)
    with torch.random.fork_rng(devices=[]), tracker, cuda.active():
        tracker.phase = "host"
        buffer = ReplayBuffer(layout, ROWS, np.zeros(0, layout), META)
        tracker.phase = "build"
        learner = _learner(config, buffer)
        modules = learner.policy, learner.algorithm
        tracker.name([p for module in modules for p in module.parameters()], "weights")
        built = len(tracker.events)
        steps = [_step(learner, tracker, number) for number in range(2)]
    parameters = {p for module in modules for p in module.parameters()}
    return Trace(
        events=tracker.events,
        ops=tracker.ops,
        category=tracker.category,
        built=built,
        steps=steps,
        batch_size=config.rl.batch_size,
        accumulation=1,
        passes=1,
        parameters=sum(p.numel() for p in parameters),
        trained=sum(p.numel() for p in parameters if p.requires_grad),
        units=[],
        saved=SavedWeights(raw=_saved(learner)),
        sync_points=cuda.sync_points,
    )


def _learner(config: TrainConfig, buffer: ReplayBuffer) -> Learner:
    before, after = rehearsed_pipelines(config.policy, META)
    return Learner(Pretrained(policy_on(config), before, after), buffer, config.rl, config.seed)


def _step(learner: Learner, tracker: OperationTracker, number: int) -> StepEvents:
    """An update. The GPU has its batches already: there is nothing to load."""
    step = StepEvents(number, start=len(tracker.events), loaded=len(tracker.events))
    tracker.phase = "forward"
    bounds = torch.zeros(2, dtype=torch.int64, device=META)
    learner.update(bounds, Noise(0, number, learner.sample_ids), number)
    tracker.name(_optimizer_state(learner), "optimizer")
    trained = [p for each in (learner.policy, learner.algorithm) for p in each.parameters()]
    tracker.name([p.grad for p in trained if p.grad is not None], "gradients")
    step.end = len(tracker.events)
    return step


def _optimizer_state(learner: Learner) -> list[torch.Tensor]:
    optimizers = learner.algorithm.optimizers.values()
    return [
        value
        for optimizer in optimizers
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    ]


def _saved(learner: Learner) -> int:
    """Bytes of a checkpoint: the policy, the algorithm and the optimizers."""
    state = {**learner.policy.state_dict(), **learner.algorithm.state_dict()}
    return total(state.values()) + total(_optimizer_state(learner))
