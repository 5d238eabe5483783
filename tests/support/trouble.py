"""What befalls a rank: `Ranks(then={rank: partial(at_call, ...)})` makes it happen in that rank's process."""

from __future__ import annotations

import functools
import importlib
import itertools
import signal
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from flexor.data.loader import loader
from flexor.train import graph, loop
from flexor.train.checkpoint import folder as checkpoint
from flexor.train.ranks import processes, watchdog
from flexor.train.ranks.processes import Processes
from support import ranks, runs
from support.limits import FOREVER_S, LIMIT_S

STEP = "flexor.train.graph:compute_step"
READ = "flexor.data.loader.order_planner:OrderPlanner.plan"


def at_call(target: str, call: int, event: Callable[[], Any]) -> None:
    """Have this process do something just before it calls a function (module:name) for the nth time."""
    module, _, name = target.partition(":")
    *owners, name = name.split(".")
    owner = functools.reduce(getattr, owners, importlib.import_module(module))
    function, calls = getattr(owner, name), itertools.count(1)

    def wrapper(*arguments: Any, **options: Any) -> Any:
        if next(calls) == call:
            event()
        return function(*arguments, **options)

    setattr(owner, name, wrapper)


def hang_while_reading(step: int) -> None:
    """Have this process read steps one by one, and this one forever."""
    loader.GROUP_SAMPLES = 1
    at_call(READ, step + 1, functools.partial(time.sleep, FOREVER_S))


def before_step(step: int, event: Callable[[], Any]) -> Callable[[], None]:
    """In a run from its start: `step` are done when it happens."""
    return functools.partial(at_call, STEP, step + 1, event)


def send(number: int) -> Callable[[], None]:
    return functools.partial(signal.raise_signal, number)


def touch_and_sleep(file: Path) -> None:
    file.touch()
    time.sleep(FOREVER_S)


def fail() -> None:
    raise ValueError("a mistake of ours")


def hurry(event: Callable[[], Any] | None = None) -> None:
    """Hear of the others more often, so that a test need not wait for seconds; and what else befalls this rank."""
    watchdog.TICK_S, watchdog.GRACE_S = 0.2, 1.0
    if event:
        event()


def wait_for_all(event: Callable[[], Any] | None = None) -> None:
    """Ranks that all fail with the same error print it once, however long the slowest takes to fail; as in `hurry`."""
    processes.SAME_ERROR_S = LIMIT_S
    if event:
        event()


def lose_patience(after: int, seconds: float, at: Sequence[str] = (), asleep: float = 0) -> None:
    """Wait for others and allow no progress for `seconds` only, once some steps are done: the first ones take long.

    Sleep for longer, before the first call of each function `at`.
    """
    join, make = Processes.join, loop.Watchdog

    def joined(self: Processes, *arguments: Any) -> None:
        join(self, *arguments)
        torch.distributed.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds))

    def made(*arguments: Any) -> Any:
        dog = make(*arguments)
        at_call(STEP, after + 1, functools.partial(setattr, dog, "timeout_s", seconds))
        return dog

    Processes.join, loop.Watchdog = joined, made  # type: ignore[assignment, method-assign, misc]
    for target in at:
        at_call(target, 1, functools.partial(time.sleep, asleep))


def interrupted(folder: Path, count: int, arguments: Sequence[str], run: Path, step: int, more: int) -> None:
    """A run whose ranks are killed once the checkpoint of a step is there, after at most `more` steps of this life."""
    stay = before_step(more, functools.partial(time.sleep, FOREVER_S))
    started = ranks.Ranks(folder, count, arguments, then=dict.fromkeys(range(count), stay))
    started.all[0].wait_for(lambda: step in saved_steps(run))
    started.kill()


def spoil_batch(step: int) -> None:
    """NaN in one sample that this rank computes."""
    function = graph.compute_step

    def wrapper(state: Any, micro_batches: list[dict[str, Any]]) -> Any:
        if state.step == step:
            micro_batches[0]["observation.state"][0, 0] = torch.nan
        return function(state, micro_batches)

    graph.compute_step = wrapper


def fill_disk_at_shard(step: int) -> None:
    """The disk is full when this rank writes its part of a checkpoint."""
    real = Path.open

    def opened(path: Path, *arguments: Any, **options: Any) -> Any:
        full = path.name.startswith("rank-") and f".{step:06d}.writing" in path.parts
        return real(Path("/dev/full") if full else path, *arguments, **options)

    Path.open = opened  # type: ignore[method-assign]


def assert_same(run: Path, other: Path, step: int) -> None:
    """Bitwise: every figure of every step, and all that training made, sharded or not."""
    assert runs.figures(run) == runs.figures(other)
    assert [line["step"] for line in runs.figures(run)] == list(range(1, step + 1))
    assert runs.state(run, step) == runs.state(other, step)
    for made in (ranks.weights, ranks.everything):
        first, second = made(run, step), made(other, step)
        assert first.keys() == second.keys()
        assert [name for name in first if not torch.equal(first[name], second[name])] == []


def saved_steps(run: Path) -> list[int]:
    return list(checkpoint.complete(run / "checkpoints"))


def steps_done(run: Path) -> int:
    try:
        return len((run / "metrics.jsonl").read_text().splitlines())
    except FileNotFoundError:
        return 0


def words(errors: Sequence[str], text: str) -> int:
    """How often all ranks together said something."""
    return sum(error.count(text) for error in errors)
