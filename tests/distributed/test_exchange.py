"""The exchange of gradients: what lies in which bucket, and which parameters take part."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_sameness import LOSS_TOLERANCE, WEIGHT_TOLERANCE
from torch import nn

from flexor.core.errors import FlexorError
from flexor.monitor.step_times import StepTimes
from flexor.policies.act.config import ACTConfig
from flexor.policies.base import Policy
from flexor.train.engine import exchange as exchanges
from flexor.train.engine.base import Engine
from flexor.train.engine.exchange import ALIGNED, _layout
from flexor.train.ranks.processes import Processes
from support import ranks, runs
from support.own_policy import own_policy

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = st.lists(
    st.tuples(st.lists(st.integers(1, 9), max_size=3), st.sampled_from(DTYPES)), min_size=1, max_size=30
)


@settings(deadline=None)
@given(SHAPES, st.integers(1, 2000))
def test_each_gradient_has_one_place_in_one_bucket(shapes, bucket_bytes):
    parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape, dtype in shapes]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchanges, "BUCKET_BYTES", bucket_bytes)
        layout = _layout(parameters, frozenset())
    assert {id(p) for b in layout.buckets for p in b.parameters} == {id(p) for p in parameters}
    assert sum(len(b.parameters) for b in layout.buckets) == len(parameters)
    for bucket in layout.buckets:
        assert {p.dtype for p in bucket.parameters} == {bucket.parameters[0].dtype}
        assert len(bucket.parameters) == 1 or sum(p.nbytes for p in bucket.parameters) <= bucket_bytes
        ends = [o + p.numel() for o, p in zip(bucket.offsets, bucket.parameters)]
        assert all(end <= start for end, start in zip(ends, [*bucket.offsets[1:], bucket.size]))
        assert all(o * p.element_size() % ALIGNED == 0 for o, p in zip(bucket.offsets, bucket.parameters))
        assert all(layout.bucket_of[p] is bucket for p in bucket.parameters)
    by_dtype = [[p for b in layout.buckets for p in b.parameters if p.dtype == dtype] for dtype in DTYPES]
    assert all(map(_in_order, by_dtype, [[p for p in parameters if p.dtype == dtype] for dtype in DTYPES]))


def _in_order(first: list[nn.Parameter], second: list[nn.Parameter]) -> bool:
    return len(first) == len(second) and all(a is b for a, b in zip(first, second))


class Network(Policy):
    """Weights of several memory layouts and dtypes, one that no loss uses, and one that some losses use."""

    def __init__(self) -> None:
        super().__init__(ACTConfig())
        torch.manual_seed(0)
        self.convolution = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.norm = nn.GroupNorm(2, 4)
        self.linear = nn.Linear(4, 5, dtype=torch.bfloat16)
        self.transposed = nn.Parameter(torch.randn(5, 6).mT.contiguous().mT)
        self.never = nn.Parameter(torch.ones(3))
        self.sometimes = nn.Parameter(torch.ones(6))
        self.frozen = nn.Parameter(torch.ones(6), requires_grad=False)

    def compute(self, images: torch.Tensor, sometimes: bool) -> torch.Tensor:
        features = self.norm(self.convolution(images)).mean((2, 3))
        out = self.linear(features.bfloat16()).float() @ self.transposed + self.frozen
        return (out * self.sometimes if sometimes else out).square().sum()


@pytest.fixture
def engine() -> Iterator[Engine]:
    processes = Processes()
    processes.join(CPU, 60)
    yield Engine(CPU, processes=processes)
    processes.leave()


def gradients(policy: Policy) -> dict[str, torch.Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in policy.named_parameters()}


@pytest.mark.parametrize("bucket_bytes", [1, 200, 1 << 20])
def test_gradients_of_one_rank_are_what_they_were(engine, bucket_bytes, monkeypatch):
    """With accumulation. Afterwards they have the memory layout of their weights."""
    monkeypatch.setattr(exchanges, "BUCKET_BYTES", bucket_bytes)
    policy, images = Network(), torch.randn(2, 3, 5, 5)
    for passes in (1, 1, 3):
        for _ in range(passes):
            policy.compute(images, True).backward()
        expected = gradients(policy)
        policy.zero_grad()
        if engine.exchange is None:
            engine.prepare(policy, torch.optim.SGD(policy.parameters()))
        for number in range(passes):
            with engine.accumulate(last=number + 1 == passes):
                policy.compute(images, True).backward()
        engine.finish_backward(StepTimes())
        computed = gradients(policy)
        assert computed["never"] is None and computed["frozen"] is None
        for name, parameter in policy.named_parameters():
            if expected[name] is not None:
                assert torch.equal(computed[name], expected[name])
                assert parameter.grad.stride() == parameter.stride()
        policy.zero_grad()


def test_a_loss_that_uses_other_parameters_than_before_is_refused_by_name(engine):
    policy, images = Network(), torch.randn(2, 3, 5, 5)
    engine.prepare(policy, torch.optim.SGD(policy.parameters()))
    for sometimes, names in ((True, None), (True, None), (False, "sometimes")):
        with engine.accumulate(last=True):
            policy.compute(images, sometimes).backward()
        if names is None:
            engine.finish_backward(StepTimes())
        else:
            with pytest.raises(FlexorError, match=r"sometimes.*find_unused_parameters=true"):
                engine.finish_backward(StepTimes())
        policy.zero_grad()


OWN = own_policy(
    """\
        self.used = torch.nn.Linear(2, 2)
        self.by_some = torch.nn.Linear(2, 2)
        self.by_none = torch.nn.Linear(2, 2)
    def loss(self, batch, noise):
        predicted = self.used(batch["observation.state"])
        if noise.sample_ids[0] % 2 == 0:
            predicted = predicted + self.by_some(batch["observation.state"])
        return Loss((predicted - batch["action"][:, 0]).square().mean(-1), {})
"""
)


@pytest.mark.ranks
def test_ranks_that_use_different_parameters(lowdim, tmp_path):
    """Refused by name, and computed as by one process if one asks for it. What no rank uses stays as it is."""
    (tmp_path / "own.py").write_text(OWN)
    policy = [f"--policy.type={tmp_path / 'own.py'}:Own", "--policy.device=cpu"]
    flags = ["--steps=8", "--optimizer.weight_decay=0.1", "--optimizer.eps=1e-5", "--precision=no"]
    search = "--parallel.find_unused_parameters=true"

    def arguments(name: str, *more: str) -> list[str]:
        return ["train", *runs.flags(lowdim, tmp_path / name, policy, *flags, *more)]

    ranks.run(tmp_path / "0", 1, arguments("one", "--batch_size=1", "--gradient_accumulation_steps=2"))
    ranks.run(tmp_path / "1", 2, arguments("two", "--batch_size=1", search))
    assert ranks.losses(tmp_path / "two") == pytest.approx(ranks.losses(tmp_path / "one"), rel=LOSS_TOLERANCE)
    one, two = (ranks.weights(tmp_path / name, 8) for name in ("one", "two"))
    assert ranks.apart(one, two) < WEIGHT_TOLERANCE
    refused = ranks.Ranks(tmp_path / "2", 2, arguments("refused", "--batch_size=1"))
    assert 1 in refused.end() and "by_some.weight" in refused.errors() and search in refused.errors()
