"""The planned buckets of gradients are those of the trainer's exchange, and take as much memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.testing._internal.distributed.fake_pg import FakeStore

from flexor.config.schema import ParallelConfig, TrainConfig
from flexor.plan.memory.allocator import MIB, replay
from flexor.plan.memory.bound import least_memory
from flexor.plan.memory.buckets import fill_buckets
from flexor.plan.memory.memory import NCCL, MemoryPlanner
from flexor.plan.trace import rehearsal
from flexor.plan.trace.events import ReadyGradient, Trace
from flexor.plan.trace.trace import trace_step
from flexor.train.engine.exchange import BUCKET_BYTES, Bucket, GradientExchange
from flexor.train.ranks.processes import Processes
from support.plans import H200, settings

LARGE = {"dim_model": 512, "dim_feedforward": 3200, "n_heads": 8, "n_encoder_layers": 4}
CASES: dict[str, dict[str, Any]] = {
    "float32": {"policy": LARGE},
    "bfloat16 copies": {"policy": LARGE, "precision": "bf16"},
    "bfloat16 weights": {"policy": LARGE, "precision": "bf16", "weights_dtype": "bf16"},
    "channels last": {"policy": {**LARGE, "vision_backbone": "resnet18"}, "channels_last": True},
    "two passes": {"policy": LARGE, "gradient_accumulation_steps": 2},
}


@pytest.fixture
def fake_ranks() -> Iterator[None]:
    """Collectives that end at once and move nothing, also for tensors without memory."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def exchanged(config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> tuple[Trace, list[Bucket]]:
    """A trace with the trainer's exchange, of its second step: the first one finds the order of the gradients."""
    made: list[GradientExchange] = []

    class ManyRanks(rehearsal.Rehearsal):
        def __init__(self, config: TrainConfig, batch_size: int, accumulation: int, tracker: Any):
            ranks = Processes(control="joined")
            engine = rehearsal.WatchedEngine(
                tracker, rehearsal.META, config.precision, False, ranks, config.parallel
            )
            super().__init__(config, batch_size, accumulation, tracker, engine=engine)
            assert self.state.engine.exchange
            made.append(self.state.engine.exchange)

        def steps_to_trace(self) -> list[int]:
            return [0, 1]

    with monkeypatch.context() as patch:
        patch.setattr(rehearsal, "Rehearsal", ManyRanks)
        trace = trace_step(config, 2, H200)
    (layout,) = made[0]._layouts.values()
    return trace, layout.buckets


@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("fake_ranks")
def test_planned_buckets_are_the_trainers(case: str, monkeypatch: pytest.MonkeyPatch):
    config = settings(**CASES[case])
    trace, buckets = exchanged(config, monkeypatch)
    alone = trace_step(config, 2, H200)
    planned = fill_buckets(alone.steps[-1].ready)
    assert len(planned) > 1
    assert [(len(b.gradients), b.nbytes) for b in planned] == [
        (len(b.parameters), b.size * b.parameters[0].element_size()) for b in buckets
    ]
    planner = MemoryPlanner(config, H200, world_size=2)
    many = least_memory(planner.trace_of_rank(alone))
    assert many.state == least_memory(trace).state == least_memory(alone).state
    assert many.peak == pytest.approx(least_memory(trace).peak, rel=0.001)


def test_one_more_bucket_or_two_at_most():
    config = settings(policy=LARGE)
    trace = trace_step(config, 2, H200)
    packed = MemoryPlanner(config, H200, world_size=2).trace_of_rank(trace)
    alone, many = least_memory(trace), least_memory(packed)
    assert alone.peak <= many.peak <= alone.peak + 2 * BUCKET_BYTES


def test_a_graph_keeps_the_buckets_that_gloo_exchanges():
    config = settings("vqbet", steps=100, step="auto")
    trace = trace_step(config, 2, H200)
    trace.steps[0].graph_key = "the first phase could be captured too"
    parallel = (ParallelConfig(backend="nccl"), ParallelConfig(backend="gloo"))
    planners = [MemoryPlanner(replace(config, parallel=each), H200, world_size=2) for each in parallel]
    nccl, gloo = (planner.trace_of_rank(trace) for planner in planners)
    assert not nccl.kept_by_graph and gloo.kept_by_graph
    first = sum(bucket.nbytes for bucket in fill_buckets(trace.steps[0].ready))
    more = replay(gloo, graph=True).allocated - replay(nccl, graph=True).allocated
    assert more == pytest.approx(first, rel=0.01)
    assert replay(gloo).allocated == replay(nccl).allocated
    assert planners[0].context - planners[1].context == NCCL


def gradients(*sizes: tuple[int, torch.dtype]) -> list[ReadyGradient]:
    return [ReadyGradient(op, n, dtype, n, dtype, False, op) for op, (n, dtype) in enumerate(sizes)]


@given(st.lists(st.tuples(st.integers(1, 50), st.sampled_from([torch.float32, torch.bfloat16])), max_size=40))
def test_every_gradient_is_in_one_bucket(sizes: list[tuple[int, torch.dtype]]):
    ready = gradients(*((MIB * n, dtype) for n, dtype in sizes))
    buckets = fill_buckets(ready)
    assert sorted(g for bucket in buckets for g in bucket.gradients) == sorted(ready)
    assert [bucket.op for bucket in buckets] == sorted(bucket.op for bucket in buckets)
    for bucket in buckets:
        assert bucket.nbytes <= BUCKET_BYTES or len(bucket.gradients) == 1
        assert len({gradient.dtype for gradient in bucket.gradients}) == 1
        assert all(gradient.op <= bucket.op for gradient in bucket.gradients)


def test_small_gradients_are_aligned():
    (bucket,) = fill_buckets(gradients(*[(4, torch.float32)] * 3))
    assert bucket.nbytes == 3 * 16
