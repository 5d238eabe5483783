"""Small runs for tests of the loop, and what two runs must have in common to be the same."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from flexor.cli.main import main
from flexor.train.checkpoint import folder as checkpoint
from support import environment, selection
from support.limits import LIMIT_S, wait_for

FIGURES = ("loss", "grad_norm", "lr", "l1_loss", "kld_loss")


def flags(dataset: Path, run: Path, tiny: Sequence[str], *more: str) -> list[str]:
    return [
        f"--dataset.root={dataset}",
        f"--output_dir={run}",
        *tiny,
        "--batch_size=4",
        "--num_workers=0",
        "--log_freq=1",
        "--optimizer.lr=1e-3",
        *more,
    ]


def train(dataset: Path, run: Path, tiny: Sequence[str], *more: str) -> Path:
    """A run in this process, to its end."""
    assert main(["train", *flags(dataset, run, tiny, *more)]) == 0
    return run


FOLDERS = (
    "act",
    "diffusion",
    "vqbet",
    "tdmpc",
    "multi_task_dit",
    "pi0",
    "pi0_fast",
    "smolvla",
    "xvla",
    "wall_x",
    "sac",
)


class Forking(ForkServerProcess):
    """Forked from a process that takes ten seconds to import everything: only in workers that have marked tests."""

    def __init__(self, *arguments: Any, **options: Any):
        selection.must_be_marked()
        super().__init__(*arguments, **options)


SERVER = ForkServerContext()
SERVER.Process = Forking  # type: ignore[misc,assignment]
SERVER.set_forkserver_preload(
    [
        "flexor.cli.launch",
        *(f"flexor.policies.{name}.policy" for name in FOLDERS),
        "flexor.train.loop",
        "flexor.rl.actor",
        "flexor.rl.run",
        "flexor.evaluate.report",
        "flexor.plan.preflight",
        "flexor.config.help",
        "flexor.train.engine.fsdp",
        "pyarrow.compute",
        "numpy.ma",  # which np.unique asks for
        "torch.utils.serialization.config",
        "torch._dynamo",  # what the first optimizer imports
        "transformers.models.clip.modeling_clip",  # seconds, for each process of a policy with a CLIP
        "support.trouble",
        "support.small_resnet",
        "support.small_pi",
        "support.gc_freeze",  # the last
    ]
)


def _become(folder: Path, arguments: Sequence[str], before: Callable[[], Any] | None) -> None:
    """What a forked process does: the program, with its output in files."""
    code = 70
    try:
        for number, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(folder / name, os.O_CREAT | os.O_WRONLY), number)
        sys.stdout, sys.stderr = os.fdopen(1, "w", 1), os.fdopen(2, "w", 1)
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        torch.set_num_threads(1)
        if before:
            before()
        code = main(list(arguments))
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


class Forked:
    """The program in a process of its own, forked from one that has torch imported: that takes seconds."""

    def __init__(self, folder: Path, *arguments: str, before: Callable[[], Any] | None = None):
        folder.mkdir(parents=True, exist_ok=True)
        self.files = [folder / "stdout", folder / "stderr"]
        for file in self.files:
            file.touch()  # it may be killed before it opens them
        self.process = SERVER.Process(target=_become, args=(folder, arguments, before))
        self.process.start()
        self.pid = self.process.pid

    def poll(self) -> int | None:
        return self.process.exitcode

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.process.pid or 0, number)

    def end(self) -> tuple[str, str]:
        """Wait for its end; what it said on standard output and standard error."""
        self.process.join(LIMIT_S)
        if self.poll() is None:
            self.process.kill()
            raise AssertionError("the run takes too long")
        return self.files[0].read_text(), self.files[1].read_text()

    def wait_for(self, condition: Callable[[], bool]) -> None:
        def met() -> bool:
            assert self.poll() is None or condition(), self.files[1].read_text()
            return condition()

        try:
            wait_for(met, "the run takes too long")
        except BaseException:
            self.process.kill()
            raise


def start(*arguments: str) -> subprocess.Popen[str]:
    """The program as a user starts it."""
    return subprocess.Popen(
        [sys.executable, "-m", "flexor", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment.for_cpu(),
    )


def cut_back(run: Path, copy: Path, step: int) -> Path:
    """A copy of a run as if it had been killed some steps after saving `step`."""
    shutil.copytree(run, copy, symlinks=True)
    for number, folder in checkpoint.complete(copy / "checkpoints").items():
        if number > step:
            shutil.rmtree(folder)
    (copy / "checkpoints" / "last").unlink()
    return copy


def bytes_of(folder: Path) -> int:
    """What the files of a folder take on a disk."""
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*"))


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def figures(run: Path) -> list[dict[str, Any]]:
    """What each step computed, without how long it took."""
    steps = [line for line in metrics(run) if "loss" in line]
    return [{k: line[k] for k in ("step", *FIGURES) if k in line} for line in steps]


def tensors(run: Path, step: int) -> dict[str, torch.Tensor]:
    """Everything a checkpoint holds that training made: weights, optimizer, moving average."""
    folder = checkpoint.complete(run / "checkpoints")[step]
    names = [p for p in folder.rglob("*.safetensors") if not p.name.startswith("rng_state")]
    return {
        f"{path.relative_to(folder)}:{name}": value
        for path in sorted(names)
        for name, value in load_file(path).items()
    }


def state(run: Path, step: int) -> dict[str, Any]:
    """The numbers beside the tensors: schedule, scaler, parameter groups, position."""
    folder = checkpoint.complete(run / "checkpoints")[step] / "training_state"
    saved = json.loads((folder / "flexor.json").read_text())
    names = ("scheduler_state.json", "optimizer_param_groups.json", "training_step.json")
    return {name: json.loads((folder / name).read_text()) for name in names} | {"scaler": saved["scaler"]}


def assert_same(run: Path, other: Path, step: int) -> None:
    """Bitwise: every figure of every step, and all that is saved at the last one."""
    assert figures(run) == figures(other)
    assert [line["step"] for line in figures(run)] == list(range(1, step + 1))
    first, second = tensors(run, step), tensors(other, step)
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []
    assert state(run, step) == state(other, step)


def assert_checkpoints_whole(run: Path) -> None:
    """Every numbered folder is what was written, and `last` names one of them."""
    folders = [p for p in (run / "checkpoints").glob("*") if p.name.isdigit()]
    for folder in folders:
        checkpoint.verify(folder)
    last = run / "checkpoints" / "last"
    if last.is_symlink():
        assert last.resolve() in [folder.resolve() for folder in folders]
