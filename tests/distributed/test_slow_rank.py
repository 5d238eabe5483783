"""A rank that is slower than the others is named, whatever it is that takes long there."""

import functools
import time
from collections.abc import Iterator
from typing import Any

import pytest

from flexor.data.loader.prefetch import Prefetcher
from support import ranks, runs
from support.own_policy import own_policy

pytestmark = pytest.mark.ranks(waits=True)

SLEEP_S = 5.0  # longer than a busy machine takes for a step
FORWARD, BACKWARD, READ = 2, 3, 4  # steps (as the log counts them) in which a rank is slow, and how
OWN = own_policy(
    f"""\
        self.layer = torch.nn.Linear(2, 2)
    def begin_step(self, step):
        self.step = step + 1
    def loss(self, batch, noise):
        import os, time
        slow = os.environ["RANK"] == "1"
        if slow and self.step == {FORWARD}:
            time.sleep({SLEEP_S})
        error = (self.layer(batch["observation.state"]) - batch["action"][:, 0]).square().mean(-1)
        if slow and self.step == {BACKWARD}:
            error.register_hook(lambda _: time.sleep({SLEEP_S}))
        return Loss(error, {{}})
"""
)


def read_late(step: int) -> None:
    """In this process, the batch of a step comes late."""
    real = Prefetcher.steps

    def late(self: Any, start: int, stop: int) -> Iterator[Any]:
        for number, batches in enumerate(real(self, start, stop), start + 1):
            if number == step:
                time.sleep(SLEEP_S)
            yield batches

    Prefetcher.steps = late  # type: ignore[method-assign]


def test_the_slow_rank_is_named(lowdim, tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    settings = [f"--policy.type={tmp_path / 'own.py'}:Own", "--policy.device=cpu"]
    flags = runs.flags(lowdim, tmp_path / "run", settings, "--steps=4", "--save_checkpoint=false")
    late = {0: functools.partial(read_late, READ)}
    started = ranks.Ranks(tmp_path / "out", 2, ["train", *flags], then=late)
    assert started.end() == [0, 0], started.errors()
    lines = {line["step"]: line for line in runs.metrics(tmp_path / "run")}
    for step, rank in ((FORWARD, 1), (BACKWARD, 1), (READ, 0)):
        slowest, most = lines[step]["slowest"], lines[step]["max_rank"]
        assert slowest["rank"] == rank and slowest["own_s"] >= SLEEP_S > slowest["others_s"], step
        assert most["communication"] == 1 - rank  # the other one waits for it
    assert lines[FORWARD]["max_rank"]["forward"] == lines[BACKWARD]["max_rank"]["backward"] == 1
    assert lines[FORWARD]["forward_s"] >= SLEEP_S and lines[BACKWARD]["backward_s"] >= SLEEP_S
    assert lines[READ]["data_wait"] * lines[READ]["step_s"] >= SLEEP_S
