"""A rank that is slower than the others is named, whatever it is that takes long there."""

import functools
import os
import time
from collections.abc import Iterator
from typing import Any

import pytest

from flexor.data.loader import loader
from flexor.data.loader.prefetch import Prefetcher
from support import ranks, runs
from support.own_policy import own_policy

pytestmark = pytest.mark.ranks(waits=True)

SLEEP_S = 25.0  # longer than a busy machine takes for a step
STEP = 3  # in which a rank is slow, as the log counts
OWN_POLICY = own_policy(
    f"""\
        self.layer = torch.nn.Linear(2, 2)
    def begin_step(self, step):
        self.step = step + 1
    def loss(self, batch, noise):
        import os, time
        slow = os.environ.get("SLOW") if self.step == {STEP} else None
        if slow == "forward":
            time.sleep({SLEEP_S})
        error = (self.layer(batch["observation.state"]) - batch["action"][:, 0]).square().mean(-1)
        if slow == "backward":
            error.register_hook(lambda _: time.sleep({SLEEP_S}))
        return Loss(error, {{}})
"""
)


def compute_slowly(part: str) -> None:
    os.environ["SLOW"] = part


def read_late(step: int) -> None:
    """In this process, steps are read one by one, and the batch of one comes late."""
    loader.GROUP_SAMPLES = 1
    real = Prefetcher.groups

    def late(self: Any, count: int) -> Iterator[Any]:
        for number, batches in enumerate(real(self, count), 1):
            if number == step:
                time.sleep(SLEEP_S)
            yield batches

    Prefetcher.groups = late  # type: ignore[method-assign]


SLOW = {  # what takes long, on which rank
    "forward": (1, functools.partial(compute_slowly, "forward")),
    "backward": (1, functools.partial(compute_slowly, "backward")),
    "read": (0, functools.partial(read_late, STEP)),
}


def test_the_slow_rank_is_named(lowdim, tmp_path):
    (tmp_path / "own.py").write_text(OWN_POLICY)
    policy = [f"--policy.type={tmp_path / 'own.py'}:Own", "--policy.device=cpu"]
    started = {}
    for part, (rank, slow) in SLOW.items():  # side by side: what they do is wait
        run = tmp_path / part / "run"
        flags = runs.flags(lowdim, run, policy, "--steps=4", "--save_checkpoint=false")
        started[part] = ranks.Ranks(tmp_path / part / "out", 2, ["train", *flags], then={rank: slow})
    for part, (rank, _) in SLOW.items():
        assert started[part].end() == [0, 0], started[part].errors()
        lines = runs.metrics(tmp_path / part / "run")
        (line,) = [line for line in lines if line["step"] == STEP]
        slowest, most = line["slowest"], line["max_rank"]
        assert slowest["rank"] == rank and slowest["own_s"] >= SLEEP_S > slowest["others_s"], part
        assert most["communication"] == 1 - rank  # the other one waits for it
        if part == "read":
            assert line["data_wait"] * line["step_s"] >= SLEEP_S
        else:
            assert most[part] == 1 and line[f"{part}_s"] >= SLEEP_S
