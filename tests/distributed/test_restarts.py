"""A run whose launcher starts it again after a crash goes on by itself, and ends as if nothing had happened."""

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import environment, ranks, runs, trouble
from support.warm_python import WarmPython

pytestmark = pytest.mark.ranks(waits=True)

STEPS = 12
TORCHRUN = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=2"]
CRASHING = ["-m", "support.crashing_flexor", "3,7"]  # before the first checkpoint, and after it
OURS = ["flexor", "launch", "local", "--processes=2", "--max-restarts=1"]
STARTS = {  # none of them names the run's folder
    "torchrun": [*TORCHRUN, *CRASHING, "train", "--save_freq=5"],
    "ours": [*OURS, "train", "--save_freq=1"],
}


def flags(lowdim: Path, tiny_act: list[str]) -> list[str]:
    settings = [word for word in runs.flags(lowdim, Path(), tiny_act) if "--output_dir" not in word]
    return [*settings, f"--steps={STEPS}", "--deterministic=true"]


@pytest.fixture(scope="module")
def uninterrupted(lowdim, tiny_act, tmp_path_factory) -> Path:
    """The run that nothing happened to."""
    folder = tmp_path_factory.mktemp("whole")
    ranks.run(folder, 2, ["train", *flags(lowdim, tiny_act), f"--output_dir={folder / 'run'}"])
    return folder / "run"


class Launched:
    """A launcher at work in a folder of its own, with what it says in a file."""

    def __init__(self, folder: Path, python: str, module: list[str]):
        self.folder, self.log = folder, folder / "log"
        with self.log.open("w") as file:
            command = [python, "-m", *module]
            self.process = subprocess.Popen(command, cwd=folder, env=environment.for_cpu(), stderr=file)

    def end(self) -> Path:
        """Its end, which must be a good one; the run's folder."""
        assert self.process.wait() == 0, self.log.read_text()
        (run,) = self.folder.glob("runs/*")
        return run


def crash_once(arguments: list[str]) -> list[str]:
    """In a process that our launcher starts: rank 1 of the first start is killed after five steps."""
    if os.environ.get("FLEXOR_RESTART_COUNT") == "0" and os.environ["RANK"] == "1":
        trouble.before_step(5, trouble.send(signal.SIGKILL))()
    return arguments


@pytest.fixture(scope="module")
def started(uninterrupted, lowdim, tiny_act, tmp_path_factory) -> Iterator[dict[str, Launched]]:
    """All at once: much of what they do is wait."""
    warm = WarmPython(crash_once)
    all_of_them = {
        name: Launched(
            tmp_path_factory.mktemp("launched"), str(warm.python), [*module, *flags(lowdim, tiny_act)]
        )
        for name, module in STARTS.items()
    }
    yield all_of_them
    for launched in all_of_them.values():
        launched.process.terminate()
        launched.process.wait()
    warm.close()


@pytest.mark.slow
def test_our_launcher_restarts_a_run_that_goes_on(started, uninterrupted):
    launched = started["ours"]
    run = launched.end()
    assert "restarting all 2 processes: restart 1 of 1" in launched.log.read_text()
    assert "resuming from 0000" in launched.log.read_text()
    trouble.assert_same(uninterrupted, run, STEPS)


@pytest.mark.slow
def test_torchrun_restarts_a_run_that_begins_again_and_then_goes_on(started, uninterrupted):
    launched = started["torchrun"]
    run, output = launched.end(), launched.log.read_text()
    assert output.count("steps 0 to 12") == 2 and output.count("steps 5 to 12") == 1
    assert "resuming from 000005" in output
    trouble.assert_same(uninterrupted, run, STEPS)
