"""What adapters, weights in bfloat16 and an 8-bit optimizer take, against numbers worked out by hand."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flexor.config.schema import EMAConfig, OptimizerConfig, ParallelConfig, TrainConfig
from flexor.plan.memory.ranks import sharded
from flexor.plan.trace.events import Event, Trace
from flexor.plan.trace.trace import trace_step
from flexor.policies.adapters import LoraConfig
from support.own_policy import own_policy
from support.plans import H200, plan_memory, settings

# 6 -> 100 -> 100 -> 6: matrices of 600, 10 000 and 600 numbers, vectors of 100, 100, 100 and 6
MATRICES, VECTORS = 600 + 10_000 + 600, 3 * 100 + 6
TENSORS = 7
OWN_POLICY = own_policy(
    """\
        self.first = torch.nn.Linear(6, 100)
        self.norm = torch.nn.LayerNorm(100, bias=False)
        self.middle = torch.nn.Linear(100, 100)
        self.head = torch.nn.Linear(100, 6)
    def loss(self, batch, noise):
        hidden = self.middle(self.norm(self.first(batch["observation.state"]))).relu()
        return Loss((self.head(hidden) - batch["action"][:, 0]).square().mean(-1), {})
""",
)

Make = Callable[..., TrainConfig]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    (tmp_path / "own.py").write_text(OWN_POLICY)
    return lambda **more: settings(f"{tmp_path / 'own.py'}:Own", **more)


def state_bytes(trace: Trace) -> tuple[int, int, int]:
    return trace.nbytes("weights"), trace.nbytes("gradients"), trace.nbytes("optimizer")


STEP = 4  # bytes: torch's optimizers count steps for each tensor


def test_nothing_special(make: Make):
    numbers = MATRICES + VECTORS
    assert state_bytes(trace_step(make(), 2, H200)) == (
        4 * numbers,
        4 * numbers,
        8 * numbers + STEP * TENSORS,
    )


def test_adapters(make: Make):
    lora = LoraConfig(r=2, full_training_modules=["head"])
    first, middle, head = 2 * (6 + 100), 2 * (100 + 100), 600 + 6
    trained = first + middle + head
    weights = MATRICES + VECTORS + first + middle
    assert state_bytes(trace_step(make(lora=lora), 2, H200)) == (
        4 * weights,
        4 * trained,
        8 * trained + STEP * 6,
    )


def test_weights_in_bfloat16(make: Make):
    weights = 2 * MATRICES + 4 * VECTORS
    trace = trace_step(make(weights_dtype="bf16", precision="bf16"), 2, H200)
    assert state_bytes(trace) == (weights, weights, 2 * weights + STEP * TENSORS)
    assert trace.nbytes("casts") == 2 * (100 + 100 + 6)  # biases: matrices have the type already
    average = trace_step(make(weights_dtype="bf16", precision="bf16", ema=EMAConfig(enable=True)), 2, H200)
    assert average.nbytes("ema") >= 4 * (MATRICES + VECTORS)


def test_adapters_on_weights_in_bfloat16(make: Make):
    adapters = 2 * (6 + 100) + 2 * (100 + 100) + 2 * (100 + 6)
    config = make(weights_dtype="bf16", precision="bf16", lora=LoraConfig(r=2))
    weights = 2 * MATRICES + 4 * VECTORS + 4 * adapters
    assert state_bytes(trace_step(config, 2, H200)) == (weights, 4 * adapters, 8 * adapters + STEP * 6)


@pytest.mark.parametrize("dtype", ["float32", "bf16"])
def test_an_optimizer_in_8_bits(make: Make, dtype: str):
    lower = {"weights_dtype": "bf16", "precision": "bf16"} if dtype == "bf16" else {}
    trace = trace_step(make(optimizer=OptimizerConfig(type="adamw_8bit"), **lower), 2, H200)
    small = MATRICES - 10_000 + VECTORS  # each tensor has fewer than 4096 numbers
    scales = 2 * 4 * 40  # 10 000 numbers in blocks of 256
    state = 2 * 10_000 + scales + 8 * small + STEP * TENSORS
    assert state <= trace.nbytes("optimizer") < state + 200 * TENSORS  # and the numbers of each tensor's step
    updates = [op for op in trace.ops if op.name == "flexor::adamw_8bit"]
    assert 2 <= len(updates) <= 4 and all(op.written > 0 for op in updates)


LOWER = {"weights_dtype": "bf16", "precision": "bf16"}
EVERY: dict[str, dict[str, Any]] = {
    "adapters": {"lora": LoraConfig(r=4, dropout=0.1)},
    "adapters, recomputed, bf16": {
        "lora": LoraConfig(r=4),
        "activation_checkpointing": True,
        "precision": "bf16",
    },
    "bf16 weights": LOWER,
    "bf16 weights, adapters, average": {**LOWER, "lora": LoraConfig(r=4), "ema": EMAConfig(enable=True)},
    "8 bits": {"optimizer": OptimizerConfig(type="adamw_8bit")},
    "8 bits, fp16": {"optimizer": OptimizerConfig(type="adamw_8bit"), "precision": "fp16"},
}


@functools.cache
def plain_trace(kind: str) -> Trace:
    return trace_step(settings(kind), 2, H200)


@pytest.mark.parametrize("kind", ["act", "diffusion", "vqbet", "tdmpc"])
@pytest.mark.parametrize("way", EVERY)
def test_every_policy(kind: str, way: str):
    config = settings(kind, **EVERY[way])
    if config.policy.moves_weights and not way.startswith("8 bits"):
        pytest.skip("refused")
    trace, plain = trace_step(config, 2, H200), plain_trace(kind)
    assert trace.nbytes("optimizer") < plain.nbytes("optimizer")
    assert trace.trained == plain.trained or "lora" in EVERY[way]


def test_many_processes_share_what_is_trained(make: Make):
    adapters = 2 * (6 + 100) + 2 * (100 + 100) + 2 * (100 + 6)
    ddp = make(lora=LoraConfig(r=2), parallel=ParallelConfig(strategy="ddp"))
    assert plan_memory(ddp, H200, 2, world_size=4).part("gradients") == rounded(4 * adapters)  # one bucket
    # gradients of what is trained, then the buffer they are summed in; and this rank's part of them
    fsdp = make(lora=LoraConfig(r=2), parallel=ParallelConfig(strategy="fsdp"))
    assert reduced(fsdp) == [4 * adapters, 4 * adapters]
    assert shards(fsdp) == adapters


def test_shards_of_weights_in_bfloat16(make: Make):
    """Matrices are gathered as they are stored; a gradient is summed in float32."""
    config = make(weights_dtype="bf16", precision="bf16", parallel=ParallelConfig(strategy="fsdp"))
    trained = MATRICES + VECTORS
    assert reduced(config) == [2 * trained, 4 * trained]
    assert shards(config) == pytest.approx((2 * MATRICES + 4 * VECTORS) / 4, abs=8)


def test_fsdp_gathers_two_blocks_at_a_time():
    config = settings("act", precision="bf16", parallel=ParallelConfig(strategy="fsdp"))
    trace = trace_step(config, 2, H200)
    blocks = sorted((unit.gathered(True) for unit in trace.units[:-1]), reverse=True)
    assert len(blocks) > 2
    assert most_gathered(trace, config) <= trace.units[-1].gathered(True) + sum(blocks[:2])
    kept = replace(config, parallel=ParallelConfig(strategy="fsdp", reshard_after_forward=False))
    assert most_gathered(trace, kept) == trace.units[-1].gathered(True) + sum(blocks)


def most_gathered(trace: Trace, config: TrainConfig) -> int:
    """The most bytes of gathered weights that a rank has at a time."""
    rank, last = sharded(trace, 4, config.parallel, config.precision != "no"), max(trace.category)
    sizes: dict[int, int] = {}
    most = 0
    for event in rank.events:
        if event.storage > last and rank.category[event.storage] == "weights":
            sizes[event.storage] = event.nbytes if event.kind == "alloc" else 0
            most = max(most, sum(sizes.values()))
    return most


def reduced(config: TrainConfig) -> list[int]:
    """The sizes of what FSDP allocates besides shards to reduce the gradients of a step."""
    return [nbytes for kind, _, nbytes, _ in gradient_events(config, new=True) if kind == "alloc" and nbytes]


def shards(config: TrainConfig) -> int:
    """Bytes of a rank's gradients."""
    return sum(event.nbytes for event in gradient_events(config, new=False) if event.kind == "alloc")


def gradient_events(config: TrainConfig, new: bool) -> list[Event]:
    trace = trace_step(config, 2, H200)
    rank, last = sharded(trace, 4, config.parallel, config.precision != "no"), max(trace.category)
    events = [event for event in rank.events if rank.category.get(event.storage) == "gradients"]
    return [event for event in events if (event.storage > last) == new]


def rounded(nbytes: int) -> int:
    return -(-nbytes // 512) * 512
