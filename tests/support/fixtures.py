"""Fixtures: tiny datasets made once, flags of a tiny policy, the program's log; and what holds for every test.

torch and what needs it are imported where they are used: the process that only hands out tests to others does without.
"""

import logging
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# The same examples in every run, and however long they take: a machine may be busy. Fixtures that live as long as one
# test are fine for all examples, as ours are only folders.
settings.register_profile(
    "flexor",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("flexor")


@pytest.fixture(scope="session", autouse=True)
def quiet_machine() -> None:
    """One thread each, so that tests side by side do not fight. And torch's dozens of loggers hand on what they get:
    pytest adds itself to each that does not, and leaves it again, in every phase of every test.
    """
    import torch

    torch.set_num_threads(1)
    for name, logger in logging.root.manager.loggerDict.items():
        if name.partition(".")[0] == "torch" and isinstance(logger, logging.Logger):
            logger.propagate = True
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # started in the background by a shell
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def ordinary_priority() -> Iterator[None]:
    """A video encoder may make the thread that opens it a real-time one, and all that tests start from then on."""
    yield
    if sys.platform.startswith("linux"):
        assert os.sched_getscheduler(0) == os.SCHED_OTHER


@pytest.fixture(autouse=True)
def same_kernels() -> Iterator[None]:
    """What a run sets in its process is undone, or the next test would compute otherwise than it does alone.

    A product in bfloat16 on a CPU that has none makes torch do without oneDNN; a run may want deterministic algorithms.
    """
    import torch

    torch.backends.mkldnn.set_flags(True)
    yield
    torch.backends.mkldnn.set_flags(True)
    if torch.are_deterministic_algorithms_enabled():  # the call imports the compiler
        torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def same_environment() -> Iterator[None]:
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four demonstrations of the built-in task, pictures of 32 pixels. Only to be read: copy to change."""
    from flexor.sim.record import record_dataset

    return record_dataset(tmp_path_factory.mktemp("datasets") / "place", episodes=4, image_size=32)


@pytest.fixture(scope="session")
def lowdim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four episodes without pictures, of two tasks: a policy on it has kilobytes instead of megabytes."""
    from support.samples import write_lowdim

    return write_lowdim(tmp_path_factory.mktemp("datasets") / "lowdim")


@pytest.fixture(scope="session")
def tiny_act() -> list[str]:
    """Flags of the smallest ACT."""
    from support.small_policies import TINY_ACT

    return list(TINY_ACT)


@pytest.fixture(scope="module")
def shared_traces() -> Iterator[None]:
    """Plans of the same settings share their traces, whichever test of a file makes them: they take most of the time.
    Which folder holds the data changes no trace, nor does the batch of the run, as a trace is told its own.
    """
    from flexor.plan.trace import traces

    trace, made = traces.trace_step, {}

    def once(config: Any, batch_size: int, gpu: Any, accumulation: int) -> Any:
        data = replace(config.dataset, root=None)
        settings = replace(config, dataset=data, batch_size=1, global_batch_size=None, scale_lr=None)
        key = (repr(settings), batch_size, gpu.compute_capability, accumulation)
        if key not in made:
            made[key] = trace(config, batch_size, gpu, accumulation)
        return made[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(traces, "trace_step", once)
        yield


@pytest.fixture(scope="session")
def warm_python() -> Iterator[str]:
    """A Python that takes no seconds to import torch, for launchers to start the program with."""
    from support.warm_python import WarmPython

    warm = WarmPython()
    yield str(warm.python)
    warm.close()


@pytest.fixture
def log_lines() -> Iterator[list[str]]:
    """What the program logs (it does not hand its log on to pytest's own capture)."""
    from flexor.core.log import log

    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler, level = Keep(), log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    yield lines
    log.removeHandler(handler)
    log.setLevel(level)
