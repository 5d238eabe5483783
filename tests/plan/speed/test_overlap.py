"""The arithmetic of buckets on their way beside a backward pass."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from flexor.plan.site.hardware import load_hardware
from flexor.plan.speed.overlap import Sent, last_backward, packing, sent, traffic
from flexor.plan.speed.time import step_time
from flexor.plan.trace.trace import trace_step
from support.plans import settings

BACKWARD = 10.0
BUCKETS = st.lists(st.builds(Sent, st.floats(0, BACKWARD), st.integers(1, 50)), min_size=1, max_size=20).map(
    sorted
)
SPEED, LATENCY = st.floats(0.1, 1e4), st.floats(0, 1)


def test_by_hand():
    buckets = [Sent(1, 30), Sent(2, 10), Sent(9, 20)]
    made = traffic(buckets, BACKWARD, lambda nbytes: nbytes / 10)
    # 1 to 4, 4 to 5, 9 to 11: the last second is exposed
    assert made == pytest.approx((6, 1))
    assert traffic([], BACKWARD, lambda nbytes: nbytes) == (0, 0)


@given(BUCKETS, SPEED, LATENCY)
def test_a_step_takes_at_least_as_long_as_the_slower_of_computing_and_sending(
    buckets: list[Sent], speed: float, latency: float
):
    made = traffic(buckets, BACKWARD, lambda nbytes: latency + nbytes / speed)
    total = sum(latency + bucket.nbytes / speed for bucket in buckets)
    assert made.communication == pytest.approx(total)
    assert BACKWARD + made.exposed >= max(BACKWARD, total) - 1e-9
    assert made.exposed <= total + 1e-9
    last = buckets[-1]
    assert BACKWARD + made.exposed >= last.ready + latency + last.nbytes / speed - 1e-9


@given(BUCKETS, SPEED, LATENCY, st.floats(1, 10), st.data())
def test_more_bytes_a_slower_link_and_more_latency_never_help(
    buckets: list[Sent], speed: float, latency: float, factor: float, data: st.DataObject
):
    assume(factor > 1)
    index = data.draw(st.integers(0, len(buckets) - 1))
    grown = [b._replace(nbytes=round(factor * b.nbytes)) if i == index else b for i, b in enumerate(buckets)]
    before = traffic(buckets, BACKWARD, lambda nbytes: latency + nbytes / speed)
    for after in (
        traffic(grown, BACKWARD, lambda nbytes: latency + nbytes / speed),
        traffic(buckets, BACKWARD, lambda nbytes: latency + nbytes / (speed / factor)),
        traffic(buckets, BACKWARD, lambda nbytes: factor * latency + nbytes / speed),
    ):
        assert after.communication >= before.communication - 1e-9
        assert after.exposed >= before.exposed - 1e-9


@pytest.mark.parametrize("kind", ("act", "vqbet"))
def test_buckets_are_full_in_the_backward_pass(kind: str):
    """The first while much of it is left, the last at its end."""
    gpu = load_hardware().find("H200")
    trace = trace_step(settings(kind, steps=100, policy=WIDE.get(kind)), 2, gpu)
    ops = [op for _, op in last_backward(trace)]
    assert {op.phase for op in ops} == {"backward"} and len(ops) > 100
    buckets, backward = sent(trace, lambda op: 1.0)
    assert len(buckets) == len(packing(trace)) and backward == len(ops) + len(buckets)
    ready = [bucket.ready for bucket in buckets]
    assert ready == sorted(ready) and 0.9 * backward < ready[-1] <= backward
    if kind in WIDE:
        assert len(buckets) > 1 and ready[0] < 0.6 * backward


WIDE = {"act": {"dim_model": 512, "dim_feedforward": 3200, "n_heads": 8, "n_encoder_layers": 4}}


def test_one_gpu_exchanges_nothing():
    gpu = load_hardware().find("H200")
    config = settings()
    time = step_time(trace_step(config, 2, gpu), gpu, config=config)
    assert (time.communication, time.exposed) == (0, 0)
