"""Memory plans: parts that add up, any batch size from two traces, many processes, what fits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flexor.config.schema import EMAConfig, ParallelConfig
from flexor.core.errors import ConfigError
from flexor.data.settings import DatasetConfig, ImageTransformsConfig
from flexor.plan.memory.allocator import MIB, CachingAllocator, replay
from flexor.plan.memory.memory import SPARE, MemoryPlanner, Parallelism, context_of, is_captured, usable
from flexor.plan.trace.events import Event, StepEvents, Trace
from flexor.plan.trace.trace import trace_step
from support.own_policy import own_policy
from support.plans import H200, Gpu, plan_memory, settings


def by_hand(events: list[tuple], *, built: int, loaded: int) -> Trace:
    """A trace of one step, whose storages are all activations unless they are built or loaded."""
    made = [Event(kind, storage, nbytes, -1) for kind, storage, nbytes in events]
    category = {e.storage: "activations" for e in made} | {
        e.storage: "weights" if i < built else "batch" for i, e in enumerate(made[:loaded])
    }
    steps = [StepEvents(0, built, loaded, len(made))]
    return Trace(made, [], category, built, steps, 2, 1, 1, 0, 0, [(0, 0)])


def test_a_replay_worked_out_by_hand():
    trace = by_hand(
        [
            ("alloc", 1, 4 * MIB),  # a weight
            ("alloc", 2, MIB // 2),  # a batch
            ("alloc", 3, 30 * MIB),
            ("scratch", 0, 8 * MIB),
            ("free", 3, 0),
            ("alloc", 4, 6 * MIB),  # kept, as the optimizer's state is
            ("free", 2, 0),
        ],
        built=1,
        loaded=2,
    )
    peak = replay(trace, steps=3)
    # from the second step on the state is there before the peak, and two batches meet while nothing else is there
    assert peak.allocated == (4 + 30 + 8 + 6) * MIB + MIB // 2
    assert peak.by_category == {
        "weights": 4 * MIB,
        "batch": MIB // 2,
        "activations": 36 * MIB,
        "workspaces": 8 * MIB,
    }
    # 4, 8 and 6 share 20 MiB, 30 is alone, and batches have small segments
    assert peak.reserved == (20 + 30 + 2) * MIB


def test_a_batch_goes_when_another_phase_of_training_begins():
    trace = by_hand([("alloc", 1, 512), ("alloc", 2, 40 * MIB), ("free", 2, 0)], built=1, loaded=2)
    trace.events += [
        Event("alloc", 3, 40 * MIB, -1),
        Event("alloc", 4, 90 * MIB, -1),
        Event("free", 4, 0, -1),
    ]
    trace.category |= {3: "batch", 4: "activations"}
    trace.steps.append(StepEvents(9, 3, 4, 6))
    assert replay(trace, steps=3).allocated == 512 + (40 + 90) * MIB


def test_two_batches_are_there_while_the_next_one_comes():
    trace = by_hand([("alloc", 1, 512), ("alloc", 2, 40 * MIB), ("free", 2, 0)], built=1, loaded=2)
    assert replay(trace, steps=1).allocated == 512 + 40 * MIB
    assert replay(trace, steps=2).allocated == 512 + 80 * MIB


GRAPH = [
    ("alloc", 1, 40 * MIB),  # a weight
    ("alloc", 2, 12 * MIB),  # a batch
    ("alloc", 3, 32 * MIB),  # a workspace of cuBLAS, which stays
    ("alloc", 4, 60 * MIB),
    ("free", 4, 0),
    ("alloc", 5, 20 * MIB),  # kept, as the optimizer's state is
    ("free", 2, 0),
]


def with_workspace(events: list[tuple]) -> Trace:
    trace = by_hand(events, built=1, loaded=2)
    trace.category[3], trace.inputs = "workspaces", (12 * MIB,)
    return trace


def test_a_graph_has_a_copy_of_the_batch_and_takes_the_place_of_eager_memory():
    trace = with_workspace(GRAPH)
    eager, graph = replay(trace), replay(trace, graph=True)
    assert eager.allocated == (40 + 12 + 32 + 20 + 60) * MIB
    assert graph.allocated == eager.allocated + 12 * MIB
    assert graph.by_category["batch"] == 24 * MIB and graph.by_category["workspaces"] == 32 * MIB
    # eager memory is returned before the graph takes its own
    assert graph.reserved < eager.reserved + (12 + 32 + 60) * MIB


def test_phases_with_the_same_key_share_a_graph():
    trace = with_workspace(GRAPH)
    start = len(trace.events)
    trace.events += [
        Event(kind, storage and storage + 10, nbytes, -1)
        for kind, storage, nbytes in GRAPH[1:]
        if storage != 3
    ]
    trace.category |= {12: "batch", 14: "activations", 15: "optimizer"}
    trace.steps.append(StepEvents(9, start, start + 1, len(trace.events)))
    once = replay(with_workspace(GRAPH), graph=True)
    assert replay(trace, graph=True).allocated == once.allocated
    trace.steps[1].graph_key = "another"
    assert replay(trace, graph=True).allocated == once.allocated + (12 + 20) * MIB  # its copy, and its state
    trace.steps[1].graph_key = None
    assert replay(trace, graph=True).allocated == once.allocated + 20 * MIB


@pytest.mark.parametrize(
    ("more", "captured"),
    [
        ({"step": "auto"}, True),
        ({"step": "graph"}, True),
        ({"step": "eager"}, False),
        ({"step": "auto", "activation_checkpointing": True}, True),
        ({"step": "auto", "activation_checkpointing": True, "compile": True}, False),
        ({"step": "auto", "parallel": ParallelConfig(strategy="fsdp")}, True),
        ({"step": "auto", "parallel": ParallelConfig(strategy="fsdp", cpu_offload=True)}, False),
    ],
)
def test_plans_know_which_runs_have_a_graph(more: dict, captured: bool):
    config = settings(**more)
    trace = trace_step(config, 2, H200)
    assert is_captured(config, H200, trace, Parallelism()) == captured
    automatic = replace(config, step="auto")
    assert is_captured(automatic, H200, trace, Parallelism("ddp", 2)) == (captured or config.step == "eager")
    sharded = is_captured(automatic, H200, trace, Parallelism("fsdp", 2, 2))
    assert sharded == (captured or config.step == "eager")
    assert not is_captured(replace(config, step="auto"), Gpu(compute_capability=None), trace, Parallelism())


def test_a_policy_that_reads_values_has_no_graph(tmp_path):
    (tmp_path / "own.py").write_text(
        own_policy(
            """\
        self.layer = torch.nn.Linear(6, 6)
    def loss(self, batch, noise):
        error = (self.layer(batch["observation.state"]) - batch["action"][:, 0]).square().mean(-1)
        return Loss(error, {"largest": error + error.max().item()})
"""
        )
    )
    config = settings(f"{tmp_path / 'own.py'}:Own", step="auto")
    assert not is_captured(config, H200, trace_step(config, 2, H200), Parallelism())


def test_a_run_that_can_not_have_the_graph_it_asks_for_is_refused():
    config = settings(step="graph", activation_checkpointing=True, compile=True)
    with pytest.raises(ConfigError, match=r"step=graph: .*activation_checkpointing"):
        plan_memory(config, H200, 2)


@pytest.fixture(scope="module")
def planner() -> MemoryPlanner:
    return MemoryPlanner(settings(), H200)


def test_parts_add_up(planner: MemoryPlanner):
    plan = planner.at(8)
    assert plan.allocated == sum(plan.parts.values())
    assert plan.total == plan.allocated + plan.allocator + plan.context
    assert plan.part("weights") >= 4 * planner.trace(8).parameters
    assert plan.part("optimizer") >= 8 * planner.trace(8).trained
    assert plan.phase in ("forward", "backward", "optimizer")
    assert plan.allocator >= 0 and max(size for _, size in plan.timeline) == plan.allocated


AUGMENTED = DatasetConfig(image_transforms=ImageTransformsConfig(enable=True))


@pytest.mark.parametrize("kind", ["act", "act, augmented", "diffusion", "vqbet", "tdmpc"])
def test_any_batch_size_from_two_traces(kind: str):
    kind, _, more = kind.partition(", ")
    config = settings(kind, **({"dataset": AUGMENTED} if more else {}))
    planner = MemoryPlanner(config, H200)
    scaled, traced = planner.trace(7), trace_step(config, 7, H200)
    assert planner.traces.scalable
    sizes = [[e.nbytes for e in t.events[t.steps[0].loaded :]] for t in (scaled, traced)]
    assert sizes[0] == sizes[1]
    costs = [
        [(op.flops, op.read, op.written, op.extent, op.scratch) for op in t.ops] for t in (scaled, traced)
    ]
    assert costs[0] == costs[1]
    assert replay(scaled) == replay(traced)


def test_loading_in_pieces_is_not_stretched():
    config = settings(size=(512, 512), policy={"dim_model": 16, "dim_feedforward": 16, "n_heads": 2})
    planner = MemoryPlanner(config, H200)
    many = 100  # pictures of a quarter of a million pixels: two pieces
    scaled, traced = planner.trace(many), trace_step(config, many, H200)
    assert replay(scaled).reserved == replay(traced).reserved


def test_more_of_what_takes_memory_takes_more():
    base = settings()
    plan = plan_memory(base, H200, 16)
    average = plan_memory(replace(base, ema=EMAConfig(enable=True)), H200, 16)
    assert average.allocated - plan.allocated == pytest.approx(plan.part("weights"), rel=0.1)
    again = plan_memory(replace(base, activation_checkpointing=True), H200, 16)
    assert again.part("activations") < plan.part("activations")
    lower = plan_memory(replace(base, precision="bf16"), H200, 16)
    assert lower.part("activations") < plan.part("activations")
    operations = [
        [op.name for op in trace_step(c, 2, H200).ops] for c in (base, replace(base, dataset=AUGMENTED))
    ]
    slots = [len([name for name in names if "augment_slot" in name]) for names in operations]
    assert slots == [0, 3]
    passes = plan_memory(replace(base, gradient_accumulation_steps=4), H200, 16)
    assert passes.accumulation == 4 and passes.part("batch") > plan.part("batch")
    assert passes.part("gradients") >= 4 * trace_step(base, 2, H200).trained


def test_expandable_segments_waste_less():
    config = settings(size=(96, 96), policy={"vision_backbone": "resnet18"})
    plain, expandable = (plan_memory(config, H200, 16, expandable=e) for e in (False, True))
    assert expandable.reserved <= plain.reserved


def test_the_later_phase_of_a_policy_counts():
    plan = plan_memory(settings("vqbet", steps=100), H200, 4)
    assert plan.step == 99


def test_ddp_needs_little_more():
    config = replace(settings(), parallel=ParallelConfig(strategy="ddp"))
    alone, many = (plan_memory(config, H200, 4, world_size=n) for n in (1, 4))
    assert many.parallelism.strategy == "ddp"
    assert alone.allocated <= many.allocated <= alone.allocated + 4 * trace_step(config, 2, H200).trained
    assert many.context > alone.context


def test_fsdp_shares_out_what_is_kept():
    config = replace(settings(), parallel=ParallelConfig(strategy="fsdp"))
    alone, many = (plan_memory(config, H200, 4, world_size=n) for n in (1, 8))
    assert many.parallelism.shards == 8
    assert many.part("optimizer") < alone.part("optimizer") / 4
    hybrid = replace(config, parallel=ParallelConfig(strategy="hsdp"))
    groups = plan_memory(hybrid, H200, 4, world_size=8, local_world_size=2)
    assert groups.parallelism.shards == 2
    assert many.part("optimizer") < groups.part("optimizer") < alone.part("optimizer")


def test_auto_takes_ddp_if_half_of_the_memory_is_enough():
    config = settings()
    need = 16 * trace_step(config, 2, H200).trained
    for memory, strategy in ((2 * need, "ddp"), (2 * need - 2, "fsdp")):
        assert plan_memory(config, Gpu(memory), 2, world_size=4).parallelism.strategy == strategy


def test_the_largest_batch_fits_and_one_more_does_not(planner: MemoryPlanner):
    needed = planner.at(40).reserved + context_of(H200)
    small = MemoryPlanner(planner.config, Gpu(round(needed / (1 - SPARE)) + 1), traces=planner.traces)
    largest = small.largest_batch()
    assert usable(small.gpu) >= needed and largest >= 40
    assert small.fits(largest) and not small.fits(largest + 1)


def test_nothing_fits_on_a_gpu_that_is_too_small():
    assert MemoryPlanner(settings(), Gpu(900 * MIB)).largest_batch() == 0


def test_the_batch_is_split_as_the_run_splits_it():
    config = settings(batch_size=4, global_batch_size=16)
    assert plan_memory(config, H200, world_size=2).accumulation == 2
    assert config.global_batch_size == 16  # settings are left alone


def test_other_gpus_have_no_context():
    assert context_of(Gpu(compute_capability=None)) == 0
    assert CachingAllocator().reserved == 0
