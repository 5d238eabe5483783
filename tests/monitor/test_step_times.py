"""Marks of a step: each part is the time since the mark before it, and nothing waits for a GPU."""

import time

import pytest
import torch

from flexor.monitor.meters import Arithmetic, Meters, RankTimes, slowest
from flexor.monitor.step_times import PARTS, StepTimes
from flexor.train.engine.base import Engine

CPU = torch.device("cpu")
LONG = 1_000_000_000  # GPU cycles: about half a second


class Clock:
    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def step(self, times: StepTimes, seconds: dict[str, float]) -> None:
        """A step of the loop whose parts take these seconds."""

        def passes(part: str) -> None:
            self.now += seconds.get(part, 0.0)

        passes("other")
        times.waiting()
        passes("data")
        times.has_batch()
        passes("copy")
        times.begins()
        for part in ("forward", "backward", "optimizer"):
            passes(part)
            times.mark(part)
        times.queued()
        passes("rest")
        times.mark("rest")


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def test_parts_are_the_times_between_marks(clock):
    times = StepTimes(CPU)
    times.waiting()
    spent = {"other": 7.0, "data": 1.0, "copy": 2.0, "forward": 3.0, "backward": 4.0, "optimizer": 5.0}
    for _ in range(2):
        clock.step(times, spent)
    taken, steps = times.take()
    assert steps == 2 and taken.pop("launch") == 24 and taken.pop("rest") == 0
    assert taken == {part: 2 * seconds for part, seconds in spent.items()}
    assert times.take() == ({}, 0)


def test_what_is_rare_is_a_part_too_and_what_is_between_belongs_to_none(clock):
    times = StepTimes(CPU)
    times.waiting()
    clock.now += 2
    with times.part("checkpoint"):
        clock.now += 3
    clock.now += 4
    times.waiting()
    assert times.take()[0] == {"other": 6, "checkpoint": 3}


def test_without_a_device_nothing_is_measured():
    times = StepTimes()
    times.mark("forward")
    assert times.take() == ({}, 0)


def test_a_line_of_one_rank(clock):
    meters = Meters(CPU, arithmetic=Arithmetic(6e9, 2e9))
    meters.times.waiting()
    for data in (1.0, 2.0):
        clock.step(meters.times, {"data": data, "forward": 3.0, "backward": 4.0, "other": 0.5})
        meters.count_step(8)
    values = meters.report(Engine(CPU), steps_left=10)
    assert values == {
        "samples_per_s": 16 / 18,
        "data_wait": 3 / 18,
        "step_s": 9.0,
        "left_s": 90.0,
        "forward_s": 3.0,
        "backward_s": 4.0,
        "optimizer_s": 0.0,
        "flops_per_s": 6e9 / 9,
        "ceiling_share": 1 / 3,
    }
    meters.reset()
    with meters.times.part("checkpoint"):
        clock.now += 4
    clock.step(meters.times, {"forward": 2.0})
    meters.count_step(8)
    values = meters.report(Engine(CPU), steps_left=9)
    assert values["checkpoint_s"] == 4 and values["forward_s"] == 2 and values["step_s"] == 6
    assert values["left_s"] == 54  # the first line does not count: it has what happens once
    meters.reset()
    clock.step(meters.times, {"forward": 2.0})
    meters.count_step(8)
    assert meters.report(Engine(CPU))["checkpoint_s"] == 0  # so that nobody takes the old value for a new one


def test_the_time_left_comes_from_steps_that_are_like_those_to_come(clock):
    """In the first line too: the first steps, and those that warm up or capture a graph, are left out."""
    meters = Meters(CPU)

    def step(seconds: float, slow_once: bool = False) -> None:
        clock.step(meters.times, {"forward": seconds})
        if slow_once:
            meters.leave_out_step()
        meters.count_step(8)

    def left(steps_left: int) -> float:
        value = meters.report(Engine(CPU), steps_left)["left_s"]
        meters.reset()
        return value

    for seconds in (300.0, 60.0, 60.0):
        step(seconds)
    step(90.0, slow_once=True)
    for _ in range(6):
        step(2.0)
    assert left(100) == 200
    step(40.0, slow_once=True)
    assert left(99) == 99 * 40  # of one step in two lines, and the first has filled caches as well
    step(40.0, slow_once=True)
    step(3.0)
    assert left(97) == 97 * 3


def test_before_the_first_step_there_are_no_times():
    values = Meters(CPU).report(Engine(CPU))
    assert values.keys() == {"samples_per_s", "data_wait"} and values["data_wait"] == 0


class Gathered(Engine):
    """This rank, and others that measured something else."""

    def __init__(self, *other_ranks: RankTimes):
        super().__init__(CPU)
        self.other_ranks = other_ranks

    def gather(self, value):
        return [value, *self.other_ranks]


def rank(host: str, exchanges: bool = True, **seconds: float) -> RankTimes:
    return RankTimes(host, 20.0, 2, seconds, {}, exchanges)


def test_times_are_those_of_the_rank_that_has_the_most(clock):
    meters = Meters(CPU, exchanges=True, host="a")
    meters.times.waiting()
    for _ in range(2):
        clock.step(meters.times, {"data": 1.0, "forward": 2.0, "backward": 1.0})
        meters.count_step(8)
    values = meters.report(Gathered(rank("b", data=4.0, forward=8.0, backward=2.0, communication=1.0)))
    assert values["step_s"] == 10 and values["forward_s"] == 4 and values["communication_s"] == 0.5
    assert values["max_rank"] == {"forward": 1, "backward": 0, "optimizer": 0, "communication": 1}
    assert values["slowest"] == {"rank": 1, "host": "b", "own_s": 7.0, "others_s": 4.0}


def test_the_slowest_rank_is_the_one_that_takes_longest_until_it_meets_the_others():
    ranks = [
        rank("a", data=2.0, forward=4.0, backward=4.0, communication=10.0),
        rank("a", data=2.0, forward=4.0, backward=6.0, communication=8.0),
        rank("b", data=2.0, forward=4.0, backward=10.0, communication=4.0),
    ]
    assert slowest(ranks) == {"rank": 2, "host": "b", "own_s": 8.0, "others_s": 5.5}
    sharded = [rank("a", False, data=2.0, forward=9.0), rank("b", False, data=4.0, forward=7.0)]
    assert slowest(sharded) == {"rank": 1, "host": "b", "own_s": 2.0, "others_s": 1.0}


# On a GPU


@pytest.fixture
def times():
    times = StepTimes(torch.device("cuda", 0))
    times.waiting()
    torch.cuda.synchronize()
    return times


@pytest.mark.gpu
def test_a_slow_loader_costs_nothing_while_the_gpu_works(times):
    torch.cuda._sleep(LONG)
    times.mark("optimizer")
    times.waiting()
    time.sleep(0.1)  # in the loader, while the GPU works
    times.has_batch()
    torch.cuda.synchronize()
    seconds, steps = times.take()
    assert seconds["data"] < 0.1 < seconds["optimizer"] and steps == 1


@pytest.mark.gpu
def test_only_the_time_in_the_loader_counts(times):
    times.mark("optimizer")
    torch.cuda.synchronize()
    time.sleep(0.1)  # something else: logging
    times.waiting()
    times.has_batch()
    torch.cuda.synchronize()
    seconds, _ = times.take()
    assert seconds["data"] < 0.1 <= seconds["other"]


@pytest.mark.gpu
def test_nothing_waits_for_the_gpu(times):
    torch.cuda._sleep(LONG)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            times.waiting()
            times.has_batch()
            times.begins()
            for part in PARTS:
                times.mark(part)
        assert times.take()[1] == 0
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not torch.cuda.current_stream().query()  # the GPU still sleeps
    torch.cuda.synchronize()
    seconds, steps = times.take()
    assert steps == 3 and seconds["other"] > 0.1


@pytest.mark.gpu
def test_a_copy_counts_where_the_gpu_waits_for_it(times):
    side, copied = torch.cuda.Stream(), []
    for busy in (LONG, 1):  # the GPU has other work during the copy, or none
        torch.cuda._sleep(busy)
        times.waiting()
        times.has_batch()
        with torch.cuda.stream(side):
            torch.cuda._sleep(LONG // 2)
        torch.cuda.current_stream().wait_stream(side)
        times.begins()
        torch.cuda.synchronize()
        copied.append(times.take()[0]["copy"])
    assert copied[0] < copied[1] / 2
