"""Traces are shared between GPUs and batch sizes exactly where they are the same."""

from __future__ import annotations

import pytest

from flexor.plan.memory.allocator import replay
from flexor.plan.site.hardware import load_hardware
from flexor.plan.trace.trace import trace_step
from flexor.plan.trace.traces import Traces
from flexor.policies.vlm import decode
from support.plans import Gpu, settings

CARDS = {
    gpu.compute_capability: Gpu(1 << 40, gpu.compute_capability) for gpu in load_hardware().gpus.values()
}


@pytest.mark.parametrize(
    ("precision", "cards"), [("no", [(7, 5), (8, 0), (9, 0), None]), ("bf16", list(CARDS))]
)
def test_a_shared_trace_is_the_cards_own(precision: str, cards: list):
    config = settings("act", (32, 32), policy={"use_vae": False}, precision=precision)
    traces = Traces(config)
    shared = {card: traces.at(2, 1, CARDS[card]) for card in cards}
    assert len(traces.made) < len(cards)  # one for each kind of card
    for card in cards:
        traced = trace_step(config, 2, CARDS[card])
        assert replay(shared[card]) == replay(traced), card
        assert [op.name for op in shared[card].ops] == [op.name for op in traced.ops]


def test_passes_beyond_the_second_are_not_traced():
    config = settings("act", (32, 32))
    traces, gpu = Traces(config), CARDS[8, 0]
    scaled, traced = traces.at(2, 5, gpu), trace_step(config, 2, gpu, 5)
    assert (scaled.accumulation, scaled.passes) == (traced.accumulation, traced.passes)
    peaks = [replay(trace) for trace in (scaled, traced)]
    assert len({(peak.allocated, peak.reserved, str(peak.by_category)) for peak in peaks}) == 1
    assert {accumulation for _, accumulation, _ in traces.made} == {2}


def test_operations_that_depend_on_the_batch_size_are_traced(monkeypatch: pytest.MonkeyPatch):
    """pi0-FAST computes its logits in pieces: here two with a batch size of 2, and 11 with 24."""
    monkeypatch.setattr(decode, "LOSS_CHUNK", 64)
    config = settings("pi0_fast")
    traced, rescaled = trace_step(config, 24, CARDS[8, 0]), Traces(config).at(24, 1, CARDS[8, 0])
    assert rescaled.events == traced.events and rescaled.ops == traced.ops
    few = trace_step(config, 2, CARDS[8, 0])
    assert len(few.ops) < len(traced.ops)


def test_no_trace_is_made_twice():
    config = settings("act", (32, 32))
    traces = Traces(config)
    for batch in (2, 3, 4, 30):
        for card in ((8, 6), (8, 9), (12, 0), (9, 0)):
            traces.at(batch, 1, CARDS[card])
    assert sorted(batch for batch, _, _ in traces.made) == [2, 4]


def test_gpus_get_the_settings_that_are_left_to_them():
    config = settings("act", (32, 32), precision="auto", channels_last=None)
    traces = Traces(config)
    for card, settled in {
        (9, 0): {"precision": "bf16", "channels_last": True},
        (7, 5): {"precision": "no", "channels_last": True},
        None: {"precision": "no", "channels_last": False},
    }.items():
        traced = trace_step(settings("act", (32, 32), **settled), 2, CARDS[card])
        assert replay(traces.at(2, 1, CARDS[card])) == replay(traced)
