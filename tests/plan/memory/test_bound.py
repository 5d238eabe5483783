"""What a run needs at least: never more than a replay needs, and little less."""

import pytest

from flexor.core.typed import with_settings
from flexor.plan.memory.bound import least_memory
from flexor.plan.memory.memory import MemoryPlanner
from flexor.plan.trace.traces import Traces
from support.plans import H200, Gpu, settings

RUNS = {
    "eager": (settings("act"), 1),
    "a graph": (settings("act", precision="bf16", step="graph"), 1),
    "phases": (settings("vqbet"), 1),
    "two passes": (settings("pi0", gradient_accumulation_steps=2), 1),
    "four processes": (settings("act"), 4),
}


@pytest.mark.parametrize("config, processes", RUNS.values(), ids=RUNS)
def test_no_replay_needs_less(config, processes):
    config = with_settings(config, {"parallel.strategy": "fsdp" if processes > 1 else "auto"})
    planner = MemoryPlanner(config, H200, world_size=processes)
    trace = planner.trace(8, config.gradient_accumulation_steps)
    least, plan = planner.least(trace), planner.plan(trace)
    assert least == least_memory(planner.trace_of_rank(trace))
    assert 0 < least.state < least.peak <= plan.allocated
    assert least.peak > 0.8 * plan.allocated  # close enough to be of use
    state = planner.least(planner.trace(32, config.gradient_accumulation_steps)).state
    assert state == least.state  # with any batch size


def test_what_never_fits_is_not_tried():
    config = settings("act")
    traces = Traces(config)
    state = MemoryPlanner(config, H200, traces=traces).least(traces.at(2, 1, H200)).state
    too_small = MemoryPlanner(config, Gpu(state), traces=traces)
    made = len(traces.made)
    assert too_small.never_fits(like := traces.at(2, 1, H200)) and too_small.largest_batch(like=like) == 0
    assert len(traces.made) == made
