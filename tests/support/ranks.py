"""Runs of many processes on this machine, and a record of what each rank computed."""

from __future__ import annotations

import functools
import json
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from flexor.core.batch import SAMPLE_ID
from flexor.core.rng import Noise
from flexor.train.checkpoint import folder as checkpoint
from flexor.train.checkpoint.tensors import open_tensors
from support import runs
from support.ports import ReservedPort


def environment(rank: int, count: int, port: int) -> dict[str, str]:
    """What a launcher tells a process."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    return {k: str(v) for k, v in names.items()} | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def record_steps(folder: Path) -> None:
    """From here on write down which samples this process computes, and the noise each of them gets."""
    from flexor.train import graph

    real = graph.compute_step
    file = (folder / f"record_{os.environ.get('RANK', '0')}.jsonl").open("a")

    def recorded(state: Any, micro_batches: list[Any]) -> Any:
        for batch in micro_batches:
            ids = batch[SAMPLE_ID]
            noise = Noise(state.config.seed, state.step, ids).normal("record", (len(ids), 3))
            line = {"step": state.step, "ids": ids.tolist(), "noise": noise.tolist()}
            file.write(json.dumps(line) + "\n")
        file.flush()
        return real(state, micro_batches)

    graph.compute_step = recorded


def enter(env: Mapping[str, str], record: Path, then: Callable[[], Any] | None) -> None:
    os.environ.update(env)
    record_steps(record)
    if then:
        then()


class Ranks:
    """The processes of one run, forked from one that has torch imported; no launcher looks after them."""

    def __init__(
        self,
        folder: Path,
        count: int,
        arguments: Sequence[str],
        then: Mapping[int, Callable[[], Any]] | None = None,
        env: Mapping[str, str] | None = None,
    ):
        folder.mkdir(parents=True, exist_ok=True)
        self.port = ReservedPort()  # rank 0 binds it when it has started
        self.all = []
        for rank in range(count):
            variables = {**(environment(rank, count, self.port.number) if count > 1 else {}), **(env or {})}
            before = functools.partial(enter, variables, folder, (then or {}).get(rank))
            self.all.append(runs.Forked(folder / str(rank), *arguments, before=before))

    def end(self) -> list[int | None]:
        """Exit codes, when all are done."""
        self.output = [rank.end() for rank in self.all]
        self.port.release()
        return [rank.returncode for rank in self.all]

    def errors(self) -> str:
        return "\n".join(err for _, err in self.output)

    def kill(self) -> None:
        for rank in self.all:
            rank.send_signal(signal.SIGKILL)
        self.end()


def run(folder: Path, count: int, arguments: Sequence[str]) -> None:
    """To the end, which must be a good one."""
    ranks = Ranks(folder, count, arguments)
    assert ranks.end() == [0] * count, ranks.errors()


def computed(*folders: Path) -> dict[int, list[tuple[int, tuple[float, ...]]]]:
    """step -> (sample, its noise) over all ranks, in the order of the global batch; later folders win."""
    steps: dict[int, list[tuple[int, tuple[float, ...]]]] = {}
    for folder in folders:
        samples: dict[int, list[tuple[int, tuple[float, ...]]]] = {}
        for path in sorted(folder.glob("record_*.jsonl"), key=lambda p: int(p.stem[7:])):
            for text in path.read_text().splitlines():
                line = json.loads(text)
                pairs = zip(line["ids"], map(tuple, line["noise"]))
                samples.setdefault(line["step"], []).extend(pairs)
        steps |= samples
    return dict(sorted(steps.items()))


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in runs.figures(run)]


def weights(run: Path, step: int) -> dict[str, torch.Tensor]:
    saved = runs.tensors(run, step)
    return {k: v for k, v in saved.items() if k.startswith("pretrained_model/model.safetensors")}


def apart(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    """The largest difference between two sets of tensors."""
    assert first.keys() == second.keys()
    return max(float((first[k].float() - second[k].float()).abs().max()) for k in first)


def everything(run: Path, step: int) -> dict[str, torch.Tensor]:
    """All that training made, by name, whichever way it was saved: weights, optimizer, moving average."""
    folder = checkpoint.complete(run / "checkpoints")[step]
    saved = open_tensors(folder, [f"parameter {i}" for i in range(1000)])
    tensors = {name: torch.zeros(like.shape) for name, like in saved.described().items()}
    saved.fill(tensors)
    return tensors
