"""Time in the loader counts as waiting only while the GPU has no work."""

import time

import pytest
import torch

from flexor.monitor.data_wait import DataWait
from flexor.monitor.meters import Meters
from flexor.train.engine.base import Engine

LONG = 1_000_000_000  # GPU cycles: about half a second


def test_on_a_cpu_all_the_time_in_the_loader_counts():
    wait = DataWait(torch.device("cpu"))
    for asked in (0.5, 0.25):
        wait.got(asked)
        wait.queued()
    assert wait.take() == (0.75, 0.0)
    assert wait.take() == (0.0, 0.0)


def test_without_a_gpu_nothing_is_said_about_it():
    meters = Meters(torch.device("cpu"))
    values = meters.report(Engine(torch.device("cpu")))
    assert values["data_wait"] == 0 and "gpu_busy" not in values


@pytest.fixture
def wait():
    device = torch.device("cuda", 0)
    wait = DataWait(device)
    wait.got(0.0)
    torch.cuda.synchronize(device)
    return wait


@pytest.mark.gpu
def test_a_slow_loader_costs_nothing_while_the_gpu_works(wait):
    torch.cuda._sleep(LONG)
    wait.queued()
    wait.got(1000.0)  # as if the host had been in the loader for so long
    torch.cuda.synchronize()
    waited, idle = wait.take()
    assert waited == idle < 10


@pytest.mark.gpu
def test_only_the_time_in_the_loader_counts(wait):
    wait.queued()
    torch.cuda.synchronize()
    time.sleep(0.05)  # something else: saving, evaluating
    wait.got(0.001)
    torch.cuda.synchronize()
    waited, idle = wait.take()
    assert waited == 0.001 and idle >= 0.05


@pytest.mark.gpu
def test_nothing_waits_for_the_gpu(wait):
    torch.cuda._sleep(LONG)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            wait.queued()
            wait.got(0.0)
        wait.take()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not torch.cuda.current_stream().query()  # the GPU still sleeps
    torch.cuda.synchronize()
